"""The forecast of a pass over a mixture of experts: the number of experts that its tokens need together."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise

import pytest
from fakes import END, FakeEngine, decode
from hypothesis import given
from hypothesis import strategies as st

from outrider.workers.engines.costs import CostCurve, measure
from outrider.workers.engines.engine import Chosen, Feed, Mixture, Router
from outrider.workers.engines.expert_costs import MOST_READING, ExpertNeeds, ExpertSharing, expert_seconds
from outrider.workers.messages import Row
from outrider.workers.speculation import MOST_CANDIDATES, DraftCost
from outrider.workers.target.proposers import LookupProposer
from outrider.workers.target.slots import best_request
from outrider.workers.target.text_and_stop_strings import TextWriter
from outrider.workers.target.verifier import Verifier

ROUTERS = (Router(64, 8),) * 6
# Of one pass, in seconds: at all, for each token, for each expert.
BASE, TOKEN, EXPERT = 1.0, 0.05, 0.01


def drawn(shares: Sequence[int], common: float, chance: random.Random) -> int:
    """The experts of a pass, where a token of a row takes each of its predecessor's with the chance ``common``."""
    needed = 0
    for router in ROUTERS:
        found: set[int] = set()
        for share in shares:
            taken: list[int] = []
            for _ in range(share):
                kept = [expert for expert in taken if chance.random() < common]
                known = set(kept)
                others = [expert for expert in range(router.experts) if expert not in known]
                taken = kept + chance.sample(others, int(router.chosen) - len(kept))
                found.update(taken)
        needed += len(found)
    return needed


def seconds(tokens: int, needed: float) -> float:
    return BASE + TOKEN * tokens + EXPERT * needed


def test_what_is_known_of_no_text_is_that_tokens_have_nothing_in_common() -> None:
    needs, chance = ExpertNeeds(ROUTERS), random.Random(1)
    assert needs(1) == pytest.approx(48)
    for tokens in (2, 5, 16):
        found = sum(drawn([1] * tokens, 0.0, chance) for _ in range(20)) / 20
        assert needs(tokens) == pytest.approx(found, rel=0.03)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("common", [0.3, 0.8])
@pytest.mark.parametrize("rows", [1, 4])
def test_what_passes_needed_is_what_passes_are_expected_to_need(common: float, rows: int) -> None:
    needs, chance = ExpertNeeds(ROUTERS), random.Random(2)
    for turn in range(120):
        share = (1, 2, 5, 5)[turn % 4]
        needs.observe([share] * rows, drawn([share] * rows, common, chance))
    for share in (1, 2, 5):
        found = sum(drawn([share] * rows, common, chance) for _ in range(20)) / 20
        assert needs(share * rows) == pytest.approx(found, rel=0.08)
    # Of a size that none had.
    found = sum(drawn([3] * rows, common, chance) for _ in range(20)) / 20
    assert needs(3 * rows) == pytest.approx(found, rel=0.1)


def test_rows_of_a_text_say_what_candidates_of_the_next_will_need() -> None:
    """Prompts are read before the first candidate is asked for."""
    needs, chance = ExpertNeeds(ROUTERS), random.Random(3)
    before = needs(8)
    needs.observe([20], drawn([20], 0.9, chance))
    found = sum(drawn([8], 0.9, chance) for _ in range(20)) / 20
    assert abs(needs(8) - found) < 0.3 * abs(before - found)


def test_ragged_passes_teach_as_well() -> None:
    needs, chance = ExpertNeeds(ROUTERS), random.Random(4)
    for _ in range(150):
        shares = [chance.choice([1, 4, 6]) for _ in range(3)]
        needs.observe(shares, drawn(shares, 0.8, chance))
    found = sum(drawn([4, 4, 4], 0.8, chance) for _ in range(20)) / 20
    assert needs(12) == pytest.approx(found, rel=0.08)


@given(
    st.lists(st.tuples(st.lists(st.integers(1, 600), min_size=1, max_size=6), st.floats(0.0, 1.0)), max_size=12),
)
def test_more_tokens_never_need_fewer_experts(passes: list[tuple[list[int], float]]) -> None:
    needs = ExpertNeeds(ROUTERS)
    for shares, fraction in passes:
        needs.observe(shares, round(needs.a_token + fraction * (needs.experts - needs.a_token)))
    found = [needs(tokens) for tokens in range(1, 40)]
    assert all(later >= earlier - 1e-9 for earlier, later in pairwise(found))
    assert found[-1] <= needs.experts + 1e-9 and found[0] >= needs.a_token - 1e-9


def test_a_pass_that_says_nothing_changes_nothing() -> None:
    needs = ExpertNeeds(ROUTERS)
    before = [needs(tokens) for tokens in (1, 4, 16)]
    for shares, read in (([1], 48), ([1000], needs.experts), ([4], 7)):
        needs.observe(shares, read)
        assert [needs(tokens) for tokens in (1, 4, 16)] == before


def curve_of(engine_seconds: float = EXPERT) -> CostCurve:
    apart = ExpertNeeds(ROUTERS)
    points = {tokens: seconds(tokens, apart(tokens)) for tokens in (1, 2, 4, 8, 16, 32)}
    return CostCurve(points, ExpertSharing(ROUTERS, apart, CostCurve(points), engine_seconds))


def test_a_curve_comes_to_say_what_passes_over_texts_take() -> None:
    curve, chance = curve_of(), random.Random(5)
    assert curve(8) == pytest.approx(seconds(8, ExpertNeeds(ROUTERS)(8)))
    for _ in range(60):
        for shares in ([1], [8]):
            needed = drawn(shares, 0.85, chance)
            curve.observe_pass(shares, seconds(sum(shares), needed), needed)
    found = sum(drawn([8], 0.85, chance) for _ in range(20)) / 20
    assert curve(8) == pytest.approx(seconds(8, found), rel=0.05)
    found = sum(drawn([5], 0.85, chance) for _ in range(20)) / 20
    assert curve(5) == pytest.approx(seconds(5, found), rel=0.08), "in between, where none was seen"


def test_a_slower_machine_is_not_taken_for_other_experts() -> None:
    curve, chance = curve_of(), random.Random(6)
    needs = curve.sharing.needs if curve.sharing else None
    for _ in range(80):
        needed = drawn([4], 0.5, chance)
        curve.observe_pass([4], 2.0 * seconds(4, needed), needed)
    assert needs is not None
    assert curve(4) == pytest.approx(2.0 * seconds(4, needs(4)), rel=0.05)


def test_what_is_kept_of_the_start_learns_what_texts_need_but_no_seconds() -> None:
    curve, chance = curve_of(), random.Random(7)
    start, other = curve.snapshot(), CostCurve({1: 10.0, 8: 20.0}).sharing_like(curve)
    before = start(8), other(8)
    for _ in range(40):
        needed = drawn([8], 0.9, chance)
        curve.observe_pass([8], 3.0 * seconds(8, needed), needed)
    for each, was in zip((start, other), before, strict=True):
        assert 0.5 * was < each(8) < 0.95 * was
    assert curve(8) > 1.5 * start(8)


def best_k(curve: CostCurve, chance: float) -> int:
    reaches = [[chance**held for held in range(1, MOST_CANDIDATES + 1)]]
    return best_request(reaches, curve, DraftCost(0.02, 0.01)).counts[0]


@pytest.mark.slow
def test_the_number_of_candidates_goes_by_the_experts_that_they_need() -> None:
    """Where expert reads are nearly all of a pass, plain decoding wins over texts whose tokens share none, and candidates
    win where they share most."""
    apart = ExpertNeeds(ROUTERS)
    points = {tokens: 0.1 + EXPERT * apart(tokens) for tokens in (1, 2, 4, 8, 16, 32)}

    def learned(common: float) -> CostCurve:
        curve = CostCurve(points, ExpertSharing(ROUTERS, ExpertNeeds(ROUTERS), CostCurve(points), EXPERT))
        source = random.Random(8)
        for _ in range(80):
            for share in (1, 2, 4, 8):
                needed = drawn([share], common, source)
                curve.observe_pass([share], 0.1 + EXPERT * needed, needed)
        return curve

    assert best_k(learned(0.0), 0.6) == 0
    few, many = best_k(learned(0.6), 0.8), best_k(learned(0.95), 0.8)
    assert 1 <= few < many


def test_seconds_of_an_expert_are_the_difference_that_reading_it_made() -> None:
    apart = {4: (2.0, 150.0), 8: (3.0, 250.0), 16: (4.0, 330.0)}
    alike = {4: (1.0, 50.0), 8: (1.0, 50.0), 2: (9.0, 48.0)}
    assert expert_seconds(apart, alike) == pytest.approx(0.01)
    assert expert_seconds(apart, {4: (5.0, 50.0)}) == 0.0, "a disturbed pass"
    assert expert_seconds(apart, {}) == 0.0
    assert expert_seconds({4: (1.0, 50.0)}, {4: (1.0, 50.0)}) == 0.0
    assert curve_of(100.0).sharing.reading(8) == MOST_READING  # type: ignore[union-attr]


class SparseEngine(FakeEngine):
    """Equal tokens need equal experts, others have nothing in common."""

    def feed(self, feeds: Sequence[Feed]) -> list[Chosen]:
        assert self.mixture is not None
        different = len({token for feed in feeds for token in feed.tokens})
        self.mixture.read = drawn([1] * different, 0.0, random.Random(different))
        return super().feed(feeds)


def test_measuring_a_mixture_takes_tokens_apart_and_alike() -> None:
    engine = SparseEngine(context=400, vocabulary=50000)
    engine.mixture = Mixture(ROUTERS)
    curve = measure(engine, seconds=60.0)
    kinds = {len(set(feed.tokens)) == 1 for each in engine.passes for feed in each if len(feed.tokens) in (4, 8, 16)}
    assert kinds == {True, False}
    assert curve.sharing is not None and engine.rows == {}
    record = curve.record()["experts"]
    assert isinstance(record, dict) and record["experts"] == 384 and record["a_token"] == 48
    assert record["needed_apart"][8] == pytest.approx(ExpertNeeds(ROUTERS)(8), rel=0.1)
    assert measure(FakeEngine()).record() == {}


def test_rounds_teach_the_curve_what_their_rows_need() -> None:
    engine = SparseEngine()
    engine.mixture = Mixture(ROUTERS)
    curve = curve_of()
    verifier = Verifier(
        engine=engine,
        new_writer=lambda row: TextWriter(decode, row.stop, (END,)),
        proposer=LookupProposer(),
        batch=3,
        draft_tokens=2,
        verify_seconds=curve,
        end_tokens=(END,),
    )
    verifier.add(Row(key, (key, 3, 1, 3, 1), 20) for key in range(3))
    verifier.round()
    assert curve.sharing is not None and curve.sharing.needs.rows == 3
    before = curve.sharing.needs(9)
    while not verifier.idle:
        verifier.round()
    assert curve.sharing.needs(9) < 0.95 * before, "this engine's tokens are few, so that they come again"
