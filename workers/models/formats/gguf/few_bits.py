"""GGUF's types of few bits, converted exactly to codes that the kernels have.

The integers of a grid or table become codes of as many bits as they need: Q2_K is kept in two bits, Q3_K like Q6_K, IQ1_S
and IQ3_S in five bits, IQ1_M, IQ2_XXS, IQ2_XS, IQ2_S and IQ3_XXS in eight, TQ1_0, TQ2_0, Q1_0 and Q2_0 in four. IQ4_NL and
IQ4_XS keep their codes of four.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.kernels.quantised import QuantisedRows, Scheme
from outrider.workers.models.formats.gguf.grids import grid, signs
from outrider.workers.models.formats.gguf.parts import SUPER, Bytes, Floats, half, in_rows, nibbles, plain, two_levels


def _words(blocks: Bytes, start: int, stop: int, type: Any) -> NDArray[Any]:
    """The bytes of each block from ``start`` to ``stop``, as integers of another type."""
    found: NDArray[Any] = np.ascontiguousarray(blocks[..., start:stop]).view(type)
    return found


def _parts(packed: NDArray[Any], *shifts: int) -> NDArray[Any]:
    """Each number shifted right by each of ``shifts``, concatenated."""
    parts: NDArray[Any] = packed[..., None] >> np.array(shifts, packed.dtype)
    return parts.reshape(*packed.shape[:-1], packed.shape[-1] * len(shifts))


def _lines(packed: Bytes) -> Bytes:
    """Two-bit codes: bits 0 and 1 of 32 bytes, then bits 2 and 3 of the same bytes, and so on; then of the next 32."""
    lines = packed.reshape(*packed.shape[:-1], -1, 1, 32) >> np.array([0, 2, 4, 6], np.uint8)[:, None]
    found: Bytes = lines.reshape(*packed.shape[:-1], -1) & np.uint8(3)
    return found


def _whole(scheme: Scheme, values: NDArray[Any], scales: Floats) -> QuantisedRows:
    """Rows from signed integers ``values`` and a scale for each group: code = value + 2^(bits - 1)."""
    codes = (values.astype(np.int16) + (1 << (scheme.bits - 1))).astype(np.uint8)
    return plain(scheme, scales.reshape(len(scales), -1), codes)


def _ternary(scheme: Scheme, codes: Bytes, scales: Floats) -> QuantisedRows:
    """Codes 0, 1 and 2 stand for -1, 0 and 1."""
    return QuantisedRows(scheme, in_rows(codes), scales, np.ones(scales.shape, np.uint8))


def q1_0(scheme: Scheme, blocks: Bytes) -> QuantisedRows:
    bits = np.unpackbits(blocks[..., 2:], axis=-1, bitorder="little")
    return _ternary(scheme, bits * np.uint8(2), half(blocks, 0))


def q2_0(scheme: Scheme, blocks: Bytes) -> QuantisedRows:
    return _ternary(scheme, _parts(blocks[..., 2:], 0, 2, 4, 6) & np.uint8(3), half(blocks, 0))


def tq1_0(scheme: Scheme, blocks: Bytes) -> QuantisedRows:
    """A byte b holds five digits of base 3 (four in the last bytes), highest first, as the fraction b / 256: digit i is
    floor(3 (b 3^i mod 256) / 256)."""
    digits = []
    for start, stop, count in ((0, 32, 5), (32, 48, 5), (48, 52, 4)):
        powers = np.array([3**digit for digit in range(count)], np.uint8)[:, None]
        rest = blocks[..., None, start:stop] * powers
        digits.append((rest.astype(np.uint16) * 3 >> 8).astype(np.uint8).reshape(*blocks.shape[:-1], -1))
    return _ternary(scheme, np.concatenate(digits, axis=-1), half(blocks, 52))


def tq2_0(scheme: Scheme, blocks: Bytes) -> QuantisedRows:
    return _ternary(scheme, _lines(blocks[..., :64]), half(blocks, 64))


def q2_k(scheme: Scheme, blocks: Bytes) -> QuantisedRows:
    factors = in_rows(blocks[..., :16]).astype(np.int16)
    scales, minima = (half(blocks, 80), factors & 15), (half(blocks, 82), factors >> 4)
    return two_levels(scheme, in_rows(_lines(blocks[..., 16:80])), scales, minima)


def q3_k(scheme: Scheme, blocks: Bytes) -> QuantisedRows:
    # Bit g of byte i is the upper bit of code i of the g-th 32 codes.
    upper = blocks[..., None, :32] >> np.arange(8, dtype=np.uint8)[:, None] & np.uint8(1)
    codes = _lines(blocks[..., 32:96]) | upper.reshape(*blocks.shape[:-1], SUPER) << np.uint8(2)
    low = np.concatenate([blocks[..., 96:104] & 15, blocks[..., 96:104] >> 4], axis=-1)
    high = (blocks[..., None, 104:108] >> np.array([0, 2, 4, 6], np.uint8)[:, None] & 3).reshape(low.shape)
    factors = in_rows(low | high << 4).astype(np.int16) - 32
    # The zero point is 4 in the file and 32 here (six bits), so codes are raised by 28.
    return two_levels(scheme, in_rows(codes + np.uint8(28)), (half(blocks, 108), factors), None)


def _indices(scheme: Scheme, codes: Bytes, scales: Floats) -> QuantisedRows:
    scales = in_rows(scales)
    return QuantisedRows(scheme, in_rows(codes), scales, np.zeros(scales.shape, np.uint8))


def iq4_nl(scheme: Scheme, blocks: Bytes) -> QuantisedRows:
    return _indices(scheme, nibbles(blocks[..., 2:]), half(blocks, 0))


def iq4_xs(scheme: Scheme, blocks: Bytes) -> QuantisedRows:
    low = _parts(blocks[..., 4:8], 0, 4) & 15
    high = _parts(_words(blocks, 2, 4, np.uint16), *range(0, 16, 2)) & 3
    factors = (low | high << 4).astype(np.float32) - 32
    codes = nibbles(blocks[..., 8:].reshape(*blocks.shape[:-1], 8, 16))
    return _indices(scheme, codes, half(blocks, 0)[..., None] * factors)


def _of_grid(name: str, rows: NDArray[Any]) -> NDArray[np.int8]:
    """The grid's row of each number, concatenated: [..., values]."""
    found: NDArray[np.int8] = grid(name)[rows].reshape(*rows.shape[:-1], -1)
    return found


def _of_signs(rows: NDArray[Any]) -> NDArray[np.int8]:
    found: NDArray[np.int8] = signs()[rows].reshape(*rows.shape[:-1], -1)
    return found


def _sign_bits(packed: Bytes) -> NDArray[np.int8]:
    bits = np.unpackbits(packed, axis=-1, bitorder="little").astype(np.int8)
    return np.int8(1) - np.int8(2) * bits


def _halves(factors: NDArray[Any]) -> Floats:
    return np.float32(0.5) + factors.astype(np.float32)


def iq2_xxs(scheme: Scheme, blocks: Bytes) -> QuantisedRows:
    words = _words(blocks, 2, 66, np.uint32).reshape(*blocks.shape[:-1], 8, 2)
    rows = np.ascontiguousarray(words[..., 0]).view(np.uint8)
    values = _of_grid("IQ2_XXS", rows) * _of_signs(_parts(words[..., 1], 0, 7, 14, 21) & 127)
    return _whole(scheme, values, half(blocks, 0)[..., None] * _halves(words[..., 1] >> 28) * np.float32(0.25))


def iq2_xs(scheme: Scheme, blocks: Bytes) -> QuantisedRows:
    words = _words(blocks, 2, 66, np.uint16)
    values = _of_grid("IQ2_XS", words & 511) * _of_signs(words >> 9)
    factors = _halves(_parts(blocks[..., 66:74], 0, 4) & 15)
    return _whole(scheme, values, half(blocks, 0)[..., None] * factors * np.float32(0.25))


def iq2_s(scheme: Scheme, blocks: Bytes) -> QuantisedRows:
    rows = blocks[..., 2:34] | (_parts(blocks[..., 66:74], 0, 2, 4, 6) & 3).astype(np.uint16) << 8
    factors = _halves(_parts(blocks[..., 74:82], 0, 4) & 15)
    scales = half(blocks, 0)[..., None] * factors * np.float32(0.25)
    return _whole(scheme, _of_grid("IQ2_S", rows) * _sign_bits(blocks[..., 34:66]), scales)


def iq3_xxs(scheme: Scheme, blocks: Bytes) -> QuantisedRows:
    words = _words(blocks, 66, 98, np.uint32)
    values = _of_grid("IQ3_XXS", blocks[..., 2:66]) * _of_signs(_parts(words, 0, 7, 14, 21) & 127)
    return _whole(scheme, values, half(blocks, 0)[..., None] * _halves(words >> 28) * np.float32(0.5))


def iq3_s(scheme: Scheme, blocks: Bytes) -> QuantisedRows:
    rows = blocks[..., 2:66] | np.unpackbits(blocks[..., 66:74], axis=-1, bitorder="little").astype(np.uint16) << 8
    factors = 1 + 2 * (_parts(blocks[..., 106:110], 0, 4) & 15).astype(np.float32)
    values = _of_grid("IQ3_S", rows) * _sign_bits(blocks[..., 74:106])
    return _whole(scheme, values, half(blocks, 0)[..., None] * factors)


def iq1_s(scheme: Scheme, blocks: Bytes) -> QuantisedRows:
    """A weight is scale * (grid value + d), with a grid value of -1, 0 or 1 and d = 1/8 or -1/8; values are in eighths."""
    words = _words(blocks, 34, 50, np.uint16)
    rows = blocks[..., 2:34] | (_parts(words, 0, 3, 6, 9) & 7) << 8
    more = np.where(words >> 15, -1, 1)
    factors = 2 * (words >> 12 & 7).astype(np.float32) + 1
    values = 8 * _of_grid("IQ1_S", rows) + np.repeat(more, 32, axis=-1)
    return _whole(scheme, values, half(blocks, 0)[..., None] * factors / np.float32(8))


def iq1_m(scheme: Scheme, blocks: Bytes) -> QuantisedRows:
    """As IQ1_S. The 16 bits of the fp16 scale are in the upper four bits of four words."""
    words = _words(blocks, 48, 56, np.uint16)
    bits = np.bitwise_or.reduce((words & 0xF000) >> np.array([12, 8, 4, 0], np.uint16), axis=-1)
    scales = bits.astype(np.uint16)[..., None].view(np.float16).astype(np.float32)
    upper = _parts(blocks[..., 32:48], 0, 4)
    rows = blocks[..., :32] | (upper & 7).astype(np.uint16) << 8
    values = 8 * _of_grid("IQ1_S", rows) + np.repeat(np.where(upper & 8, -1, 1), 8, axis=-1)
    factors = 2 * (_parts(words, 0, 3, 6, 9) & 7).astype(np.float32) + 1
    return _whole(scheme, values, scales * factors / np.float32(8))
