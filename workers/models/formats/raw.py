"""Reads the tensors of safetensors files with ``pread``.

They are not mapped: weights are read once for packing, and mapped pages would count as this process's memory afterwards.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.workers.errors import ModelError
from outrider.workers.models.files import open_ordinary
from outrider.workers.models.headers import Entry, quoted

# The NumPy type for each type of safetensors; bf16 and fp8, for which NumPy has none, are passed on as their bits.
TYPES: dict[str, np.dtype[Any]] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(np.uint16),
    "F8_E4M3": np.dtype(np.uint8),
    "F8_E8M0": np.dtype(np.uint8),
    "U32": np.dtype(np.uint32),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "U8": np.dtype(np.uint8),
    "I8": np.dtype(np.int8),
    "BOOL": np.dtype(np.bool_),
}
Array = NDArray[Any]


class RawTensors:
    """Named tensors of several files. Several threads may read at once."""

    def __init__(self, entries: Mapping[str, Entry]) -> None:
        self.entries = entries
        self._open: dict[Path, int] = {}

    def rows(self, name: str, start: int, stop: int) -> Array:
        """Rows of a tensor (elements of a vector)."""
        entry = self.entries[name]
        if entry.type not in TYPES:
            raise ModelError(f"{entry.file}: the tensor {quoted(name)} is of type {entry.type}, which is not supported")
        values = np.empty((stop - start, *entry.shape[1:]), TYPES[entry.type])
        row_bytes = values.nbytes // max(1, stop - start)
        self.fill(entry.file, entry.offset + start * row_bytes, values.reshape(-1).view(np.uint8), name)
        return values

    def whole(self, name: str) -> Array:
        return self.rows(name, 0, rows_of(self.entries[name]))

    def fill(self, file: Path, offset: int, bytes_: NDArray[np.uint8], name: str) -> None:
        """Read bytes of a file into an array. ``name`` is the tensor's, for a sentence."""
        if file not in self._open:
            self._open[file] = open_ordinary(file)
        buffer, taken = bytes_.data, 0
        while taken < bytes_.nbytes:
            count = os.preadv(self._open[file], [buffer[taken:]], offset + taken)
            if count == 0:
                raise ModelError(f"{file} ends inside the weight {quoted(name)}: the file is truncated")
            taken += count

    def seen_as(self, entries: Mapping[str, Entry]) -> RawTensors:
        """A reader of other entries that shares the open files; these are closed with this object."""
        other = RawTensors(entries)
        other._open = self._open
        return other

    def close(self) -> None:
        for descriptor in self._open.values():
            os.close(descriptor)
        self._open.clear()


def rows_of(entry: Entry) -> int:
    """How many rows a tensor has, or elements; a scalar is a vector of one."""
    return entry.shape[0] if entry.shape else 1


def to_float32(values: Array) -> NDArray[np.float32]:
    """Floats of ``RawTensors`` as float32; uint16 stands for bf16."""
    if values.dtype == np.uint16:
        return (values.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return values.astype(np.float32)


# The value of each e8m0 byte: 2^(byte - 127); 255 is NaN.
POWERS_OF_TWO = np.append(np.ldexp(np.float32(1.0), np.arange(-127, 128)), np.nan).astype(np.float32)


def nibbles(words: Array) -> NDArray[np.uint8]:
    """int32 words [n, m] as their 4-bit parts [n, 8 m], the lowest first; bytes [n, m] likewise as [n, 2 m]."""
    packed = np.ascontiguousarray(words).view(np.uint8)
    result = np.empty((*packed.shape, 2), np.uint8)
    np.bitwise_and(packed, 15, out=result[..., 0])
    np.right_shift(packed, 4, out=result[..., 1])
    return result.reshape(packed.shape[0], -1)


def unpacked(words: Array, bits: int, count: int) -> NDArray[np.uint8]:
    """int32 words [n, m] as ``count`` unsigned numbers of 1 to 8 bits a row, the lowest first and without gaps."""
    if bits == 4:
        return nibbles(words)[:, :count]
    packed = np.ascontiguousarray(words).view(np.uint8)
    if bits == 8:
        return packed[:, :count]
    single = np.unpackbits(packed, axis=1, count=count * bits, bitorder="little").reshape(len(packed), count, bits)
    result: NDArray[np.uint8] = (single << np.arange(bits, dtype=np.uint8)).sum(axis=2, dtype=np.uint8)
    return result
