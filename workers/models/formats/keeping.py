"""How the tensors of a checkpoint that comes quantised are kept in memory: each exactly as the checkpoint has it."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from outrider.kernels.builder import Kept
from outrider.kernels.program import Codes, Format, Tensor
from outrider.kernels.quantised import Scheme, Values
from outrider.kernels.storage import UnknownStorage, storage_for
from outrider.workers.errors import ModelError
from outrider.workers.models.checkpoint import Checkpoint
from outrider.workers.models.formats.matrix import Matrix


@dataclass(frozen=True, slots=True)
class AsItComes:
    """``precision`` says what becomes of activations; weights stay what they are. What the checkpoint has not quantised is
    kept in its own type."""

    checkpoint: Checkpoint
    precision: Format

    def __call__(self, tensor: Tensor, table: bool) -> Kept:
        matrix = self.checkpoint.matrix(tensor)
        if matrix is None:
            self.checkpoint.check(tensor)
            return Kept({"BF16": Format.BF16, "F16": Format.FP16}.get(self.checkpoint.type_of(tensor), Format.FP32))
        try:
            storage, group = storage_for(matrix.scheme, matrix.shape[1])
            if storage.codes is Codes.E4M3:
                raise UnknownStorage(f"{matrix.scheme}: the kernels multiply e4m3 in bf16")
        except UnknownStorage as error:
            if table:
                # Read row by row, it may as well be the numbers that its codes stand for.
                return Kept(Format.FP32)
            raise ModelError(
                f'the weight "{tensor.name}" cannot be kept as its format has it: {error}; --precision bf16 runs it, '
                "--precision fp32 without rounding"
            ) from None
        return Kept(self.precision, group, storage, _name(matrix))


@dataclass(frozen=True, slots=True)
class EightBitFloats:
    """In bf16 the codes of e4m3 are kept as they come, with their scales; all else that is quantised is dequantised."""

    checkpoint: Checkpoint

    def __call__(self, tensor: Tensor, table: bool) -> Kept:
        matrix = None if table else self.checkpoint.matrix(tensor)
        if matrix is None or matrix.scheme.values is not Values.E4M3:
            return Kept(Format.BF16)
        try:
            storage, group = storage_for(matrix.scheme, matrix.shape[1])
        except UnknownStorage:
            return Kept(Format.BF16)
        return Kept(Format.BF16, group, storage)


def _name(matrix: Matrix) -> str:
    """Equal for equal orders of columns, which matrices have that were quantised on the same activations."""
    return "" if matrix.order is None else hashlib.sha256(matrix.order.tobytes()).hexdigest()


def schemes(checkpoint: Checkpoint, tensors: list[Tensor]) -> list[Scheme]:
    """Of all matrices that are quantised."""
    found = (checkpoint.matrix(tensor) for tensor in tensors)
    return [matrix.scheme for matrix in found if matrix is not None]
