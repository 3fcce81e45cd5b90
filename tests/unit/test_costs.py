"""The measured cost of a pass."""

from __future__ import annotations

import pytest
from fakes import FakeEngine
from hypothesis import given
from hypothesis import strategies as st

from outrider.workers.engines.costs import FOLLOWING, POINTS, PREFIX, PROBE_ROW, CostCurve, Recent, measure, rising


def test_it_is_linear_between_points_and_beyond_the_last() -> None:
    curve = CostCurve({1: 1.0, 4: 4.0, 8: 6.0})
    assert [curve(tokens) for tokens in (1, 2, 4, 6, 8, 12)] == pytest.approx([1.0, 2.0, 4.0, 5.0, 6.0, 8.0])


def test_one_point_is_a_constant() -> None:
    assert [CostCurve({1: 2.5})(tokens) for tokens in (1, 100)] == [2.5, 2.5]


@given(st.dictionaries(st.sampled_from(POINTS), st.floats(1e-6, 10), min_size=1), st.integers(1, 5000))
def test_a_cost_is_never_nothing(points: dict[int, float], tokens: int) -> None:
    assert CostCurve(points)(tokens) > 0


def test_an_observation_moves_the_points_beside_it() -> None:
    curve = CostCurve({1: 1.0, 4: 4.0, 8: 6.0})
    curve.observe(4, 6.0)
    assert curve(4) == pytest.approx(4.2)
    assert curve(1) == 1.0
    followed = 6.0 * (1.0 + FOLLOWING * 0.5)
    assert curve(8) == pytest.approx(followed), "a machine that is half as slow again is so everywhere"
    curve.observe(5, 100.0)
    assert curve(4) == pytest.approx(4.2 * 1.075), "an interruption counts as twice the time, no more"
    assert curve(8) == pytest.approx(followed * 1.025)
    curve.observe(9, 100.0)
    assert curve(8) == pytest.approx(followed * 1.025), "beyond the last point nothing is known apart"


def test_what_passes_take_is_what_the_curve_comes_to_say() -> None:
    curve = CostCurve({1: 1.0, 4: 4.0, 8: 6.0})
    for _ in range(200):
        curve.observe(6, 3.0)
    assert curve(6) == pytest.approx(3.0, rel=0.01)


def test_running_means_take_the_nearest_number_of_rows() -> None:
    recent = Recent(3)
    assert recent(3) is None
    recent.observe(1, 1.0)
    for seconds in (90.0, 4.0, 6.0):
        recent.observe(8, seconds)
    assert [recent(rows) for rows in (1, 2, 7, 30)] == [1.0, 1.0, 4.0, 4.0], "the first call, which took long, is forgotten"
    assert recent.usual == {1: 1.0, 8: 4.0}


def test_what_one_row_adds_is_told_by_the_fewest_that_were_seen() -> None:
    recent = Recent(1)
    assert recent.of_a_row(8) == 0.0
    recent.observe(8, 3.0)
    assert recent.of_a_row(8) == 0.0, "nothing to hold it against"
    recent.observe(2, 2.4)
    assert recent.of_a_row(8) == pytest.approx(0.1)
    assert recent.of_a_row(2) == 0.0
    recent.observe(2, 3.5)
    assert recent.of_a_row(8) == 0.0, "fewer rows in a disturbed second"
    recent.observe(1, 0.001)
    assert recent.of_a_row(8) == pytest.approx(3.0 / 8), "no row adds more than its share"


def test_measuring_leaves_no_row_behind_and_feeds_every_size() -> None:
    engine = FakeEngine(context=400)
    curve = measure(engine, seconds=60.0)
    assert engine.rows == {}
    sizes = {len(feed.tokens) for each in engine.passes for feed in each if feed.choose}
    assert sizes == set(POINTS)
    assert {feed.row for each in engine.passes for feed in each} == {PROBE_ROW}
    assert curve(1) > 0


def test_points_beside_those_measured_anew_change_like_the_nearest() -> None:
    curve = CostCurve({1: 1.0, 2: 1.2, 4: 2.0, 8: 4.0, 32: 16.0}).measured_anew({4: 1.0, 8: 6.0, 16: 9.0})
    assert curve.points == {1: 0.5, 2: 0.6, 4: 1.0, 8: 6.0, 16: 9.0, 32: 18.0}
    assert curve.measured_anew({}) is curve, "a context too short for any of them"


def test_a_pass_that_took_longer_than_one_over_more_tokens_was_disturbed() -> None:
    assert rising({1: 5.0, 8: 3.0, 4: 2.0, 16: 9.0}) == {1: 2.0, 4: 2.0, 8: 3.0, 16: 9.0}
    assert rising({}) == {}


@pytest.mark.parametrize("context", [2, 3, 8, PREFIX, PREFIX + 1, PREFIX + 7, 100])
def test_a_short_context_is_not_outgrown(context: int) -> None:
    assert measure(FakeEngine(context=context))(1) > 0


def test_a_failing_engine_leaves_no_probe_behind() -> None:
    engine = FakeEngine(choose=lambda tokens, sampling: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        measure(engine)
    assert engine.rows == {}


def test_points_that_no_pass_visits_recover_with_the_others() -> None:
    curve = CostCurve({1: 1.0, 4: 1.5, 8: 2.0, 16: 3.0})
    for _ in range(100):
        curve.observe(8, 20.0)
    assert curve(8) > 4.0
    for _ in range(300):
        curve.observe(1, 1.0)
    assert curve(8) == pytest.approx(2.0, rel=0.05)


def test_passes_that_are_measured_have_tokens_of_their_own() -> None:
    """Equal ones would all need the same experts."""
    engine, fed = FakeEngine(context=400, vocabulary=5000), []
    feed = engine.feed
    engine.feed = lambda feeds: fed.append(feeds[0].tokens) or feed(feeds)  # type: ignore[method-assign]
    measure(engine, seconds=0.0)
    every = [token for tokens in fed for token in tokens]
    assert len(set(every)) > 0.9 * len(every) > 30
