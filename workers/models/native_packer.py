"""Implements the loader's interface ``packed.Packer`` with the kernels' packing functions."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from outrider.kernels import library, packer
from outrider.kernels.program import Weight
from outrider.kernels.quantised import QuantisedRows
from outrider.workers.errors import ModelError, WorkerError
from outrider.workers.models.checkpoint import Rows
from outrider.workers.models.packed import NotFiniteError

SOURCE_TYPES = {"float32": "F32", "uint16": "BF16", "float16": "F16"}


class NativeMemory:
    """Memory for packed weights, in huge pages if possible; each page is on the node of the thread that first writes it."""

    def __init__(self, size: int) -> None:
        self._memory = packer.Memory(max(size, 1))
        self.address = self._memory.array.ctypes.data
        self.view = self._memory.array.data[:size]


class NativePacker:
    version = f"kernels {library.PACKING_VERSION}"

    def allocate(self, size: int) -> NativeMemory:
        return NativeMemory(size)

    def packed_bytes(self, weight: Weight) -> int:
        return packer.packed_bytes(weight)

    def pack_rows(self, weight: Weight, address: int, first_row: int, rows: Rows) -> None:
        try:
            packer.pack_rows(weight, address, first_row, rows, SOURCE_TYPES[rows.dtype.name])
        except library.KernelError as error:
            if error.status == "not finite":
                raise NotFiniteError from error
            raise WorkerError(f"the kernels could not pack {weight.sources}: {error}") from error

    def pack_codes(self, weight: Weight, address: int, first_row: int, rows: QuantisedRows) -> None:
        try:
            packer.pack_codes(weight, address, first_row, rows)
        except library.KernelError as error:
            name = weight.sources[0].name
            raise ModelError(f'the weight "{name}" ({rows.scheme}) cannot be kept as it is: {error}') from error

    def pack_order(self, weight: Weight, address: int, order: NDArray[np.int32]) -> None:
        packer.pack_order(weight, address, order)
