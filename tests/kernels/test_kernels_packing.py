"""The compiled packer against its NumPy definition, and the error bounds of packing."""

import ctypes
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from examples import examples
from outrider.kernels import library, packer, packing, storage
from outrider.kernels.program import Format, Weight

FORMATS = (Format.FP32, Format.BF16, Format.W4A8, Format.W8A8)
# Half a step of the coarsest rounding: int4 over a range of at most 2 * highest, with its scale rounded up.
WORST_ERROR = {Format.FP32: 0.0, Format.BF16: 2.0**-8, Format.W4A8: 1.01 / 15, Format.W8A8: 0.51 / 127}


def matrix_weight(format: Format, rows: int, columns: int, group: int = 128, gated: bool = False) -> Weight:
    return Weight(format, rows, columns, group=group if format.integer else 0, gated=gated)


def factor_weight(rows: int, columns: int) -> Weight:
    return Weight(Format.W4A8, rows, columns, group=32, storage=packing.FACTORS)


def pack_natively(weight: Weight, matrix: np.ndarray, source_type: str = "F32", split: int = 0) -> np.ndarray:
    memory = packer.Memory(packer.packed_bytes(weight))
    assert memory.address is not None
    for start, stop in ((0, split), (split, len(matrix))):
        if start < stop:
            packer.pack_rows(weight, memory.address, start, matrix[start:stop], source_type)
    return memory.array[: packing.packed_size(weight)].copy()


@settings(max_examples=examples(60), deadline=None)
@given(
    format=st.sampled_from(FORMATS),
    rows=st.integers(1, 70),
    columns=st.integers(1, 300),
    group=st.sampled_from((32, 64, 128)),
    gated=st.booleans(),
    seed=st.integers(0, 1 << 16),
)
def test_compiled_packing_is_the_definition(format, rows, columns, group, gated, seed):
    generator = np.random.default_rng(seed)
    rows = 2 * rows if gated else rows
    matrix = (generator.standard_normal((rows, columns)) * 10.0 ** generator.integers(-6, 6)).astype(np.float32)
    matrix[generator.random((rows, columns)) < 0.1] = 0
    matrix[0] = abs(matrix[0])
    weight = matrix_weight(format, rows, columns, group, gated)
    packed = packing.pack(weight, matrix)
    assert packed.size == packing.packed_size(weight) == packer.packed_bytes(weight)
    np.testing.assert_array_equal(pack_natively(weight, matrix, split=rows // 3), packed)
    unpacked = packing.unpack(weight, packed)
    assert unpacked.shape == matrix.shape
    highest = abs(matrix).max(axis=1, keepdims=True)
    assert np.all(abs(unpacked - matrix) <= WORST_ERROR[format] * highest + 1e-30)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("source_type", ["BF16", "F16"])
def test_half_precision_sources(format, source_type):
    generator = np.random.default_rng(5)
    values = generator.standard_normal((40, 96)).astype(np.float32)
    values[0, :4] = (0.0, -0.0, 3e-7, 65504.0)
    halves = packing.to_bf16(values) if source_type == "BF16" else values.astype(np.float16).view(np.uint16)
    exact = packing.from_bf16(halves) if source_type == "BF16" else halves.view(np.float16).astype(np.float32)
    weight = matrix_weight(format, 40, 96, 32)
    np.testing.assert_array_equal(pack_natively(weight, halves, source_type), packing.pack(weight, exact))


@settings(max_examples=examples(30), deadline=None)
@given(rows=st.integers(1, 40), columns=st.integers(1, 600), exponent=st.integers(-6, 4), seed=st.integers(0, 1 << 16))
def test_compiled_search_for_factors_is_the_definition(rows, columns, exponent, seed):
    generator = np.random.default_rng(seed)
    matrix = (generator.standard_normal((rows, columns)) * 10.0**exponent).astype(np.float32)
    matrix[generator.random((rows, columns)) < 0.1] = 0
    matrix[0] = abs(matrix[0])
    weight = factor_weight(rows, columns)
    packed = packing.pack(weight, matrix)
    assert packed.size == packing.packed_size(weight) == packer.packed_bytes(weight)
    np.testing.assert_array_equal(pack_natively(weight, matrix, split=rows // 3), packed)


@pytest.mark.parametrize("isa", library.available_instruction_sets())
def test_every_instruction_set_packs_alike(isa, monkeypatch):
    monkeypatch.setenv("OUTRIDER_ISA", isa)
    matrix = np.random.default_rng(3).standard_normal((40, 300)).astype(np.float32)
    for weight in (factor_weight(40, 300), *(matrix_weight(format, 40, 300, 64) for format in FORMATS)):
        np.testing.assert_array_equal(pack_natively(weight, matrix), packing.pack(weight, matrix))


def test_factors_lose_a_quarter_less_than_symmetric_groups_of_32_in_as_many_bits():
    """Beside ggml's Q4_0: a scale that makes the largest weight -8."""
    matrix = np.random.default_rng(1).standard_normal((64, 1024)).astype(np.float32)
    weight = factor_weight(*matrix.shape)
    assert packer.packed_bytes(weight) * 8 == matrix.size * 4.5
    groups = matrix.reshape(64, -1, 32)
    largest = np.take_along_axis(groups, abs(groups).argmax(axis=2)[..., None], axis=2)
    codes = np.clip(np.floor(groups / (largest / -8) + 8.5), 0, 15)
    symmetric = (codes - 8) * (largest / -8).astype(np.float16).astype(np.float32)
    found = packing.unpack(weight, pack_natively(weight, matrix))
    assert ((found - matrix) ** 2).mean() < 0.75 * ((symmetric.reshape(matrix.shape) - matrix) ** 2).mean()


@pytest.mark.parametrize("table", [False, True])
def test_fp16_stays_what_it_is(table):
    values = np.random.default_rng(4).standard_normal((40, 97)).astype(np.float16)
    values[0, :4] = (0.0, -0.0, 3e-7, 65504.0)
    weight = Weight(Format.FP16, 40, 97, table=table)
    packed = pack_natively(weight, values.view(np.uint16), "F16")
    np.testing.assert_array_equal(packed, packing.pack(weight, values.astype(np.float32)))
    np.testing.assert_array_equal(packing.unpack(weight, packed), values.astype(np.float32))
    with pytest.raises(library.KernelError, match="row 2 holds a number that is not exact in fp16"):
        pack_natively(weight, np.pad(np.zeros((2, 97), np.float32), ((0, 1), (0, 0)), constant_values=1 / 3))


def test_rows_of_a_wider_matrix_are_packed_by_their_stride():
    wide = np.random.default_rng(2).standard_normal((33, 200)).astype(np.float32)
    weight = matrix_weight(Format.W4A8, 33, 72, 32)
    np.testing.assert_array_equal(pack_natively(weight, wide[:, 8:80]), packing.pack(weight, wide[:, 8:80]))


def test_four_and_a_quarter_bits():
    assert packing.packed_size(matrix_weight(Format.W4A8, 11008, 4096)) * 8 == 11008 * 4096 * 4.25


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_weight_that_is_no_number_is_named(bad):
    matrix = np.ones((5, 16), np.float32)
    matrix[3, 7] = bad
    with pytest.raises(library.KernelError, match="row 3, column 7") as caught:
        pack_natively(matrix_weight(Format.W8A8, 5, 16), matrix)
    assert caught.value.status == "not finite"


@pytest.mark.parametrize(
    ("precision", "sentence"),
    [
        (Format.BF16, "row 3 holds a number that is infinite in bf16"),
        (Format.W4A8, "row 3, column 7 is 3.4e+38, too large"),
    ],
)
def test_a_weight_that_would_become_infinite_is_named(precision, sentence):
    matrix = np.ones((5, 16), np.float32)
    matrix[3, 7] = 3.4e38
    with pytest.raises(library.KernelError, match=re.escape(sentence)) as caught:
        pack_natively(matrix_weight(precision, 5, 16), matrix)
    assert caught.value.status == "not finite"


@pytest.mark.parametrize(
    "weight",
    [
        Weight(Format.W4A8, 8, 8, group=48),
        Weight(Format.W4A8, 2**31 - 8, 8),
        Weight(Format.W4A8, 8, 2**31 - 8),
        Weight(Format.W4ABF16, 8, 8, group=16),
        Weight(Format.W8A8, 1, 8, group=128, table=True),
        Weight(Format.FP32, 7, 8, gated=True),
        Weight(Format.FP32, 0, 8),
    ],
)
def test_weights_that_cannot_be_are_refused(weight):
    with pytest.raises(library.KernelError):
        packer.packed_bytes(weight)


@pytest.mark.parametrize("streams", [1, 2])
def test_a_timed_reading_reads_everything(streams):
    memory = packer.Memory(1 << 20)
    assert memory.address is not None
    memory.array[:] = np.random.default_rng(5).integers(0, 256, memory.size, np.uint8)
    total = int(memory.array.view(np.uint64).sum(dtype=np.uint64))
    assert packer.stream_read(memory.address, memory.size, streams) == total


def test_what_the_library_and_the_binding_both_state_is_the_same():
    structures = {
        "slice": library.SliceStructure,
        "weight": library.WeightStructure,
        "quantised": library.QuantisedStructure,
        "op": library.OpStructure,
        "program": library.ProgramStructure,
        "options": library.OptionsStructure,
        "sampling": library.SamplingStructure,
        "batch": library.BatchStructure,
        "decode_batch": library.DecodeStructure,
        "suffix_rows": library.SuffixRowsStructure,
    }
    # Words that are no names in Python.
    in_c = {"input": "in", "output": "out"}
    stated = {f"sizeof {name}": ctypes.sizeof(structure) for name, structure in structures.items()}
    stated |= {
        f"offset {name}.{in_c.get(field, field)}": getattr(structure, field).offset
        for name, structure in structures.items()
        for field, *_ in structure._fields_
    }
    stated |= {"tile rows": storage.TILE_ROWS, "block channels": storage.BLOCK, "super channels": storage.SUPER_BLOCK}
    found = {name: library.load().outrider_number(name.encode()) for name in stated}
    assert found == stated
    assert library.load().outrider_number(b"nothing") == -1
