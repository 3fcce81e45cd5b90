"""Rows with a common prefix share its keys and values, and their texts do not change."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from fakes import END, VOCABULARY, FakeEngine, Nonsense, hashed
from hypothesis import given, settings
from hypothesis import strategies as st
from test_verifier import assert_plain, finish, verifier

from examples import examples
from outrider.workers.draft.drafter import Drafter
from outrider.workers.engines import prefix_cache
from outrider.workers.engines.engine import Feed
from outrider.workers.engines.prefix_cache import KEPT_AT_FIRST, LEAST_SHARED, PrefixCache
from outrider.workers.messages import Advance, DraftRequest, Row, Sampling

CONTEXT = 400
SYSTEM = tuple(index * 7 % 11 for index in range(60))
PLAIN = Sampling()


def fill(engine: FakeEngine, row: int, prompt: Sequence[int]) -> None:
    engine.feed([Feed(row, prompt[engine.length(row) :], 1)])


def fed(engine: FakeEngine) -> int:
    return sum(len(feed.tokens) for each in engine.passes for feed in each)


def test_a_row_begins_with_what_another_has_read() -> None:
    engine = FakeEngine(CONTEXT)
    store = PrefixCache(engine, 1000)
    first, second = (*SYSTEM, 1, 2, 3), (*SYSTEM, 4, 5)
    assert store.open(1, first, PLAIN) == 0
    fill(engine, 1, first)
    assert store.open(2, second, Sampling(seed=9)) == len(SYSTEM)
    assert engine.rows[2] == list(SYSTEM)
    assert (engine.sampling[2], engine.prompt_lengths[2]) == (Sampling(seed=9), len(second))
    assert store.held == 0, "nothing has ended yet"


def test_it_waits_for_a_row_that_is_still_reading() -> None:
    engine = FakeEngine(CONTEXT)
    store = PrefixCache(engine, 1000)
    prompt = (*SYSTEM, 1)
    assert store.open(1, prompt, PLAIN) == 0
    engine.feed([Feed(1, prompt[:30], 0)])
    assert store.open(2, prompt, PLAIN) is None
    assert 2 not in engine.rows
    assert store.open(3, prompt, PLAIN, wait=False) == 30
    fill(engine, 1, prompt)
    assert store.open(2, prompt, PLAIN) == len(prompt) - 1, "the last token is fed anew, for the choice behind it"


def test_a_row_that_is_withdrawn_is_no_beginning_for_others_but_is_remembered() -> None:
    engine = FakeEngine(CONTEXT)
    store = PrefixCache(engine, 1000)
    first, second = (*SYSTEM, 1, 2, 3), (*SYSTEM, 4, 5)
    store.open(1, first, PLAIN)
    assert store.common(1) == 0, "a row's own prompt is nobody else's"
    store.withdraw(1)
    fill(engine, 1, first)
    assert store.open(2, second, PLAIN) == 0, "nothing to share, and nothing to wait for"
    assert store.common(2) == len(SYSTEM)
    fill(engine, 2, second)
    store.close(1)
    assert 1 not in engine.rows and store.held == 0, "what it has is not kept"
    assert store.open(3, first, PLAIN) == len(SYSTEM), "of the row that was read"
    store.withdraw(7)  # of a row that was too short to be known


def test_few_tokens_in_common_are_not_shared() -> None:
    engine = FakeEngine(CONTEXT)
    store = PrefixCache(engine, 1000)
    for row, prompt in enumerate([SYSTEM, (*SYSTEM[: LEAST_SHARED - 1], 11, 11), (1, 2), (1, 2)]):
        assert store.open(row, prompt, PLAIN) == 0
        fill(engine, row, prompt)
    assert store.open(9, (*SYSTEM[:LEAST_SHARED], 11), PLAIN) == LEAST_SHARED


def test_what_an_ended_row_read_is_kept_once() -> None:
    engine = FakeEngine(CONTEXT)
    store = PrefixCache(engine, 1000)
    tails = [(1,) * 20, (2,) * 30, (3,), (1,) * 20]
    for row, tail in enumerate(tails):
        prompt = (*SYSTEM, *tail)
        shared = store.open(row, prompt, PLAIN)
        assert shared == (0, 60, 60, 79)[row]
        fill(engine, row, prompt)
        store.close(row)
        assert row not in engine.rows
    assert store.held == 60 + 20 + 30, "one token more, or the same again, is not worth keeping"
    assert len(engine.rows) == 2


def test_what_was_not_used_for_longest_is_forgotten_first() -> None:
    engine = FakeEngine(CONTEXT)
    store = PrefixCache(engine, 100)
    prompts = [(kind,) * 40 for kind in range(3)]
    for row, prompt in enumerate(prompts[:2]):
        store.open(row, prompt, PLAIN)
        fill(engine, row, prompt)
        store.close(row)
    assert store.open(10, prompts[0], PLAIN) == 39
    store.close(10)
    store.open(2, prompts[2], PLAIN)
    fill(engine, 2, prompts[2])
    store.close(2)
    assert store.held == 80
    assert [store.open(20 + kind, prompt, PLAIN) for kind, prompt in enumerate(prompts)] == [39, 0, 39]


def serve(store: PrefixCache, engine: FakeEngine, row: int, prompt: Sequence[int]) -> int:
    shared = store.open(row, prompt, PLAIN)
    assert shared is not None
    fill(engine, row, prompt)
    store.close(row)
    return shared


def test_little_is_kept_of_prompts_that_have_nothing_in_common() -> None:
    engine = FakeEngine(CONTEXT)
    store = PrefixCache(engine, 4000)
    for row in range(30):
        assert serve(store, engine, row, [row % 7, row // 7, *SYSTEM, *SYSTEM]) == 0
        assert store.held <= KEPT_AT_FIRST == store.allowed
    assert len(engine.rows) == 2


def test_more_is_kept_once_prompts_begin_like_some_that_were_given_up() -> None:
    engine = FakeEngine(CONTEXT)
    store = PrefixCache(engine, 4000)
    kinds = [(kind, *SYSTEM, *SYSTEM, *SYSTEM) for kind in range(4)]
    shared = [serve(store, engine, row, (*kinds[row % 4], row % 5, row % 7)) for row in range(16)]
    assert shared == [0] * 7 + [181] * 9, "the one kept last is found; the others are known, and kept from then on"
    assert store.held == 4 * 183


def test_what_was_shared_as_it_is_asks_for_no_more() -> None:
    """Many chat prompts have nothing in common but their template's first words, and the last prompt kept has those."""
    engine = FakeEngine(CONTEXT)
    store = PrefixCache(engine, 4000)
    for row in range(40):
        shared = serve(store, engine, row, (*SYSTEM[:20], row % 7, row // 7, *SYSTEM, *SYSTEM))
        assert shared == (20 if row else 0)
        assert store.allowed == KEPT_AT_FIRST


def test_a_prompt_too_long_to_be_kept_at_first_is_kept_whole_once_it_comes_again() -> None:
    engine = FakeEngine(CONTEXT)
    store = PrefixCache(engine, 4000)
    system = SYSTEM * 6
    shared = [serve(store, engine, row, (*system, row, row)) for row in range(4)]
    assert shared == [0, KEPT_AT_FIRST, 360, 360]


def test_a_prompt_longer_than_all_that_may_be_kept_is_kept_in_part() -> None:
    engine = FakeEngine(CONTEXT)
    store = PrefixCache(engine, 50)
    store.open(1, SYSTEM, PLAIN)
    fill(engine, 1, SYSTEM)
    store.close(1)
    assert store.held == 50
    assert store.open(2, SYSTEM, PLAIN) == 50


def test_a_row_that_ends_before_it_has_read_leaves_what_it_has() -> None:
    engine = FakeEngine(CONTEXT)
    store = PrefixCache(engine, 1000)
    store.open(1, SYSTEM, PLAIN)
    engine.feed([Feed(1, SYSTEM[:20], 0)])
    store.close(1)
    assert store.open(2, SYSTEM, PLAIN) == 20


def test_nothing_is_shared_where_it_may_not_be_or_would_not_pay() -> None:
    for engine, most in ((FakeEngine(CONTEXT), 0), (FakeEngine(CONTEXT), 1000)):
        engine.forks = most == 0
        store = PrefixCache(engine, most)
        for row in (1, 2):
            assert store.open(row, SYSTEM, PLAIN) == 0
            fill(engine, row, SYSTEM)
        store.close(1)
        store.close(2)
        assert engine.rows == {}


def distinct_prefixes(rows: Sequence[Sequence[int]]) -> int:
    return len({tuple(row[:length]) for row in rows for length in range(1, len(row) + 1)})


@settings(max_examples=examples(60), deadline=None)
@given(st.integers(0, 1 << 30), st.sampled_from([40, 120, 5000]), st.sampled_from([3, 32]))
def test_what_is_kept_is_bounded_and_counted(seed: int, most: int, most_rows: int) -> None:
    dice = random.Random(seed)
    engine = FakeEngine(CONTEXT)
    store = PrefixCache(engine, most)
    live: dict[int, tuple[int, ...]] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefix_cache, "MOST_KEPT", most_rows)
        patch.setattr(prefix_cache, "MOST_REMEMBERED", most_rows)
        for row in range(60):
            prompt = tuple(dice.choices((0, 0, 1), k=2)) + SYSTEM[: dice.choice((10, 30, 60))]
            prompt += tuple(dice.choices(range(3), k=dice.randrange(40)))
            shared = store.open(row, prompt, PLAIN, wait=False)
            assert shared is not None and shared < len(prompt)
            assert engine.rows[row] == list(prompt[:shared])
            fill(engine, row, prompt)
            live[row] = prompt
            if len(live) > 4:
                store.close(key := dice.choice(list(live)))
                del live[key]
            kept = [tokens for name, tokens in engine.rows.items() if name < 0]
            assert store.held <= store.allowed <= most
            assert len(store._dropped) <= most_rows
            known = {name for alike in store._by_beginning.values() for name in alike}
            assert known == {*store._live, *store._kept, *store._dropped}
            assert len(kept) <= most_rows
            # Rows that differ within their first tokens are counted apart.
            by_beginning: dict[tuple[int, ...], list[list[int]]] = {}
            for tokens in kept:
                by_beginning.setdefault(tuple(tokens[:LEAST_SHARED]), []).append(tokens)
            assert store.held == sum(map(distinct_prefixes, by_beginning.values()))


@st.composite
def alike(draw: st.DrawFn) -> list[Row]:
    """Rows of which many begin alike, some ask for several answers, and all are sampled."""
    heads = [SYSTEM, SYSTEM[:40], tuple(reversed(SYSTEM)), ()]
    rows = []
    for number in range(draw(st.integers(1, 6))):
        tail = draw(st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=30))
        prompt, count = (*draw(st.sampled_from(heads)), *tail), draw(st.integers(1, 20))
        for sample in range(draw(st.sampled_from([1, 1, 3]))):
            sampling = Sampling(temperature=draw(st.sampled_from([0.0, 1.0])), seed=number, sample=sample)
            rows.append(Row(number * 10 + sample, prompt, count, sampling))
    return rows


@settings(max_examples=examples(100), deadline=None)
@given(alike(), st.integers(1, 8), st.sampled_from([1, 50, 1000]), st.integers(0, 1 << 30))
def test_shared_is_plain(rows: list[Row], batch: int, most: int, seed: int) -> None:
    engine = FakeEngine(CONTEXT)
    target = verifier(engine, Nonsense(seed), batch, 3, prefix_tokens=most)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("outrider.workers.target.verifier.PREFILL_TOKENS", 16)
        ended = finish(target, rows)
    assert_plain(rows, ended, CONTEXT)
    assert all(name < 0 for name in engine.rows), "what is left in the engine are kept prompts"
    prompts = sum(len(row.prompt) for row in rows)
    assert target.counters.prompt_tokens == prompts
    assert target.counters.prompt_tokens_reused <= prompts


def test_a_system_prompt_is_read_once_whatever_the_batch() -> None:
    engine = FakeEngine(CONTEXT)
    rows = [Row(key, (*SYSTEM, key % 5, key % 7), 3) for key in range(30)]
    target = verifier(engine, Nonsense(1), 8, 0, end=(), prefix_tokens=1000)
    assert_plain(rows, finish(target, rows), CONTEXT, end=())
    assert target.counters.prompt_tokens == 30 * 62
    assert target.counters.prompt_tokens_reused >= 29 * 60
    # The first prompt whole, of each other the two tokens of its own, and two more tokens written are fed.
    assert fed(engine) <= 62 + 29 * 2 + 30 * 2


def test_several_answers_share_all_but_the_last_token_of_their_prompt() -> None:
    engine = FakeEngine(CONTEXT)
    rows = [Row(key, SYSTEM, 4, Sampling(temperature=1.0, seed=3, sample=key)) for key in range(6)]
    target = verifier(engine, Nonsense(1), 6, 0, end=(), prefix_tokens=1000)
    assert_plain(rows, finish(target, rows), CONTEXT, end=())
    assert target.counters.prompt_tokens_reused == 5 * 59


def never_ends(tokens: Sequence[int], sampling: Sampling) -> int:
    return hashed(tokens, sampling) % END


def test_a_draft_shares_too_even_within_one_request() -> None:
    shared, alone = FakeEngine(CONTEXT, choose=never_ends), FakeEngine(CONTEXT, choose=never_ends)
    advances = tuple(Advance(key, 0, (*SYSTEM, key, 1, 2), 3, Sampling(seed=key), 62) for key in range(6))
    replies = [
        Drafter(engine, (), most).propose(DraftRequest(1, advances)) for engine, most in ((shared, 1000), (alone, 0))
    ]
    assert replies[0].tokens == replies[1].tokens
    assert fed(alone) == 6 * (63 + 2)
    assert fed(shared) == 63 + 5 * 3 + 6 * 2


def test_a_draft_that_is_told_a_row_again_reads_its_prompt_no_second_time() -> None:
    engine = FakeEngine(CONTEXT, choose=never_ends)
    drafter = Drafter(engine, (), 1000)
    drafter.propose(DraftRequest(1, (Advance(1, 0, (*SYSTEM, 4), 2, PLAIN, 60),)))
    engine.passes.clear()
    again = Advance(1, 0, (*SYSTEM, 4, 5, 6), 2, PLAIN, 60)
    assert (
        drafter.propose(DraftRequest(2, (again,))).tokens[1]
        == Drafter(FakeEngine(CONTEXT, choose=never_ends), ()).propose(DraftRequest(1, (again,))).tokens[1]
    )
    assert fed(engine) == 1 + 3 + 1
