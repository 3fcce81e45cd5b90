"""ALiBi: biases of attention scores by distance, in place of positions. Each head has a slope.

Every step rounds to float32 where transformers does. Powers use ``kernels/arithmetic.py``, as those of rope do, so that
slopes have the same bits on every machine.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from outrider.kernels import arithmetic, packing

Float32Array = NDArray[np.float32]


def slopes_of(heads: int) -> tuple[float, ...]:
    """BLOOM's: with n the largest power of two <= ``heads``, 2^(-8 k / n) for k = 1 .. n; then, for the other
    heads, 2^(-8 k / (2 n)) for k = 1, 3, 5, .."""
    known = 1 << (heads.bit_length() - 1)
    return tuple(
        np.append(_powers(known, range(1, known + 1)), _powers(2 * known, range(1, 2 * (heads - known), 2))).tolist()
    )


def bf16_slopes_of(heads: int) -> tuple[float, ...]:
    """Falcon's: BLOOM's, rounded to bf16, in which its biases are computed as well (Builder.attention)."""
    return tuple(packing.from_bf16(packing.to_bf16(np.array(slopes_of(heads), np.float32))).tolist())


def mpt_slopes_of(heads: int, most: int) -> tuple[float, ...]:
    """MPT's: with n the least power of two >= ``heads``, 2^(-most k / n) for k = 1 .. n; of n > heads those of k = 2, 4, ..
    are used first, then those of k = 1, 3, .."""
    count = 1 << (heads - 1).bit_length()
    every = _half_to(np.arange(1, count + 1, dtype=np.float32) * np.float32(most / count))
    return tuple((every if count == heads else np.append(every[1::2], every[::2])[:heads]).tolist())


def _powers(heads: int, exponents: range) -> Float32Array:
    """Powers of 2^(-8 / heads), which is rounded before."""
    base = _half_to(np.array([8 / heads], np.float32)).astype(np.float64)
    powers: Float32Array = arithmetic.exp(np.array(exponents, np.float64) * arithmetic.log(base)).astype(np.float32)
    return powers


def _half_to(exponents: Float32Array) -> Float32Array:
    """2^-exponent, rounded once."""
    powers: Float32Array = arithmetic.exp(-math.log(2.0) * exponents.astype(np.float64)).astype(np.float32)
    return powers
