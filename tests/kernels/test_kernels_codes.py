"""Quantised checkpoints are packed without rounding: the bits of their format's definition, in no more bytes."""

from dataclasses import replace

import numpy as np
import pytest
from quantised_rows import SCHEMES, random_rows

from outrider.kernels import library, packer, packing, storage
from outrider.kernels.program import Codes, Format, Scales, Storage, Weight
from outrider.kernels.quantised import Scheme, Values, natural_order
from outrider.kernels.storage import UnknownStorage, storage_for

# Bits a weight in the checkpoint, scales included.
BITS = {
    "gguf Q4_0": 4.5,
    "gguf Q4_1": 5,
    "gguf Q5_0": 5.5,
    "gguf Q5_1": 6,
    "gguf Q8_0": 8.5,
    "gguf Q4_K": 4.5,
    "rounded on load": 4.5,
    "gguf Q5_K": 5.5,
    "gguf Q6_K": 6.5625,
    "gguf MXFP4": 4.25,
    "awq g128": 4 + 20 / 128,
    "awq g64": 4 + 20 / 64,
    "awq g32": 4 + 20 / 32,
    "gptq 8 bits g32": 8 + 24 / 32,
    "pack-quantized g32": 4.5,
    "pack-quantized g64 fp32": 4 + 36 / 64,
    "int-quantized by row": 8,
    "pack-quantized by row": 4,
}


def weight_for(scheme: Scheme, rows: int, columns: int, gated: bool = False, ordered: bool = False) -> Weight:
    kept, group = storage_for(scheme, columns)
    return Weight(Format.W4A8, rows, columns, group=group, gated=gated, storage=kept, ordered=ordered)


def columns_for(scheme: Scheme, groups: int) -> int:
    return (scheme.super_group or scheme.group) * groups


def pack_natively(weight: Weight, rows, order=None, split: int = 0) -> np.ndarray:
    memory = packer.Memory(packer.packed_bytes(weight))
    assert memory.address is not None
    for start, stop in ((0, split), (split, len(rows.codes))):
        names = [name for name in ("codes", "scales", "zeros", "minima") if getattr(rows, name) is not None]
        part = {name: getattr(rows, name)[start:stop] for name in names}
        levels = rows.levels
        if levels is not None:
            names = [name for name in levels.__slots__ if getattr(levels, name) is not None]
            levels = replace(levels, **{name: getattr(levels, name)[start:stop] for name in names})
        packer.pack_codes(weight, memory.address, start, replace(rows, **part, levels=levels))
    if order is not None:
        packer.pack_order(weight, memory.address, order)
    return memory.array[: storage.packed_size(weight)].copy()


@pytest.mark.one_in(3)
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(("count", "groups"), [(1, 1), (33, 4), (70, 3)])
@pytest.mark.parametrize("name", SCHEMES)
def test_codes_are_packed_as_they_are(name, count, groups, gated):
    scheme = SCHEMES[name]
    count, columns = (2 * count if gated else count), columns_for(scheme, groups)
    rows, order = random_rows(scheme, count, columns), np.random.default_rng(3).permutation(columns).astype(np.int32)
    weight = weight_for(scheme, count, columns, gated)
    packed = storage.pack(weight, rows)
    assert packed.size == packing.packed_size(weight) == packer.packed_bytes(weight)
    np.testing.assert_array_equal(pack_natively(weight, rows, split=count // 3), packed)
    wanted = rows.dequantise()
    np.testing.assert_array_equal(storage.unpack(weight, packed), wanted)
    ordered = replace(weight, ordered=True)
    packed = storage.pack(ordered, rows, order)
    np.testing.assert_array_equal(pack_natively(ordered, rows, order), packed)
    np.testing.assert_array_equal(storage.unpack(ordered, packed), natural_order(wanted, order))


@pytest.mark.parametrize("name", BITS)
def test_packed_codes_take_a_tenth_more_than_the_file_at_most(name):
    weight = weight_for(SCHEMES[name], 1024, 4096)
    assert packer.packed_bytes(weight) * 8 <= 1.1 * BITS[name] * weight.rows * weight.columns


def test_numbers_that_have_no_place_are_refused_by_name():
    weight = Weight(Format.W4A8, 4, 64, group=32, storage=Storage(Codes.INT4, Scales.F16, zeros=False))
    rows = random_rows(SCHEMES["gguf Q4_0"], 4, 64)
    scales, codes, zeros = rows.scales.copy(), rows.codes.copy(), rows.zeros.copy()
    scales[2, 1] = np.float32(1 / 3)
    codes[1, 40] = 16
    zeros[3, 0] = 7
    for changed, sentence in (
        (replace(rows, scales=scales), r"row 2, column 32: the scale 0.333333343 is not exact in fp16"),
        (replace(rows, codes=codes), r"row 1, column 40: a code of 16, at most 15 fits"),
        (replace(rows, zeros=zeros), r"row 3, column 0: a zero point of 7 where all are 8"),
        (replace(rows, scales=np.full_like(scales, np.nan)), r"row 0, column 0: the scale is -?nan"),
    ):
        with pytest.raises(library.KernelError, match=sentence):
            pack_natively(weight, changed)
    with_zeros = replace(weight, storage=Storage(Codes.INT4, Scales.F16, zeros=True))
    zeros[3, 0] = 129
    with pytest.raises(
        library.KernelError, match="row 3, column 0: a zero point of 129 of codes of 4 bits, at most 128 fit"
    ):
        pack_natively(with_zeros, replace(rows, zeros=zeros))
    ordered = replace(weight, ordered=True)
    with pytest.raises(library.KernelError, match="the order of 64 columns has 0 at place 1, twice or out of range"):
        pack_natively(ordered, rows, np.zeros(64, np.int32))


@pytest.mark.parametrize(
    "scheme",
    [
        Scheme("gptq", 4, 48),
        Scheme("mlx", 4, 48, minima=True),
        Scheme("gptq", 4, 16, symmetric=False),
        Scheme("gguf Q3_K", 5, 16),
        Scheme("gguf Q3_K", 3, 16, super_group=256, signed_sub_scales=True),
        Scheme("fp8", 8, 48, values=Values.E4M3),
    ],
)
def test_schemes_without_a_storage_are_refused(scheme):
    with pytest.raises(UnknownStorage, match=scheme.source):
        storage_for(scheme, 512)
