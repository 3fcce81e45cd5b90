"""The layouts that the tuner tries, by cores and engine."""

from __future__ import annotations

from typing import get_args

import pytest

from outrider.runner.options.values import Layout as LayoutOption
from outrider.runner.planning.layouts import layouts_of
from outrider.runner.planning.placement import PlannedActor
from outrider.workers.speculation import LayoutKind


def actor(role: str, cores: tuple[int, ...]) -> PlannedActor:
    return PlannedActor(role, 0, "here", cores, (0,), len(cores), "cpu", "", {}, (), {})


def names(target: tuple[int, ...], draft: tuple[int, ...] | None, movable: bool, parallel: bool = False) -> list[str]:
    of_draft = None if draft is None else actor("draft", draft)
    return [each.name for each in layouts_of(actor("target", target), of_draft, movable, parallel)]


def test_layouts_are_named_as_the_option_names_them() -> None:
    found = names((0, 1), (0, 1), movable=True)
    values = get_args(LayoutOption)[0]
    assert set(found) - {"plain"} == set(get_args(values)) - {"auto"}


@pytest.mark.parametrize("movable", [True, False])
def test_on_cores_of_its_own_the_draft_drafts_ahead(movable: bool) -> None:
    assert names((1, 2), (0,), movable) == ["split"]


def test_on_shared_cores_both_work_in_sequence_unless_they_can_be_divided() -> None:
    both = (0, 1)
    assert names(both, both, movable=False) == ["shared"]
    assert names((0,), (0,), movable=True) == ["shared"]
    assert names(both, both, movable=True) == ["shared", "plain", "split"]


def test_a_parallel_draft_never_drafts_ahead() -> None:
    assert names((1, 2), (0,), movable=True, parallel=True) == ["split"]
    assert names((0, 1), (0, 1), movable=True, parallel=True) == ["shared", "plain"]
    [split] = layouts_of(actor("target", (1, 2)), actor("draft", (0,)), True, parallel=True)
    assert split.kind is LayoutKind.SEQUENTIAL


@pytest.mark.parametrize(("texts", "name"), [(False, "plain"), (True, "no draft model")])
def test_without_a_draft_model_nothing_is_shared(texts: bool, name: str) -> None:
    [only] = layouts_of(actor("target", (0, 1)), None, True, texts=texts)
    assert (only.name, only.plain) == (name, not texts), "a plain layout asks for no candidates, those in texts neither"


def test_no_core_is_given_twice_nor_lost_when_they_are_divided() -> None:
    cores = tuple(range(2, 30))
    for each in layouts_of(actor("target", cores), actor("draft", cores), True):
        if each.kind is LayoutKind.SEQUENTIAL:
            assert each.target_cores == each.draft_cores == cores
        else:
            assert sorted(each.target_cores + each.draft_cores) == list(cores)
            assert len(each.draft_cores) == 3
