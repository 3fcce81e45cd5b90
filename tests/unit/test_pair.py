"""A benchmark's pair comes up: the real pair and replica, with actors that answer in the order the test says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
from driver_fakes import PLAN, REPORT

from outrider.runner.bench.pair import Pair
from outrider.runner.driving import replica as module
from outrider.workers.errors import JobError, WorkerError

PAIR = replace(PLAN, draft=PLAN.target)


def never() -> None:
    """Of a Ray that is not lost."""


@dataclass(frozen=True)
class Promise:
    name: str


@dataclass(frozen=True)
class Actor:
    role: str

    def __getattr__(self, method: str) -> Any:
        return SimpleNamespace(remote=lambda *arguments: Promise(f"{self.role} {method}"))


def answering(monkeypatch: pytest.MonkeyPatch, order: Sequence[str]) -> list[str]:
    """What has been answered, as it goes; promises that ``order`` does not name are never kept."""
    answered: list[str] = []
    roles = {module.TargetActor: "target", module.DraftActor: "draft"}

    def wait(futures: list[Promise], num_returns: int, timeout: float) -> tuple[list[Promise], list[Promise]]:
        due = sorted((each for each in futures if each.name in order), key=lambda each: order.index(each.name))
        return due[:1], [each for each in futures if each not in due[:1]]

    def get(promise: Promise) -> Any:
        answered.append(promise.name)
        return REPORT if promise.name.endswith("load") else None

    monkeypatch.setattr(module, "_start_actor", lambda actor_class, plan: Actor(roles[actor_class]))
    for name, fake in (("wait", wait), ("get", get), ("kill", lambda actor: None)):
        monkeypatch.setattr(module.ray, name, fake)
    return answered


@pytest.mark.parametrize("when", [0, 1, 2])
def test_a_pair_is_up_once_the_target_is_and_has_its_draft(monkeypatch: pytest.MonkeyPatch, when: int) -> None:
    order = ["draft load", "target attach"]
    order.insert(when, "target load")
    answered = answering(monkeypatch, order)
    with Pair(PAIR, 60.0, never) as pair:
        assert answered == order
        assert pair.reports == {"target": REPORT, "draft": REPORT}


def test_a_target_alone_waits_for_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    answered = answering(monkeypatch, ["target load"])
    with Pair(PLAN, 60.0, never):
        assert answered == ["target load"]


@pytest.mark.parametrize(("up", "late"), [([], "the target"), (["target load"], "the draft")])
def test_who_is_late_is_named(monkeypatch: pytest.MonkeyPatch, up: list[str], late: str) -> None:
    answering(monkeypatch, up)
    with pytest.raises(WorkerError, match=late), Pair(PAIR, 0.0, never):
        pytest.fail("it is not up")


def test_a_pair_whose_ray_is_lost_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    answering(monkeypatch, [])
    with (
        pytest.raises(JobError, match="the raylet was killed; the benchmark ends"),
        Pair(PLAN, 60.0, lambda: "the raylet was killed"),
    ):
        pytest.fail("it is not up")
