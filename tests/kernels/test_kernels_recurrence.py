"""Recurrent states: rows that are fed, truncated and forked in any way equal rows that are read at once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from kernel_models import (
    BOUNDED,
    BY_COLUMN,
    DELTA,
    HYBRID,
    SCAN,
    SCAN_ALONE,
    Packed,
    Shape,
    all_logits,
    assert_same_bits,
    pack_program,
    packed,
    random_matrices,
    tokens,
)

from outrider.kernels import library
from outrider.kernels.builder import Builder
from outrider.kernels.library import CacheFull, KernelError
from outrider.kernels.native import NativeDecodeFeed, NativeFeed, NativeModel, NativeStopRule
from outrider.kernels.program import Cache, Format, Kind, Slice, Tensor
from outrider.kernels.sampling_values import SamplingValues

INSTRUCTION_SETS = library.available_instruction_sets()
# Its keys and values take so little that snapshots lie far apart.
WIDE = replace(HYBRID, width=128, heads=16, kv_heads=1, taps=16)
GREEDY = SamplingValues()


@pytest.fixture(
    scope="module",
    params=[HYBRID, WIDE, DELTA, BOUNDED, SCAN, BY_COLUMN, SCAN_ALONE],
    ids=["near", "far", "delta", "bounded", "scan", "by column", "alone"],
)
def model(request: Any) -> Packed:
    return packed(request.param, Format.W4A8)


@pytest.mark.one_in(9)
@pytest.mark.parametrize("prompt", [0, 300])
@pytest.mark.parametrize("taken_back", [1, 3, 8, 9, 17, 40, 150])
def test_a_truncation_of_any_length(model: Packed, taken_back: int, prompt: int) -> None:
    text, other = (tokens(HYBRID, 220, seed) for seed in (1, 2))
    with model.model(threads=2) as engine:
        whole = all_logits(engine, engine.open(), text)
        row, length = engine.open(GREEDY, prompt), 0
        # Fed by passes of many tokens and of single ones, and each time led astray.
        for piece in (1, 160, 5, 1, 1, 40):
            part = text[length : length + piece]
            found = engine.forward([NativeFeed(row, part, choose=0, logits=len(part))])[0].logits
            assert_same_bits(found, whole[length : length + len(part)])
            length += len(part)
            for step in range(0, taken_back, 7):
                engine.forward([NativeFeed(row, other[step : min(step + 7, taken_back)], choose=1)])
            engine.truncate(row, length)
            back = min(taken_back, length)
            engine.truncate(row, length - back)
            assert engine.length(row) == length - back
            length -= back


@pytest.mark.one_in(4)
@pytest.mark.parametrize("candidates", [1, 4, 16, 30])
def test_every_candidate_of_a_pass_can_be_gone_back_to(model: Packed, candidates: int) -> None:
    text, other = (tokens(HYBRID, 130, seed) for seed in (1, 2))
    with model.model() as engine:
        whole = all_logits(engine, engine.open(), text)
        for accepted in range(candidates + 1):
            row = engine.open(GREEDY, 60)
            engine.forward([NativeFeed(row, text[:60], choose=1)])
            start = 60
            for _ in range(2):
                fed = [text[start], *other[:candidates]]
                fed[1 : accepted + 1] = text[start + 1 : start + 1 + accepted]
                [answer] = engine.forward([NativeFeed(row, fed, choose=len(fed), logits=accepted + 1)][:1])
                assert len(answer.tokens) == len(fed)
                engine.truncate(row, start + 1 + accepted)
                start += 1 + accepted
            assert_same_bits(all_logits(engine, row, text[start:]), whole[start:])
            engine.close_row(row)


@pytest.mark.one_in(9)
@pytest.mark.parametrize("length", [0, 1, 15, 31, 32, 33, 70, 95, 96, 127, 128, 149, 150])
def test_a_fork_at_any_length(model: Packed, length: int) -> None:
    text, more = tokens(HYBRID, 200), 60
    with model.model() as engine:
        plain = engine.open()
        whole = all_logits(engine, plain, text)
        engine.close_row(plain)
        source = engine.open(GREEDY, 140)
        engine.forward([NativeFeed(source, text[:150], choose=1)])
        engine.forward([NativeFeed(source, [5], choose=1)])
        early = engine.fork(source, length, GREEDY, length)
        for token in tokens(HYBRID, more, seed=3):
            engine.forward([NativeFeed(source, [token], choose=1)])
        late = engine.fork(source, length, GREEDY, length)
        again = engine.fork(late, length, GREEDY, length)
        engine.close_row(source)
        for row in (late, early, again):
            assert engine.length(row) == length
            assert_same_bits(all_logits(engine, row, text[length:], (2, 1)), whole[length:])
            engine.close_row(row)
        assert engine.cache_use()[1] == 0


@pytest.mark.parametrize(("shape", "length"), [(HYBRID, 70), (SCAN_ALONE, 166)], ids=["hybrid", "alone"])
def test_a_fork_reads_again_only_what_is_behind_a_snapshot(shape: Shape, length: int) -> None:
    text = tokens(HYBRID, 200)
    with packed(shape, Format.W4A8).model() as engine:
        source = engine.open(GREEDY, 140)
        engine.forward([NativeFeed(source, text[:140], choose=1)])
        engine.forward([NativeFeed(source, text[140:], choose=1)])
        used = engine.cache_use()[1]
        row = engine.fork(source, length, GREEDY, 170)
        assert engine.cache_use()[1] == used
        # Of hybrids tokens 64 to 71 are read: the first two blocks are shared. (Without attention they hold nothing.)
        engine.forward([NativeFeed(row, text[length : length + 2], choose=1)])
        assert engine.cache_use()[1] == used + 1


def random_walk(engine: NativeModel, seed: int) -> None:
    """Rows of a few texts that grow, go astray and back, and begin as forks of one another; logits at every step."""
    random = np.random.default_rng(seed)
    texts = [tokens(HYBRID, 230, seed) for seed in range(2)]
    whole = [all_logits(engine, engine.open(), text) for text in texts]
    rows: dict[int, tuple[int, int]] = {}  # text, length
    for _ in range(60):
        kind = random.integers(5)
        if kind == 0 and len(rows) < 6:
            prompt = int(random.integers(0, 200))
            rows[engine.open(GREEDY, prompt)] = (int(random.integers(2)), 0)
        elif kind == 1 and rows:
            row = int(random.choice(list(rows)))
            text, length = rows[row]
            length = int(random.integers(max(0, length - random.choice([3, 12, 230])), length + 1))
            engine.truncate(row, length)
            rows[row] = (text, length)
        elif kind == 2 and rows and len(rows) < 6:
            row = int(random.choice(list(rows)))
            text, length = rows[row]
            length = int(random.integers(0, length + 1))
            rows[engine.fork(row, length, GREEDY, int(random.integers(0, 200)))] = (text, length)
        elif kind == 3 and len(rows) > 3:
            row = int(random.choice(list(rows)))
            engine.close_row(row)
            del rows[row]
        else:
            fed, wanted = [], []
            for row in random.permutation(list(rows))[: random.integers(1, 4)].tolist():
                text, length = rows[row]
                count = min(int(random.choice([1, 2, 6, 25, 90])), len(texts[text]) - length)
                if count:
                    asked = int(random.integers(1, count + 1))
                    part = texts[text][length : length + count]
                    fed.append(NativeFeed(row, part, choose=int(random.integers(0, count + 1)), logits=asked))
                    wanted.append(whole[text][length + count - asked : length + count])
                    rows[row] = (text, length + count)
            for answer, logits in zip(engine.forward(fed), wanted, strict=True):
                assert_same_bits(answer.logits, logits)


# Which walk it is concerns what all instruction sets share: all but one have the machine's best one.
WALKS = [(isa, (0,)) for isa in INSTRUCTION_SETS] + [(INSTRUCTION_SETS[0], (1,)), (INSTRUCTION_SETS[0], (2, 3))]


@pytest.mark.one_in(7)
@pytest.mark.parametrize(("isa", "seeds"), WALKS)
def test_random_walks(model: Packed, isa: str, seeds: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_ISA", isa)
    for seed in seeds:
        with model.model(threads=1 + seed % 3) as engine:
            random_walk(engine, seed)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("shape", [HYBRID, DELTA, SCAN, BY_COLUMN], ids=["convolutions", "delta", "scan", "by column"])
@pytest.mark.parametrize("format", [Format.FP32, Format.BF16, Format.W8A8])
def test_random_walks_in_other_formats(shape: Shape, format: Format) -> None:
    with packed(shape, format).model(threads=2) as engine:
        random_walk(engine, 9)


def test_branches_of_a_row_whose_state_was_lost(model: Packed) -> None:
    text = tokens(HYBRID, 150)
    with model.model() as engine:
        plain = engine.open()
        engine.forward([NativeFeed(plain, text[:60])])
        fresh = engine.forward([NativeFeed(plain, text[60:66], 6, branches=[(2, 7), (5, 9)], logprobs=2)])
        row = engine.open(GREEDY, 150)
        engine.forward([NativeFeed(row, text, choose=1)])
        engine.truncate(row, 60)
        [answer] = engine.forward([NativeFeed(row, text[60:66], 6, branches=[(2, 7), (5, 9)], logprobs=2)])
        assert (answer.tokens, answer.margins, answer.logprobs) == (fresh[0].tokens, fresh[0].margins, fresh[0].logprobs)


def test_rows_that_go_on_by_themselves(model: Packed) -> None:
    """A draft's: several passes in a call, and then back to where the target was."""
    text = tokens(HYBRID, 80)
    with model.model() as engine:
        row, plain = engine.open(GREEDY, 50), engine.open(GREEDY, 50)
        engine.forward([NativeFeed(row, text[:50], 0)])
        engine.forward([NativeFeed(plain, text[:50], 0)])
        # Of the last call's more inputs are kept than a call keeps: the state moves on within it.
        for start, count in [(50, 12), (54, 12), (58, 12), (62, 12), (66, 40)]:
            [[made, *_]], _ = engine.decode([NativeDecodeFeed(row, text[start : start + 4], count)], NativeStopRule())
            found = []
            fed = text[start : start + 4]
            for _ in range(count):
                [answer] = engine.forward([NativeFeed(plain, fed)])
                fed = answer.tokens
                found += fed
            assert made == found
            for each in (row, plain):
                engine.truncate(each, start + 4)


def test_a_full_cache_leaves_rows_as_they_were() -> None:
    model, text = packed(HYBRID, Format.W4A8), tokens(HYBRID, 600)
    with model.model() as engine:
        whole = all_logits(engine, engine.open(), text)
    # A block takes 6 KB.
    with model.model(cache_bytes=50_000) as engine:
        source, other = engine.open(GREEDY, 100), engine.open()
        engine.forward([NativeFeed(source, text[:120])])
        row = engine.fork(source, 70, GREEDY, 100)
        engine.forward([NativeFeed(source, text[120:150])])
        engine.truncate(source, 90)
        with pytest.raises(CacheFull):
            engine.forward([NativeFeed(row, text[70:75]), NativeFeed(source, text[90:91]), NativeFeed(other, text)])
        assert [engine.length(each) for each in (row, source, other)] == [70, 90, 0]
        for each, length in ((row, 70), (source, 90)):
            [answer] = engine.forward([NativeFeed(each, text[length : length + 5], 1, 5)])
            assert_same_bits(answer.logits, whole[length : length + 5])


def test_eight_bits_of_keys_leave_the_state_alone() -> None:
    model = packed(HYBRID, Format.W4A8)
    model = Packed(replace(model.program, cache=Cache.INT8), model.memory)
    with model.model() as engine:
        random_walk(engine, 5)


def test_programs_that_make_no_sense_are_refused() -> None:
    model = packed(HYBRID, Format.W4A8)
    ops = list(model.program.ops)
    at = next(index for index, op in enumerate(ops) if op.kind is Kind.CONVOLVE)
    op = ops[at]
    norm = next(op.weight for op in ops if op.kind is Kind.NORM)
    for changed, sentence in [
        (replace(op, weight=-1), "a convolution needs taps"),
        (replace(op, weight=norm), "taps are an fp32 table of 2 to 16"),
        (replace(op, bias=op.weight), "a convolution's bias is an fp32 vector"),
        (replace(op, key=replace(op.key, width=16)), "what a convolution reads or writes has 16 columns instead of 144"),
        (replace(op, output=op.input), "a convolution cannot write into what it reads"),
    ]:
        with pytest.raises(KernelError, match=sentence):
            Packed(replace(model.program, ops=(*ops[:at], changed, *ops[at + 1 :])), model.memory).model()
    delta = packed(DELTA, Format.W4A8)
    ops = list(delta.program.ops)
    at = next(index for index, op in enumerate(ops) if op.kind is Kind.DELTA)
    op = ops[at]
    for changed, sentence in [
        (replace(op, kv_heads=3), "heads with a state must be a multiple of the key heads"),
        (replace(op, bias=-1), "decays are fp32 vectors, one number a head"),
        (replace(op, heads=1 << 16, kv_heads=1 << 16, head_size=1 << 16), "decays are fp32 vectors, one number a head"),
        (replace(op, head_size=10), "queries has 40 columns instead of 20"),
        (replace(op, output=replace(op.output, width=160, offset=8)), "values of a multiple of 16 columns"),
        (replace(op, output=replace(op.value)), "an operation with a state cannot write into what it reads"),
    ]:
        with pytest.raises(KernelError, match=sentence):
            Packed(replace(delta.program, ops=(*ops[:at], changed, *ops[at + 1 :])), delta.memory).model()
    scan = packed(SCAN, Format.W4A8)
    ops = list(scan.program.ops)
    at = next(index for index, op in enumerate(ops) if op.kind is Kind.SCAN)
    op = ops[at]
    for changed, sentence in [
        (replace(op, weight=op.bias), "decays are fp32 vectors"),
        (replace(op, residual=replace(op.residual, width=5)), "gates has 5 columns instead of 6"),
        (replace(op, key=replace(op.key, width=20)), "keys has 20 columns instead of 40"),
        (replace(op, output=replace(op.value)), "an operation with a state cannot write into what it reads"),
    ]:
        with pytest.raises(KernelError, match=sentence):
            Packed(replace(scan.program, ops=(*ops[:at], changed, *ops[at + 1 :])), scan.memory).model()
    scan = packed(BY_COLUMN, Format.W4A8)
    ops = list(scan.program.ops)
    at = next(index for index, op in enumerate(ops) if op.kind is Kind.SCAN)
    op = ops[at]
    for changed, sentence in [
        (replace(op, weight=op.bias), "rates are an fp32 table, with a row for each column"),
        (replace(op, bias=norm), "biases and factors an fp32 vector"),
        (replace(op, residual=replace(op.residual, width=40)), "decays are fp32 vectors, one number a head"),
    ]:
        with pytest.raises(KernelError, match=sentence):
            Packed(replace(scan.program, ops=(*ops[:at], changed, *ops[at + 1 :])), scan.memory).model()
    with model.model() as engine, pytest.raises(KernelError, match="row 0 cannot skip 2 tokens"):
        engine.skip(engine.open(), [1, 2])
    builder = Builder(10, 10, Format.BF16)
    builder.embed(Tensor("embed", (10, 16)))
    x = builder.convolve(builder.load_hidden(builder.hidden_in(16)), Tensor("taps", (16, 1, 3)))
    builder.store_hidden(x)
    taking = builder.finish(builder.linear(x, [Tensor("head", (10, 16))]))
    with pytest.raises(KernelError, match="a program with a recurrent state can neither take in states nor change rope"):
        Packed(taking, pack_program(taking, random_matrices(taking, 0))).model()
    with pytest.raises(ValueError, match=r"taps has shape \(16, 3\), its input has 16 columns"):
        builder.convolve(Slice(0, 0, 16), Tensor("taps", (16, 3)))
