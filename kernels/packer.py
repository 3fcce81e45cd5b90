"""The Python binding of the kernels' packing functions: memory for weights, and their packed form."""

from __future__ import annotations

import ctypes
from ctypes import byref
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.kernels.library import QuantisedStructure, WeightStructure, check, load
from outrider.kernels.program import Weight
from outrider.kernels.quantised import QuantisedRows, Values
from outrider.kernels.storage import geometry


class Memory:
    """Zeroed, 2 MB aligned memory, in huge pages if possible; ``array`` is a view of its bytes."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.address: int | None = load().outrider_memory_allocate(size)
        if self.address is None:
            raise MemoryError(f"no {size} bytes of memory for weights")
        self.array: NDArray[np.uint8] = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(self.address))

    def free(self) -> None:
        """Release the memory. Neither it nor a view of it may be used afterwards."""
        if self.address is not None:
            load().outrider_memory_free(self.address, self.size)
            self.address = None

    def __del__(self) -> None:
        self.free()


def stream_read(address: int, size: int, streams: int) -> int:
    """Read memory once with one thread, as one or two streams, to measure its bandwidth; returns a sum of the words
    read."""
    return int(load().outrider_stream_read(address, size, streams))


def weight_structure(weight: Weight, address: int | None) -> WeightStructure:
    stored = weight.stored
    shape = (weight.rows, weight.columns, weight.group, int(weight.gated), int(weight.table))
    storage = (int(stored.codes), int(stored.scales), int(stored.zeros), int(weight.ordered))
    return WeightStructure(address, int(weight.format), *shape, *storage)


def packed_bytes(weight: Weight) -> int:
    """Bytes of the packed form."""
    size = int(load().outrider_packed_bytes(byref(weight_structure(weight, None))))
    if size < 0:
        check(-size)
    return size


SOURCE_TYPES = {"F32": 0, "BF16": 1, "F16": 2}


def pack_rows(weight: Weight, address: int, first_row: int, source: NDArray[Any], source_type: str) -> None:
    """Packs ``source`` [rows, columns] as rows ``first_row``.. of the weight whose packed form lies at ``address``.

    ``source_type`` is safetensors' name of the element type; bf16 and fp16 come as uint16 (or any two-byte type).
    """
    width = 4 if source_type == "F32" else 2
    if source.ndim != 2 or source.shape[1] != weight.columns or source.itemsize != width or source.strides[1] != width:
        raise ValueError(f"{source.shape} of {source.dtype} as {source_type} rows of {weight.columns} columns")
    structure = weight_structure(weight, address)
    stride = source.strides[0] // width
    arguments = (first_row, source.shape[0], source.ctypes.data, SOURCE_TYPES[source_type], stride)
    check(load().outrider_pack_rows(byref(structure), *arguments))


def pack_codes(weight: Weight, address: int, first_row: int, rows: QuantisedRows) -> None:
    """Packs the codes and scales of quantised rows, unchanged, as rows ``first_row``.. of the weight.

    The weight's storage and group are those that ``storage.storage_for`` names for the rows' scheme.
    """
    if rows.minima is not None and rows.levels is None:
        rows = rows.in_groups_of(weight.group)
    levels = rows.levels
    groups = -(-weight.columns // rows.scheme.group)
    supers = -(-weight.columns // geometry(weight).block)
    count = len(rows.codes)

    def array(values: NDArray[Any] | None, type: type, columns: int) -> NDArray[Any] | None:
        if values is None:
            return None
        if values.shape != (count, columns):
            raise ValueError(f"an array of {values.shape} where {count} rows of {columns} belong")
        return np.ascontiguousarray(values, type)

    arrays = [
        array(rows.codes, np.uint8, weight.columns),
        array(rows.scales, np.float32, groups) if levels is None else array(levels.super_scales, np.float32, supers),
        array(rows.zeros, np.uint8, groups)
        if rows.scheme.values is Values.INTEGER and rows.minima is None and levels is None
        else None,
        array(levels.sub_scales, np.int16, groups) if levels else None,
        array(rows.minima, np.float32, groups) if levels is None else array(levels.super_minima, np.float32, supers),
        array(levels.sub_minima, np.int16, groups) if levels else None,
    ]
    pointers = [None if values is None else values.ctypes.data for values in arrays]
    source = QuantisedStructure(*pointers, rows.scheme.group)
    check(load().outrider_pack_codes(byref(weight_structure(weight, address)), first_row, count, byref(source)))


def pack_order(weight: Weight, address: int, order: NDArray[np.int32]) -> None:
    """Packs the input channel of each column of a weight in activation order."""
    values = np.ascontiguousarray(order, np.int32)
    if values.shape != (weight.columns,):
        raise ValueError(f"an order of {values.shape} for {weight.columns} columns")
    check(load().outrider_pack_order(byref(weight_structure(weight, address)), values.ctypes.data))
