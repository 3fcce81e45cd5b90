"""A cache of 8 bits: against the NumPy reference, and against itself, bit for bit however it is asked."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from kernel_models import BIGCODE, GROUPED, LLAMA, OPT, QWEN, SHAPES, Packed, Shape, packed, tokens

from outrider.kernels import library
from outrider.kernels.library import CacheFull, KernelError
from outrider.kernels.native import Feeding, NativeModel
from outrider.kernels.program import Cache, Format
from outrider.kernels.reference import ReferenceModel

# Of the largest logit: keys, values and queries that fall on the other side of a half, one int8 step of a head's numbers.
TOLERANCE = 3e-2


def small(shape: Shape, format: Format = Format.W4A8) -> Packed:
    model = packed(shape, format)
    return replace(model, program=replace(model.program, cache=Cache.INT8))


def logits(model: NativeModel, row: int, text: list[int], pieces: tuple[int, ...] = ()) -> np.ndarray:
    parts, start = [], 0
    for piece in (*pieces, len(text)):
        if part := text[start : start + piece]:
            parts.append(model.forward([Feeding(row, part, choose=0, logits=len(part))])[0].logits)
        start += piece
    return np.concatenate(parts)


@pytest.mark.parametrize("format", [Format.W4A8, Format.W8A8, Format.BF16])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_against_the_reference(shape: Shape, format: Format) -> None:
    model, text = small(shape, format), tokens(shape, 75)
    wanted = ReferenceModel(model.program, model.memory).logits(text)
    with model.model(threads=2) as engine:
        found = logits(engine, engine.open(), text)
    assert np.isfinite(found).all()
    assert abs(found - wanted).max() <= TOLERANCE * abs(wanted).max()
    sixteen = packed(shape, format)
    with sixteen.model() as engine:
        assert not np.array_equal(logits(engine, engine.open(), text), found), "it is another rounding"


@pytest.mark.parametrize("shape", [QWEN, OPT, GROUPED, BIGCODE], ids=["window", "heads", "grouped", "one head"])
def test_no_bit_depends_on_pieces_threads_or_instruction_set(shape: Shape, monkeypatch: pytest.MonkeyPatch) -> None:
    model, text = small(shape), tokens(shape, 580)
    wanted = ReferenceModel(model.program, model.memory).logits(text)
    found = {}
    for isa in library.available_instruction_sets():
        monkeypatch.setenv("OUTRIDER_ISA", isa)
        with model.model(threads=2) as engine:
            found[isa] = logits(engine, engine.open(), text, (255, 1, 1, 7, 2, 3, 4, 5, 6, 250))
    with model.model() as engine:
        whole = logits(engine, engine.open(), text)
    assert abs(whole - wanted).max() <= TOLERANCE * abs(wanted).max()
    for each in found.values():
        np.testing.assert_array_equal(each.view(np.uint32), whole.view(np.uint32))


@pytest.mark.slow
@pytest.mark.parametrize("head", [8, 24, 64, 72, 80, 128, 256])
def test_head_sizes(head: int) -> None:
    shape = Shape(width=4 * head, heads=4, kv_heads=2, inner=96, layers=1, vocabulary=50, group=32)
    model, text = small(shape), tokens(shape, 300)
    wanted = ReferenceModel(model.program, model.memory).logits(text)
    with model.model(threads=2) as engine:
        whole = logits(engine, engine.open(), text)
        pieces = logits(engine, engine.open(), text, (1, 40, 7, 7))
    np.testing.assert_array_equal(pieces.view(np.uint32), whole.view(np.uint32))
    assert abs(whole - wanted).max() <= TOLERANCE * abs(wanted).max()


def rows_that_fit(model: Packed, cache_bytes: int) -> int:
    """Rows of 32 tokens, which is a block of the cache."""
    with model.model(cache_bytes=cache_bytes) as engine:
        for count in range(1000):
            try:
                engine.forward([Feeding(engine.open(), [1] * 32, choose=0)])
            except CacheFull:
                return count
    raise AssertionError("there was no limit")


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
        whole = logits(engine, row, text)
        fork = engine.fork(row, 40)
        engine.truncate(row, 33)
        for each, start in ((fork, 40), (row, 33)):
            again = logits(engine, each, text[start:])
            np.testing.assert_array_equal(again.view(np.uint32), whole[start:].view(np.uint32))


def test_a_cache_that_is_not_known_is_refused() -> None:
    model = packed(LLAMA, Format.W4A8)
    strange = replace(model, program=replace(model.program, cache=7))
    with pytest.raises(KernelError, match="cache format 7 is unknown"):
        strange.model()
