"""The common form of quantised matrices, between the readers of checkpoint formats and the packing of weights.

A matrix has N rows (outputs) and K columns (inputs). ``Scheme`` says how it is quantised, and is known before a weight is
read; ``QuantisedRows`` are some of its rows. ``dequantise`` defines the weights that they stand for:

- integers, one level of scales (AWQ, GPTQ, compressed-tensors, GGUF's Q4_0, Q5_0 and Q8_0): w = (code - zero) * scale
- with minima (Q4_1, Q5_1, Q4_K, Q5_K, MLX's): w = code * scale - minimum
- two levels (Q4_K, Q5_K, Q6_K): scale = super_scale * sub_scale and minimum = super_minimum * sub_minimum, where the
  super-scales are fp16 and the others integers of 6 or 8 bits: the products are exact in fp32, and come beside the levels
- E4M3 (fp8), E2M1 (MXFP4, NVFP4), NF4 and FP4 (bitsandbytes), IQ4 (GGUF's IQ4_NL, IQ4_XS): w = value(code) * scale

Every scale belongs to one row and ``group`` neighbouring columns; what a file states once for a row, a block of rows or
the whole tensor is repeated. Columns come in the order of the codes: where the scheme says ``ordered`` (activation order),
column j multiplies input channel ``order[j]``, and the groups are neighbours again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]


class Values(Enum):
    """What a code stands for before it is scaled."""

    INTEGER = "int"
    E4M3 = "e4m3"
    E2M1 = "e2m1"
    NF4 = "nf4"
    FP4 = "fp4"
    IQ4 = "iq4"


# The significant bits of a scale by its type (the leading one included), which a header must have room for.
SCALE_BITS = {"F16": 11, "BF16": 8, "F32": 24, "E8M0": 1}


@dataclass(frozen=True, slots=True)
class Scheme:
    """How a matrix is quantised.

    ``source`` is the checkpoint's format, as it is said to people ("awq", "gptq", "gguf Q4_K" ...). ``group`` divides the
    columns; per-row and per-tensor scales have all columns in one group. ``symmetric``: every zero point is 2^(bits-1).
    ``super_group`` is the number of columns under one super-scale, 0 with one level; ``signed_sub_scales`` may be negative.
    ``scale_type`` is safetensors' name of the type of the scales (of the super-scales, where there are two levels).
    """

    source: str
    bits: int
    group: int
    values: Values = Values.INTEGER
    symmetric: bool = True
    minima: bool = False
    super_group: int = 0
    signed_sub_scales: bool = False
    scale_type: str = "F16"
    ordered: bool = False

    def __str__(self) -> str:
        return f"{self.source}, {self.bits} bits, groups of {self.group}"


@dataclass(frozen=True, slots=True)
class Levels:
    """Of rows with two levels: super-scales [n, K / super_group], and small integers [n, K / group] that multiply them."""

    super_scales: Floats
    sub_scales: NDArray[np.int16]
    super_minima: Floats | None = None
    sub_minima: NDArray[np.int16] | None = None

    def taken(self, rows: NDArray[np.int64]) -> Levels:
        super_minima = None if self.super_minima is None else self.super_minima[rows]
        sub_minima = None if self.sub_minima is None else self.sub_minima[rows]
        return Levels(self.super_scales[rows], self.sub_scales[rows], super_minima, sub_minima)


@dataclass(frozen=True, slots=True)
class QuantisedRows:
    """``codes`` [n, K], ``scales``, ``zeros`` and ``minima`` [n, K / group]. Zero points are 0 to 255; without any (floats,
    minima) they are all 0."""

    scheme: Scheme
    codes: Bytes
    scales: Floats
    zeros: Bytes
    minima: Floats | None = None
    levels: Levels | None = None

    def taken(self, rows: NDArray[np.int64]) -> QuantisedRows:
        """These rows, by index."""
        minima = None if self.minima is None else self.minima[rows]
        levels = None if self.levels is None else self.levels.taken(rows)
        return QuantisedRows(self.scheme, self.codes[rows], self.scales[rows], self.zeros[rows], minima, levels)

    def in_groups_of(self, size: int) -> QuantisedRows:
        """Of one level: each group as several smaller ones that have the same scale, zero point and minimum."""
        group = self.scheme.group
        if group == size:
            return self
        if group % size:
            raise ValueError(f"groups of {group} are none of {size}")
        # The last group of a row need not be whole.
        taken = np.arange(-(-self.codes.shape[1] // size)) // (group // size)
        minima = None if self.minima is None else self.minima[:, taken]
        smaller = replace(self.scheme, group=size)
        return QuantisedRows(smaller, self.codes, self.scales[:, taken], self.zeros[:, taken], minima)

    def dequantise(self) -> Floats:
        """As fp32, columns in the order of the codes. Exact, but for the one rounding of a minimum's subtraction."""
        scheme = self.scheme
        scales = np.repeat(self.scales, scheme.group, axis=1)
        if scheme.values is Values.INTEGER:
            values = self.codes.astype(np.float32) - np.repeat(self.zeros, scheme.group, axis=1)
        else:
            values = TABLES[scheme.values][self.codes]
        result: Floats = values * scales
        return result if self.minima is None else result - np.repeat(self.minima, scheme.group, axis=1)


def natural_order(columns: Floats, order: Sequence[int] | NDArray[np.int32] | None) -> Floats:
    """Columns in activation order, permuted to the order of the input channels."""
    if order is None:
        return columns
    result = np.empty_like(columns)
    result[:, np.asarray(order)] = columns
    return result


def _e4m3() -> Floats:
    """The eight-bit float without infinities: four bits of exponent (bias 7), three of fraction; 0x7F is no number."""
    codes = np.arange(128)
    exponent, fraction = codes >> 3, codes & 7
    values = np.where(exponent == 0, np.ldexp(fraction / 8, -6), np.ldexp(1 + fraction / 8, exponent - 7))
    values[127] = np.nan
    return np.concatenate([values, -values]).astype(np.float32)


E4M3 = _e4m3()
# e2m1: codes 0 to 7, then the same with the sign set. All are multiples of 1/2.
_HALVES = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], np.float32)
E2M1: Floats = np.concatenate([_HALVES, -_HALVES])
# bitsandbytes' tables: the middles of equal shares of a normal distribution, and floats of two bits of exponent and one of
# fraction, divided by the largest.
NF4: Floats = np.array(
    [
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334),
        *(-0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
        *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
    ],
    np.float32,
)
_TWELFTHS = np.array([0.0, 0.0625, 8.0, 12.0, 4.0, 6.0, 2.0, 3.0], np.float32)
FP4: Floats = (np.concatenate([_TWELFTHS, -_TWELFTHS]) / np.float32(12.0)).astype(np.float32)
# llama.cpp's table of 16 integers.
IQ4: Floats = np.array(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113],
    np.float32,
)
TABLES = {Values.E4M3: E4M3, Values.E2M1: E2M1, Values.NF4: NF4, Values.FP4: FP4, Values.IQ4: IQ4}
