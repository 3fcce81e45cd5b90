"""The measured cost of a pass."""

from __future__ import annotations

import pytest
from fakes import FakeEngine
from hypothesis import given
from hypothesis import strategies as st

from outrider.workers.engines.costs import (
    FOLLOWING,
    POINTS,
    PREFIX,
    PROBE_ROW,
    ContextCost,
    CostCurve,
    Recent,
    measure,
    rising,
)


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
    assert curve(1) == pytest.approx(1.0 + FOLLOWING * 0.5)
    followed = 6.0 * (1.0 + FOLLOWING * 0.5)
    assert curve(8) == pytest.approx(followed), "a machine that is half as slow again is so everywhere"
    curve.observe(5, 100.0)
    assert curve(4) == pytest.approx(4.2 * 1.075), "an interruption counts as twice the time, no more"
    assert curve(8) == pytest.approx(followed * 1.025)


def test_a_pass_over_more_tokens_than_were_measured_adds_a_point() -> None:
    """A line through what small passes took would else promise more and more of large ones, and nothing teach it better."""
    curve = CostCurve({1: 1.0, 16: 4.0, 32: 8.0})
    curve.observe_pass([200], 1e3)
    assert curve.points == {1: 1.0, 16: 4.0, 32: 8.0, 64: 16.0, 128: 32.0}, "beyond the last size nothing is known apart"
    curve = CostCurve({1: 1.0, 16: 4.0, 32: 8.0})
    for _ in range(100):
        curve.observe_pass([20] * 3, 24.0)
    assert curve(60) == pytest.approx(24.0, rel=0.01)
    assert max(curve.points) == 64


def test_what_passes_take_is_what_the_curve_comes_to_say() -> None:
    curve = CostCurve({1: 1.0, 4: 4.0, 8: 6.0})
    for _ in range(200):
        curve.observe(6, 3.0)
    assert curve(6) == pytest.approx(3.0, rel=0.01)


def waves(slope: float, rows: int, passes: int, faster: float = 1.0) -> CostCurve:
    """Rows that begin together, write 96 tokens each and make room for others, seen by a curve measured behind nothing."""
    curve = CostCurve({1: 1.0, 8: 2.0, 16: 3.0})
    for number in range(passes):
        context = rows * (50 + 40 * (number // 96 % 3) + number % 96)
        tokens = rows * (1 + number % 2)
        curve.observe_pass([tokens // rows] * rows, faster * (1.0 + tokens / 8) + slope * context, context=context)
    return curve


@pytest.mark.parametrize("slope", [0.0, 0.0005, 0.002])
@pytest.mark.parametrize("faster", [1.0, 0.7])
def test_what_the_tokens_behind_a_pass_add_is_learned_apart(slope: float, faster: float) -> None:
    """Else what a wave of long rows takes more would look like what their number takes, and more tokens hardly dearer."""
    curve = waves(slope, 8, 600, faster)
    assert curve.context.seconds == pytest.approx(slope, rel=0.05), "a little is still doubted"
    for context in (600, 1200):
        for tokens in (8, 16):
            assert curve(tokens, context) == pytest.approx(faster * (1.0 + tokens / 8) + slope * context, rel=0.03)


def test_what_context_adds_is_doubted_until_lengths_have_differed() -> None:
    assert waves(0.002, 1, 3).context.seconds < 0.0002
    assert ContextCost().seconds == 0.0
    known = waves(0.002, 8, 400)
    for again in (known.snapshot(), known.measured_anew({1: 1.0, 8: 2.0}), known.sharing_like(known)):
        assert again.context.seconds == known.context.seconds
    again = known.snapshot()
    again.observe_pass([1] * 8, 50.0, context=10)
    assert again.context.seconds == known.context.seconds, "one pass is no slope"


def test_before_passes_tell_context_is_believed_to_be_read_as_fast_as_weights() -> None:
    engine = FakeEngine(1000)
    engine.context_share = 1e-3
    curve = measure(engine)
    assert curve.context.seconds == pytest.approx(1e-3 * curve(1))
    believed = ContextCost(0.002)
    for number in range(50):
        believed.observe(8, 400 + 8 * number, 2.0, 2.0)
    assert 0.0005 < believed.seconds < 0.002, "what comes is believed little by little"


def test_a_pass_behind_which_nothing_is_said_of_context_is_as_before() -> None:
    plain, told = CostCurve({1: 1.0, 8: 2.0}), CostCurve({1: 1.0, 8: 2.0})
    plain.observe(4, 1.7)
    told.observe_pass([4], 1.7)
    assert plain.points == told.points


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
