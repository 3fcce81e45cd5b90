"""A program's weights, and how each tensor of a checkpoint is stored as one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from outrider.kernels.program import FACTORS, Format, Storage, Tensor, Weight


@dataclass(frozen=True, slots=True)
class StoredAs:
    """How one tensor is stored.

    ``order`` names the activation order of a quantised matrix's columns, if it has one: matrices with equal names share it.
    """

    format: Format
    group: int = 0
    storage: Storage | None = None
    order: str = ""


# The name of the order of experts that have an activation order each, or none.
EACH_ITS_OWN = "each its own"
# (tensor, whether it is a table that is read row by row) -> how it is stored.
StorageChoice = Callable[[Tensor, bool], StoredAs]


class Weights:
    """``precision``, ``group`` and ``storage_choice`` are the builder's."""

    def __init__(self, precision: Format, group: int, storage_choice: StorageChoice | None) -> None:
        self.all: list[Weight] = []
        self._precision = precision
        self._group = group
        self._storage_choice = storage_choice
        self._numbers: dict[Weight, int] = {}

    def add(self, weight: Weight) -> int:
        # Equal weights are stored once: the rope frequencies of all layers, a tied table.
        if weight not in self._numbers:
            self._numbers[weight] = len(self.all)
            self.all.append(weight)
        return self._numbers[weight]

    def table(self, table: Tensor, packed: bool = False) -> int:
        """``packed``: the table may be a packed matrix of codes, which a tied LM head then shares."""
        format = Format.FP32 if self._precision.fp32 else Format.BF16
        if self._storage_choice is not None:
            kept = self._storage_choice(table, True)
            if packed and kept.storage is not None and not kept.order:
                return self.matrix([table], kept, gated=False)
            format = Format.FP32 if kept.storage is not None else kept.format
        return self.add(Weight(format, table.count, table.shape[1], (table,), table=True))

    def constants(self, values: Sequence[float]) -> int:
        return self.add(Weight(Format.FP32, 1, len(values), values=tuple(values), table=True))

    def vector(self, parts: Sequence[Tensor]) -> int:
        return self.add(Weight(Format.FP32, 1, sum(part.count for part in parts), tuple(parts), table=True))

    def kept_as(self, matrix: Tensor, precision: Format | None) -> StoredAs:
        """How a matrix is stored; ``precision`` is its own format, or None for the program's."""
        if self._storage_choice is not None:
            kept = self._storage_choice(matrix, False)
            # Groups lie within rows, so codes cannot be transposed; the dequantised weights are.
            if matrix.transposed and kept.storage is not None:
                return StoredAs(Format.FP32 if kept.format.integer else kept.format)
            # A router's fp8 is dequantised where the router is fp32.
            codes = kept.storage is not None and kept.format.integer
            return kept if precision is None or codes else StoredAs(precision)
        format = self._precision if precision is None else precision
        if not format.integer:
            return StoredAs(format)
        if format in (Format.W4A8, Format.W4ABF16) and not self._group:
            return StoredAs(format, 32, FACTORS)
        return StoredAs(format, self._group or 128)

    def matrix(self, parts: Sequence[Tensor], kept: StoredAs, *, gated: bool) -> int:
        rows, columns = sum(part.count for part in parts), parts[0].columns
        weight = Weight(kept.format, rows, columns, tuple(parts), group=kept.group, gated=gated)
        return self.add(replace(weight, storage=kept.storage, ordered=bool(kept.order)))


def joined(kept: set[StoredAs]) -> StoredAs | None:
    """How matrices that one product joins are stored: as each is, if all are alike; as plain floats, if all are floats of
    one type; else None."""
    first = next(iter(kept))
    if len(kept) == 1:
        return first
    return None if first.format.integer or {each.format for each in kept} != {first.format} else StoredAs(first.format)
