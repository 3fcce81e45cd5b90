"""AWQ's "gemm" layout: four-bit codes, eight consecutive rows (outputs) in one word, permuted."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.kernels.quantised import QuantisedRows, Scheme
from outrider.workers.models.formats.matrix import Held, Parts

BITS = 4
# The row (of eight) in each nibble of a word, from the lowest nibble on.
NEIGHBOURS = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass(frozen=True, slots=True)
class AwqMatrix:
    """``qweight`` int32 [K, N/8], ``qzeros`` int32 [K/G, N/8], ``scales`` [K/G, N]."""

    source: Parts
    scheme: Scheme
    shape: tuple[int, int]
    order: None = None
    _held: Held[tuple[NDArray[Any], NDArray[Any], NDArray[np.float32]]] = field(default_factory=Held)

    @classmethod
    def of(cls, source: Parts, shape: tuple[int, int], group: int, symmetric: bool) -> AwqMatrix:
        rows, columns = shape
        group = source.check_group(group, columns)
        if rows % 8:
            source.refuse(f"has {rows} rows, eight of which lie in one word")
        source.entry("qweight", (columns, rows // 8), "I32")
        source.entry("qzeros", (columns // group, rows // 8), "I32")
        scales = source.entry("scales", (columns // group, rows), "F16", "BF16", "F32")
        return cls(source, Scheme("awq", BITS, group, symmetric=symmetric, scale_type=scales.type), shape)

    @property
    def parts(self) -> tuple[str, ...]:
        return tuple(self.source.used)

    def rows(self, start: int, stop: int) -> QuantisedRows:
        # A row is spread over the whole tensor, so the (packed) tensor is read once and held.
        weights, zeros, scales = self._held.get(self._whole)
        zeros = _rows(zeros, start, stop)
        if self.scheme.symmetric:
            self.source.check_symmetric(zeros, BITS)
        return QuantisedRows(self.scheme, _rows(weights, start, stop), np.ascontiguousarray(scales[:, start:stop].T), zeros)

    def _whole(self) -> tuple[NDArray[Any], NDArray[Any], NDArray[np.float32]]:
        return self.source.whole("qweight"), self.source.whole("qzeros"), self.source.scales("scales")

    def done(self) -> None:
        self._held.clear()


def _rows(words: NDArray[Any], start: int, stop: int) -> NDArray[np.uint8]:
    """Rows of a matrix whose columns are the tensor's rows."""
    first = start // 8
    packed = np.ascontiguousarray(words[:, first : -(-stop // 8)]).view(np.uint8)
    fours = np.empty((packed.shape[0], packed.shape[1] // 4, 8), np.uint8)
    halves = packed.reshape(packed.shape[0], -1, 4)
    for place, neighbour in enumerate(NEIGHBOURS):
        np.bitwise_and(halves[..., place // 2] >> (4 * (place % 2)), 15, out=fours[..., neighbour])
    flat = fours.reshape(packed.shape[0], -1)
    return np.ascontiguousarray(flat[:, start - 8 * first : stop - 8 * first].T)
