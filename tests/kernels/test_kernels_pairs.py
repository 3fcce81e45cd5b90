"""Products of sums instead of two products (kernels/src/pairs.inc): the same bits at every number of rows."""

from dataclasses import replace

import numpy as np
import pytest
from kernel_models import Packed, Shape, all_logits, assert_same_bits, build, random_matrices, tokens

from outrider.kernels import library, packing
from outrider.kernels.program import Codes, Format, Scales, Storage

WORDS = Storage(Codes.INT4, Scales.WORDS, zeros=True)
# Columns of two blocks of 128 channels and a narrow one, whose last group is narrow too; and of less than one block.
ODD = Shape(width=328, heads=41, kv_heads=41, inner=72, layers=1)
WHOLE = Shape(width=640, heads=8, kv_heads=4, inner=512, layers=1)


def model_of(shape: Shape, group: int, extremes: bool) -> Packed:
    program = build(shape, Format.W4A8)
    weights = tuple(
        weight if weight.table else replace(weight, group=group, storage=packing.FACTORS if group == 32 else WORDS)
        for weight in program.weights
    )
    program = replace(program, weights=weights)
    matrices = random_matrices(program, seed=3)
    if extremes:
        # The lowest and the highest codes, and many activations that are a block's largest.
        matrices = [(np.sign(matrix) / 8).astype(np.float32) if matrix.shape[0] > 1 else matrix for matrix in matrices]
    return Packed(program, packing.pack_program(program, matrices))


@pytest.mark.parametrize("extremes", [False, True], ids=["", "extremes"])
@pytest.mark.parametrize("group", [32, 128])
@pytest.mark.parametrize("shape", [ODD, WHOLE], ids=["odd", "whole"])
def test_pairs_at_every_number_of_rows(shape, group, extremes, monkeypatch):
    if "avx512pairs" not in library.available_instruction_sets():
        pytest.skip("no AVX-512 with bf16 here")
    model, text = model_of(shape, group, extremes), tokens(shape, 420)
    monkeypatch.setenv("OUTRIDER_ISA", "generic")
    with model.model() as engine:
        wanted = all_logits(engine, engine.open(), text)
    monkeypatch.setenv("OUTRIDER_ISA", "avx512pairs")
    with model.model(threads=2) as engine:
        # All sizes of one block of rows, of two, and more than share a pass over a tile.
        for sizes in (range(1, 26), (97, 110)):
            assert_same_bits(all_logits(engine, engine.open(), text, tuple(sizes)), wanted)
