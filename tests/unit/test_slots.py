"""The slots of a pass: the choice is the best of all choices where pass times grow by tiles, and is computed quickly."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from itertools import accumulate

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.workers.engines.costs import CostCurve
from outrider.workers.speculation import MOST_CANDIDATES, DraftCost, LayoutKind, round_seconds
from outrider.workers.target.slots import (
    MOST_SLOTS,
    Filled,
    Reaches,
    best_request,
    deepest,
    expected_hits,
    fill_slots,
    worth_verifying,
)

STEP = DraftCost(0.05)
# Passes of a model of 1.1 billion parameters, milliseconds.
CURVE = CostCurve({1: 17.0, 2: 17.2, 4: 18.0, 8: 19.5, 12: 21.0, 16: 22.5, 32: 34.0, 64: 55.0, 128: 110.0})


def alike(chances: Sequence[float], depth: int = MOST_CANDIDATES) -> Reaches:
    return [[chance ** (at + 1) for at in range(depth)] for chance in chances]


def counts_of(chances: Sequence[float], verify: Callable[[int], float], step: float) -> list[int]:
    return fill_slots(alike(chances), verify, DraftCost(step)).counts


def price(
    counts: Sequence[int],
    reaches: Reaches,
    verify: Callable[[int], float],
    draft_cost: DraftCost,
    kind: LayoutKind = LayoutKind.SEQUENTIAL,
) -> tuple[float, float]:
    """Tokens and seconds of a round with this many candidates of each row, reckoned row by row and step by step."""
    rows, most = len(counts), max(counts)
    tokens = rows + sum(float(reach) for row, count in zip(reaches, counts, strict=True) for reach in row[:count])
    absent = sum(count < step for step in range(1, most + 1) for count in counts)
    hit = float(np.prod(np.array(reaches)[:, most - 1])) if most else 0.0
    return tokens, float(round_seconds(kind, verify(rows + sum(counts)), draft_cost, most, hit, absent))


chances_of_rows = st.lists(st.lists(st.floats(0, 1), min_size=4, max_size=4), min_size=1, max_size=3)
rises = st.lists(st.sampled_from([0.0, 0.0, 0.01, 0.1, 0.5]), min_size=16, max_size=16)


@given(chances_of_rows, rises, st.floats(0, 0.5), st.floats(0, 0.5), st.floats(0, 1), st.sampled_from(LayoutKind))
def test_no_other_choice_commits_more_a_second(
    chances: list[list[float]], rises: list[float], step: float, hop: float, share: float, kind: LayoutKind
) -> None:
    """Of up to three rows with up to four candidates each, by whatever passes cost: they need not be convex."""
    reaches = np.cumprod(np.array(chances), axis=1).tolist()
    seconds = list(accumulate(rises, initial=1.0))
    draft_cost = DraftCost(step, hop, row=share * step / len(chances) if kind is LayoutKind.SEQUENTIAL else 0.0)

    def verify(tokens: int) -> float:
        return seconds[tokens - 1]

    filled = fill_slots(reaches, verify, draft_cost, kind)
    tokens, took = price(filled.counts, reaches, verify, draft_cost, kind)
    assert (filled.tokens, filled.seconds) == pytest.approx((tokens, took))
    every = itertools.product(range(5), repeat=len(chances))
    rates = [tokens / took for counts in every for tokens, took in [price(counts, reaches, verify, draft_cost, kind)]]
    assert filled.rate == pytest.approx(max(rates))
    assert filled.plain_rate == pytest.approx(rates[0])


@given(chances_of_rows, rises, st.integers(3, 6))
def test_of_what_is_known_already_no_other_beginning_of_the_rows_does_better(
    chances: list[list[float]], rises: list[float], fed: int
) -> None:
    reaches = np.cumprod(np.array(chances), axis=1).tolist()
    seconds = list(accumulate(rises, initial=1.0))
    filled = fill_slots(reaches, lambda tokens: seconds[tokens - fed], fed=fed, drafted=False)
    rates = []
    for counts in itertools.product(range(5), repeat=len(chances)):
        held = sum(sum(row[:count]) for row, count in zip(reaches, counts, strict=True))
        rates.append((len(chances) + held) / seconds[sum(counts)])
    assert filled.rate == pytest.approx(max(rates))


def test_a_pass_is_filled_up_to_its_tile_by_whichever_row_is_likeliest() -> None:
    """Up to eight tokens cost the same, up to sixteen twice that; sure rows take the slots of doubtful ones."""

    def tiles(tokens: int) -> float:
        return float(-(-tokens // 8))

    filled = fill_slots(alike([0.9, 0.9, 0.4, 0.1]), tiles, DraftCost(0.01))
    assert (sum(filled.counts), filled.counts[0], filled.counts[3]) == (4, filled.counts[1], 0)
    # The next tile pays where candidates are sure enough to fill most of it.
    sure = fill_slots(alike([1.0] * 8, 4), lambda tokens: 1.0 if tokens <= 8 else 1.5 if tokens <= 16 else 5.0)
    assert sure.counts == [1] * 8, "the first of these eight costs half a pass, which all eight together gain twice over"


def test_nothing_is_asked_where_nothing_is_accepted_or_verification_costs_by_the_token() -> None:
    assert counts_of([0.0] * 4, lambda tokens: 1.0, 0.01) == [0] * 4
    assert counts_of([0.9], lambda tokens: float(tokens), 0.2) == [0]


def test_all_is_asked_where_it_is_free_and_right() -> None:
    assert counts_of([1.0], lambda tokens: 1.0, 0.0) == [MOST_CANDIDATES]


def test_a_row_that_never_hits_asks_for_nothing_beside_one_that_does() -> None:
    counts = counts_of([0.95, 0.0], lambda tokens: 1.0 + 0.05 * tokens, 0.01)
    assert counts[0] > 2
    assert counts[1] == 0


def test_steps_that_few_rows_take_are_cheaper_where_the_draft_says_so() -> None:
    """The seventh step is for one row alone, and costs a tenth of what it does for eight."""
    chances = [0.98] + [0.5] * 7
    whole = fill_slots(alike(chances), CURVE, DraftCost(2.0))
    parts = fill_slots(alike(chances), CURVE, DraftCost(2.0, row=0.25))
    assert parts.counts[0] > whole.counts[0]
    assert parts.rate > whole.rate


@given(
    st.lists(st.floats(0, 1), min_size=1, max_size=40),
    st.floats(0.0, 1.0),
    st.floats(0, 1),
    st.floats(0, 1),
)
def test_many_rows_are_never_worse_than_plain_nor_than_any_number_for_all_alike(
    chances: list[float], per_token: float, step: float, hop: float
) -> None:
    def verify(tokens: int) -> float:
        return 1.0 + per_token * tokens

    reaches = alike(chances, deepest(len(chances)))
    filled = fill_slots(reaches, verify, DraftCost(step, hop))
    tokens, seconds = price(filled.counts, reaches, verify, DraftCost(step, hop))
    assert (filled.tokens, filled.seconds) == pytest.approx((tokens, seconds))
    for count in range(len(reaches[0]) + 1):
        tokens, seconds = price([count] * len(chances), reaches, verify, DraftCost(step, hop))
        assert filled.rate >= tokens / seconds * (1 - 1e-9)


def test_no_more_is_looked_into_than_any_pass_has_room_for() -> None:
    assert [deepest(rows) for rows in (0, 1, 32, 64, 4096)] == [MOST_CANDIDATES] * 3 + [MOST_SLOTS // 64, 1]
    filled = fill_slots(alike([1.0] * 100, 5), lambda tokens: 1.0)
    assert sum(filled.counts) == 500


def test_what_a_token_gains_is_what_it_costs_less_than_without() -> None:
    request = best_request(alike([1.0], 4), lambda tokens: 1.0, DraftCost(0.25))
    assert request.counts == [4]
    assert request.gain == pytest.approx(1.0 - 2.0 / 5.0)
    assert best_request(alike([0.0]), lambda tokens: 1.0, DraftCost(0.25)).gain == 0.0


def test_a_candidate_is_worth_less_the_more_verifying_costs() -> None:
    rows = alike([0.9, 0.5])
    cheap = best_request(rows, lambda tokens: 1.0 + 0.01 * tokens, STEP)
    dear = best_request(rows, lambda tokens: 1.0 + 0.05 * tokens, STEP)
    assert 0.0 < cheap.least_reach < dear.least_reach < 1.0
    free = best_request(rows, lambda tokens: 1.0 + 0.01 * tokens, DraftCost(0.0))
    assert cheap.least_sum > free.least_sum == 0.0
    ahead = best_request(rows, lambda tokens: 1.0 + 0.01 * tokens, STEP, LayoutKind.OVERLAPPED)
    assert ahead.least_sum == 0.0, "the draft's time is not the target's"


def test_of_one_row_another_step_is_worth_while_where_it_brings_what_it_and_its_slot_cost() -> None:
    chance, step, slot = 0.8, 0.05, 0.03
    request = best_request(alike([chance]), lambda tokens: 1.0 + slot * tokens, DraftCost(step))
    [count] = request.counts
    tokens = 1.0 + sum(chance ** (at + 1) for at in range(count))
    rate = tokens / (1.0 + slot * (count + 1) + step * count)
    assert request.least_reach == pytest.approx(rate * slot)
    least = request.least_reach + request.least_sum
    assert chance * least == pytest.approx(rate * (step + slot))
    # The last that was worth it, and the first that is not.
    assert chance ** (count - 1) >= least > chance ** (count + 1)


@given(st.lists(st.lists(st.floats(0.03, 0.99), max_size=20), min_size=1, max_size=6))
def test_what_is_verified_is_the_beginning_of_each_row_and_no_worse_than_nothing(chances: list[list[float]]) -> None:
    reaches = [[min(each[: at + 1]) for at in range(len(each))] for each in chances]
    counts = worth_verifying(reaches, CURVE)
    assert all(0 <= count <= len(each) for count, each in zip(counts, reaches, strict=True))
    gained = len(reaches) + sum(sum(each[:count]) for each, count in zip(reaches, counts, strict=True))
    assert gained / CURVE(len(reaches) + sum(counts)) >= len(reaches) / CURVE(len(reaches)) * 0.999


def test_what_so_many_candidates_bring_is_the_sum_of_their_reaches() -> None:
    reaches = alike([0.5, 0.9, 0.3], 3)
    assert expected_hits(reaches, [2, 3, 0]) == pytest.approx((0.5 + 0.25 + 0.9 + 0.81 + 0.729, 0.25 * 0.729))
    assert expected_hits(reaches, [5, 0, 0]) == pytest.approx((0.875, 0.125))
    assert expected_hits(reaches, [0, 0, 0]) == (0.0, 1.0)


@pytest.mark.parametrize("reach", [0.01, 0.9])
def test_a_lone_candidate_is_verified_where_it_is_likely(reach: float) -> None:
    assert worth_verifying([[reach]], CURVE) == [int(reach > 0.5)]


def simulated(rows: int, rounds: int, choose: Callable[[Reaches], Filled]) -> float:
    """Tokens a second of rows whose candidates hold with chances of their own, by what each round is said to take."""
    random = np.random.default_rng(rows)
    chances = random.beta(6, 3, rows)
    reaches = alike(chances.tolist(), deepest(rows))
    tokens = seconds = 0.0
    for _ in range(rounds):
        filled = choose(reaches)
        seconds += filled.seconds
        for chance, count in zip(chances, filled.counts, strict=True):
            tokens += 1 + int(np.argmin([*(random.random(count) < chance), False]))
    return tokens / seconds


@pytest.mark.one_in(3)
@pytest.mark.parametrize("rows", [2, 4, 8, 16, 64])
def test_simulated_rows_gain_what_was_forecast_and_never_less_than_plain(rows: int) -> None:
    draft_cost = DraftCost(1.2 + 0.06 * rows, 0.5, row=0.06)
    chosen: list[Filled] = []

    def choose(reaches: Reaches) -> Filled:
        chosen.append(fill_slots(reaches, CURVE, draft_cost))
        return chosen[-1]

    rate = simulated(rows, 400, choose)
    forecast = sum(each.tokens for each in chosen) / sum(each.seconds for each in chosen)
    assert rate == pytest.approx(forecast, rel=0.05)
    assert rate >= 0.98 * rows / CURVE(rows)


def test_choosing_takes_no_time_that_anybody_would_notice() -> None:
    """Between two passes of 60 ms. On a quiet machine it takes less than 0.2 ms (docs/lab)."""
    reaches = alike(np.random.default_rng(0).uniform(0.3, 0.95, 64).tolist(), deepest(64))
    took = []
    for _ in range(50):
        started = time.perf_counter()
        fill_slots(reaches, CURVE, DraftCost(2.5, 0.5, row=0.05))
        took.append(time.perf_counter() - started)
    assert min(took) < 1e-3
