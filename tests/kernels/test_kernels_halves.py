"""Passes whose feeds go through the program in two halves (kernels/src/pass_halves.cpp): the bits of whole ones."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from kernel_models import (
    CAPPED,
    GROUPED,
    LATENT,
    LLAMA,
    LONG,
    OPT,
    QWEN,
    SHAPES,
    Packed,
    Shape,
    assert_same_bits,
    build,
    pack_program,
    packed,
    random_matrices,
)
from numpy.typing import NDArray

from outrider.kernels import library
from outrider.kernels.native import NativeFeed
from outrider.kernels.program import Cache, Format

SUPPORT = Path(__file__).resolve().parents[1] / "support"
# A whole pair of blocks of 128 channels, multiplied in pairs where that is done, in several layers.
PAIRED = Shape(width=256, heads=8, kv_heads=8, inner=384, layers=3)
MANY = Shape(width=256, heads=32, kv_heads=4, inner=136, layers=2, group=128)
DIVIDED = {
    "paired": PAIRED,
    "many": MANY,
    "llama": LLAMA,
    "grouped": GROUPED,
    "qwen": QWEN,
    "opt": OPT,
    "capped": CAPPED,
    "long": LONG,
    "latent": LATENT,
}


def answers(
    model: Packed, threads: int, halves: str, monkeypatch: pytest.MonkeyPatch
) -> list[tuple[NDArray[np.float32], list[int]]]:
    """What passes over twenty rows of many lengths make: of one token, of several, of none that is wanted."""
    made = list[tuple[NDArray[np.float32], list[int]]]()
    monkeypatch.setenv("OUTRIDER_HALVES", halves)
    vocabulary = model.program.vocabulary
    with model.model(threads) as engine:
        rows = [engine.open() for _ in range(20)]
        for number, row in enumerate(rows):
            length = 1 + 37 * number % 300
            engine.forward([NativeFeed(row, [(7 * t + number) % vocabulary for t in range(length)], 0)])
        for new in (1, 3, 2):
            feeds = [
                NativeFeed(row, [(5 * number + t) % vocabulary for t in range(1 + (new - 1) * (number % new))], 1, 1)
                if new < 3 or number % 3
                else NativeFeed(row, [number], 0)
                for number, row in enumerate(rows)
            ]
            made += [(answer.logits, list(answer.tokens)) for answer in engine.forward(feeds)]
        for wanting in (rows[:10], rows[10:]):
            feeds = [NativeFeed(row, [n], int(row in wanting), int(row in wanting)) for n, row in enumerate(rows)]
            made += [(answer.logits, list(answer.tokens)) for answer in engine.forward(feeds)]
    return made


@pytest.mark.one_in(12)
@pytest.mark.parametrize("cache", [Cache.BF16, Cache.INT8], ids=["bf16", "int8"])
@pytest.mark.parametrize(
    ("shape", "format"),
    [(shape, Format.W4A8) for shape in DIVIDED.values()] + [(PAIRED, Format.W4ABF16), (MANY, Format.W4ABF16)],
    ids=[*DIVIDED, "paired-w4abf16", "many-w4abf16"],
)
def test_halves_make_the_bits_of_whole_passes(
    shape: Shape, format: Format, cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = replace(build(shape, format), cache=cache)
    model = Packed(program, pack_program(program, random_matrices(program)))
    for threads in (1, 2, 3):
        whole = answers(model, threads, "0", monkeypatch)
        for found, wanted in zip(answers(model, threads, "1", monkeypatch), whole, strict=True):
            assert_same_bits(found[0], wanted[0])
            assert found[1] == wanted[1]


@pytest.mark.slow
@pytest.mark.parametrize("cache", [Cache.BF16, Cache.INT8], ids=["bf16", "int8"])
def test_a_row_with_more_blocks_than_are_asked_for_at_once(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    program = replace(build(replace(PAIRED, layers=2, context=4_200), Format.W4A8), cache=cache)
    model = Packed(program, pack_program(program, random_matrices(program)))
    made = []
    for halves in ("0", "1"):
        monkeypatch.setenv("OUTRIDER_HALVES", halves)
        with model.model(2) as engine:
            rows = [engine.open() for _ in range(17)]
            engine.forward([NativeFeed(rows[5], [t % 50 for t in range(32 * 130)], 0)])
            made.append([answer.logits for answer in engine.forward([NativeFeed(row, [row % 50], 1) for row in rows])])
    for found, wanted in zip(*made, strict=True):
        assert_same_bits(found, wanted)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("isa", sorted(set(library.available_instruction_sets()) - {library.instruction_set()}))
def test_halves_on_every_instruction_set(isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_ISA", isa)
    model = packed(PAIRED, Format.W4A8)
    whole = answers(model, 2, "0", monkeypatch)
    for found, wanted in zip(answers(model, 2, "1", monkeypatch), whole, strict=True):
        assert_same_bits(found[0], wanted[0])


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", ["mixture", "hybrid", "delta"])
def test_programs_that_do_not_go_in_halves_stay_whole(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = packed(SHAPES[name], Format.W4A8)
    whole = answers(model, 2, "0", monkeypatch)
    for found, wanted in zip(answers(model, 2, "1", monkeypatch), whole, strict=True):
        assert_same_bits(found[0], wanted[0])


def test_another_word_than_0_or_1_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_HALVES", "yes")
    with pytest.raises(library.KernelError, match="OUTRIDER_HALVES is 0"):
        packed(PAIRED, Format.W4A8).model(1)


@pytest.mark.slow
def test_the_quicker_way_is_kept_to(tmp_path: Path) -> None:
    sources = SUPPORT.parents[1] / "kernels" / "src"
    program = tmp_path / "check"
    flags = ["-std=c++17", "-O1", "-Wall", "-Wextra", f"-I{sources}"]
    files = [str(SUPPORT / "halves_check.cpp"), str(sources / "halves_choice.cpp")]
    subprocess.run(["c++", *flags, *files, "-o", str(program)], check=True)
    done = subprocess.run([str(program)], check=False, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
