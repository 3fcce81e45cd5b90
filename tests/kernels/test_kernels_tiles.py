"""Codes on AMX tiles (kernels/src/linear_amx.inc): the same bits at every number of rows."""

import pytest
from kernel_models import Packed, Shape, assert_bits_of_generic, build, pack_program, random_matrices, stored, tokens

from outrider.kernels import library, packing
from outrider.kernels.program import Codes, Format, Scales, Storage

# Columns of two blocks of 128 channels and a narrow one, whose last group is narrow too.
SHAPE = Shape(width=328, heads=41, kv_heads=41, inner=72, layers=1)
WORDS = Storage(Codes.INT4, Scales.WORDS, zeros=True)
BYTES = Storage(Codes.INT8, Scales.WORDS, zeros=True)


@pytest.mark.parametrize(
    ("format", "group", "storage"),
    [
        (Format.W4A8, 32, packing.FACTORS),
        (Format.W4A8, 64, WORDS),
        (Format.W4A8, 128, WORDS),
        (Format.W8A8, 128, BYTES),
    ],
    ids=["w4a8", "w4a8:g64", "w4a8:g128", "w8a8"],
)
def test_tiles_at_every_number_of_rows(format, group, storage, monkeypatch):
    """Rows that are multiplied together are as many each time, so the last of them may begin among those before."""
    if "amx" not in library.available_instruction_sets():
        pytest.skip("no AMX here")
    program = stored(build(SHAPE, format), group=group, storage=storage)
    model = Packed(program, pack_program(program, random_matrices(program, seed=3)))
    sizes = ((9, 16, 17, 31, 32), (33, 34, 37, 63), (65, 66), (97,), (129, 31))
    assert_bits_of_generic(model, "amx", tokens(SHAPE, 260), sizes, monkeypatch)
