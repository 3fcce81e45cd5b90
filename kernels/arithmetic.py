"""The arithmetic that decides a sampled token, defined operation by operation.

NumPy's own ``log`` and ``exp`` give other bits with other instruction sets, so nothing here uses them: every function is
additions, multiplications, divisions and bit operations on float64, in the order written. The native sampler performs the
same operations in the same order, so both give the same bits on every machine.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

Float64Array = NDArray[np.float64]

SQRT_2: Final = 1.4142135623730951
LOG2_E: Final = 1.4426950408889634
# ln 2 in two pieces: the first has trailing zeros enough that its product with any exponent is exact.
LN2_HIGH: Final = 6.93147180369123816490e-01
LN2_LOW: Final = 1.90821492927058770002e-10
# log((1+s)/(1-s)) / 2s - 1 = z/3 + z^2/5 + ... with z = s^2, highest power first
LOG_COEFFICIENTS: Final = tuple(1.0 / denominator for denominator in range(23, 1, -2))
# 1/n!, highest first
EXP_COEFFICIENTS: Final = (
    1.0 / 6227020800.0,
    1.0 / 479001600.0,
    1.0 / 39916800.0,
    1.0 / 3628800.0,
    1.0 / 362880.0,
    1.0 / 40320.0,
    1.0 / 5040.0,
    1.0 / 720.0,
    1.0 / 120.0,
    1.0 / 24.0,
    1.0 / 6.0,
    0.5,
    1.0,
    1.0,
)
# Below this, exp is taken as zero; above, the power of two that scales it is a normal number.
EXP_FLOOR: Final = -700.0
SUM_LANES: Final = 16

PHILOX_ROUNDS: Final = 10
PHILOX_MULTIPLIERS: Final = (0xD2511F53, 0xCD9E8D57)
PHILOX_WEYL: Final = (0x9E3779B9, 0xBB67AE85)
# The last counter word says what the numbers are for, so that another use can never collide with this one.
NOISE_STREAM: Final = 0x0A11CE


def log(x: Float64Array) -> Float64Array:
    """Natural logarithm of positive, normal numbers."""
    bits = np.ascontiguousarray(x, dtype=np.float64).view(np.uint64)
    exponent = ((bits >> np.uint64(52)).astype(np.int64) - 1023).astype(np.float64)
    mantissa = ((bits & np.uint64(0xFFFFFFFFFFFFF)) | np.uint64(0x3FF0000000000000)).view(np.float64)
    above = mantissa > SQRT_2
    mantissa = np.where(above, mantissa * 0.5, mantissa)
    exponent = np.where(above, exponent + 1.0, exponent)
    s = (mantissa - 1.0) / (mantissa + 1.0)
    z = s * s
    series = np.full_like(z, LOG_COEFFICIENTS[0])
    for coefficient in LOG_COEFFICIENTS[1:]:
        series = series * z + coefficient
    double = s + s
    result: Float64Array = exponent * LN2_HIGH + (double + (double * (z * series) + exponent * LN2_LOW))
    return result


def exp(x: Float64Array) -> Float64Array:
    """e to the x for x up to 700; zero below ``EXP_FLOOR``."""
    clipped = np.maximum(np.asarray(x, dtype=np.float64), EXP_FLOOR)
    power = np.rint(clipped * LOG2_E)
    rest = (clipped - power * LN2_HIGH) - power * LN2_LOW
    series = np.full_like(rest, EXP_COEFFICIENTS[0])
    for coefficient in EXP_COEFFICIENTS[1:]:
        series = series * rest + coefficient
    scale = ((power.astype(np.int64) + 1023) << 52).view(np.float64)
    return np.where(np.asarray(x) < EXP_FLOOR, 0.0, series * scale)


def lane_sum(x: Float64Array) -> float:
    """The sum of a vector in the one order that every implementation uses.

    Lane j adds elements j, j+16, j+32, ... one after the other; then the 16 lanes fold in halves.
    """
    padded = np.zeros(-(-x.size // SUM_LANES) * SUM_LANES)
    padded[: x.size] = x
    lanes = np.zeros(SUM_LANES)
    if padded.size:
        # cumsum along the rows is sequential by definition; a plain sum might be pairwise.
        lanes = np.cumsum(padded.reshape(-1, SUM_LANES), axis=0)[-1]
    while lanes.size > 1:
        half = lanes.size // 2
        lanes = lanes[:half] + lanes[half:]
    return float(lanes[0])


def philox(seed: int, counter: tuple[NDArray[np.uint32], int, int, int]) -> NDArray[np.uint32]:
    """Philox4x32-10 over a vector of first counter words: four random words for each, shape (n, 4)."""
    mask = np.uint64(0xFFFFFFFF)
    shift = np.uint64(32)
    words = [counter[0].astype(np.uint64)]
    words += [np.full_like(words[0], value & 0xFFFFFFFF) for value in counter[1:]]
    key = [seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF]
    for _ in range(PHILOX_ROUNDS):
        first = words[0] * np.uint64(PHILOX_MULTIPLIERS[0])
        second = words[2] * np.uint64(PHILOX_MULTIPLIERS[1])
        words = [
            (second >> shift) ^ words[1] ^ np.uint64(key[0]),
            second & mask,
            (first >> shift) ^ words[3] ^ np.uint64(key[1]),
            first & mask,
        ]
        key = [(word + weyl) & 0xFFFFFFFF for word, weyl in zip(key, PHILOX_WEYL, strict=True)]
    return np.stack(words, axis=1).astype(np.uint32)


def gumbel(seed: int, sample: int, position: int, vocabulary: int) -> Float64Array:
    """The noise of one position, for every token: token t takes word t % 4 of counter (t // 4, position, sample)."""
    blocks = np.arange(-(-vocabulary // 4), dtype=np.uint32)
    words = philox(seed, (blocks, position, sample, NOISE_STREAM)).reshape(-1)[:vocabulary]
    # Close to 1 the uniform number is exact to 2^-33, which is where the largest noise (the one that wins) comes from.
    uniform = 1.0 - (words.astype(np.float64) + 0.5) * 2.0**-32
    return -log(-log(uniform))
