"""A cache of 8 bits: against the NumPy reference, and against itself, bit for bit however it is asked."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import numpy as np
import pytest
from kernel_models import (
    BIGCODE,
    GROUPED,
    LATENT,
    LLAMA,
    OPT,
    QWEN,
    SHAPES,
    SHARED,
    Packed,
    Shape,
    all_logits,
    assert_same_bits,
    build,
    pack_program,
    packed,
    random_matrices,
    tokens,
)

from outrider.kernels import library
from outrider.kernels.library import CacheFull, KernelError
from outrider.kernels.native import NativeFeed
from outrider.kernels.program import Cache, Format, Kind
from outrider.kernels.reference import ReferenceModel

# Of the largest logit: keys, values and queries that fall on the other side of a half, one int8 step of a head's numbers.
TOLERANCE = 3e-2


def small(shape: Shape, format: Format = Format.W4A8) -> Packed:
    model = packed(shape, format)
    return replace(model, program=replace(model.program, cache=Cache.INT8))


@pytest.mark.one_in(12)
@pytest.mark.parametrize("format", [Format.W4A8, Format.W8A8, Format.BF16])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_against_the_reference(shape: Shape, format: Format) -> None:
    model, text = small(shape, format), tokens(shape, 75)
    wanted = ReferenceModel(model.program, model.memory).logits(text)
    with model.model(threads=2) as engine:
        found = all_logits(engine, engine.open(), text)
    assert np.isfinite(found).all()
    assert abs(found - wanted).max() <= TOLERANCE * abs(wanted).max()
    sixteen = packed(shape, format)
    with sixteen.model() as engine:
        assert not np.array_equal(all_logits(engine, engine.open(), text), found), "it is another rounding"


@pytest.mark.parametrize(
    "shape",
    [
        pytest.param(QWEN, id="window"),
        pytest.param(LATENT, id="values", marks=pytest.mark.slow),
        pytest.param(GROUPED, id="grouped", marks=pytest.mark.slow),
        pytest.param(OPT, id="heads", marks=pytest.mark.slow),
        pytest.param(BIGCODE, id="one head", marks=pytest.mark.slow),
    ],
)
def test_no_bit_depends_on_pieces_threads_or_instruction_set(shape: Shape, monkeypatch: pytest.MonkeyPatch) -> None:
    model, text = small(shape), tokens(shape, 580)
    wanted = ReferenceModel(model.program, model.memory).logits(text)
    found = {}
    for isa in library.available_instruction_sets():
        monkeypatch.setenv("OUTRIDER_ISA", isa)
        with model.model(threads=2) as engine:
            found[isa] = all_logits(engine, engine.open(), text, (255, 1, 1, 7, 2, 3, 4, 5, 6, 250))
    with model.model() as engine:
        whole = all_logits(engine, engine.open(), text)
    assert abs(whole - wanted).max() <= TOLERANCE * abs(wanted).max()
    for each in found.values():
        assert_same_bits(each, whole)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("head", [8, 80, 128, *(pytest.param(size, marks=pytest.mark.slow) for size in (24, 64, 72, 256))])
def test_head_sizes(head: int) -> None:
    shape = Shape(width=4 * head, heads=4, kv_heads=2, inner=96, layers=1, vocabulary=50, group=32)
    model, text = small(shape), tokens(shape, 300)
    wanted = ReferenceModel(model.program, model.memory).logits(text)
    with model.model(threads=2) as engine:
        whole = all_logits(engine, engine.open(), text)
        pieces = all_logits(engine, engine.open(), text, (1, 40, 7, 7))
    assert_same_bits(pieces, whole)
    assert abs(whole - wanted).max() <= TOLERANCE * abs(wanted).max()


def rows_that_fit(model: Packed, cache_bytes: int) -> int:
    """Rows of 32 tokens, which is a block of the cache."""
    with model.model(cache_bytes=cache_bytes) as engine:
        for count in range(1000):
            try:
                engine.forward([NativeFeed(engine.open(), [1] * 32, choose=0)])
            except CacheFull:
                return count
    raise AssertionError("there was no limit")


@pytest.mark.one_in(3)
@pytest.mark.parametrize("kept", Cache)
@pytest.mark.parametrize(
    "shape",
    [LLAMA, BIGCODE, LATENT, Shape(width=96, heads=4, kv_heads=2, layers=2), SHARED],
    ids=["a", "b", "values", "odd", "shared"],
)
def test_what_a_token_takes_is_as_the_program_says(shape: Shape, kept: Cache) -> None:
    model = packed(shape, Format.W4A8)
    model = replace(model, program=replace(model.program, cache=kept))
    block = -(-32 * model.program.token_bytes // 64) * 64
    assert (rows_that_fit(model, 5 * block), rows_that_fit(model, 5 * block - 1)) == (5, 4)


def test_it_takes_little_more_than_half_the_memory() -> None:
    shape = Shape(width=256, heads=4, kv_heads=4, layers=2)
    # A head of 64: 64 bytes and a scale of 4, instead of 128.
    assert rows_that_fit(small(shape), 1 << 21) / rows_that_fit(packed(shape, Format.W4A8), 1 << 21) == pytest.approx(
        128 / 68, rel=0.1
    )


def test_rows_are_forked_and_truncated_like_others() -> None:
    model, text = small(LLAMA), tokens(LLAMA, 70)
    with model.model() as engine:
        row = engine.open()
        whole = all_logits(engine, row, text)
        fork = engine.fork(row, 40)
        all_logits(engine, fork, text[:20])  # other tokens than the row's, into the block that both have
        engine.truncate(row, 50)
        again = all_logits(engine, row, text[50:])
        assert_same_bits(again, whole[50:])
        engine.truncate(fork, 40)
        again = all_logits(engine, fork, text[40:])
        assert_same_bits(again, whole[40:])


def test_what_a_block_held_before_is_never_seen() -> None:
    """Not even scales that are no numbers: one token's values, and no other's, overflow."""
    shape, strange = replace(LLAMA, layers=1), 210
    program = replace(build(shape, Format.W4A8), cache=Cache.INT8)
    matrices = random_matrices(program)
    embed, linear = (next(op for op in program.ops if op.kind is kind) for kind in (Kind.EMBED, Kind.LINEAR))
    matrices[embed.weight][:, 0] = 0.0
    matrices[embed.weight][strange] = 0.0
    matrices[embed.weight][strange, 0] = 1.0
    matrices[linear.weight][2 * shape.width :, 0] = 1e38  # the rows of the values
    model = Packed(program, pack_program(program, matrices))
    text = [token % strange for token in tokens(shape, 70)]
    with model.model() as engine:
        wanted = all_logits(engine, engine.open(), text)
    with model.model() as engine:
        row = engine.open()
        with pytest.raises(KernelError, match="not a finite"):
            engine.forward([NativeFeed(row, [strange] * 96)])
        engine.close_row(row)
        found = all_logits(engine, engine.open(), text)
    assert_same_bits(found, wanted)


def test_values_that_are_no_numbers_are_refused_as_in_16_bits() -> None:
    """Two channels overflow in opposite directions, so that every value is one infinity less another."""
    shape = replace(LLAMA, layers=1)
    program = build(shape, Format.BF16)
    matrices = random_matrices(program)
    embed, linear = (next(op for op in program.ops if op.kind is kind) for kind in (Kind.EMBED, Kind.LINEAR))
    matrices[embed.weight][7] = 0.0
    matrices[embed.weight][7, [0, 128]] = 1.0
    values = matrices[linear.weight][2 * shape.width :]
    values[:, 0], values[:, 128] = 3e38, -3e38
    memory = pack_program(program, matrices)
    for cache in (Cache.BF16, Cache.INT8):
        with (
            Packed(replace(program, cache=cache), memory).model() as engine,
            pytest.raises(KernelError, match="not a finite"),
        ):
            engine.forward([NativeFeed(engine.open(), [7] * 40)])


def test_a_cache_that_is_not_known_is_refused() -> None:
    model = packed(LLAMA, Format.W4A8)
    strange = replace(model, program=replace(model.program, cache=cast(Cache, 7)))
    with pytest.raises(KernelError, match="cache format 7 is unknown"):
        strange.model()
