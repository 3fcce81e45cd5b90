"""Who is asked for how much, round by round: the slots of a pass dealt out among rows of different luck."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import cast

import pytest

from outrider.workers.constraints.matching import Matching
from outrider.workers.engines.costs import CostCurve
from outrider.workers.messages import Row, Sampling
from outrider.workers.speculation import MOST_CANDIDATES, Acceptance, DraftCost, LayoutKind
from outrider.workers.target.asking_policy import AskingPolicy
from outrider.workers.target.forecast import Forecast, Round
from outrider.workers.target.live_row import LiveRow
from outrider.workers.target.proposers import NO_PROPOSAL, NoProposer, Proposal
from outrider.workers.target.text_and_stop_strings import TextWriter

# Up to sixteen tokens take little more than one, then every token costs.
CURVE = CostCurve({1: 17.0, 4: 18.0, 8: 19.5, 16: 22.5, 32: 60.0, 64: 120.0})


class Draft(NoProposer):
    def __init__(self, cost: DraftCost | None, unread: Sequence[int] = (), knows_chances: bool = False) -> None:
        self.knows_chances = knows_chances
        self.cost, self.unread_by_key = cost, dict(enumerate(unread))

    def draft_cost(self, rows: int) -> DraftCost | None:
        return self.cost

    def unread(self, live: LiveRow) -> int:
        return self.unread_by_key.get(live.row.key, 1)


def live(key: int, chance: float, left: int = 100) -> LiveRow:
    row = LiveRow(Row(key, (5, 6), left, Sampling()), [5, 6], TextWriter(lambda tokens: "", (), ()), 0.0, cached=1)
    row.acceptance = Acceptance(chance, weight=1000.0)
    return row


def asked(policy: AskingPolicy, rows: Sequence[LiveRow]) -> list[int]:
    return policy.request(rows)[0].counts


def policy_of(draft: Draft, draft_tokens: int | None = None) -> AskingPolicy:
    return AskingPolicy(draft, CURVE, draft_tokens, 1000, False)


def test_the_rate_that_is_expected_leaves_out_what_is_read_once() -> None:
    rows = [live(0, 0.9), live(1, 0.9)]
    reading, forecast = policy_of(Draft(DraftCost(1.0, 0.5, read=2.0), unread=(30, 30))).request(rows)
    known, without = policy_of(Draft(DraftCost(1.0, 0.5, read=2.0), unread=(0, 0))).request(rows)
    assert forecast is not None and without is not None
    assert reading.counts == known.counts
    assert forecast.seconds == pytest.approx(without.seconds + 120.0) and forecast.reading == pytest.approx(120.0)
    assert reading.rate == pytest.approx(known.rate) == pytest.approx(without.tokens / without.seconds)


def test_the_price_of_a_slot_says_whose_candidates_are_sent_and_every_row_may_go_as_deep_as_any() -> None:
    rows = [live(0, 0.9), live(1, 0.9), live(2, 0.3)]
    request, forecast = policy_of(Draft(DraftCost(1.0, 0.5))).request(rows)
    assert len(set(request.counts)) == 1 and request.counts[0] >= 3
    assert 0.0 < request.least_reach < 0.3, "a doubtful row's first candidate may be a sure one, its later ones hardly"
    assert request.least_sum > 0.0
    assert forecast is not None
    plain = policy_of(Draft(None)).request(rows)[1]
    assert plain is not None
    assert forecast.tokens / forecast.seconds > 1.5 * plain.tokens / plain.seconds


def test_a_row_alone_may_go_as_deep_as_a_draft_is_sure_that_knows_its_chances() -> None:
    """It is the draft that stops, at what a step and its slot are worth."""
    cost, row = DraftCost(1.0, 0.5), live(0, 0.7)
    policy = policy_of(Draft(cost, knows_chances=True))
    request, forecast = policy.request([row])
    assert request.counts == [MOST_CANDIDATES]
    assert 0.0 < request.least_reach < 0.1 < request.least_reach + request.least_sum < 0.5
    [usual] = asked(policy_of(Draft(cost)), [row])
    assert 0 < usual < MOST_CANDIDATES, "from a text, say, all that is asked for comes"
    assert forecast == policy_of(Draft(cost)).request([row])[1]
    assert asked(policy, [live(0, 0.7, left=4)]) == [3]
    assert max(asked(policy, [live(0, 0.7), live(1, 0.7)])) < MOST_CANDIDATES, "the other one would wait"
    in_one_pass = replace(cost, one_pass=[1.0 + 0.1 * count for count in range(MOST_CANDIDATES)])
    assert asked(policy_of(Draft(in_one_pass, knows_chances=True)), [row]) == asked(policy_of(Draft(in_one_pass)), [row])
    policy.layout_kind = LayoutKind.OVERLAPPED
    assert max(asked(policy, [row])) < MOST_CANDIDATES
    assert asked(policy_of(Draft(cost, knows_chances=True), 3), [row]) == [3]


def test_a_row_that_begins_badly_is_asked_for_more_until_it_has_shown_that_it_is_another_kind() -> None:
    """Its candidates miss and miss, where those of others hold in four cases of five."""
    curve = CostCurve({1: 21.0, 2: 21.8, 4: 23.0, 6: 26.0, 8: 30.8, 12: 44.0, 16: 59.5})
    policy = AskingPolicy(Draft(DraftCost(2.1, 0.8)), curve, None, 1000, False)

    def others() -> None:
        for accepted in (4, 4, 3, 2, 0):
            policy.observe_row(live(1, 0.8), 4, accepted)

    for _ in range(50):
        others()
    row = live(0, 0.8)
    row.acceptance = policy.new_row_acceptance()
    missed = 0
    while any(asked(policy, [row])):
        policy.observe_row(row, 4, 0)
        others()
        missed += 1
    assert 15 < missed < 30


# Each token costs, as where operations bind and not bytes.
BOUND_BY_OPERATIONS = CostCurve({1: 33.0, 2: 47.6, 3: 66.7, 4: 81.8, 6: 121.8, 8: 161.9, 16: 310.0})


@pytest.mark.parametrize(("observed", "asks"), [(5, True), (500, False)])
def test_a_few_misses_do_not_end_the_asking_for_a_row_alone(observed: int, asks: bool) -> None:
    """A candidate pays that holds in three cases of five; these do in two."""
    policy = AskingPolicy(Draft(DraftCost(4.0, 1.5)), BOUND_BY_OPERATIONS, None, 1000, False)
    row = live(0, 0.4)
    for at in range(observed):
        policy.observe_row(row, 1, int(at % 5 < 2))
    assert any(asked(policy, [row])) is asks


def test_of_a_batch_what_was_seen_counts() -> None:
    policy = AskingPolicy(Draft(DraftCost(4.0, 1.5)), BOUND_BY_OPERATIONS, None, 1000, False)
    rows = [live(0, 0.6), live(1, 0.6)]
    for accepted in (1, 1, 0, 1, 0, 0):
        policy.observe_row(rows[accepted], 1, accepted)
    assert asked(policy, rows) == [0, 0]


def test_a_pass_that_is_full_has_no_slot_for_anybody() -> None:
    rows = [live(key, 0.8) for key in range(16)]
    assert asked(policy_of(Draft(DraftCost(3.0, 0.5))), rows) == [0] * 16
    assert min(asked(policy_of(Draft(DraftCost(3.0, 0.5))), rows[:4])) > 0


def test_no_row_is_asked_for_more_than_it_has_room_for() -> None:
    rows = [live(0, 0.95), live(1, 0.95, left=2), live(2, 0.95, left=1)]
    counts = asked(policy_of(Draft(DraftCost(0.5, 0.1))), rows)
    assert counts[0] > 2
    assert counts[1:] == [1, 0]


def test_a_row_whose_text_the_draft_would_have_to_read_is_left_out_where_that_does_not_pay() -> None:
    rows = [live(0, 0.9), live(1, 0.9)]
    reading = DraftCost(1.0, 0.5, read=1.0)
    assert min(asked(policy_of(Draft(reading, [1, 1])), rows)) > 0
    counts = asked(policy_of(Draft(reading, [1, 100_000])), rows)
    assert counts[0] > 0 == counts[1]


def test_a_step_is_paid_by_the_rows_that_take_part() -> None:
    """Four rows share what a step takes; one of them alone is not worth it, where the others have too much to read."""
    rows = [live(key, 0.6) for key in range(4)]
    dear = DraftCost(7.0, 0.5, read=1.0)
    assert min(asked(policy_of(Draft(dear, [1, 1, 1, 1])), rows)) > 0
    assert asked(policy_of(Draft(dear, [1, 100_000, 100_000, 100_000])), rows) == [0] * 4


def test_what_a_draft_takes_is_measured_on_a_few_rows() -> None:
    rows = [live(key, 0.9) for key in range(8)]
    unread = [60, 50, 40, 30, 20, 10, 5, 70]
    counts = asked(policy_of(Draft(DraftCost(0.0, rows=0), unread)), rows)
    assert [at for at, count in enumerate(counts) if count] == [3, 4, 5, 6], "those of which it knows the most"
    assert min(asked(policy_of(Draft(DraftCost(0.5, rows=8), unread)), rows)) > 0
    fixed = policy_of(Draft(DraftCost(0.0, rows=0), unread), 3)
    assert asked(fixed, rows) == [3] * 8


def test_a_step_that_was_measured_with_fewer_rows_takes_longer_with_more() -> None:
    cost = DraftCost(2.0, 0.5, one_pass=(1.0, 2.0), rows=1)
    assert cost.of_rows(1, CURVE) is cost
    more = cost.of_rows(32, CURVE)
    assert more.step == pytest.approx(2.0 * 60.0 / 17.0) and more.hop == 0.5
    assert more.one_pass == pytest.approx((60.0 / 17.0, 120.0 / 17.0))
    for known in (DraftCost(2.0), replace(cost, rows=0), replace(cost, rows=64)):
        assert known.of_rows(32, CURVE) == known


def round_of(policy: AskingPolicy, rows: Sequence[LiveRow], tokens: float, seconds: float) -> Round:
    """A round that brought this many times the tokens that were forecast, and took this many times the seconds."""
    forecast = policy.request(rows)[1]
    assert forecast is not None
    came = round(forecast.tokens * tokens)
    done = Round((8,), (came - 1,), len(rows), True, forecast=forecast)
    policy.observe_round(done, True, forecast.seconds * seconds)
    return done


def test_a_draft_that_does_not_keep_what_is_forecast_is_not_asked_until_that_is_long_ago() -> None:
    policy, rows = policy_of(Draft(DraftCost(4.0, 0.5))), [live(key, 0.6) for key in range(4)]
    assert any(asked(policy, rows))
    for _ in range(40):
        done = round_of(policy, rows, 1.0, 1.4)
    looks = [any(asked(policy, rows)) for _ in range(9)]
    assert not any(looks)
    plain = Round((0,) * 4, (0,) * 4, 4, True, forecast=Forecast(18.0, 4.0))
    for _ in range(8000):
        policy.observe_round(plain, False, 18.0)
    assert any(asked(policy, rows) for _ in range(9))
    for _ in range(40):
        policy.observe_round(done, True, 1.4 * cast(Forecast, done.forecast).seconds)
        policy.observe_round(plain, False, 1.4 * 18.0)
    assert any(asked(policy, rows) for _ in range(9)), "everything takes as much longer"


def test_another_layout_is_another_draft() -> None:
    policy, rows = policy_of(Draft(DraftCost(4.0, 0.5))), [live(key, 0.6) for key in range(4)]
    for _ in range(40):
        round_of(policy, rows, 1.0, 1.4)
    assert not any(asked(policy, rows))
    policy.layout_changed()
    assert any(asked(policy, rows))


def test_rounds_in_which_a_prompt_was_read_say_nothing_of_what_was_forecast() -> None:
    policy, rows = policy_of(Draft(DraftCost(4.0, 0.5))), [live(key, 0.6) for key in range(4)]
    forecast = policy.request(rows)[1]
    for _ in range(40):
        policy.observe_round(Round((8,), (7,), 4, False, read=100, forecast=forecast), True, 1e3)
        policy.observe_round(Round((8,), (7,), 4, True), True, 1e3)
    assert any(asked(policy, rows))


def test_long_rows_take_longer_whatever_is_asked_for() -> None:
    """The curve was measured behind nothing: what context adds is added to passes with and without candidates alike."""
    policy = policy_of(Draft(DraftCost(1.0, 0.5)), 2)
    for number in range(400):
        context = 3 * (number % 100)
        policy.verify_seconds.observe_pass([1] * 3, policy.verify_seconds(3) + 0.05 * context, context=context)
    rows = [live(key, 0.9, left=400) for key in range(3)]
    forecasts = []
    for cached in (1, 201):
        for row in rows:
            row.cached = cached
            row.tokens = [5] * (cached + 1)
        forecasts.append(policy.request(rows)[1])
    short, long = forecasts
    assert short is not None and long is not None
    assert (short.context, long.context) == (3, 603)
    assert long.seconds - short.seconds == pytest.approx(600 * policy.verify_seconds.context.seconds)
    assert policy.verify_seconds.context.seconds > 0.01


@pytest.mark.parametrize("count", [0, 6, 20])
def test_a_number_that_the_user_fixed_is_every_rows(count: int) -> None:
    rows = [live(0, 0.9), live(1, 0.1), live(2, 0.9, left=3)]
    assert asked(policy_of(Draft(DraftCost(5.0, 5.0)), count), rows) == [count, count, min(count, 2)]


def test_positions_and_rows_are_judged_by_what_was_accepted() -> None:
    """Second candidates never hold, so there is no use in asking for them, however often first ones do."""
    draft, rows = Draft(DraftCost(0.5, 0.1)), [live(key, 0.9) for key in range(2)]
    for row in rows:
        row.acceptance = Acceptance(0.9)
    policy = policy_of(draft)
    before = asked(policy, rows)
    for _ in range(200):
        for row in rows:
            policy.observe_row(row, 2, 1)
    assert before[0] > 1
    assert asked(policy, rows) == [1, 1]


def test_what_was_made_is_cut_down_to_the_likeliest_candidates_that_share_the_pass() -> None:
    """Sixteen tokens have room, and every one behind costs two milliseconds."""
    policy, forecast = policy_of(Draft(DraftCost(1.0, 0.5))), Forecast(30.0, 9.0, 5.0)
    sure, doubtful = (0.95, 0.93, 0.9, 0.85), (0.6, 0.3, 0.1, 0.05)
    made = [Proposal((1, 2, 3, 4), reaches=each) for each in (sure, doubtful)]

    def counts(rows: int, proposals: list[Proposal], policy: AskingPolicy = policy) -> list[int]:
        """Beside rows without candidates."""
        found = policy.cut_to_slots([*proposals, *[NO_PROPOSAL] * (rows - len(proposals))], rows, forecast)
        return [len(each.tokens) for each in found[: len(proposals)]]

    assert [counts(rows, made) for rows in (10, 12, 13, 16)] == [[4, 2], [4, 0], [3, 0], [0, 0]]
    assert counts(10, [*made, Proposal((7, 7))]) == [4, 0, 2], "of the third nobody knows, so it has its slots"
    runners_up = [each._replace(runners_up=[(0, 9), (3, 9)]) for each in made]
    found = policy.cut_to_slots([*runners_up, *[NO_PROPOSAL] * 7], 9, forecast)
    assert [(len(each.tokens), each.runners_up) for each in found[:2]] == [(3, [(0, 9)]), (0, [])]
    assert counts(100, made, policy_of(Draft(DraftCost(1.0)), 4)) == [4, 4], "as many as was said"
    assert counts(100, made[:1]) == [4], "nobody beside it to rank it against"


def test_what_a_constraint_forces_is_nothing_that_candidates_gain() -> None:
    """Three tokens of four are forced: without candidates each choice brings them along."""
    policy, rows = policy_of(Draft(DraftCost(1.0, 0.5))), [live(key, 0.8) for key in range(4)]
    free = asked(policy, rows)
    for _ in range(50):
        policy.observe_forced(1, 4)
    assert asked(policy, rows) == free, "rows without a constraint are what they were"
    matching = cast(Matching, object())  # that there is one is all that is asked
    for row in rows:
        row.matching = matching
    [count] = set(asked(policy, rows))
    assert 0 < count < 4 * free[0], "a candidate takes four slots, so fewer are worth theirs"
    made = [Proposal((1, 2, 3, 4), reaches=(0.5, 0.5, 0.5, 0.5)) for _ in range(2)]
    forecast = Forecast(20.0, 9.0, 1.0)
    kept = [
        [len(each.tokens) for each in policy.cut_to_slots(made, 12, forecast, constrained)] for constrained in ((), (0, 1))
    ]
    assert kept[0] == [4, 4] and sum(kept[1]) < 8, "the same chances, all but the first of what is forced"


def test_where_asking_does_not_pay_it_is_looked_at_less_often_until_things_change() -> None:
    policy = policy_of(Draft(DraftCost(10.0)))
    rows = [live(0, 0.2)]
    for at in range(500):
        policy.observe_row(live(1, 0.2), 1, int(at % 5 == 0))
    assert asked(policy, rows) == [0]
    rows[0].acceptance = Acceptance(0.99, weight=1000.0)
    policy._proposer = Draft(DraftCost(0.1))
    rounds = next(index for index in range(20) if any(asked(policy, rows)))
    assert rounds == 1, "one round is left out behind the first that does not pay"
    policy._proposer = Draft(DraftCost(1e3))
    looks = [asked(policy, rows) for _ in range(31)]
    assert not any(map(any, looks))
    policy._proposer = Draft(DraftCost(0.1))
    assert next(index for index in range(20) if any(asked(policy, rows))) <= 8
    policy._proposer = Draft(DraftCost(1e3))
    assert not any(asked(policy, rows))
    policy._proposer = Draft(DraftCost(0.1))
    policy.layout_changed()
    assert any(asked(policy, rows))
