"""The compiled forward pass against the NumPy reference, and against itself: bit for bit however it is asked."""

import itertools
import mmap
import os
import re
import resource
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import kernel_models
import numpy as np
import pytest
from kernel_models import (
    BF16_BIASES,
    BIGCODE,
    CHUNKED,
    GROUPED,
    LLAMA,
    OPT,
    QWEN,
    SHAPES,
    SHARED,
    SLOPES,
    Packed,
    Shape,
    all_logits,
    assert_same_bits,
    build,
    in_turn,
    pack_program,
    packed,
    random_matrices,
    tokens,
)

from outrider.kernels import library
from outrider.kernels.library import KernelError
from outrider.kernels.native import NativeDecodeFeed, NativeFeed, NativeStopRule
from outrider.kernels.program import Activation, Cache, Format, Kind
from outrider.kernels.reference import ReferenceModel
from outrider.kernels.sampling_values import SamplingValues

FORMATS = tuple(Format)
INTEGER_FORMATS = tuple(format for format in Format if format.integer)
INSTRUCTION_SETS = library.available_instruction_sets()
# Largest difference from the float64 reference over the largest logit. fp32: summation over a few hundred channels. bf16:
# activations are rounded after sums of another order, so some fall on the other side (2^-8 each). Integer: likewise, one
# int8 step of a group of channels.
TOLERANCE = {
    Format.FP32: 5e-6,
    Format.BF16: 1e-2,
    Format.FP16: 1e-2,
    Format.W4A8: 3e-2,
    Format.W8A8: 3e-2,
    Format.W4ABF16: 1e-2,
    Format.W8AF32: 5e-6,
    # Keys and values are kept in bf16, and some fall on the other side there.
    Format.FP16: 1e-3,
}


@pytest.fixture(scope="module")
def models() -> dict[tuple[str, Format], Packed]:
    class Made(dict[tuple[str, Format], Packed]):
        def __missing__(self, key: tuple[str, Format]) -> Packed:
            name, format = key
            return self.setdefault(key, packed(SHAPES[name], format))

    return Made()


@pytest.mark.one_in(7)
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("name", SHAPES)
def test_against_the_reference(models, name, format):
    model = models[name, format]
    text = tokens(SHAPES[name], 75)
    wanted = ReferenceModel(model.program, model.memory).logits(text)
    with model.model() as engine:
        found = all_logits(engine, engine.open(), text)
    assert np.isfinite(found).all()
    assert abs(found - wanted).max() <= TOLERANCE[format] * abs(wanted).max()


@pytest.mark.one_in(24)
@pytest.mark.parametrize(("name", "format", "isa"), in_turn(FORMATS, INSTRUCTION_SETS))
def test_feeding_threads_and_neighbours_change_no_bit(models, name, format, isa, monkeypatch):
    monkeypatch.setenv("OUTRIDER_ISA", isa)
    model, shape = models[name, format], SHAPES[name]
    text = tokens(shape, 44)
    with model.model() as engine:
        whole = all_logits(engine, engine.open(), text)
        assert_same_bits(all_logits(engine, engine.open(), text, (1, 7, 2, 5, 4, 6, 3, 8, 1)), whole)
    with model.model(threads=2) as engine:
        row, neighbours = engine.open(), [engine.open() for _ in range(3)]
        parts, start = [], 0
        for index, piece in enumerate((3, 8, 1, 7, 25)):
            feeds = [NativeFeed(row, text[start : start + piece], choose=piece, logits=piece)]
            for other in neighbours:
                feeds.insert(index % 2, NativeFeed(other, tokens(shape, 1 + (other * 5 + index) % 9, seed=other), choose=0))
            parts.append(engine.forward(feeds)[[feed.row for feed in feeds].index(row)].logits)
            start += piece
        assert_same_bits(np.concatenate(parts), whole)


@pytest.mark.one_in(24)
@pytest.mark.parametrize(("name", "format"), [*zip(SHAPES, itertools.cycle([Format.W4A8, Format.BF16]))])
def test_any_number_of_threads_does_the_same_work(models, name, format):
    """Some of them have nothing of their own, and more than one share to help with."""
    model, text, cores = models[name, format], tokens(SHAPES[name], 44), sorted(os.sched_getaffinity(0))
    with model.model() as engine, ThreadPoolExecutor(1) as aside:
        whole = all_logits(engine, engine.open(), text)

        def by(threads):
            engine.use_cores([cores[thread % len(cores)] for thread in range(threads)])
            return all_logits(engine, engine.open(), text, (9, 1, 34))

        for threads in (3, 7, 40, 2, 1):
            # Whoever asks for a pass is kept to the first core, so that is somebody else.
            assert_same_bits(aside.submit(by, threads).result(), whole)


@pytest.mark.one_in(24)
@pytest.mark.parametrize("format", INTEGER_FORMATS)
@pytest.mark.parametrize("name", SHAPES)
def test_integer_models_are_the_same_on_every_instruction_set(models, name, format, monkeypatch):
    text = tokens(SHAPES[name], 40)
    found = {}
    for isa in INSTRUCTION_SETS:
        monkeypatch.setenv("OUTRIDER_ISA", isa)
        with models[name, format].model() as engine:
            found[isa] = all_logits(engine, engine.open(), text)
    for logits in found.values():
        assert_same_bits(logits, found["generic"])


@pytest.mark.one_in(5)
@pytest.mark.parametrize("format", [Format.FP32, Format.BF16])
@pytest.mark.parametrize(
    "shape", [QWEN, OPT, GROUPED, SLOPES, BF16_BIASES], ids=["qwen", "opt", "grouped", "slopes", "bf16 biases"]
)
def test_long_rows_cross_blocks_and_chunks(shape, format):
    model = packed(shape, format)
    text = tokens(shape, 580)
    wanted = ReferenceModel(model.program, model.memory).logits(text)
    with model.model(threads=2) as engine:
        whole = all_logits(engine, engine.open(), text)
        assert_same_bits(all_logits(engine, engine.open(), text, (255, 1, 1, 7, 250)), whole)
    assert abs(whole - wanted).max() <= TOLERANCE[format] * abs(wanted).max()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("head", "format"),
    # Each in two formats: all read the same keys and values.
    [
        (head, FORMATS[(2 * at + more) % len(FORMATS)])
        for at, head in enumerate((8, 24, 64, 72, 80, 128, 256))
        for more in (0, 1)
    ],
)
def test_head_sizes(head, format):
    shape = Shape(width=4 * head, heads=4, kv_heads=2, inner=96, layers=1, vocabulary=50, group=32)
    model = packed(shape, format)
    text = tokens(shape, 300)
    wanted = ReferenceModel(model.program, model.memory).logits(text)
    with model.model(threads=2) as engine:
        whole = all_logits(engine, engine.open(), text)
        assert_same_bits(all_logits(engine, engine.open(), text, (1, 40, 7, 7)), whole)
    assert abs(whole - wanted).max() <= TOLERANCE[format] * abs(wanted).max()


@pytest.mark.one_in(2)
@pytest.mark.parametrize("chunk", [7, 255, 256, 300])
def test_what_a_token_sees_begins_with_its_chunk(chunk):
    """However chunks lie to the keys that are taken together; earlier ones may as well never have been computed."""
    shape = replace(CHUNKED, chunk=chunk, layers=1)
    model, text = packed(shape, Format.FP32), tokens(shape, 310)
    wanted = ReferenceModel(model.program, model.memory).logits(text)
    with model.model(threads=2) as engine:
        whole = all_logits(engine, engine.open(), text)
        assert_same_bits(all_logits(engine, engine.open(), text, (chunk - 2, 5, 1, 1, 8)), whole)
        skipped, first = engine.open(), 300 // chunk * chunk
        engine.skip(skipped, text[:first])
        assert_same_bits(all_logits(engine, skipped, text[first:]), whole[first:])
    assert abs(whole - wanted).max() <= TOLERANCE[Format.FP32] * abs(wanted).max()


@pytest.mark.parametrize("shape", [LLAMA, CHUNKED], ids=["llama", "chunked"])
def test_truncated_rows_are_as_if_the_tokens_had_never_been(shape):
    model = packed(shape, Format.W4A8)
    text = tokens(shape, 70)
    with model.model() as engine:
        plain = all_logits(engine, engine.open(), text)
        row = engine.open()
        engine.forward([NativeFeed(row, text[:37] + tokens(shape, 30, seed=9))])
        engine.truncate(row, 37)
        assert engine.length(row) == 37
        assert_same_bits(all_logits(engine, row, text[37:]), plain[37:])


def test_forked_rows_share_until_they_write():
    model = packed(BIGCODE, Format.BF16)
    text = tokens(BIGCODE, 90)
    with model.model() as engine:
        first = engine.open()
        plain = all_logits(engine, first, text)
        used = engine.cache_use()[1]
        second = engine.fork(first, 70)
        assert engine.cache_use()[1] == used
        third = engine.fork(second, 70)
        assert_same_bits(all_logits(engine, second, text[70:]), plain[70:])
        engine.forward([NativeFeed(third, tokens(BIGCODE, 20, seed=4))])
        engine.close_row(second)
        engine.truncate(first, 70)
        assert_same_bits(all_logits(engine, first, text[70:]), plain[70:])
        for row in (first, third):
            engine.close_row(row)
        assert engine.cache_use()[1] == 0


def test_a_full_cache_is_reported_and_nothing_is_fed():
    model = packed(GROUPED, Format.W4A8)
    # A block of this model takes 6 KB: room for six blocks of 32 tokens.
    with model.model(cache_bytes=40_000) as engine:
        row, other = engine.open(), engine.open()
        engine.forward([NativeFeed(other, [1, 2, 3])])
        before = engine.cache_use()[1]
        with pytest.raises(library.CacheFull):
            engine.forward([NativeFeed(other, [4]), NativeFeed(row, tokens(GROUPED, 640))])
        assert engine.length(row) == 0
        assert engine.length(other) == 3
        assert engine.cache_use()[1] == before
        answer = engine.forward([NativeFeed(other, [4])])[0]
        assert len(answer.tokens) == 1


def test_greedy_choices_are_the_highest_logits_and_their_lead():
    model = packed(OPT, Format.W8A8)
    with model.model(threads=2) as engine:
        row = engine.open()
        answer = engine.forward([NativeFeed(row, tokens(OPT, 33), choose=20, logits=33)])[0]
    assert answer.tokens == answer.logits[13:].argmax(axis=1).tolist()
    ordered = np.sort(answer.logits[13:].astype(np.float64), axis=1)
    np.testing.assert_array_equal(answer.margins, ordered[:, -1] - ordered[:, -2])


@pytest.mark.one_in(24)
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("name", SHAPES)
def test_what_is_not_asked_for_changes_no_bit(models, name, format):
    """Behind the last attention only the positions go on whose logits are wanted."""
    model, shape = models[name, format], SHAPES[name]
    texts = [tokens(shape, count) for count in (21, 9, 30)]
    with model.model() as engine:
        wanted = [all_logits(engine, engine.open(), text) for text in texts]
        rows = [engine.open() for _ in texts]
        # Of the last row's tokens the last is fed later, behind a pass that nobody asked anything of.
        asked = ((1, 1), (0, 3), (12, 5))
        parts = (texts[0], texts[1], texts[2][:-1])
        feeds = [NativeFeed(row, part, *counts) for row, part, counts in zip(rows, parts, asked, strict=True)]
        answers = engine.forward(feeds)
        for answer, part, whole, (choices, logits) in zip(answers, parts, wanted, asked, strict=True):
            assert len(answer.tokens) == choices
            assert_same_bits(answer.logits, whole[len(part) - logits : len(part)])
        extra = engine.open()
        engine.forward([NativeFeed(extra, texts[2], 0)])
        assert_same_bits(engine.forward([NativeFeed(rows[2], texts[2][-1:], 1, 1)])[0].logits, wanted[2][-1:])
        engine.truncate(extra, len(texts[2]) - 1)
        assert_same_bits(engine.forward([NativeFeed(extra, texts[2][-1:], 1, 1)])[0].logits, wanted[2][-1:])


def test_programs_that_would_miss_positions_are_refused():
    model = packed(LLAMA, Format.W4A8)
    ops = list(model.program.ops)
    selects = [index for index, op in enumerate(ops) if op.kind is Kind.SELECT]
    last = max(index for index, op in enumerate(ops) if op.kind is Kind.ATTENTION)
    assert selects == [last + 1, last + 2]
    first, second = (ops[index] for index in selects)
    rope = next(op for op in ops if op.kind is Kind.ROPE)
    behind = last + 3
    output = ops[behind]
    assert (output.residual, output.input) == (first.output, second.output)
    position = replace(ops[0], kind=Kind.POSITION, input=first.input)
    every_position = "work on all positions, and come before select"
    for at, changed, sentence in [
        (last, (first, ops[last]), every_position),
        *((behind, (extra, output), every_position) for extra in (ops[0], position)),
        (behind, (rope, output), "reads positions that were not selected"),
        (behind, (replace(second, input=second.output, output=second.input), output), "what is selected already"),
        (behind, (second, output), "what is selected already"),
        (behind + 1, (first, ops[behind + 1]), "selects stand side by side"),
        (behind, (replace(output, residual=second.input),), "reads positions that were not selected"),
        (behind, (replace(output, input=second.input),), "reads positions that were not selected"),
        (0, (first, second, *ops[:1]), every_position),
    ]:
        program = replace(model.program, ops=(*ops[:at], *changed, *ops[at + 1 :]))
        with pytest.raises(KernelError, match=sentence):
            Packed(program, model.memory).model()


def test_operations_that_share_a_cache_bring_the_same_keys_and_values():
    model = packed(SHARED, Format.W4A8)
    assert (model.program.layers, len(model.program.caches)) == (2, 2)
    ops = model.program.ops
    assert max(index for index, op in enumerate(ops) if op.kind is Kind.SELECT) < max(
        index for index, op in enumerate(ops) if op.kind is Kind.ROPE
    ), "the layers that read another's cache are spared where nothing is asked for"
    places = [index for index, op in enumerate(ops) if op.kind is Kind.ATTENTION]
    reader, scale = ops[places[2]], next(index for index, op in enumerate(ops) if op.kind is Kind.SCALE)
    for at, changed, sentence in [
        (places[2], replace(reader, key=reader.value, value=reader.key), "layer 0 is shared by operations of other keys"),
        (places[2], replace(reader, integer=1), "layer 1 is shared by operations of other keys"),
        (places[2], replace(reader, integer=2), "attention that fills a cache"),
        (places[1], replace(ops[places[1]], integer=-1), "attention that fills a cache"),
        (scale, replace(ops[scale], weight=-1), "scale needs a vector of factors"),
    ]:
        with pytest.raises(KernelError, match=sentence):
            Packed(replace(model.program, ops=(*ops[:at], changed, *ops[at + 1 :])), model.memory).model()


def test_slopes_that_make_no_sense_are_refused():
    model = packed(SLOPES, Format.FP32)
    ops = list(model.program.ops)
    at = next(index for index, op in enumerate(ops) if op.kind is Kind.ATTENTION)
    matrix = next(op for op in ops if op.kind is Kind.LINEAR)
    for changed, sentence in [
        (replace(ops[at], bias=matrix.weight), "slopes are an fp32 vector, one for each head"),
        (replace(ops[at], cap=2.0), "attention with slopes has no cap of scores"),
    ]:
        with pytest.raises(KernelError, match=sentence):
            Packed(replace(model.program, ops=(*ops[:at], changed, *ops[at + 1 :])), model.memory).model()


def test_factors_by_position_bounds_and_xielu_that_make_no_sense_are_refused():
    model = packed(SHAPES["clipped"], Format.FP32)
    ops = list(model.program.ops)
    last = max(index for index, op in enumerate(ops) if op.kind is Kind.SELECT)
    scale, xielu, clip = (
        next(index for index, op in enumerate(ops) if wanted(op))
        for wanted in (
            lambda op: op.kind is Kind.SCALE,
            lambda op: op.kind is Kind.XIELU,
            lambda op: op.activation is Activation.CLIP,
        )
    )
    behind = replace(ops[scale], input=ops[last].output, output=ops[last].output)
    for at, changed, sentence in [
        (scale, (replace(ops[scale], window=-1),), "factors by position come before select"),
        (last, (ops[last], behind), "factors by position come before select"),
        (scale, (replace(ops[scale], weight=-1),), "scale needs a vector of factors"),
        (xielu, (replace(ops[xielu], weight=ops[scale].weight),), "xIELU needs a vector of four numbers"),
        (clip, (replace(ops[clip], cap=0.0),), "what is clipped has a bound"),
    ]:
        program = replace(model.program, ops=(*ops[:at], *changed, *ops[at + 1 :]))
        with pytest.raises(KernelError, match=sentence):
            Packed(program, model.memory).model()


def test_heads_that_make_no_sense_are_refused():
    model = packed(SHAPES["latent"], Format.FP32)
    ops, count = list(model.program.ops), len(model.program.weights)
    at = next(index for index, op in enumerate(ops) if op.kind is Kind.HEADS)
    heads = ops[at]
    for changed, sentence in [
        (replace(heads, heads=0), "0 heads from weight"),
        (replace(heads, weight=-1), "heads from weight -1 on"),
        (replace(heads, weight=count - 1), f"heads from weight {count - 1} on, of {count}"),
        (replace(heads, weight=heads.weight - 1), "matrices in tiles, all of one shape and storage"),
        (replace(heads, input=heads.input.part(0, 5 * 24)), "6 heads cannot make"),
        (replace(heads, input=heads.input.part(0, 6 * 15)), "6 heads cannot make"),
        (replace(heads, output=heads.output.part(0, heads.output.width - 6)), "6 heads cannot make"),
        (replace(heads, output=heads.input), "6 heads cannot make"),
        (replace(heads, input=heads.output.part(0, heads.input.width)), "cannot be written into their input's buffer"),
    ]:
        with pytest.raises(KernelError, match=sentence):
            Packed(replace(model.program, ops=(*ops[:at], changed, *ops[at + 1 :])), model.memory).model()


def test_chunks_and_experts_without_weights_that_make_no_sense_are_refused():
    model = packed(CHUNKED, Format.FP32)
    ops = list(model.program.ops)
    cases: list[tuple[Kind, dict[str, Any], str]] = [
        (Kind.ATTENTION, {"window": -(2**31)}, "a chunk of more tokens than a row has"),
        (Kind.SCALE, {"integer": 2**31 - 1}, "factors of positions that no row has"),
        (Kind.SCALE, {"integer": -1}, "scale takes one factor, or one for each column"),
        (Kind.SCALE, {"window": 0, "integer": 2}, "scale takes one factor, or one for each column"),
        (Kind.MIX, {"integer": 2}, "mix weighs products, or does not"),
    ]
    for kind, change, sentence in cases:
        at = next(index for index, op in enumerate(ops) if op.kind is kind)
        changed = replace(ops[at], **change)
        with pytest.raises(KernelError, match=sentence):
            Packed(replace(model.program, ops=(*ops[:at], changed, *ops[at + 1 :])), model.memory).model()


def test_bounds_and_idle_experts_that_make_no_sense_are_refused():
    model = packed(SHAPES["idle"], Format.FP32)
    ops = list(model.program.ops)
    experts, behind = [index for index, op in enumerate(ops) if op.kind is Kind.EXPERTS][:2]
    gated = next(
        index for index, op in enumerate(ops) if op.kind is Kind.LINEAR and op.activation is Activation.BOUNDED_SILU
    )
    mix = next(index for index, op in enumerate(ops) if op.kind is Kind.MIX)
    cases: list[tuple[int, dict[str, Any], str]] = [
        (gated, {"cap": 0.0}, "what is bounded behind its activation is a gated layer, with a bound"),
        (experts, {"cap": 0.0}, "what is bounded behind its activation is a gated layer, with a bound"),
        (behind, {"activation": Activation.BOUNDED_SILU}, "what is bounded behind its activation is a gated layer"),
        (mix, {"heads": 0}, "mix needs the number of experts that have products"),
        (mix, {"value": ops[mix].value.part(0, 5)}, "what stands for products"),
        (mix, {"value": ops[mix].output}, "mix cannot write into what it reads"),
    ]
    for at, change, sentence in cases:
        changed = (*ops[:at], replace(ops[at], **change), *ops[at + 1 :])
        with pytest.raises(KernelError, match=sentence):
            Packed(replace(model.program, ops=changed), model.memory).model()


def test_norms_of_products_that_make_no_sense_are_refused():
    model = packed(SHAPES["normed"], Format.FP32)
    ops = list(model.program.ops)
    at = next(index for index, op in enumerate(ops) if op.kind is Kind.MIX)
    cases: list[tuple[dict[str, Any], str]] = [
        ({"bias": -1}, "products are multiplied before and behind their norm"),
        ({"weight": -1}, "products are multiplied before and behind their norm"),
        ({"weight": ops[0].weight}, "the norm of products has fp32 vectors"),
    ]
    for change, sentence in cases:
        changed = (*ops[:at], replace(ops[at], **change), *ops[at + 1 :])
        with pytest.raises(KernelError, match=sentence):
            Packed(replace(model.program, ops=changed), model.memory).model()


def test_vectors_side_by_side_that_make_no_sense_are_refused():
    model = packed(SHAPES["streams"], Format.FP32)
    ops, widths = list(model.program.ops), model.program.buffers
    at_blend, at_match, at_cut = (
        next(index for index, op in enumerate(ops) if op.kind is kind)
        for kind in (Kind.BLEND, Kind.MATCH_RMS, Kind.GAUSSIAN_TOP_K)
    )
    blend, match, cut = ops[at_blend], ops[at_match], ops[at_cut]
    columns = next(index for index, op in enumerate(ops) if op.kind is Kind.SCALE and op.integer)
    one_factor, width = next(op.weight for op in ops if op.kind is Kind.SCALE), match.key.width
    select = next(op for op in ops if op.kind is Kind.SELECT and op.input.width >= width)
    selected = select.output.part(0, width)
    behind = replace(match, heads=1, input=selected, key=select.input.part(0, width), output=selected)
    for at, changed, sentence in [
        (at_blend, replace(blend, heads=0), "vectors side by side are of one width"),
        (at_blend, replace(blend, heads=blend.heads + 4), "vectors side by side are of one width"),
        (
            at_blend,
            replace(blend, key=replace(blend.key, width=blend.key.width - 1)),
            "a coefficient for each vector",
        ),
        (at_blend, replace(blend, output=blend.output.part(0, width + 1)), "a coefficient for each vector"),
        (at_blend, replace(blend, output=blend.input), "what makes several vectors cannot write over it"),
        (at_blend, replace(blend, residual=blend.input.part(0, width)), "vectors side by side has"),
        (at_match, replace(match, key=match.key.part(0, width - 1)), "matched with one of their width"),
        (at_match, replace(match, output=match.output.part(0, width)), "matched with one of their width"),
        (
            at_match,
            replace(match, key=match.output.part(0, width)),
            "what makes several vectors cannot write over it",
        ),
        (at_match, replace(match, epsilon=-1.0), "vectors side by side are of one width"),
        (at_match, replace(match, key=replace(match.key, buffer=len(widths))), "do not exist"),
        (
            1 + max(index for index, op in enumerate(ops) if op.kind is Kind.SELECT),
            behind,
            "reads positions that were not selected",
        ),
        (at_cut, replace(cut, input=cut.input.part(0, 9)), "input of the top-k has 9 columns"),
        (columns, replace(ops[columns], integer=2), "scale takes one factor, or one for each column"),
        (columns, replace(ops[columns], window=-4), "factors by position come before select"),
        (columns, replace(ops[columns], weight=one_factor), "scale needs a vector of factors"),
    ]:
        with pytest.raises(KernelError, match=sentence):
            Packed(replace(model.program, ops=(*ops[:at], changed, *ops[at + 1 :])), model.memory).model()


def test_connections_that_make_no_sense_are_refused():
    model = packed(SHAPES["connected"], Format.FP32)
    ops = list(model.program.ops)
    at = next(index for index, op in enumerate(ops) if op.kind is Kind.CONNECT)
    op, short = ops[at], next(op.weight for op in ops if op.kind is Kind.CONNECT and len(op.connections) < 3)
    assert len(op.connections) == 3
    for changed, sentence in [
        (replace(op, heads=0), "weights of 1 to 16 streams"),
        (replace(op, heads=17), "weights of 1 to 16 streams"),
        (replace(op, output=op.output.part(0, 5)), "weights of 1 to 16 streams"),
        (replace(op, weight=-1), "a vector of factors and biases"),
        (replace(op, weight=short), "a vector of factors and biases"),
        (replace(op, integer=0), "in one round or more"),
        (replace(op, epsilon=-1.0), "an epsilon of 0 or more"),
        (replace(op, input=op.input.part(0, 3)), "logits of connections"),
        (replace(op, output=op.input), "cannot write into its input"),
    ]:
        with pytest.raises(KernelError, match=sentence):
            Packed(replace(model.program, ops=(*ops[:at], changed, *ops[at + 1 :])), model.memory).model()


def system_can_populate() -> bool:
    with mmap.mmap(-1, mmap.PAGESIZE) as memory:
        try:
            memory.madvise(23)  # MADV_POPULATE_WRITE, from Linux 5.14 on
        except OSError:
            return False
    return True


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


@pytest.mark.slow
@pytest.mark.skipif(not system_can_populate(), reason="this system takes memory at its first use only")
def test_memory_taken_before_the_work_is_that_of_the_work():
    """More than a slab of 64 MB, and not whole ones: what was taken has to be what is used first."""
    model, rows, length = packed(LLAMA, Format.W4A8), 60, 600
    text = tokens(LLAMA, length)
    with model.model(threads=2) as engine:
        engine.forward([NativeFeed(engine.open(), text, 1)])
        before = resident_bytes()
        engine.reserve(length, 1, rows * length)
        taken = resident_bytes() - before
        assert engine.cache_use()[1] == length // 32 + 1
        assert taken > 80 << 20
        for _ in range(rows - 2):
            engine.forward([NativeFeed(engine.open(), text, 1)])
        assert resident_bytes() - before - taken < 6 << 20
        engine.reserve(1, 1, 1 << 40)
        assert engine.cache_use()[0] < 2200 << 20
        for tokens_a_pass, choices, cached in [(0, 0, 1), (4, 5, 1), (4, 1, -1)]:
            with pytest.raises(KernelError, match="memory for passes of"):
                engine.reserve(tokens_a_pass, choices, cached)


def test_memory_taken_before_the_work_keeps_to_the_limit():
    with packed(LLAMA, Format.W4A8).model(cache_bytes=1 << 20) as engine:
        engine.reserve(1, 1, 1 << 20)
        assert 0 < engine.cache_use()[0] <= 1 << 20


def test_mistakes_are_told_in_a_sentence():
    model = packed(OPT, Format.W8A8)
    with model.model() as engine:
        row = engine.open()
        for feed, sentence in [
            (NativeFeed(row, [OPT.vocabulary]), "token 211 is not in the vocabulary"),
            (NativeFeed(row, [-1]), "token -1"),
            (NativeFeed(row + 1, [1]), "is not open"),
            (NativeFeed(row, []), "0 tokens fed"),
            (NativeFeed(row, [1], choose=2), "2 choices"),
            (NativeFeed(row, [1] * 641), "context is 640"),
            (NativeFeed(row, [1, 2], branches=[(0, 3)]), "a branch after 0 of 2 tokens fed"),
            (NativeFeed(row, [1, 2], branches=[(1, 3), (2, 3)]), "a branch after 2 of 2 tokens fed"),
            (NativeFeed(row, [1, 2], branches=[(1, OPT.vocabulary)]), "token 211 is not in the vocabulary"),
            (NativeFeed(row, [1, 2], branches=[(1, -1)]), "token -1"),
        ]:
            with pytest.raises(library.KernelError, match=sentence):
                engine.forward([feed])
            assert engine.length(row) == 0
        with pytest.raises(library.KernelError, match="twice"):
            engine.forward([NativeFeed(row, [1]), NativeFeed(row, [1])])


def test_an_instruction_set_that_is_not_there_is_refused(monkeypatch):
    monkeypatch.setenv("OUTRIDER_ISA", "avx1024")
    with pytest.raises(library.KernelError, match="OUTRIDER_ISA=avx1024 is not"):
        library.instruction_set()
    with pytest.raises(library.KernelError, match=r"which has: .*generic"):
        packed(OPT, Format.W8A8).model()


@pytest.mark.one_in(24)
@pytest.mark.parametrize(("name", "format", "threads"), in_turn(FORMATS, [1, 3]))
def test_a_branch_is_as_if_its_token_had_been_fed(models, name, format, threads):
    """Choices, margins and log-probabilities, also with penalties, near the ends of blocks, and of several rows at once."""
    shape, model = SHAPES[name], models[name, format]
    text = tokens(shape, 80)
    sampling = SamplingValues(temperature=0.8, seed=5, repetition_penalty=1.3, frequency_penalty=0.4)
    # Length of the row before, and what is fed; with what else might come after this many of these.
    cases = [(30, 9, [(1, 3), (2, 90), (2, 4), (8, 5)]), (0, 40, [(33, 7)]), (61, 2, [(1, 8)]), (5, 3, [])]
    if shape.longest:
        # Where a row changes its rope, nothing is computed behind a token that was not chosen: test_kernels_long_rope.py.
        cases[1] = (0, shape.longest - 2, [(13, 7)])

    def opened(engine, length):
        row = engine.open(sampling, 4)
        if length:
            engine.forward([NativeFeed(row, text[:length], 0)])
        return row

    with model.model(threads=threads) as engine:
        alone = []
        for length, count, branches in cases:
            row = opened(engine, length)
            [answer] = engine.forward([NativeFeed(row, text[length : length + count], count, logprobs=2)])
            found = [(answer.tokens, answer.margins, answer.logprobs)]
            for after, token in branches:
                other = opened(engine, length)
                engine.forward([NativeFeed(other, text[length : length + after], 0)])
                [answer] = engine.forward([NativeFeed(other, [token], 1, logprobs=2)])
                found.append((answer.tokens, answer.margins, answer.logprobs))
            alone.append(tuple([each for part in parts for each in part] for parts in zip(*found, strict=True)))
        rows = [opened(engine, length) for length, *_ in cases]
        feeds = [
            NativeFeed(row, text[length : length + count], count, logprobs=2, branches=branches)
            for row, (length, count, branches) in zip(rows, cases, strict=True)
        ]
        together = [(answer.tokens, answer.margins, answer.logprobs) for answer in engine.forward(feeds)]
        assert together == alone
        # Nothing of them stays.
        for row, (length, count, _) in zip(rows, cases, strict=True):
            assert engine.length(row) == length + count
            assert_same_bits(
                all_logits(engine, row, text[length + count :]), all_logits(engine, engine.open(), text)[length + count :]
            )


@pytest.mark.one_in(6)
@pytest.mark.parametrize("isa", INSTRUCTION_SETS)
@pytest.mark.parametrize("wanted", [1, 0])
@pytest.mark.parametrize("name", ["grouped", "qwen", "bigcode", "shared"])
def test_branches_behind_long_rows_that_share_their_beginning(models, name, wanted, isa, monkeypatch):
    """Across the chunks that attention works on, of rows that part in the middle of a block, on every instruction set.

    With a choice behind what is fed, and without.
    """
    monkeypatch.setenv("OUTRIDER_ISA", isa)
    shape, model = SHAPES[name], models[name, Format.W4A8]
    text = tokens(shape, 270)
    with model.model(threads=2) as engine:
        source = engine.open()
        engine.forward([NativeFeed(source, text[:250], 0)])
        ends = [[9, 8, 7, 6, 5, 4, 3, 2], [4] * 20, [7, 3]]
        rows = [engine.fork(source, 250) for _ in ends]
        branches = [[(5, 11), (6, 12), (7, 13)], [(1, 5), (19, 6)], [(1, 2)]]
        feeds = [NativeFeed(*each[:2], wanted, branches=each[2]) for each in zip(rows, ends, branches, strict=True)]
        for feed, answer in zip(feeds, engine.forward(feeds), strict=True):
            assert len(answer.tokens) == wanted + len(feed.branches)
            fed = [*[feed.tokens] * wanted, *([*feed.tokens[:after], token] for after, token in feed.branches)]
            alone = [engine.forward([NativeFeed(engine.fork(source, 250), each)])[0] for each in fed]
            assert answer.tokens == [each.tokens[0] for each in alone]
            assert answer.margins == [each.margins[0] for each in alone]
            whole = all_logits(engine, engine.open(), [*text[:250], *feed.tokens, 1, 2])
            assert_same_bits(all_logits(engine, feed.row, [1, 2]), whole[-2:])


def test_a_branch_without_finite_scores_is_as_if_it_had_not_been_tried():
    """A hint must not fail a pass; the same token fed in earnest does."""
    program = build(OPT, Format.FP32)
    matrices = random_matrices(program)
    matrices[next(index for index, weight in enumerate(program.weights) if weight.table and weight.rows > 1)][13] = 3e38
    model = Packed(program, pack_program(program, matrices))
    with model.model() as engine:
        row = engine.open()
        [alone] = engine.forward([NativeFeed(engine.open(), [1, 2, 3], 3)])
        [answer] = engine.forward([NativeFeed(row, [1, 2, 3], 3, branches=[(1, 13), (2, 4)])])
        assert answer.tokens[:3] == alone.tokens
        assert answer.tokens[3] == -1
        assert answer.tokens[4] >= 0
        with pytest.raises(KernelError, match="not a finite number"):
            engine.forward([NativeFeed(row, [13])])


def test_branches_leave_a_small_cache_as_it_was():
    model = packed(GROUPED, Format.W4A8)
    small = Packed(replace(model.program, cache=Cache.INT8), model.memory)
    text = tokens(GROUPED, 60)
    with small.model(threads=2) as engine:
        plain, row = all_logits(engine, engine.open(), text), engine.open()
        engine.forward([NativeFeed(row, text[:40], 1, branches=[(7, 1), (39, 2)])])
        assert_same_bits(all_logits(engine, row, text[40:]), plain[40:])


def step_by_step(engine, feeds, stopping):
    """What ``decode`` is to bring, by single passes."""
    brought = []
    for feed in feeds:
        tokens, margins, runners_up, reach, next_tokens = [], [], [], feed.reach, feed.tokens
        while True:
            [answer] = engine.forward([NativeFeed(feed.row, next_tokens, 1, 1)])
            # A greedy choice is that of the logits as they are.
            runners_up.append(int(np.argsort(-answer.logits[0], kind="stable")[1]))
            tokens += answer.tokens
            margins += answer.margins
            span = sum(bound <= margins[-1] for bound in stopping.bounds)
            reach *= max(stopping.least_chance, 1.0 - (1.0 - stopping.usual[span]) * feed.miss_factor)
            if len(tokens) == feed.most or tokens[-1] in feed.ends or reach < stopping.least_reach:
                break
            next_tokens = tokens[-1:]
        brought.append((tokens, margins, runners_up))
    return brought


def test_rows_that_go_on_by_themselves_stop_one_by_one(models):
    model = models["llama", Format.W4A8]
    text = tokens(LLAMA, 30)
    stopping = NativeStopRule((0.05, 0.3, 1.0), (0.5, 0.8, 0.9, 1.0), 0.02, 0.2)
    wanted: list[dict[str, Any]] = [
        dict(tokens=text[:7], most=9),
        dict(tokens=text[7:8], most=1),
        dict(tokens=text[8:20], most=12, ends=range(0, 211, 5)),
        dict(tokens=text[3:9], most=12, reach=0.6, miss_factor=2.0),
    ]
    with model.model() as engine:
        feeds = [
            NativeDecodeFeed(engine.open(SamplingValues(temperature=at % 3 / 3, seed=at)), **each)
            for at, each in enumerate(wanted, 1)
        ]
        alone = step_by_step(engine, feeds, stopping)
        for feed in feeds:
            engine.truncate(feed.row, 0)
        together, seconds = engine.decode(feeds, stopping)
        lengths = [engine.length(feed.row) for feed in feeds]
    assert [each[:2] for each in together] == [each[:2] for each in alone]
    assert together[2] == alone[2], "a greedy row has the runners-up of its logits"
    assert len({len(chosen) for chosen, *_ in together}) == 4, "each stops for a reason of its own"
    assert len(seconds) == max(len(chosen) for chosen, *_ in together)
    assert lengths == [len(feed.tokens) + len(chosen) - 1 for feed, (chosen, *_) in zip(feeds, together, strict=True)]


def test_rows_stop_together_where_another_pass_is_worth_it_for_none(models):
    """A reach of a half after each choice: three rows are worth 1.5, then 0.75, then 0.375."""
    halving: dict[str, Any] = dict(bounds=(), usual=(0.5,), least_chance=0.0, least_reach=0.0)
    with models["llama", Format.W4A8].model() as engine:
        feeds = [NativeDecodeFeed(engine.open(), [1 + row], 9) for row in range(3)]
        for least_sum, passes in ((2.0, 1), (1.5, 2), (0.4, 3), (0.0, 9)):
            for feed in feeds:
                engine.truncate(feed.row, 0)
            choices, seconds = engine.decode(feeds, NativeStopRule(**halving, least_sum=least_sum))
            assert [len(tokens) for tokens, *_ in choices] == [passes] * 3
            assert len(seconds) == passes


@pytest.mark.parametrize("guess_room", [3, 8, 40])
def test_what_a_text_went_on_with_before_changes_no_choice_and_spares_passes(models, guess_room):
    """Rows that repeat passages, one that has nothing to repeat, and one that ends in the middle of what was guessed."""
    text = tokens(LLAMA, 24)
    stopping = NativeStopRule((0.05, 0.3, 1.0), (0.5, 0.8, 0.9, 1.0), 0.02, 0.0)
    with models["llama", Format.W4A8].model() as engine:
        row = engine.open()
        [(written, *_)], _ = engine.decode([NativeDecodeFeed(row, text, 160)], NativeStopRule())
        passages = (written[at : at + 6] for at in range(160))
        twice = next(at for at, six in enumerate(passages) if six == written[at + 6 : at + 12] and len({*six}) == 6)
        rows = [engine.open(SamplingValues(temperature=at % 2 / 2, seed=at)) for at in range(4)]
        feeds = [
            NativeDecodeFeed(rows[0], [*text, *written[:100]], 24),
            NativeDecodeFeed(rows[1], [*text, *text[:20]], 16),
            NativeDecodeFeed(rows[2], [*text, *written[: twice + 8]], 24, ends=[written[twice + 11]]),
            NativeDecodeFeed(rows[3], text[:1], 9),
        ]
        for wanted in (feeds, feeds[:1], feeds[2:3]):
            plain, plain_steps = engine.decode(wanted, stopping)
            lengths = [engine.length(feed.row) for feed in wanted]
            for feed in wanted:
                engine.truncate(feed.row, 0)
            for _ in range(3):
                guessed, steps = engine.decode(wanted, stopping, guess_room)
                assert guessed == plain
                assert [engine.length(feed.row) for feed in wanted] == lengths
                assert len(steps) <= len(plain_steps)
                assert all(1 <= count <= len(wanted) for count, _ in steps)
                for feed in wanted:
                    engine.truncate(feed.row, 0)
            if len(wanted) == 1:
                assert len(steps) < len(plain_steps)


def test_a_run_without_room_is_refused(models):
    with models["llama", Format.W4A8].model() as engine:
        row = engine.open()
        with pytest.raises(KernelError, match="0 choices wanted, there is room for 1 to 0"):
            engine.decode([NativeDecodeFeed(row, [1], 0)], NativeStopRule())
        with pytest.raises(KernelError, match="0 spans of margins"):
            engine.decode([NativeDecodeFeed(row, [1], 1)], NativeStopRule(usual=()))
        with pytest.raises(KernelError, match="0 tokens to go on from"):
            engine.decode([NativeDecodeFeed(row, [], 1)], NativeStopRule(), 8)
        assert engine.length(row) == 0


@pytest.mark.one_in(5)
@pytest.mark.parametrize("isa", INSTRUCTION_SETS)
@pytest.mark.parametrize("precision", FORMATS)
@pytest.mark.parametrize("kind", [Kind.EMBED, Kind.NORM])
def test_numbers_that_are_not_finite_are_refused_in_every_format(
    kind: Kind, precision: Format, isa: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One absurd weight, as damaged checkpoints have them: no int8 stands for what comes of it."""
    monkeypatch.setenv("OUTRIDER_ISA", isa)
    program = build(SHAPES["capped"] if kind is Kind.EMBED else QWEN, precision)
    matrices = random_matrices(program)
    weight = next(op for op in program.ops if op.kind is kind).weight
    matrices[weight][7 if kind is Kind.EMBED else 0] = 3e38
    with (
        Packed(program, pack_program(program, matrices)).model() as engine,
        pytest.raises(KernelError, match="not a finite number"),
    ):
        engine.forward([NativeFeed(engine.open(), [1, 2, 7])])


@pytest.mark.one_in(2)
@pytest.mark.parametrize("isa", INSTRUCTION_SETS)
@pytest.mark.parametrize("cache", [Cache.BF16, Cache.INT8])
def test_a_key_alone_that_is_no_number_is_refused(cache: Cache, isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of its channels overflow in opposite directions; its value and all queries are finite."""
    monkeypatch.setenv("OUTRIDER_ISA", isa)
    shape = replace(LLAMA, layers=1)
    program = replace(build(shape, Format.BF16), cache=cache)
    matrices = random_matrices(program)
    embed, linear = (next(op for op in program.ops if op.kind is kind) for kind in (Kind.EMBED, Kind.LINEAR))
    matrices[embed.weight][:, [0, 128]] = 0.0
    matrices[embed.weight][7] = 0.0
    matrices[embed.weight][7, [0, 128]] = 1.0
    keys = matrices[linear.weight][shape.width : 2 * shape.width]
    keys[:, 0], keys[:, 128] = 3e38, -3e38
    with Packed(program, pack_program(program, matrices)).model() as engine:
        assert np.isfinite(engine.forward([NativeFeed(engine.open(), [1, 2, 3], logits=1)])[0].logits).all()
        # Only what comes behind it sees that key, among many others.
        row = engine.open()
        engine.forward([NativeFeed(row, [1, 2, 7, *range(20, 60)], choose=0)])
        with pytest.raises(KernelError, match="not a finite number"):
            engine.forward([NativeFeed(row, [5])])


@pytest.mark.one_in(5)
@pytest.mark.parametrize("isa", INSTRUCTION_SETS)
@pytest.mark.parametrize(
    "activation",
    [
        Activation.RELU,
        Activation.RELU_SQUARED,
        Activation.GELU_ERF,
        Activation.GELU_TANH,
        Activation.SILU,
        Activation.SIGMOID,
        Activation.RETAINED,
    ],
)
def test_what_is_no_number_comes_through_every_activation(
    activation: Activation, isa: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUTRIDER_ISA", isa)
    shape = replace(OPT, layers=1, width=192, activation=activation)
    program = build(shape, Format.BF16)
    matrices = random_matrices(program)
    at = next(at for at, op in enumerate(program.ops) if op.kind is Kind.LINEAR and op.activation is activation)
    norm, matrix = program.ops[at - 1], matrices[program.ops[at].weight]
    # What comes before it is nothing but the norm's bias, infinite as bf16: times 0 that is no number.
    matrices[norm.weight][:] = 0.0
    matrices[norm.bias][0, 0], matrix[:, 0] = 3.4e38, 0.0
    memory = pack_program(program, matrices)
    with Packed(program, memory).model() as engine, pytest.raises(KernelError, match="not a finite number"):
        engine.forward([NativeFeed(engine.open(), [1, 2, 3])])


NO_MEMORY_FOR_A_CHOICE = """
import re, resource
from pathlib import Path
from kernel_models import Shape, packed
from outrider.kernels.library import KernelError
from outrider.kernels.native import NativeFeed
from outrider.kernels.program import Format
from outrider.kernels.sampling_values import SamplingValues
model = packed(Shape(width=16, heads=1, kv_heads=1, inner=16, layers=1, vocabulary=400_000), Format.BF16).model(threads=2)
rows = [model.open(SamplingValues(temperature=0.7, repetition_penalty=1.1, seed=3)) for _ in range(6)]
feeds = [NativeFeed(row, [5]) for row in rows]
model.reserve(len(rows), len(rows), 256)
held = int(re.search(r"VmSize:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) << 10
unlimited = resource.getrlimit(resource.RLIMIT_AS)
resource.setrlimit(resource.RLIMIT_AS, (held + (1 << 20), unlimited[1]))
try:
    model.forward(feeds)
except KernelError as error:
    print(error.status, "-", error)
resource.setrlimit(resource.RLIMIT_AS, unlimited)
for row in rows:
    model.truncate(row, 0)
again = [answer.tokens for answer in model.forward(feeds)]
fresh = [model.open(SamplingValues(temperature=0.7, repetition_penalty=1.1, seed=3)) for _ in rows]
print(again == [answer.tokens for answer in model.forward([NativeFeed(row, [5]) for row in fresh])])
"""


@pytest.mark.slow
@pytest.mark.skipif(
    "libasan" in os.environ.get("LD_PRELOAD", ""), reason="the sanitizer's allocator ends the process itself"
)
def test_no_memory_for_a_choice_is_a_status_and_rows_go_on() -> None:
    """What a thread of a pool lacks ended the process."""
    found = run_apart(NO_MEMORY_FOR_A_CHOICE, MALLOC_ARENA_MAX="1", MALLOC_MMAP_THRESHOLD_="65536")
    assert found.stdout.splitlines() == ["no memory - no memory for the choice of a token", "True"], found


TOO_MANY_THREADS = """
import re, resource
from pathlib import Path
from kernel_models import GROUPED, packed
from outrider.kernels.library import KernelError
from outrider.kernels.program import Format
model = packed(GROUPED, Format.W4A8)
model.model(threads=2).close()
held = int(re.search(r"VmSize:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) << 10
resource.setrlimit(resource.RLIMIT_AS, (held + (60 << 20),) * 2)
try:
    model.model(threads=64)
except KernelError as error:
    print(error)
"""


def run_apart(code: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(Path(kernel_models.__file__).parent), **variables}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)


@pytest.mark.slow
def test_threads_that_cannot_be_started_are_a_sentence() -> None:
    done = run_apart(TOO_MANY_THREADS)
    assert re.match(r"only \d+ of 64 threads could be started \(.+\): raise the limit", done.stdout), done
