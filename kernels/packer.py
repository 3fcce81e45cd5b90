"""A Python face for the packing half of the compiled kernels: memory for weights, and their packed form."""

from __future__ import annotations

import ctypes
from ctypes import byref
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.kernels.library import WeightStructure, check, load
from outrider.kernels.program import Weight


class Memory:
    """Zeroed, 2 MB aligned memory with huge pages asked for; ``array`` shows it as bytes."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.address: int | None = load().outrider_memory_allocate(size)
        if self.address is None:
            raise MemoryError(f"no {size} bytes of memory for weights")
        self.array: NDArray[np.uint8] = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(self.address))

    def free(self) -> None:
        """Gives the memory back. Nothing may use it, or a view of it, any more."""
        if self.address is not None:
            load().outrider_memory_free(self.address, self.size)
            self.address = None

    def __del__(self) -> None:
        self.free()


def stream_read(address: int, size: int, streams: int) -> int:
    """Reads memory once, as one stream or as two, as fast as one thread can; a sum over what was read."""
    return int(load().outrider_stream_read(address, size, streams))


def weight_structure(weight: Weight, address: int | None) -> WeightStructure:
    return WeightStructure(
        address, int(weight.format), weight.rows, weight.columns, weight.group, int(weight.gated), int(weight.table)
    )


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
