"""Outlier channels, balanced before weights are rounded to integers.

Some models (OPT-6.7b is the known one) have channels whose norm gain is many times the others' while the weights that read
them are as many times smaller. Rounded by groups, such weights vanish beside their neighbours, and such activations drown
theirs. The factor can be moved from the gain into the weights: the function stays what it was, and both fit their groups.

Only channels far out of balance are touched, so the rounding of an ordinary model is the plain one. The factors are powers
of two and come from comparisons, maxima and divisions alone: exact, and the same on every machine.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from outrider.kernels.program import Kind, Op, Program

Float32Array = NDArray[np.float32]
# A channel is out of balance when its gain over its weights is this many times the typical one, or this little of it.
OUT_OF_BALANCE = 16.0
# Beyond this a channel is dead rather than an outlier, and nothing is gained by touching it.
LARGEST_FACTOR = 2.0**12


@dataclass(frozen=True, slots=True)
class NormGroup:
    """A norm's vectors (gain, and bias where there is one) and all the matrices that read its output, as weight indices."""

    vectors: tuple[int, ...]
    matrices: tuple[int, ...]


def norm_groups(program: Program) -> list[NormGroup]:
    """The norms of full width that nothing but integer matrices read."""
    writer: dict[int, int] = {}
    readers: dict[int, list[int]] = {}
    for number, op in enumerate(program.ops):
        for part in op.reads:
            if part.buffer in writer:
                readers.setdefault(writer[part.buffer], []).append(number)
        if op.output.buffer >= 0:
            writer[op.output.buffer] = number
    groups = []
    for number, op in enumerate(program.ops):
        if op.kind is not Kind.NORM or op.heads != 1 or op.output == op.input or op.residual.buffer >= 0:
            continue
        reading = [program.ops[reader] for reader in readers.get(number, ())]
        if reading and all(_is_integer_linear(program, reader, op) for reader in reading):
            vectors = tuple(index for index in (op.weight, op.bias) if index >= 0)
            groups.append(NormGroup(vectors, tuple(reader.weight for reader in reading)))
    uses = [index for group in groups for index in (*group.vectors, *group.matrices)]
    # A weight that two pairs share, or a vector that two norms share, cannot take two factors.
    return [group for group in groups if all(uses.count(index) == 1 for index in (*group.vectors, *group.matrices))]


def _is_integer_linear(program: Program, reader: Op, norm: Op) -> bool:
    return (
        reader.kind is Kind.LINEAR
        and reader.input == norm.output
        and reader.residual.buffer != norm.output.buffer
        and program.weights[reader.weight].format.integer
    )


def channel_factors(gain: Float32Array, column_maxima: Float32Array) -> Float32Array | None:
    """By how much each column of the matrices is multiplied and the norm divided; None where all are in balance."""
    gain = np.abs(gain)
    alive = (gain > 0) & (column_maxima > 0)
    if not alive.any():
        return None
    ratio = gain[alive].astype(np.float64) / column_maxima[alive].astype(np.float64)
    ratio /= np.sort(ratio)[len(ratio) // 2]
    factors = np.ones(len(gain), dtype=np.float32)
    # The factor is near the ratio's square root: half of the imbalance goes to either side.
    _, exponents = np.frexp(ratio)
    chosen = np.exp2(exponents // 2).clip(1 / LARGEST_FACTOR, LARGEST_FACTOR).astype(np.float32)
    outside = (ratio > OUT_OF_BALANCE) | (ratio < 1 / OUT_OF_BALANCE)
    factors[alive] = np.where(outside, chosen, np.float32(1))
    return factors if outside.any() else None
