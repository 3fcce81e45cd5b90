"""Products of sums instead of two products (kernels/src/pairs.inc): the same bits at every number of rows."""

from dataclasses import replace

import numpy as np
import pytest
from coded_models import model_of as model_of_codes
from kernel_models import (
    Packed,
    Shape,
    all_logits,
    assert_bits_of_generic,
    assert_same_bits,
    build,
    pack_program,
    random_matrices,
    stored,
    tokens,
)
from quantised_rows import SCHEMES

from outrider.kernels import library, packing
from outrider.kernels.program import Codes, Format, Scales, Storage

WORDS = Storage(Codes.INT4, Scales.WORDS, zeros=True)
# Columns of two blocks of 128 channels and a narrow one, whose last group is narrow too; and of less than one block.
ODD = Shape(width=328, heads=41, kv_heads=41, inner=72, layers=1)
# Experts of a few rows and of more than a block of them, whose gates have part of a tile.
MIXTURE = Shape(width=328, heads=41, kv_heads=41, inner=136, group=128, experts=5, chosen=2, layers=2)
WHOLE = Shape(width=640, heads=8, kv_heads=4, inner=512, layers=1)


# In bf16 an activation is two rows of int8.
FORMATS = pytest.mark.parametrize("format", [Format.W4A8, Format.W4ABF16], ids=["int8", "bf16"])


def model_of(shape: Shape, group: int, codes: str, format: Format) -> Packed:
    changed = stored(program := build(shape, format), group=group, storage=packing.FACTORS if group == 32 else WORDS)
    # A router stays in fp32.
    weights = zip(program.weights, changed.weights, strict=True)
    program = replace(changed, weights=tuple(own if own.format is Format.FP32 else other for own, other in weights))
    matrices = random_matrices(program, seed=3)
    if codes:
        # The lowest and the highest codes, and many activations that are a block's largest.
        matrices = [(np.sign(matrix) / 8).astype(np.float32) if matrix.shape[0] > 1 else matrix for matrix in matrices]
    if codes == "lopsided":
        # Of two that share a byte the upper one is the higher: what a block's codes make alone is as much as it can be.
        for matrix in matrices:
            if matrix.shape[0] > 1:
                matrix[:, :320] = np.abs(matrix[:, :320]) * np.where(np.arange(matrix[:, :320].shape[1]) % 8 < 4, -1, 1)
    return Packed(program, pack_program(program, matrices))


@pytest.mark.one_in(6)
@FORMATS
@pytest.mark.parametrize("codes", ["", "extremes", "lopsided"])
@pytest.mark.parametrize("group", [32, 128])
@pytest.mark.parametrize("shape", [ODD, WHOLE], ids=["odd", "whole"])
def test_pairs_at_every_number_of_rows(shape, group, codes, format, monkeypatch):
    if "avx512pairs" not in library.available_instruction_sets():
        pytest.skip("no AVX-512 with bf16 here")
    model, text = model_of(shape, group, codes, format), tokens(shape, 420)
    # All sizes of one block of rows, of two, and more than share a pass over a tile.
    assert_bits_of_generic(model, "avx512pairs", text, (tuple(range(1, 26)), (97, 110)), monkeypatch)


@pytest.mark.one_in(8)
@FORMATS
@pytest.mark.parametrize(
    "name",
    [
        "gguf Q4_0",
        "gguf Q4_1",
        "mlx 3 bits",
        "mlx 4 bits",
        "awq g32",
        "awq g64",
        "pack-quantized g32",
        "pack-quantized g64 fp32",
    ],
)
def test_groups_within_a_block_at_every_number_of_rows(name, format, monkeypatch):
    if "avx512pairs" not in library.available_instruction_sets():
        pytest.skip("no AVX-512 with bf16 here")
    shape, model = model_of_codes(SCHEMES[name], format)
    assert_bits_of_generic(model, "avx512pairs", tokens(shape, 140), (tuple(range(1, 16)), (97,)), monkeypatch)


@pytest.mark.one_in(2)
@FORMATS
def test_experts_in_pairs_beside_others(format, monkeypatch):
    """Each expert by its own rows: of a pass some are multiplied in pairs, others as they are."""
    if "avx512pairs" not in library.available_instruction_sets():
        pytest.skip("no AVX-512 with bf16 here")
    model, text = model_of(MIXTURE, 128, "", format), tokens(MIXTURE, 200)
    assert_bits_of_generic(model, "avx512pairs", text, ((3, 7, 12, 19, 31), (97,)), monkeypatch)


@pytest.mark.one_in(4)
@FORMATS
@pytest.mark.parametrize("group", [32, 128])
def test_what_this_processor_multiplies_in_pairs(group, format, monkeypatch):
    """Unasked, a processor does it from as many tokens on as pay there."""
    model, text = model_of(WHOLE, group, "", format), tokens(WHOLE, 420)
    assert_bits_of_generic(model, "", text, (tuple(range(1, 26)), (97, 110)), monkeypatch)


@pytest.mark.parametrize("format", [Format.BF16, Format.FP32], ids=["bf16", "fp32"])
def test_floats_are_those_of_avx512bf16(format, monkeypatch):
    """Hosts and jobs of either may be mixed, so both name the same instruction set for floats."""
    if "avx512pairs" not in library.available_instruction_sets():
        pytest.skip("no AVX-512 with bf16 here")
    program = build(WHOLE, format)
    model, text = Packed(program, pack_program(program, random_matrices(program))), tokens(WHOLE, 60)
    found, names = [], set()
    for isa in ("avx512bf16", "avx512pairs"):
        monkeypatch.setenv("OUTRIDER_ISA", isa)
        names.add(library.float_instruction_set())
        with model.model() as engine:
            found.append(all_logits(engine, engine.open(), text, (1, 7, 20)))
    assert_same_bits(*found)
    assert names == {"avx512bf16"}
