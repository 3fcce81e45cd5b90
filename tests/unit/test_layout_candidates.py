"""Which arrangements are tried where."""

from __future__ import annotations

import pytest

from outrider.runner.planning.layout_candidates import arrangements_of
from outrider.runner.planning.placement import PlannedActor


def actor(role: str, cores: tuple[int, ...]) -> PlannedActor:
    return PlannedActor(role, 0, "here", cores, (0,), len(cores), "cpu", "", {}, (), {})


def names(target: tuple[int, ...], draft: tuple[int, ...] | None, movable: bool, batch: int = 8) -> list[str]:
    of_draft = None if draft is None else actor("draft", draft)
    return [each.name for each in arrangements_of(actor("target", target), of_draft, movable, batch)]


@pytest.mark.parametrize("movable", [True, False])
def test_split_seats_work_at_the_same_time(movable: bool) -> None:
    assert names((1, 2), (0,), movable) == ["ahead", "groups"]
    assert names((1, 2), (0,), movable, batch=1) == ["ahead"]


def test_shared_seats_take_turns_unless_they_can_be_divided() -> None:
    both = (0, 1)
    assert names(both, both, movable=False) == ["turns"]
    assert names((0,), (0,), movable=True) == ["turns"]
    assert names(both, both, movable=True) == ["turns", "plain", "ahead", "groups"]
    assert names(both, both, movable=True, batch=1) == ["turns", "plain", "ahead"]


def test_without_a_draft_there_is_nothing_to_arrange() -> None:
    assert names((0, 1), None, movable=True) == ["turns"]


def test_no_core_is_given_twice_nor_lost_when_they_are_divided() -> None:
    cores = tuple(range(2, 30))
    for each in arrangements_of(actor("target", cores), actor("draft", cores), True, 8):
        if each.overlap == "turns":
            assert each.target_cores == each.draft_cores == cores
        else:
            assert sorted(each.target_cores + each.draft_cores) == list(cores)
            assert len(each.draft_cores) == 3
