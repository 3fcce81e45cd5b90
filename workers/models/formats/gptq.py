"""GPTQ: codes of 2, 3, 4 or 8 bits, the columns (inputs) of a row packed into words, maybe in another order (act-order).

Version 1 stores zero point - 1. Its writers subtract from whole words, so a zero point of 0 borrows from the next one in
the word; the reader adds to whole words likewise. Codes of 3 bits cross words (32 codes in 3 words), and their zero points
are incremented one by one, modulo 8. gptqmodel, which writes both versions, reads them so.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.kernels.quantised import QuantisedRows, Scheme
from outrider.workers.models.formats.matrix import Held, Parts, in_groups
from outrider.workers.models.formats.raw import unpacked

ONE_EACH = {2: np.uint32(0x55555555), 4: np.uint32(0x11111111), 8: np.uint32(0x01010101)}


@dataclass(frozen=True, slots=True)
class GptqMatrix:
    """``qweight`` int32 [K bits/32, N], ``qzeros`` int32 [K/G, N bits/32], ``scales`` [K/G, N], ``g_idx`` int32 [K].

    ``stated`` is the group in the configuration; the last group of a row may be shorter.
    """

    source: Parts
    scheme: Scheme
    shape: tuple[int, int]
    order: NDArray[np.int32] | None
    stored_less_one: bool
    stated: int
    _held: Held[tuple[NDArray[Any], NDArray[Any], NDArray[np.float32]]] = field(default_factory=Held)

    @classmethod
    def of(
        cls, source: Parts, shape: tuple[int, int], *, bits: int, group: int, symmetric: bool, stored_less_one: bool
    ) -> GptqMatrix:
        rows, columns = shape
        stated = columns if group == -1 else group
        group = source.whole_groups(stated, columns)
        together, words = (32, 3) if bits == 3 else (32 // bits, 1)
        if rows % together or columns % together:
            places = "one word" if words == 1 else f"{words} words"
            source.refuse(f"has {rows} rows and {columns} columns, {together} of which lie in {places}")
        source.entry("qweight", (columns * bits // 32, rows), "I32")
        groups = -(-columns // stated)
        source.entry("qzeros", (groups, rows * bits // 32), "I32")
        scales = source.entry("scales", (groups, rows), "F16", "BF16", "F32")
        order = _order(source, columns, stated) if source.has("g_idx") else None
        type_ = scales.type
        scheme = Scheme("gptq", bits, group, symmetric=symmetric, scale_type=type_, ordered=order is not None)
        return cls(source, scheme, shape, order, stored_less_one, stated)

    @property
    def parts(self) -> tuple[str, ...]:
        return tuple(self.source.used)

    def rows(self, start: int, stop: int) -> QuantisedRows:
        bits = self.scheme.bits
        # A row is spread over the whole tensor, so the (packed) tensor is read once and held.
        weights, zeros, scales = self._held.get(self._whole)
        codes = unpacked(weights[:, start:stop].T, bits, self.shape[1])
        if self.order is not None:
            codes = codes[:, self.order]
        groups = self.stated, self.scheme.group, self.shape[1]
        zeros = np.ascontiguousarray(in_groups(zeros[:, start:stop].T, *groups))
        if self.scheme.symmetric:
            self.source.check_symmetric(zeros, bits)
        scales = np.ascontiguousarray(in_groups(scales[:, start:stop].T, *groups))
        return QuantisedRows(self.scheme, np.ascontiguousarray(codes), scales, zeros)

    def _whole(self) -> tuple[NDArray[Any], NDArray[Any], NDArray[np.float32]]:
        zeros = self.source.whole("qzeros")
        bits = self.scheme.bits
        if self.stored_less_one and bits != 3:
            zeros = (zeros.view(np.uint32) + ONE_EACH[bits]).view(np.int32)
        zeros = unpacked(zeros, bits, self.shape[0])
        if self.stored_less_one and bits == 3:
            zeros = zeros + np.uint8(1) & np.uint8(7)
        return self.source.whole("qweight"), zeros, self.source.scales("scales")

    def done(self) -> None:
        self._held.clear()


def _order(source: Parts, columns: int, group: int) -> NDArray[np.int32] | None:
    """The order of columns by group; None where they are stored in that order."""
    source.entry("g_idx", (columns,), "I32")
    return group_order(source, source.whole("g_idx"), group)


def group_order(source: Parts, groups: NDArray[np.int32], group: int) -> NDArray[np.int32] | None:
    """From the group of each column: the columns of group 0 in ascending order, then those of group 1, and so on."""
    order = np.argsort(groups, kind="stable").astype(np.int32)
    if not np.array_equal(groups[order], np.arange(len(groups)) // group):
        source.refuse(f"has a g_idx that does not give each group {group} columns")
    return None if np.array_equal(order, np.arange(len(groups))) else order
