"""Floats of four and eight bits stay packed, and give bit for bit what the same matrices give dequantised to bf16."""

from dataclasses import replace

import numpy as np
import pytest
from kernel_models import MIXTURE, Packed, Shape, all_logits, assert_same_bits, build, tokens

from outrider.kernels import library, packer, packing, storage
from outrider.kernels.program import Format, Program, Weight
from outrider.kernels.quantised import TABLES, QuantisedRows, Scheme, Values

SCHEMES = {
    "blocks of 128": Scheme("fp8", 8, 128, Values.E4M3, scale_type="F32"),
    "by row": Scheme("fp8", 8, 4096, Values.E4M3, scale_type="BF16"),
    "groups of 32": Scheme("fp8", 8, 32, Values.E4M3, scale_type="F16"),
    "far apart": Scheme("fp8 far apart", 8, 128, Values.E4M3, scale_type="F32"),
    "groups of 64": Scheme("fp8", 8, 64, Values.E4M3, scale_type="F32"),
    "nothing subnormal": Scheme("fp8 nothing subnormal", 8, 128, Values.E4M3, scale_type="F32"),
    "one scale for all rows": Scheme("fp8 one scale", 8, 128, Values.E4M3, scale_type="F32"),
    "one scale for every other sixteen": Scheme("fp8 one scale here and there", 8, 128, Values.E4M3, scale_type="F32"),
    "nf4": Scheme("bitsandbytes nf4", 4, 64, Values.NF4, scale_type="F32"),
    "nf4 far apart": Scheme("nf4 far apart", 4, 64, Values.NF4, scale_type="F32"),
    "fp4 by 128": Scheme("bitsandbytes fp4", 4, 128, Values.FP4, scale_type="F32"),
    "nvfp4": Scheme("nvfp4", 4, 16, Values.E2M1, scale_type="F32"),
    "mxfp4": Scheme("mxfp4", 4, 32, Values.E2M1, scale_type="E8M0"),
    "mxfp4 with groups of zeros": Scheme("mxfp4 with groups of zeros", 4, 32, Values.E2M1, scale_type="E8M0"),
}
SMALLEST = np.float32(2.0**-127)
ODD = Shape(width=352, heads=22, kv_heads=22, inner=200, layers=1)
# The last group of some matrices fills no whole lines.
RAGGED = Shape(width=352, heads=22, kv_heads=22, inner=202, layers=1)


def random_rows(scheme: Scheme, rows: int, columns: int, seed: int = 0) -> QuantisedRows:
    """Every finite code, subnormal ones and both zeros among them."""
    generator = np.random.default_rng(seed)
    finite = np.flatnonzero(np.isfinite(TABLES[scheme.values])).astype(np.uint8)
    scales = generator.uniform(0.5, 1.5, (rows, -(-columns // scheme.group))).astype(np.float32) * columns**-0.5 / 100
    scales *= generator.choice([-1, 1], scales.shape)
    if scheme.values is not Values.E4M3:
        scales *= 100
    if scheme.source.endswith("far apart"):
        # Products that are subnormal, and scales beyond those that are usual; by tile, so that usual ones are among them.
        powers = np.exp2(generator.choice([-123, 0, 14], (-(-rows // 16), scales.shape[1])))
        scales *= np.repeat(powers, 16, axis=0)[:rows]
    if scheme.source == "fp8 nothing subnormal":
        finite = finite[finite & 0x78 != 0]
    if scheme.source == "fp8 one scale":
        scales[:] = scales[:1]
    if scheme.source == "fp8 one scale here and there":
        finite = finite[finite & 0x78 != 0]
        for first in range(0, rows, 32):
            scales[first : first + 16] = scales[first]
    if scheme.scale_type == "BF16":
        scales = packing.from_bf16(packing.to_bf16(scales))
    elif scheme.scale_type == "F16":
        scales = scales.astype(np.float16).astype(np.float32)
    elif scheme.scale_type == "E8M0":
        scales = np.exp2(np.round(np.log2(abs(scales))))
    scales, codes = scales.astype(np.float32), generator.choice(finite, (rows, columns))
    if scheme.source.endswith("groups of zeros"):
        # As llama.cpp writes a group of zeros: with the smallest exponent. A code of 8 is -0.
        empty = generator.random(scales.shape) < 0.3
        scales[empty] = SMALLEST
        zeros = np.repeat(empty, scheme.group, axis=1)[:, :columns]
        codes[zeros] &= 8
    return QuantisedRows(scheme, codes, scales, np.zeros(scales.shape, np.uint8))


def weight_for(scheme: Scheme, rows: int, columns: int, gated: bool = False) -> Weight:
    kept, group = storage.storage_for(scheme, columns)
    return Weight(Format.BF16, rows, columns, group=group, gated=gated, storage=kept)


def pack_natively(weight: Weight, rows: QuantisedRows) -> np.ndarray:
    memory = packer.Memory(packer.packed_bytes(weight))
    assert memory.address is not None
    packer.pack_codes(weight, memory.address, 0, rows)
    return memory.array[: packing.packed_size(weight)].copy()


@pytest.mark.one_in(4)
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(("count", "columns"), [(1, 32), (33, 352), (70, 384), (4, 205)])
@pytest.mark.parametrize("name", SCHEMES)
def test_codes_are_packed_as_they_are(name, count, columns, gated):
    scheme, count = SCHEMES[name], 2 * count if gated else count
    weight, rows = weight_for(scheme, count, columns, gated), random_rows(scheme, count, columns)
    packed = storage.pack(weight, rows)
    assert packed.size == packing.packed_size(weight) == packer.packed_bytes(weight)
    np.testing.assert_array_equal(pack_natively(weight, rows), packed)
    wanted = TABLES[scheme.values][rows.codes] * np.repeat(rows.scales, scheme.group, axis=1)[:, :columns]
    np.testing.assert_array_equal(storage.unpack(weight, packed), wanted)


@pytest.mark.parametrize("name", ["blocks of 128", "by row"])
def test_fp8_takes_a_tenth_more_than_the_file_at_most(name):
    weight = weight_for(SCHEMES[name], 1024, 4096)
    assert packer.packed_bytes(weight) <= 1.1 * weight.rows * weight.columns


@pytest.mark.parametrize(("name", "bits"), [("nf4", 4.5), ("fp4 by 128", 4.25), ("nvfp4", 6), ("mxfp4", 4.25)])
def test_bits_of_a_weight_of_four(name, bits):
    weight = weight_for(SCHEMES[name], 1024, 4096)
    assert packer.packed_bytes(weight) * 8 == bits * weight.rows * weight.columns


def models_of(scheme: Scheme, shape: Shape) -> tuple[Packed, Packed]:
    """One with the codes, and one whose matrices were dequantised."""
    program = build(shape, Format.BF16)
    kept, plain = [], []
    for number, weight in enumerate(program.weights):
        if weight.table or weight.format is Format.FP32:
            generator = np.random.default_rng(number)
            matrix = generator.normal(size=(weight.rows, weight.columns)).astype(np.float32)
            matrix = np.asarray(weight.values, np.float32)[None] if weight.values else matrix
            kept.append((weight, packing.pack(weight, matrix)))
            plain.append(kept[-1])
            continue
        stored, group = storage.storage_for(scheme, weight.columns)
        coded = replace(weight, storage=stored, group=group)
        packed = storage.pack(coded, random_rows(scheme, weight.rows, weight.columns, number))
        kept.append((coded, packed))
        plain.append((weight, packing.pack(weight, storage.unpack(coded, packed))))
    return joined(program, kept), joined(program, plain)


def joined(program: Program, weights: list[tuple[Weight, np.ndarray]]) -> Packed:
    program = replace(program, weights=tuple(weight for weight, _ in weights))
    offsets, size = packing.weight_offsets(program)
    raw = np.zeros(size + packing.ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % packing.ALIGNMENT
    memory = raw[start : start + size]
    for offset, (_, piece) in zip(offsets, weights, strict=True):
        memory[offset : offset + piece.size] = piece
    return Packed(program, memory)


@pytest.mark.one_in(16)
@pytest.mark.parametrize("isa", library.available_instruction_sets())
@pytest.mark.parametrize(
    ("name", "shape"),
    [(name, ODD) for name in SCHEMES] + [("one scale for all rows", RAGGED), ("blocks of 128", MIXTURE)],
)
def test_passes_have_the_bits_of_dequantised_matrices(name, shape, isa, monkeypatch):
    monkeypatch.setenv("OUTRIDER_ISA", isa)
    coded, plain = models_of(SCHEMES[name], shape)
    text = tokens(shape, 45)
    with coded.model(threads=2) as engine, plain.model(threads=2) as other:
        found = all_logits(engine, engine.open(), text)
        assert np.isfinite(found).all() and found.std() > 0
        assert_same_bits(found, all_logits(other, other.open(), text))
        for model in (engine, other):
            row = model.open()
            one = [all_logits(model, row, [token]) for token in text[:3]]
            np.testing.assert_array_equal(np.concatenate(one), found[:3])
            row = model.open()
            some = [all_logits(model, row, part) for part in (text[:5], text[5:21], text[21:45])]
            np.testing.assert_array_equal(np.concatenate(some), found)


def test_numbers_that_have_no_place_are_refused_by_name():
    weight, rows = weight_for(SCHEMES["blocks of 128"], 4, 256), random_rows(SCHEMES["blocks of 128"], 4, 256)
    codes, scales = rows.codes.copy(), rows.scales.copy()
    codes[1, 40] = 0xFF
    scales[2, 1] = 1e37
    for changed, sentence in (
        (replace(rows, codes=codes), "row 1, column 40 is nan"),
        (replace(rows, scales=scales), r"row 2, column 128: the scale 9.99\d*e\+36 makes infinite numbers"),
    ):
        with pytest.raises(library.KernelError, match=sentence):
            pack_natively(weight, changed)
    weight, rows = weight_for(SCHEMES["mxfp4"], 4, 256), random_rows(SCHEMES["mxfp4"], 4, 256)
    rows.scales[1, 2], rows.codes[1, 64:95], rows.codes[1, 95] = SMALLEST, 0, 1
    with pytest.raises(library.KernelError, match=r"row 1, column 64: the scale 5.87747\d*e-39 is not exact in e8m0"):
        pack_natively(weight, rows)
    weight = weight_for(SCHEMES["blocks of 128"], 4, 256)
    with pytest.raises(library.KernelError, match="codes of kind 6"):
        packer.packed_bytes(replace(weight, format=Format.FP32))
