"""A quantised tensor of a GGUF file, rows of it at a time."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from outrider.kernels.quantised import QuantisedRows, Scheme
from outrider.workers.errors import ModelError
from outrider.workers.models.formats.gguf.blocks import Kind
from outrider.workers.models.formats.raw import RawTensors
from outrider.workers.models.headers import quoted


@dataclass(frozen=True, slots=True)
class GgufMatrix:
    """``order_of_rows``: the row in the file of each row (None: the same); ``order``: as in ``Matrix``. ``common``: the
    tensor with a number that multiplies all scales, and its place there."""

    name: str
    raw: RawTensors
    kind: Kind
    scheme: Scheme
    shape: tuple[int, int]
    order_of_rows: NDArray[np.int64] | None = None
    order: NDArray[np.int32] | None = None
    common: tuple[str, int] | None = None

    @property
    def parts(self) -> tuple[str, ...]:
        return (self.name,)

    def rows(self, start: int, stop: int) -> QuantisedRows:
        first, wanted = start, None
        if self.order_of_rows is not None:
            wanted = self.order_of_rows[start:stop]
            first, stop = int(wanted.min()), int(wanted.max()) + 1
        entry = self.raw.entries[self.name]
        row_bytes = self.shape[1] // self.kind.values * self.kind.bytes
        packed = np.empty((stop - first, self.shape[1] // self.kind.values, self.kind.bytes), np.uint8)
        self.raw.fill(entry.file, entry.offset + first * row_bytes, packed.reshape(-1), self.name)
        if wanted is not None:
            packed = packed[wanted - first]
        assert self.kind.unpack is not None
        with np.errstate(invalid="ignore", over="ignore"):
            rows = self.kind.unpack(self.scheme, packed)
            if self.common is not None:
                name, place = self.common
                rows = replace(rows, scales=rows.scales * self.raw.whole(name).reshape(-1)[place])
        if not np.isfinite(rows.scales).all() or (rows.minima is not None and not np.isfinite(rows.minima).all()):
            raise ModelError(f"{entry.file}: {quoted(self.name)} ({self.scheme.source}) holds a scale that is not finite")
        return rows

    def done(self) -> None:
        pass
