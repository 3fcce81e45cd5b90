"""Groups whose products fit 16 bits (kernels/src/linear_sums16.inc): the bits of other units on both sides of the limit."""

import numpy as np
import pytest
from kernel_models import Packed, Shape, assert_bits_of_generic, build, pack_program, random_matrices, stored, tokens

from outrider.kernels import library
from outrider.kernels.program import Format

# Columns of whole groups of 128 and a narrow one, and so many words that some occur once.
SHAPE = Shape(width=328, heads=41, kv_heads=41, inner=72, layers=1, vocabulary=300)


def model_of(format: Format, group: int, density: float, sign: int) -> Packed:
    """Of an embedding's numbers this many are alike and the others zero. The weights of every third output have this sign:
    their codes are all the largest, or the smallest. Those of the others are any."""
    program = stored(build(SHAPE, format), group=group)
    generator = np.random.default_rng(group + sign)
    matrices = []
    for weight, matrix in zip(program.weights, random_matrices(program, seed=3), strict=True):
        if weight.table and matrix.shape[0] > 1:
            matrix = sign * (generator.random(matrix.shape) < density).astype(np.float32)
        elif matrix.shape[0] > 1:
            matrix = (np.sign(matrix) / 8).astype(np.float32)
            matrix[::3] = sign / 8
        matrices.append(matrix)
    return Packed(program, pack_program(program, matrices))


# 32767 / 8 is what 34 channels with the largest activation add up to, of 64: groups are on either side.
@pytest.mark.one_in(7)
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("density", [0.1, 0.5, 0.533, 1.0])
@pytest.mark.parametrize(
    ("format", "group"),
    [(Format.W4A8, 128), (Format.W4A8, 64), (Format.W4A8, 32), (Format.W8A8, 128)],
    ids=["w4a8", "w4a8:g64", "w4a8:g32", "w8a8"],
)
def test_groups_that_fit_and_that_do_not(format, group, density, sign, monkeypatch):
    if "avx2" not in library.available_instruction_sets():
        pytest.skip("no AVX2 here")
    model, text = model_of(format, group, density, sign), tokens(SHAPE, 150)
    # Every size of one block of rows, of two, and several, of which the first leaves codes expanded for the others.
    assert_bits_of_generic(model, "avx2", text, (tuple(range(1, 14)), (97, 53), (18, 25, 33, 48, 14)), monkeypatch)
