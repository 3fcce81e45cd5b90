"""The measured cost of a pass."""

from __future__ import annotations

import pytest
from fakes import FakeEngine
from hypothesis import given
from hypothesis import strategies as st

from outrider.workers.costs import POINTS, PREFIX, PROBE_ROW, CostCurve, measure


def test_it_is_linear_between_points_and_beyond_the_last() -> None:
    curve = CostCurve({1: 1.0, 4: 4.0, 8: 6.0})
    assert [curve(tokens) for tokens in (1, 2, 4, 6, 8, 12)] == pytest.approx([1.0, 2.0, 4.0, 5.0, 6.0, 8.0])


def test_one_point_is_a_constant() -> None:
    assert [CostCurve({1: 2.5})(tokens) for tokens in (1, 100)] == [2.5, 2.5]


@given(st.dictionaries(st.sampled_from(POINTS), st.floats(1e-6, 10), min_size=1), st.integers(1, 5000))
def test_a_cost_is_never_nothing(points: dict[int, float], tokens: int) -> None:
    assert CostCurve(points)(tokens) > 0


def test_an_observation_moves_its_own_point_only() -> None:
    curve = CostCurve({1: 1.0, 4: 4.0, 8: 6.0})
    curve.observe(4, 14.0)
    assert curve(4) == pytest.approx(5.0)
    assert (curve(1), curve(8)) == (1.0, 6.0)
    curve.observe(5, 100.0)
    assert curve(4) == pytest.approx(5.0)


def test_measuring_leaves_no_row_behind_and_feeds_every_size() -> None:
    engine = FakeEngine(context=400)
    curve = measure(engine)
    assert engine.rows == {}
    sizes = {len(feed.tokens) for each in engine.passes for feed in each if feed.choose}
    assert sizes == set(POINTS)
    assert {feed.row for each in engine.passes for feed in each} == {PROBE_ROW}
    assert curve(1) > 0


@pytest.mark.parametrize("context", [2, 3, 8, PREFIX, PREFIX + 1, PREFIX + 7, 100])
def test_a_short_context_is_not_outgrown(context: int) -> None:
    assert measure(FakeEngine(context=context))(1) > 0


def test_a_failing_engine_leaves_no_probe_behind() -> None:
    engine = FakeEngine(choose=lambda tokens, sampling: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        measure(engine)
    assert engine.rows == {}
