"""Acceptance, and the choice of how much to ask for."""

from __future__ import annotations

import itertools
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.workers.speculation import (
    LEAST_RUNNER_UP,
    MOST_CANDIDATES,
    Acceptance,
    DraftCost,
    LayoutKind,
    PositionChances,
    Probing,
    RunnerUpGains,
    Survival,
    accepted,
    expected_tokens,
    round_seconds,
    runner_up_chances,
)

ids = st.lists(st.integers(0, 3), max_size=6)


@given(ids, ids)
def test_accepted_is_the_length_of_the_common_prefix(candidates: list[int], chosen: list[int]) -> None:
    pairs = zip(candidates, chosen, strict=False)
    assert accepted(candidates, chosen) == len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)))


def test_an_acceptance_estimate_follows_what_it_sees() -> None:
    row = Acceptance()
    assert row.chance == pytest.approx(0.7)
    for _ in range(100):
        row.observe(4, 4)
    assert row.chance > 0.95
    for _ in range(30):
        row.observe(4, 0)
    assert row.chance < 0.45, "a row that changes its subject is noticed within a few dozen candidates"


def test_candidates_behind_the_first_miss_say_nothing() -> None:
    short, long = Acceptance(), Acceptance()
    short.observe(1, 0)
    long.observe(16, 0)
    assert short.chance == long.chance


@given(st.lists(st.tuples(st.integers(1, 16), st.integers(0, 16)), max_size=50))
def test_a_chance_is_a_chance(rounds: list[tuple[int, int]]) -> None:
    row = Acceptance()
    for proposed, held in rounds:
        row.observe(proposed, min(proposed, held))
        assert 0.0 <= row.chance <= 1.0


@given(st.floats(0, 1), st.integers(0, 16))
def test_expected_tokens_is_the_sum_over_prefixes(chance: float, candidates: int) -> None:
    assert expected_tokens(chance, candidates) == pytest.approx(sum(chance**power for power in range(candidates + 1)))


def test_long_proposals_are_promised_what_their_places_have_shown() -> None:
    """Half of the proposals are accepted to the end, of the other half nothing."""
    seen = Survival()
    for _ in range(500):
        seen.observe(16, 16)
        seen.observe(16, 0)
    assert seen.expected_tokens(16) == pytest.approx(9.0, rel=0.02)
    assert expected_tokens(seen.chance, 16) > 10.5, "one chance for all places promises more"
    assert Survival().expected_tokens(3) == pytest.approx(1 + 0.7 + 0.49 + 0.343)
    assert seen.expected_tokens(20) > seen.expected_tokens(16)


def test_each_position_is_judged_by_what_was_put_to_the_test_there() -> None:
    """First candidates are accepted in nine of ten rounds, second ones in half of those; no third one was ever tried."""
    seen = PositionChances()
    for number in range(5000):
        seen.observe(2, 0 if number % 10 == 0 else 1 + number % 2)
    chances = seen.chances
    assert chances[:2] == pytest.approx([0.9, 0.5], abs=0.06)
    assert chances[2:] == pytest.approx([chances[1]] * (MOST_CANDIDATES - 2)), "what is not known is like the one before"
    assert PositionChances().chances == pytest.approx([0.7] * MOST_CANDIDATES)


def test_what_little_is_known_of_leaves_much_to_hope_for() -> None:
    seen = PositionChances()
    before = seen.upper_bounds([0.5, 0.25])
    for _ in range(400):
        seen.observe(1, 1)
    after = seen.upper_bounds([0.5, 0.25])
    assert before == pytest.approx([1.0, 1.0]), "two deviations of four observations"
    assert after == pytest.approx([0.55, 0.55], abs=0.01), "the first position alone was tried"
    assert seen.upper_bounds([1.0, 0.0, 0.0]) == [1.0, 0.0, 0.0], "no bound is above what cannot be"
    assert seen.upper_bounds([]) == []


def test_probing_pauses_longer_and_longer_while_asking_does_not_pay() -> None:
    probing = Probing(first=2, longest=8)
    asked = [index for index in range(60) if probing.due(0.0)]
    assert [right - left for left, right in pairwise(asked)][:4] == [4, 8, 8, 8]
    probing.asked()
    assert [probing.due(0.0) for _ in range(2)] == [False, True]


def test_probing_costs_a_small_share_however_dear_it_is() -> None:
    probing = Probing(first=2, longest=1024, most_share=0.01)
    probes = sum(probing.due(5.0) for _ in range(10_000))
    assert 12 <= probes <= 20, "each costs five rounds, and all together a hundredth"


def test_what_runs_beside_the_target_is_hidden() -> None:
    draft_cost = DraftCost(step=0.25, hop=0.125)
    assert round_seconds(LayoutKind.SEQUENTIAL, 1.0, draft_cost, 3, 0.5) == 1.875
    assert round_seconds(LayoutKind.OVERLAPPED, 1.0, draft_cost, 3, 1.0) == 1.125, "a right draft only costs the hop"
    assert round_seconds(LayoutKind.OVERLAPPED, 1.0, draft_cost, 3, 0.0) == 1.875 + 0.125, "a wrong one starts over"
    slow = DraftCost(step=0.5, hop=0.125)
    missed, hit = 0.125 + 3.5 * 0.5, 0.125 + 4 * 0.5 - 1.0
    assert round_seconds(LayoutKind.OVERLAPPED, 1.0, slow, 3, 0.25) == 1.0 + 0.75 * missed + 0.25 * hit
    for kind in LayoutKind:
        assert round_seconds(kind, 1.0, draft_cost, 0, 1.0) == 1.0


def test_a_runner_up_is_worth_what_the_time_to_verify_it_brings_otherwise() -> None:
    assert runner_up_chances(2.0, 1, [1.0, 1.05, 1.2]) == pytest.approx((0.1, 0.3))
    assert runner_up_chances(2.0, 1, [1.0, 1.15, 1.15]) == pytest.approx((0.3, 0.3)), "a second one is the less likely"
    assert runner_up_chances(2.0, 1, [1.0, 1.0, 1.0]) == (LEAST_RUNNER_UP,) * 2
    assert runner_up_chances(2.0, 4, [1.0, 1.2]) == pytest.approx((0.1,)), "each of the rows has one"


def test_what_runners_up_bring_is_counted_by_rounds_of_rows() -> None:
    gains = RunnerUpGains()
    assert (gains.tried, gains.accepted) == (0.0, 0.0)
    for _ in range(2000):
        gains.observe(2, 3, 1)
    assert gains.tried == pytest.approx(1.5, rel=0.02)
    assert gains.accepted == pytest.approx(0.5, rel=0.02)
    survival = Survival()
    usual = survival.expected_tokens(3)
    survival.observe_runners_up(8, 2)
    assert survival.expected_tokens(3) == pytest.approx(usual + 0.25)
    assert survival.expected_tokens(0) == 1.0
