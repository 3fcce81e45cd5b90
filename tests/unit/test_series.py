"""Quantities over time in a bounded number of points."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.runner.report.series import Series


def test_what_happened_is_spread_over_the_time_it_took() -> None:
    series = Series(("tokens", "asked"), interval=1.0)
    series.add(0.5, 2.5, (8, 4))
    assert series.points == [[2.0, 1.0], [4.0, 2.0], [2.0, 1.0]]
    series.add(2.0, 2.0, (3, 0))
    assert series.points[2] == [5.0, 1.0]


def test_intervals_double_when_they_become_too_many() -> None:
    series = Series(("tokens",), most=4, interval=1.0)
    for second in range(9):
        series.add(second, second + 0.5, (second,))
    assert series.interval == 4.0
    assert [point[0] for point in series.points] == [0 + 1 + 2 + 3, 4 + 5 + 6 + 7, 8]


@given(st.lists(st.tuples(st.floats(0, 1e5), st.floats(0, 1e4), st.floats(0, 1e3)), max_size=40))
def test_nothing_is_lost_and_the_number_of_points_is_bounded(happenings: list[tuple[float, float, float]]) -> None:
    series = Series(("tokens",), most=10, interval=0.25)
    for began, took, amount in happenings:
        series.add(began, began + took, (amount,))
        # What one record has is taken into the next as far as it has not changed.
        assert series.record()["points"] == [[round(value, 3) for value in point] for point in series.points]
    assert len(series.points) <= 10
    assert sum(point[0] for point in series.points) == pytest.approx(sum(amount for _, _, amount in happenings), abs=1e-6)


def test_it_is_the_same_after_being_kept() -> None:
    series = Series(("tokens", "asked"), interval=1.0)
    series.add(0.0, 3.5, (7, 14))
    kept = json.loads(json.dumps(series.record()))
    again = Series.restored(("asked", "new", "tokens"), kept)
    assert [[point[2], point[0]] for point in again.points] == series.points
    assert {point[1] for point in again.points} == {0.0}
    assert again.interval == series.interval


def test_what_was_kept_under_a_larger_bound_still_fits() -> None:
    series = Series(("tokens",), most=100, interval=1.0)
    series.add(0.0, 99.0, (99,))
    again = Series.restored(("tokens",), series.record(), most=10)
    again.add(99.0, 99.5, (1,))
    assert len(again.points) <= 10
    assert sum(point[0] for point in again.points) == pytest.approx(100)
