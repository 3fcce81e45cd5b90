"""Balances outlier channels before weights are rounded to integers.

Some models (known: OPT-6.7b) have channels whose norm gain is many times that of others, and whose weights in the matrices
that read the norm are as many times smaller. In a quantisation group such weights round to zero, and such activations
dominate the scale. A factor moved from the gain into the weights leaves the function unchanged, and both fit their groups.

Only channels far out of balance are changed, so ordinary models are rounded plainly. The factors are powers of two,
computed by comparisons, maxima and divisions: exact, and the same on every machine.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from outrider.kernels.program import Kind, Op, Program

Float32Array = NDArray[np.float32]
# A channel is out of balance if gain / (largest weight) is above this many times the median, or below median / this.
OUT_OF_BALANCE = 16.0
# The largest factor: a channel that needs more is dead rather than an outlier.
LARGEST_FACTOR = 2.0**12


@dataclass(frozen=True, slots=True)
class NormGroup:
    """A norm's vectors (gain, and bias if it has one) and all matrices that read its output, as indices of weights."""

    vectors: tuple[int, ...]
    matrices: tuple[int, ...]


def norm_groups(program: Program) -> list[NormGroup]:
    """The norms over the whole width whose output only integer matrices read."""
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
    # A weight or vector in two groups cannot take two factors.
    return [group for group in groups if all(uses.count(index) == 1 for index in (*group.vectors, *group.matrices))]


def _is_integer_linear(program: Program, reader: Op, norm: Op) -> bool:
    return (
        reader.kind is Kind.LINEAR
        and reader.input == norm.output
        and reader.residual.buffer != norm.output.buffer
        and program.weights[reader.weight].format.integer
    )


def channel_factors(gain: Float32Array, column_maxima: Float32Array) -> Float32Array | None:
    """The factor by which each column of the matrices is multiplied and the norm divided; None where all are in balance."""
    gain = np.abs(gain)
    alive = (gain > 0) & (column_maxima > 0)
    if not alive.any():
        return None
    ratio = gain[alive].astype(np.float64) / column_maxima[alive].astype(np.float64)
    ratio /= np.sort(ratio)[len(ratio) // 2]
    factors = np.ones(len(gain), dtype=np.float32)
    # factor = 2^(exponent // 2), near sqrt(ratio): both sides keep half of the imbalance.
    _, exponents = np.frexp(ratio)
    chosen = np.exp2(exponents // 2).clip(1 / LARGEST_FACTOR, LARGEST_FACTOR).astype(np.float32)
    outside = (ratio > OUT_OF_BALANCE) | (ratio < 1 / OUT_OF_BALANCE)
    factors[alive] = np.where(outside, chosen, np.float32(1))
    return factors if outside.any() else None
