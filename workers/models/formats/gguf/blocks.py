"""GGUF's tensor types: a row is a sequence of blocks, each with scales and codes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from outrider.kernels.quantised import E4M3, QuantisedRows, Scheme, Values
from outrider.workers.models.formats.gguf import few_bits
from outrider.workers.models.formats.gguf.parts import SUPER, Bytes, half, in_rows, nibbles, plain, two_levels


@dataclass(frozen=True, slots=True)
class Kind:
    """A block has ``values`` weights in ``bytes``. ``scheme`` is None for plain floats."""

    name: str
    values: int
    bytes: int
    scheme: Scheme | None = None
    unpack: Callable[[Scheme, Bytes], QuantisedRows] | None = None


def _fifths(words: Bytes) -> Bytes:
    """The 32 bits of four bytes, lowest first, each as the fifth bit of a code (0 or 16)."""
    return np.unpackbits(words, axis=-1, bitorder="little") * np.uint8(16)


def _q4_0(scheme: Scheme, blocks: Bytes) -> QuantisedRows:
    return plain(scheme, half(blocks, 0), nibbles(blocks[..., 2:]))


def _q4_1(scheme: Scheme, blocks: Bytes) -> QuantisedRows:
    return plain(scheme, half(blocks, 0), nibbles(blocks[..., 4:]), -half(blocks, 2))


def _q5_0(scheme: Scheme, blocks: Bytes) -> QuantisedRows:
    return plain(scheme, half(blocks, 0), nibbles(blocks[..., 6:]) | _fifths(blocks[..., 2:6]))


def _q5_1(scheme: Scheme, blocks: Bytes) -> QuantisedRows:
    return plain(scheme, half(blocks, 0), nibbles(blocks[..., 8:]) | _fifths(blocks[..., 4:8]), -half(blocks, 2))


def _q8_0(scheme: Scheme, blocks: Bytes) -> QuantisedRows:
    return plain(scheme, half(blocks, 0), blocks[..., 2:] ^ np.uint8(128))


def _six_bits(packed: Bytes) -> tuple[NDArray[np.int16], NDArray[np.int16]]:
    """The eight six-bit factors of scales, and those of minima, in 12 bytes of each super-block: [rows, groups]."""
    first, second, third = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    scales = np.concatenate([first & 63, third & 15 | first >> 2 & 48], axis=-1)
    minima = np.concatenate([second & 63, third >> 4 | second >> 2 & 48], axis=-1)
    return in_rows(scales).astype(np.int16), in_rows(minima).astype(np.int16)


def _knibbles(packed: Bytes) -> Bytes:
    """128 bytes as 256 codes: of every 32 bytes the lower nibbles are 32 codes, and the upper nibbles the next 32."""
    lines = packed.reshape(*packed.shape[:-1], 4, 32)
    return np.stack([lines & 15, lines >> 4], axis=-2).reshape(*packed.shape[:-1], SUPER)


def _q4_k(scheme: Scheme, blocks: Bytes) -> QuantisedRows:
    scales, minima = _six_bits(blocks[..., 4:16])
    codes = in_rows(_knibbles(blocks[..., 16:]))
    return two_levels(scheme, codes, (half(blocks, 0), scales), (half(blocks, 2), minima))


def _q5_k(scheme: Scheme, blocks: Bytes) -> QuantisedRows:
    scales, minima = _six_bits(blocks[..., 4:16])
    # Bit g of byte i is the upper bit of value i of group g.
    upper = blocks[..., None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None] & 1
    codes = _knibbles(blocks[..., 48:]) | upper.astype(np.uint8).reshape(*blocks.shape[:-1], SUPER) << np.uint8(4)
    return two_levels(scheme, in_rows(codes), (half(blocks, 0), scales), (half(blocks, 2), minima))


def _q6_k(scheme: Scheme, blocks: Bytes) -> QuantisedRows:
    # Each half of the super-block has 128 codes: 64 bytes with the lower four bits of two codes each, and 32 bytes with the
    # upper two bits of four codes each.
    halves = (*blocks.shape[:-1], 2)
    low = blocks[..., :128].reshape(*halves, 64)
    high = blocks[..., 128:192].reshape(*halves, 1, 32) >> np.array([0, 2, 4, 6], np.uint8)[:, None] & 3
    codes = nibbles(low) | high.astype(np.uint8).reshape(*halves, 128) << np.uint8(4)
    factors = in_rows(blocks[..., 192:208].view(np.int8)).astype(np.int16)
    return two_levels(scheme, in_rows(codes), (half(blocks, 208), factors), None)


def _mxfp4(scheme: Scheme, blocks: Bytes) -> QuantisedRows:
    scales = np.ldexp(np.float32(1), blocks[..., 0].astype(np.int32) - 127).astype(np.float32)
    return QuantisedRows(scheme, in_rows(nibbles(blocks[..., 1:])), scales, np.zeros(scales.shape, np.uint8))


def _nvfp4(scheme: Scheme, blocks: Bytes) -> QuantisedRows:
    """Four scales (e4m3 without a sign; 127 is 0), then the nibbles of each 16 values."""
    scales = np.where(blocks[..., :4] == 127, np.float32(0), E4M3[blocks[..., :4] & 127])
    codes = nibbles(blocks[..., 4:].reshape(*blocks.shape[:-1], 4, 8))
    return QuantisedRows(scheme, in_rows(codes), in_rows(scales), np.zeros((len(blocks), scales[0].size), np.uint8))


def _named(name: str, bits: int, group: int = 32, **more: object) -> Scheme:
    return Scheme(f"gguf {name}", bits, group, **more)  # type: ignore[arg-type]


TYPES = {
    0: Kind("F32", 1, 4),
    1: Kind("F16", 1, 2),
    2: Kind("Q4_0", 32, 18, _named("Q4_0", 4), _q4_0),
    3: Kind("Q4_1", 32, 20, _named("Q4_1", 4, minima=True), _q4_1),
    6: Kind("Q5_0", 32, 22, _named("Q5_0", 5), _q5_0),
    7: Kind("Q5_1", 32, 24, _named("Q5_1", 5, minima=True), _q5_1),
    8: Kind("Q8_0", 32, 34, _named("Q8_0", 8), _q8_0),
    12: Kind("Q4_K", SUPER, 144, _named("Q4_K", 4, minima=True, super_group=SUPER), _q4_k),
    13: Kind("Q5_K", SUPER, 176, _named("Q5_K", 5, minima=True, super_group=SUPER), _q5_k),
    10: Kind("Q2_K", SUPER, 84, _named("Q2_K", 2, 16, minima=True, super_group=SUPER), few_bits.q2_k),
    11: Kind("Q3_K", SUPER, 110, _named("Q3_K", 6, 16, super_group=SUPER, signed_sub_scales=True), few_bits.q3_k),
    14: Kind("Q6_K", SUPER, 210, _named("Q6_K", 6, 16, super_group=SUPER, signed_sub_scales=True), _q6_k),
    16: Kind("IQ2_XXS", SUPER, 66, _named("IQ2_XXS", 8, scale_type="F32"), few_bits.iq2_xxs),
    17: Kind("IQ2_XS", SUPER, 74, _named("IQ2_XS", 8, 16, scale_type="F32"), few_bits.iq2_xs),
    18: Kind("IQ3_XXS", SUPER, 98, _named("IQ3_XXS", 8, scale_type="F32"), few_bits.iq3_xxs),
    19: Kind("IQ1_S", SUPER, 50, _named("IQ1_S", 5, scale_type="F32"), few_bits.iq1_s),
    20: Kind("IQ4_NL", 32, 18, _named("IQ4_NL", 4, values=Values.IQ4), few_bits.iq4_nl),
    21: Kind("IQ3_S", SUPER, 110, _named("IQ3_S", 5, scale_type="F32"), few_bits.iq3_s),
    22: Kind("IQ2_S", SUPER, 82, _named("IQ2_S", 8, 16, scale_type="F32"), few_bits.iq2_s),
    23: Kind("IQ4_XS", SUPER, 136, _named("IQ4_XS", 4, values=Values.IQ4, scale_type="F32"), few_bits.iq4_xs),
    29: Kind("IQ1_M", SUPER, 56, _named("IQ1_M", 8, 16, scale_type="F32"), few_bits.iq1_m),
    30: Kind("BF16", 1, 2),
    34: Kind("TQ1_0", SUPER, 54, _named("TQ1_0", 2, SUPER, symmetric=False), few_bits.tq1_0),
    35: Kind("TQ2_0", SUPER, 66, _named("TQ2_0", 2, SUPER, symmetric=False), few_bits.tq2_0),
    39: Kind("MXFP4", 32, 17, _named("MXFP4", 4, values=Values.E2M1, scale_type="E8M0"), _mxfp4),
    40: Kind("NVFP4", 64, 36, _named("NVFP4", 4, 16, values=Values.E2M1, scale_type="F32"), _nvfp4),
    41: Kind("Q1_0", 128, 18, _named("Q1_0", 2, 128, symmetric=False), few_bits.q1_0),
    42: Kind("Q2_0", 64, 18, _named("Q2_0", 2, 64, symmetric=False), few_bits.q2_0),
}
# The types that are not read, by llama.cpp's names.
UNREAD = {
    9: "Q8_1",
    15: "Q8_K",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
}
BY_NAME = {kind.name: kind for kind in TYPES.values()}
