"""Rows that pass the length at which rope changes its frequencies, and are truncated below it again."""

from dataclasses import replace

import numpy as np
import pytest
from kernel_models import (
    CAPPED,
    LONG,
    Packed,
    all_logits,
    assert_same_bits,
    build,
    pack_program,
    packed,
    random_matrices,
    tokens,
)

from outrider.kernels.library import CacheFull, KernelError
from outrider.kernels.native import NativeDecodeFeed, NativeFeed, NativeStopRule
from outrider.kernels.program import Format, Kind

SWITCH = LONG.longest
TEXT = tokens(LONG, 44)


@pytest.fixture(scope="module")
def model():
    return packed(LONG, Format.W4A8)


@pytest.fixture(scope="module")
def whole(model):
    with model.model() as engine:
        return all_logits(engine, engine.open(), TEXT)


@pytest.mark.parametrize("pieces", [(1,) * 43, (SWITCH,), (SWITCH - 1, 2), (SWITCH + 1,), (18, 1, 1, 1, 1)])
def test_where_the_pieces_end_changes_no_bit(model, whole, pieces):
    with model.model() as engine:
        assert_same_bits(all_logits(engine, engine.open(), TEXT, pieces), whole)


def test_a_long_row_is_computed_anew_in_parts() -> None:
    """More tokens than are read together."""
    shape = replace(LONG, longest=1100, context=1200)
    text = tokens(shape, 1104)
    with packed(shape, Format.W4A8).model() as engine:
        rows = [engine.open() for _ in range(3)]
        for row in rows:
            engine.forward([NativeFeed(row, text[:1099], choose=0)])
        found = engine.forward([NativeFeed(row, text[1099:], choose=5, logits=5) for row in rows])
        alone = engine.forward([NativeFeed(engine.open(prompt=1104), text, logits=4, choose=4)])[0].logits
        for each in found:
            assert_same_bits(each.logits[1:], alone)


def test_a_row_comes_back_over_the_switch(model, whole):
    with model.model() as engine:
        row, other = engine.open(), engine.open()
        for length, fed in ((30, 5), (18, 4), (17, 2), (SWITCH, 3), (SWITCH - 1, 25), (2, 1)):
            engine.truncate(row, min(engine.length(row), length))
            while (at := engine.length(row)) < length + fed:
                part = TEXT[at : length if at < length else length + fed]
                wanted = len(part) if at >= length else 0
                feeds = [NativeFeed(other, [3], choose=0), NativeFeed(row, part, choose=wanted, logits=wanted)]
                found = engine.forward(feeds)[1].logits
            assert_same_bits(found, whole[length : length + fed])


@pytest.mark.parametrize("prompt", [0, 6, 40])
def test_a_prompt_that_is_read_in_pieces(model, whole, prompt):
    with model.model() as engine:
        row = engine.open(prompt=prompt)
        engine.forward([NativeFeed(row, TEXT[:6], choose=0)])
        fork = engine.fork(row, 5, prompt=9)
        engine.forward([NativeFeed(row, TEXT[6:30], choose=0)])
        late = engine.fork(row, 12)
        assert_same_bits(engine.forward([NativeFeed(row, TEXT[30:], logits=3)])[0].logits, whole[-3:])
        assert_same_bits(engine.forward([NativeFeed(fork, TEXT[5:10], logits=2)])[0].logits, whole[8:10])
        assert_same_bits(engine.forward([NativeFeed(late, TEXT[12:25], logits=9)])[0].logits, whole[16:25])


@pytest.mark.parametrize("pieces", [(), (1,) * 43, (SWITCH,), (SWITCH - 1, 2), (18, 1, 1, 1, 1)])
def test_within_a_prompt_beyond_the_switch_all_is_that_of_a_long_row(model, whole, pieces):
    """Its scores are asked for, before the switch too. Rows that share a beginning with it are as their own prompts are."""
    prompt = TEXT[: SWITCH + 1]
    with model.model() as engine:
        given = all_logits(engine, engine.open(prompt=len(prompt)), prompt)
        assert_same_bits(given[SWITCH:], whole[SWITCH : SWITCH + 1])
        assert (given[1:SWITCH] != whole[1:SWITCH]).any(axis=1).all()
        short = engine.open(prompt=SWITCH)
        assert_same_bits(all_logits(engine, short, prompt, pieces), whole[: SWITCH + 1])
        engine.truncate(short, 12)
        assert_same_bits(all_logits(engine, engine.open(prompt=len(prompt)), prompt, pieces), given)
        late = engine.fork(short, 12, prompt=len(prompt))
        assert_same_bits(all_logits(engine, late, prompt[12:]), given[12:])
        back = engine.fork(late, 12, prompt=SWITCH)
        engine.truncate(late, 9)
        feeds = [NativeFeed(late, prompt[9:SWITCH], logits=4), NativeFeed(back, prompt[12:], logits=9)]
        for found, wanted in zip(engine.forward(feeds), (given[16:SWITCH], whole[12 : SWITCH + 1]), strict=True):
            assert_same_bits(found.logits, wanted)


def test_branches_within_a_prompt_beyond_the_switch(model):
    branches = [(1, 12), (6, 11)]
    with model.model() as engine:
        row = engine.open(prompt=SWITCH + 5)
        engine.forward([NativeFeed(row, TEXT[:10], choose=0)])
        found = engine.forward([NativeFeed(row, TEXT[10:18], choose=8, logprobs=2, branches=branches)])[0]
        texts = [TEXT[: 11 + at] for at in range(8)] + [[*TEXT[: 10 + after], token] for after, token in branches]
        for text, chosen, explained in zip(texts, found.tokens, found.logprobs, strict=True):
            alone = engine.forward([NativeFeed(engine.open(prompt=SWITCH + 1), text, logprobs=2)])[0]
            assert (alone.tokens, alone.logprobs) == ([chosen], [explained])
            usual = engine.forward([NativeFeed(engine.open(prompt=SWITCH), text, logprobs=2)])[0]
            assert usual.logprobs != [explained]


def written(engine, start, count):
    """A text that the model itself goes on with."""
    (chosen, _, _), *_ = engine.decode([NativeDecodeFeed(engine.open(), start, count)], NativeStopRule())[0]
    return start + chosen


@pytest.mark.parametrize("wrong", [None, 18, 19, SWITCH, 22])
def test_branches_and_log_probabilities_on_both_sides(model, wrong):
    """Candidates hold up to the ``wrong`` one; what is behind it is not asked again."""
    branches = [(6, 11), (1, 12), (3, 13), (4, 14)]
    with model.model() as engine:
        text = written(engine, TEXT[:17], 8)
        if wrong is not None:
            text[wrong] = (text[wrong] + 1) % LONG.vocabulary
        # Up to the switch all choices are made; if one of them is not what follows, none of those beyond.
        known = 8 if wrong in (None, 22) else SWITCH - 17
        row = engine.open()
        engine.forward([NativeFeed(row, text[:17], choose=0)])
        found = engine.forward([NativeFeed(row, text[17:], choose=8, logprobs=2, branches=branches)])[0]
        assert found.tokens[known:8] == [-1] * (8 - known)
        for at in range(known):
            alone = engine.forward([NativeFeed(engine.open(), text[: 18 + at], logprobs=2)])[0]
            assert (alone.tokens, alone.logprobs) == ([found.tokens[at]], [found.logprobs[at]])
        for (after, token), chosen, explained in zip(branches, found.tokens[8:], found.logprobs[8:], strict=True):
            if known < 8 and after >= known:
                assert chosen == -1
                continue
            alone = engine.forward([NativeFeed(engine.open(), [*text[: 17 + after], token], logprobs=2)])[0]
            assert (alone.tokens, alone.logprobs) == ([chosen], [explained])
        assert engine.length(row) == 25
        # On from there, from a fork of it, and from where the candidates held.
        later = engine.forward([NativeFeed(engine.open(), [*text, 5, 6], choose=2)])[0].tokens
        fork, earlier = engine.fork(row, 24), engine.fork(row, 19)
        assert engine.forward([NativeFeed(row, [5, 6], choose=2)])[0].tokens == later
        assert engine.forward([NativeFeed(fork, [text[24], 5, 6], choose=2)])[0].tokens == later
        assert engine.forward([NativeFeed(earlier, [*text[19:], 5, 6], choose=2)])[0].tokens == later


@pytest.mark.parametrize(("begin", "guess_room"), [(TEXT[:16], 0), ([*TEXT[:9], *TEXT[:7]], 24)])
def test_several_steps_in_one_call(model, begin, guess_room):
    """Guesses, the first of which go beyond the switch, are taken back."""
    with model.model() as engine:
        row, single = engine.open(), engine.open()
        (chosen, _, _), *_ = engine.decode([NativeDecodeFeed(row, begin, 12)], NativeStopRule(), guess_room)[0]
        fed, found = begin, []
        for _ in range(12):
            found += engine.forward([NativeFeed(single, fed)])[0].tokens
            fed = found[-1:]
        assert chosen == found


def test_a_cache_that_is_full_feeds_nothing(model, whole):
    with model.model(cache_bytes=1 << 21) as engine:
        row = engine.open()
        engine.forward([NativeFeed(row, TEXT[:10], choose=0)])
        others = []
        with pytest.raises(CacheFull):
            while True:
                others.append(engine.open())
                engine.forward([NativeFeed(others[-1], TEXT[:30], choose=0)])
        engine.truncate(row, 10)
        with pytest.raises(CacheFull):
            for _ in range(50):
                engine.forward([NativeFeed(row, (TEXT * 20)[10:600], choose=0)])
        for other in others:
            engine.close_row(other)
        assert engine.length(row) == 10
        assert_same_bits(engine.forward([NativeFeed(row, TEXT[10:40], logits=25)])[0].logits, whole[15:40])
        assert np.isfinite(whole).all()


def test_what_is_not_finite_is_refused_beside_a_row_that_crosses_over() -> None:
    program = build(replace(CAPPED, longest=SWITCH), Format.W4A8)
    matrices = random_matrices(program)
    embed = next(op for op in program.ops if op.kind is Kind.EMBED)
    matrices[embed.weight][7] = 3e38
    text = [token % 7 for token in tokens(CAPPED, SWITCH + 2)]
    with Packed(program, pack_program(program, matrices)).model() as engine:
        crossing = engine.open()
        engine.forward([NativeFeed(crossing, text[: SWITCH - 2], choose=0)])
        # Its choices before the switch and behind it take a pass each.
        with pytest.raises(KernelError, match="not a finite number"):
            engine.forward([NativeFeed(engine.open(), [1, 7]), NativeFeed(crossing, text[SWITCH - 2 :], 4, 4)])
