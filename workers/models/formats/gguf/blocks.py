"""GGUF's types: rows of blocks, each with its scales and codes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from outrider.kernels.quantised import Levels, QuantisedRows, Scheme, Values

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]
SUPER = 256


@dataclass(frozen=True, slots=True)
class Kind:
    """``values`` numbers lie in a block of ``bytes``. ``scheme`` is None where they are floats as they are."""

    name: str
    values: int
    bytes: int
    scheme: Scheme | None = None
    unpack: Callable[[Scheme, Bytes], QuantisedRows] | None = None


def _half(blocks: Bytes, at: int) -> Floats:
    """The fp16 at a place of every block: [rows, blocks]."""
    return np.ascontiguousarray(blocks[..., at : at + 2]).view(np.float16)[..., 0].astype(np.float32)


def _nibbles(packed: Bytes) -> Bytes:
    """The lower halves of all bytes, then the upper ones."""
    return np.concatenate([packed & np.uint8(15), packed >> np.uint8(4)], axis=-1)


def _rows(codes: Bytes) -> Bytes:
    return np.ascontiguousarray(codes).reshape(codes.shape[0], -1)


def _fifths(words: Bytes) -> Bytes:
    """The 32 bits of four bytes, the lowest first, each where the fifth bit of a code lies."""
    return np.unpackbits(words, axis=-1, bitorder="little") * np.uint8(16)


def _plain(scheme: Scheme, scales: Floats, codes: Bytes, minima: Floats | None = None) -> QuantisedRows:
    zero = 0 if scheme.minima else 1 << (scheme.bits - 1)
    return QuantisedRows(scheme, _rows(codes), scales, np.full(scales.shape, zero, np.uint8), minima)


def _q4_0(scheme: Scheme, blocks: Bytes) -> QuantisedRows:
    return _plain(scheme, _half(blocks, 0), _nibbles(blocks[..., 2:]))


def _q4_1(scheme: Scheme, blocks: Bytes) -> QuantisedRows:
    return _plain(scheme, _half(blocks, 0), _nibbles(blocks[..., 4:]), -_half(blocks, 2))


def _q5_0(scheme: Scheme, blocks: Bytes) -> QuantisedRows:
    return _plain(scheme, _half(blocks, 0), _nibbles(blocks[..., 6:]) | _fifths(blocks[..., 2:6]))


def _q5_1(scheme: Scheme, blocks: Bytes) -> QuantisedRows:
    return _plain(scheme, _half(blocks, 0), _nibbles(blocks[..., 8:]) | _fifths(blocks[..., 4:8]), -_half(blocks, 2))


def _q8_0(scheme: Scheme, blocks: Bytes) -> QuantisedRows:
    return _plain(scheme, _half(blocks, 0), blocks[..., 2:] ^ np.uint8(128))


def _six_bits(packed: Bytes) -> tuple[NDArray[np.int16], NDArray[np.int16]]:
    """The eight factors of scales and of minima of each super-block, from 12 bytes: [rows, groups]."""
    first, second, third = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    scales = np.concatenate([first & 63, third & 15 | first >> 2 & 48], axis=-1)
    minima = np.concatenate([second & 63, third >> 4 | second >> 2 & 48], axis=-1)
    return _rows(scales).astype(np.int16), _rows(minima).astype(np.int16)


def _two_levels(
    scheme: Scheme,
    codes: Bytes,
    scales: tuple[Floats, NDArray[np.int16]],
    minima: tuple[Floats, NDArray[np.int16]] | None,
) -> QuantisedRows:
    groups = SUPER // scheme.group
    spread = np.repeat(scales[0], groups, axis=1) * scales[1]
    low = None if minima is None else np.repeat(minima[0], groups, axis=1) * minima[1]
    levels = Levels(*scales, *(minima or ()))
    zero = 0 if minima is not None else 1 << (scheme.bits - 1)
    return QuantisedRows(scheme, codes, spread, np.full(spread.shape, zero, np.uint8), low, levels)


def _k_nibbles(packed: Bytes) -> Bytes:
    """Of 128 bytes 32 at a time: their lower halves are a group of 32, their upper ones the next."""
    lines = packed.reshape(*packed.shape[:-1], 4, 32)
    return np.stack([lines & 15, lines >> 4], axis=-2).reshape(*packed.shape[:-1], SUPER)


def _q4_k(scheme: Scheme, blocks: Bytes) -> QuantisedRows:
    scales, minima = _six_bits(blocks[..., 4:16])
    codes = _rows(_k_nibbles(blocks[..., 16:]))
    return _two_levels(scheme, codes, (_half(blocks, 0), scales), (_half(blocks, 2), minima))


def _q5_k(scheme: Scheme, blocks: Bytes) -> QuantisedRows:
    scales, minima = _six_bits(blocks[..., 4:16])
    # Bit g of byte i is the upper bit of value i of group g.
    upper = blocks[..., None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None] & 1
    codes = _k_nibbles(blocks[..., 48:]) | upper.astype(np.uint8).reshape(*blocks.shape[:-1], SUPER) << np.uint8(4)
    return _two_levels(scheme, _rows(codes), (_half(blocks, 0), scales), (_half(blocks, 2), minima))


def _q6_k(scheme: Scheme, blocks: Bytes) -> QuantisedRows:
    # Each half of the super-block: 64 bytes with four lower bits of twice as many values, 32 with two upper bits of four.
    halves = (*blocks.shape[:-1], 2)
    low = blocks[..., :128].reshape(*halves, 64)
    high = blocks[..., 128:192].reshape(*halves, 1, 32) >> np.array([0, 2, 4, 6], np.uint8)[:, None] & 3
    codes = _nibbles(low) | high.astype(np.uint8).reshape(*halves, 128) << np.uint8(4)
    factors = _rows(blocks[..., 192:208].view(np.int8)).astype(np.int16)
    return _two_levels(scheme, _rows(codes), (_half(blocks, 208), factors), None)


def _mxfp4(scheme: Scheme, blocks: Bytes) -> QuantisedRows:
    scales = np.ldexp(np.float32(1), blocks[..., 0].astype(np.int32) - 127).astype(np.float32)
    return QuantisedRows(scheme, _rows(_nibbles(blocks[..., 1:])), scales, np.zeros(scales.shape, np.uint8))


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
    14: Kind("Q6_K", SUPER, 210, _named("Q6_K", 6, 16, super_group=SUPER, signed_sub_scales=True), _q6_k),
    30: Kind("BF16", 1, 2),
    39: Kind("MXFP4", 32, 17, _named("MXFP4", 4, values=Values.E2M1, scale_type="E8M0"), _mxfp4),
}
# Those that are not read, by the names that llama.cpp gives them.
UNREAD = {
    9: "Q8_1",
    10: "Q2_K",
    11: "Q3_K",
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    20: "IQ4_NL",
    21: "IQ3_S",
    22: "IQ2_S",
    23: "IQ4_XS",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    29: "IQ1_M",
    34: "TQ1_0",
    35: "TQ2_0",
    40: "NVFP4",
    41: "Q1_0",
}
BY_NAME = {kind.name: kind for kind in TYPES.values()}
