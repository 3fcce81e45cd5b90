"""How the tensors of a quantised checkpoint are stored in memory, with the checkpoint's exact values."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from outrider.kernels.program import Codes, Format, Scales, Storage, Tensor
from outrider.kernels.quantised import SCALE_BITS, Values
from outrider.kernels.storage import UnknownStorage, storage_for
from outrider.kernels.weights import StoredAs
from outrider.workers.errors import ModelError
from outrider.workers.models.checkpoint import Checkpoint
from outrider.workers.models.formats.halves import exact
from outrider.workers.models.formats.matrix import Matrix

# The bits of an fp16 number, the leading one included.
HALF_BITS = 11
ROWS_READ = 4096
ONLY_IN_BF16 = (Codes.E4M3, Codes.NF4, Codes.FP4)


@dataclass(frozen=True, slots=True)
class AsInCheckpoint:
    """Codes are kept; ``precision`` only decides how activations are rounded. Plain tensors are kept in their own type.

    A matrix whose codes the kernels do not have is refused, or with ``mixed`` dequantised.
    """

    checkpoint: Checkpoint
    precision: Format
    mixed: bool = False
    dequantised: set[Tensor] = field(default_factory=set)
    halves: dict[str, bool] = field(default_factory=dict)

    def __call__(self, tensor: Tensor, table: bool) -> StoredAs:
        matrix = self.checkpoint.matrix(tensor)
        if matrix is None:
            self.checkpoint.check(tensor)
            return StoredAs({"BF16": Format.BF16, "F16": Format.FP16}.get(self.checkpoint.type_of(tensor), Format.FP32))
        try:
            storage, group = _storage_of(matrix)
            if storage.codes in ONLY_IN_BF16:
                raise UnknownStorage(f"{matrix.scheme}: the kernels multiply {matrix.scheme.values.value} in bf16")
        except UnknownStorage as error:
            if self.mixed:
                return self._dequantised(tensor, table)
            if table:
                # An embedding is read row by row, so it is dequantised.
                return StoredAs(Format.FP32)
            raise ModelError(
                f'the weight "{tensor.name}" cannot be kept in its own format: {error}; --precision bf16 runs it, '
                "--precision fp32 without rounding"
            ) from None
        if tensor.transposed:
            # Scales belong to groups of a row, so a transposed matrix is dequantised, for all heads to the same type.
            if tensor.name not in self.halves:
                self.halves[tensor.name] = fits_halves(matrix)
            return StoredAs(Format.FP16 if self.halves[tensor.name] else Format.FP32)
        return StoredAs(self.precision, group, storage, _name(matrix))

    def _dequantised(self, tensor: Tensor, table: bool) -> StoredAs:
        kept = StoredAs(Format.FP32) if self.precision.fp32 else FloatCodes(self.checkpoint)(tensor, table)
        if kept.storage is None:
            self.dequantised.add(tensor)
        return kept


@runtime_checkable
class InAnyType(Protocol):
    """A matrix whose scales and minima may have another type than fp16."""

    def fits_halves(self) -> bool:
        """Whether fp16 represents every scale and minimum that is used."""


def _storage_of(matrix: Matrix) -> tuple[Storage, int]:
    storage, group = storage_for(matrix.scheme, matrix.shape[1])
    if storage.scales is Scales.HALF_MINIMA and isinstance(matrix, InAnyType) and not matrix.fits_halves():
        raise UnknownStorage(f"{matrix.scheme}: fp16, in which the kernels have minima, lacks some of its scales or minima")
    return storage, group


@dataclass(frozen=True, slots=True)
class FloatCodes:
    """For precision bf16: codes of floats and their scales are kept; all other quantised tensors are dequantised."""

    checkpoint: Checkpoint

    def __call__(self, tensor: Tensor, table: bool) -> StoredAs:
        matrix = None if table else self.checkpoint.matrix(tensor)
        if matrix is None or matrix.scheme.values in (Values.INTEGER, Values.IQ4):
            return StoredAs(Format.BF16)
        try:
            storage, group = storage_for(matrix.scheme, matrix.shape[1])
        except UnknownStorage:
            return StoredAs(Format.BF16)
        return StoredAs(Format.BF16, group, storage)


def fits_halves(matrix: Matrix) -> bool:
    """Whether fp16 represents every dequantised weight. If a product of a code and a scale has no more bits than fp16, the
    weights are read to check their range; otherwise the answer is no."""
    scheme = matrix.scheme
    if scheme.minima or scheme.super_group or scheme.scale_type not in SCALE_BITS:
        return False
    # A value of e4m3 has four bits, one of e2m1 two; a negative integer with one bit more is a power of two.
    integer = scheme.bits - 1 if scheme.symmetric else scheme.bits
    bits = {Values.INTEGER: integer, Values.E4M3: 4, Values.E2M1: 2}.get(scheme.values, HALF_BITS)
    if SCALE_BITS[scheme.scale_type] + bits > HALF_BITS:
        return False
    starts = range(0, matrix.shape[0], ROWS_READ)
    fits = all(exact(matrix.rows(start, min(start + ROWS_READ, matrix.shape[0])).dequantise()).all() for start in starts)
    matrix.done()
    return fits


def _name(matrix: Matrix) -> str:
    """A name for the order of columns, which is equal for matrices that were quantised on the same activations."""
    return "" if matrix.order is None else hashlib.sha256(matrix.order.tobytes()).hexdigest()
