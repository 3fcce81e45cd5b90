"""How the codes and scales of quantised matrices are stored, unchanged: this file is the definition, against which the
compiled packer is tested.

A matrix of codes is stored in tiles of 32 rows like any other (packing.py); a tile is a sequence of blocks of channels, and
a block is a header with what its groups need to know, then lines of codes. A line is 32 words of 32 bits, one for each row;
half a line is 32 words of 16 bits.

**Headers.** Of WORDS a block is one group, and its header one line: the scale, an fp32 whose lower 8 bits are replaced by
the zero point. Otherwise:

- F32, F16, BF16: blocks of 128 channels; the scales of each group (a line of F32, else half a line), then, where groups
  have zero points of their own, these, a byte each: a line for four groups, half a line for two or one. Groups of 16 have
  none. With E2M1 codes (NVFP4) the stored numbers are half of the F32 scales, since the kernels multiply twice the value.
- HALF_MINIMA (Q4_1, Q5_1, MLX's): blocks of 128 channels; the fp16 scales of each group, then their fp16 minima, half a
  line each.
- E8M0: blocks of 128 channels, groups of 32; a line whose byte g is the exponent of group g, a scale being
  2^(byte - 127), or 0 where the byte is 0. The packer takes byte 0 with codes of zeros only.
- SIX_BITS (Q4_K, Q5_K): blocks of 256, groups of 32. A line with the fp16 scale (lower half of the word) and minimum, then
  three lines whose bytes 0 to 3 have in their lower 6 bits the factors of the scale for groups 0 to 3, for groups 4 to 7,
  and those of the minimum for groups 0 to 3. The minimum's factors for groups 4 to 7 lie in the upper 2 bits, their lowest
  bits in the first of the three.
- FOUR_BITS (Q2_K): blocks of 256, groups of 16. A line with the fp16 scale (lower half of the word) and minimum, then four
  lines with a byte for each group: the factor of the scale in its lower four bits, that of the minimum in the others.
- FACTORS: blocks of 128, groups of 32. A line with the bf16 scale in the upper half of the word and in the lower, the first
  lowest, four bits for each group: its factor, less 2. Then a line whose bytes are the offsets of the groups. A weight is
  (code * factor - offset) * scale: the product is a whole number of 8 bits, and so a block's sum is a whole number.
- EIGHT_BITS (Q6_K): blocks of 256, groups of 16. Four lines whose bytes are the signed factors of the groups, then half a
  line with the fp16 scale.

**Codes.** Four bits: one line for every 8 channels, byte b of a word has channel b in its lower and channel b + 4 in its
upper half. Eight bits: two lines for every 8 channels, channels 0..3 and 4..7. Six bits: for every 16 channels two lines
with the lower four bits, then one whose byte b has the upper two of channels b, b + 4, b + 8, b + 12, the first lowest.
Five bits: for every 32 channels four lines, then one whose byte b has the upper bit of channels b, b + 4, ... b + 28.
Two bits: one line for every 16 channels, byte b has channels b, b + 4, b + 8, b + 12, the first in the lowest bits.

Codes of floats are E4M3 (with scales of F32, F16 or BF16), NF4, FP4 (F32) and E2M1 (E8M0 or F32). With the format BF16,
which is the only one of the first three, what is multiplied is value * scale rounded to bf16, to nearest, so that products
have the bits of a matrix that was dequantised.

The last block may be shorter: its header is whole, its codes are those that are there, up to the end of a line.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.kernels.program import SMALLEST_SYMMETRIC_GROUP, Codes, Scales, Storage, Weight
from outrider.kernels.quantised import E2M1, E4M3, FP4, IQ4, NF4, Levels, QuantisedRows, Scheme, Values

TILE_ROWS = 32
HALF_TILE = 16
ALIGNMENT = 64
LINE_BYTES = 4 * TILE_ROWS
BLOCK = 128
SUPER_BLOCK = 256
# The largest int8 activation of a block. With four-bit codes the sum of an activation and a code must fit into a byte.
LARGEST_INT8, LARGEST_BESIDE_INT4 = 127, 120
# FACTORS stores factor - LEAST_FACTOR, in four bits.
LEAST_FACTOR = 2
MOST_FACTOR = 17
GROUPS = (128, 64, 32)
# The values of codes that index a table.
TABLES_OF = {Codes.E2M1: E2M1, Codes.E4M3: E4M3, Codes.NF4: NF4, Codes.FP4: FP4, Codes.IQ4: IQ4}
FLOAT_SCALES = {"F32": Scales.F32, "F16": Scales.F16, "BF16": Scales.BF16}

Bytes = NDArray[np.uint8]
Words = NDArray[np.uint32]
Floats = NDArray[np.float32]


# For codes that are not of four bits: how many channels fill how many lines.
UNITS = {Codes.INT2: (16, 1), Codes.INT5: (32, 5), Codes.INT6: (16, 3), Codes.INT8: (8, 2), Codes.E4M3: (8, 2)}


@dataclass(frozen=True, slots=True)
class Geometry:
    """A block's channels and the bytes of its header for a tile (``scale_bytes`` before the zero points), and how many
    channels fill how many lines."""

    block: int
    header: int
    scale_bytes: int
    unit: int
    unit_lines: int

    def code_bytes(self, channels: int) -> int:
        return -(-channels // self.unit) * self.unit_lines * LINE_BYTES

    def tile_bytes(self, columns: int) -> int:
        whole, rest = divmod(columns, self.block)
        size = whole * (self.header + self.code_bytes(self.block))
        return size + (self.header + self.code_bytes(rest) if rest else 0)


def largest_activation(weight: Weight) -> int:
    """The largest activation of a weight with int8 activations."""
    return LARGEST_BESIDE_INT4 if weight.stored.codes is Codes.INT4 else LARGEST_INT8


def geometry(weight: Weight) -> Geometry:
    storage = weight.stored
    unit, lines = UNITS.get(storage.codes, (8, 1))
    if storage.scales is Scales.WORDS:
        return Geometry(weight.group, LINE_BYTES, LINE_BYTES, unit, lines)
    if storage.scales in (Scales.SIX_BITS, Scales.EIGHT_BITS):
        header = 4 * LINE_BYTES + (LINE_BYTES // 2 if storage.scales is Scales.EIGHT_BITS else 0)
        return Geometry(SUPER_BLOCK, header, header, unit, lines)
    if storage.scales is Scales.FOUR_BITS:
        return Geometry(SUPER_BLOCK, 5 * LINE_BYTES, 5 * LINE_BYTES, unit, lines)
    if storage.scales is Scales.E8M0:
        return Geometry(BLOCK, LINE_BYTES, LINE_BYTES, unit, lines)
    if storage.scales is Scales.FACTORS:
        return Geometry(BLOCK, 2 * LINE_BYTES, 2 * LINE_BYTES, unit, lines)
    groups = BLOCK // weight.group
    if storage.scales is Scales.HALF_MINIMA:
        return Geometry(BLOCK, groups * LINE_BYTES, groups * LINE_BYTES, unit, lines)
    scales = groups * LINE_BYTES // (1 if storage.scales is Scales.F32 else 2)
    zeros = (LINE_BYTES if groups == 4 else LINE_BYTES // 2) if storage.zeros else 0
    return Geometry(BLOCK, scales + zeros, scales, unit, lines)


# The scheme of floats that are rounded to FACTORS: (code * factor - offset) * scale.
BY_FACTORS = Scheme("rounded on load", 4, 32, minima=True, super_group=BLOCK, scale_type="BF16")


# By bits, group, and whether there are minima.
TWO_LEVELS = {
    (2, 16, True): Storage(Codes.INT2, Scales.FOUR_BITS),
    (4, 32, True): Storage(Codes.INT4, Scales.SIX_BITS),
    (5, 32, True): Storage(Codes.INT5, Scales.SIX_BITS),
    (6, 16, False): Storage(Codes.INT6, Scales.EIGHT_BITS),
}


class UnknownStorage(ValueError):
    """The kernels have no storage for this scheme; the message names it."""


def storage_for(scheme: Scheme, columns: int) -> tuple[Storage, int]:
    """The storage and the group for a matrix of that scheme; the group may be a divisor of its own.

    Minima, and the scales with them, are stored in fp16: a matrix with another ``scale_type`` can be stored so only if fp16
    represents each of them.
    """
    if scheme.values is Values.E2M1 and scheme.scale_type == "E8M0" and scheme.group == 32:
        return Storage(Codes.E2M1, Scales.E8M0), 32
    if scheme.values is Values.E2M1 and scheme.scale_type == "F32" and scheme.group == SMALLEST_SYMMETRIC_GROUP:
        return Storage(Codes.E2M1, Scales.F32), SMALLEST_SYMMETRIC_GROUP
    if scheme.values is Values.E4M3:
        group = _stored_group(scheme, columns)
        if not group or scheme.scale_type not in FLOAT_SCALES:
            raise UnknownStorage(f"{scheme}: the kernels have e4m3 in groups that are multiples of 32")
        return Storage(Codes.E4M3, FLOAT_SCALES[scheme.scale_type]), group
    if scheme.values in (Values.NF4, Values.FP4):
        group = _stored_group(scheme, columns)
        if not group or scheme.scale_type != "F32":
            raise UnknownStorage(f"{scheme}: the kernels have {scheme.values.value} in groups that are multiples of 32")
        return Storage(Codes.NF4 if scheme.values is Values.NF4 else Codes.FP4, Scales.F32), group
    if scheme.values is Values.IQ4 and scheme.scale_type in ("F16", "F32") and scheme.group == 32:
        return Storage(Codes.IQ4, FLOAT_SCALES[scheme.scale_type]), 32
    if scheme.values is not Values.INTEGER:
        raise UnknownStorage(f"{scheme}: the kernels have no weights of {scheme.values.value}")
    if scheme == BY_FACTORS:
        return Storage(Codes.INT4, Scales.FACTORS), scheme.group
    if scheme.super_group:
        storage = TWO_LEVELS.get((scheme.bits, scheme.group, scheme.minima))
        if storage is None or scheme.super_group != SUPER_BLOCK or columns % SUPER_BLOCK:
            raise UnknownStorage(f"{scheme}, with scales of two levels: the kernels have Q2_K, Q4_K, Q5_K and Q6_K")
        return storage, scheme.group
    if scheme.minima:
        group = next((each for each in GROUPS if scheme.group % each == 0), 0)
        if not 2 <= scheme.bits <= 8 or not group:
            raise UnknownStorage(f"{scheme}, with minima: the kernels have 2 to 8 bits in groups that are multiples of 32")
        codes = {5: Codes.INT5, 6: Codes.INT6}.get(scheme.bits, Codes.INT4 if scheme.bits < 5 else Codes.INT8)
        return Storage(codes, Scales.HALF_MINIMA), group
    if not 2 <= scheme.bits <= 8:
        raise UnknownStorage(f"{scheme}: the kernels have integers of 2 to 8 bits")
    codes = Codes.INT4 if scheme.bits <= 4 else Codes.INT8
    small = scheme.group == SMALLEST_SYMMETRIC_GROUP and scheme.symmetric and scheme.bits in (4, 8)
    group = SMALLEST_SYMMETRIC_GROUP if small else _stored_group(scheme, columns)
    if not group:
        raise UnknownStorage(
            f"{scheme}: the kernels have groups of a multiple of 32, and symmetric ones of 16 in 4 or 8 bits"
        )
    five = scheme.bits == 5 and scheme.symmetric and group == 32
    if five:
        codes = Codes.INT5
    if scheme.scale_type == "F32" or group < 128:
        scales = FLOAT_SCALES[scheme.scale_type]
        return Storage(codes, scales, zeros=not scheme.symmetric or not (five or scheme.bits in (4, 8))), group
    return Storage(codes, Scales.WORDS, zeros=True), group


def _stored_group(scheme: Scheme, columns: int) -> int:
    """The largest of the kernels' groups that divides the scheme's own; 0 where there is none."""
    return next((each for each in GROUPS if scheme.group % each == 0), 128 if scheme.group >= columns else 0)


def middle(codes: Codes) -> int:
    """The zero point of symmetric codes."""
    return {Codes.INT8: 128, Codes.INT6: 32, Codes.INT5: 16}.get(codes, 8)


def tile_order(weight: Weight) -> NDArray[np.int64]:
    """For every row of every tile the matrix row that it holds, -1 where none: shape (tiles, 32)."""
    if not weight.gated:
        order = np.full(-(-weight.rows // TILE_ROWS) * TILE_ROWS, -1)
        order[: weight.rows] = np.arange(weight.rows)
        return order.reshape(-1, TILE_ROWS)
    half = weight.rows // 2
    part = np.full(-(-half // HALF_TILE) * HALF_TILE, -1)
    part[:half] = np.arange(half)
    gate = part.reshape(-1, HALF_TILE)
    return np.concatenate([gate, np.where(gate < 0, -1, gate + half)], axis=1)


@dataclass(frozen=True, slots=True)
class Block:
    """One block of every row: codes, and for each group the scale and the zero point, or factors of two levels."""

    codes: Bytes  # [rows, channels]
    scales: Floats  # [rows, groups]
    zeros: NDArray[np.int32]  # [rows, groups]
    minima: Floats | None = None  # [rows, groups]


def pack(weight: Weight, rows: QuantisedRows, order: NDArray[np.int32] | None = None) -> Bytes:
    """The packed bytes of a whole matrix of codes (rows stacked, gate over up)."""
    shape, places = geometry(weight), tile_order(weight)
    columns = []
    for start in range(0, weight.columns, shape.block):
        channels = min(shape.block, weight.columns - start)
        header = np.zeros((weight.rows, shape.header // TILE_ROWS), np.uint8)
        parts = _header(weight, rows, start, channels)
        codes = np.zeros((weight.rows, -(-channels // shape.unit) * shape.unit), np.uint8)
        codes[:, :channels] = rows.codes[:, start : start + channels]
        columns += [_in_tiles(part, places) for part in parts]
        used = sum(part.shape[1] * part.itemsize for part in parts)
        columns += [_in_tiles(header[:, used:], places)] if used < header.shape[1] else []
        columns.append(_in_tiles(_code_words(weight.stored.codes, codes), places))
    tiles = np.concatenate(columns, axis=1).reshape(-1)
    if not weight.ordered:
        return tiles
    assert order is not None
    return np.concatenate([tiles, _aligned(np.ascontiguousarray(order, np.int32).view(np.uint8))])


def unpack(weight: Weight, packed: Bytes) -> Floats:
    """The matrix that the packed bytes stand for, its columns in the order of the channels that they multiply."""
    blocks = list(unpack_blocks(weight, packed))
    result = np.concatenate([_values(weight, block) for block in blocks], axis=1)
    if not weight.ordered:
        return result
    natural = np.empty_like(result)
    natural[:, unpack_order(weight, packed)] = result
    return natural


def unpack_order(weight: Weight, packed: Bytes) -> NDArray[np.int32]:
    """The input channel of each column of a matrix in activation order."""
    at = len(tile_order(weight)) * geometry(weight).tile_bytes(weight.columns)
    return packed[at : at + 4 * weight.columns].view(np.int32)


def packed_size(weight: Weight) -> int:
    tiles = len(tile_order(weight)) * geometry(weight).tile_bytes(weight.columns)
    return tiles + (-(-4 * weight.columns // ALIGNMENT) * ALIGNMENT if weight.ordered else 0)


def unpack_blocks(weight: Weight, packed: Bytes) -> Iterator[Block]:
    """The blocks of a packed matrix."""
    shape, places, kind = geometry(weight), tile_order(weight), weight.stored.codes
    tiles = packed[: len(places) * shape.tile_bytes(weight.columns)].reshape(len(places), -1)
    at = 0
    for start in range(0, weight.columns, shape.block):
        channels = min(shape.block, weight.columns - start)
        end = at + shape.header

        def take(first: int, bytes: int, type: Any) -> NDArray[Any]:
            return _of_tiles(tiles[:, first : first + bytes], type, places)

        scales, zeros, minima = _read_header(weight, at, take)
        size = shape.code_bytes(channels)
        codes = _codes(kind, take(end, size, np.uint32))[:, :channels]
        count = -(-channels // weight.group)
        yield Block(codes, scales[:, :count], zeros[:, :count], None if minima is None else minima[:, :count])
        at = end + size


def _values(weight: Weight, block: Block) -> Floats:
    def spread(groups: NDArray[Any]) -> NDArray[Any]:
        return np.repeat(groups, weight.group, axis=1)[:, : block.codes.shape[1]]

    if weight.stored.codes in TABLES_OF:
        return np.asarray(TABLES_OF[weight.stored.codes][block.codes] * spread(block.scales))
    values = (block.codes.astype(np.int32) - spread(block.zeros)).astype(np.float32) * spread(block.scales)
    return np.asarray(values if block.minima is None else values - spread(block.minima))


def _in_tiles(words: NDArray[Any], places: NDArray[np.int64]) -> Bytes:
    """[rows, n] as lines (or half or quarter lines, by the size of a word) of the tiles: [tiles, bytes]."""
    padded = np.where((places < 0)[..., None], words.dtype.type(0), words[places])
    return np.ascontiguousarray(padded.swapaxes(1, 2)).view(np.uint8).reshape(len(places), -1)


def _of_tiles(lines: Bytes, type: Any, places: NDArray[np.int64]) -> NDArray[Any]:
    """The other way: [rows, n]."""
    words = np.ascontiguousarray(lines).view(type).reshape(len(places), -1, TILE_ROWS).swapaxes(1, 2)
    result = np.zeros((places.max() + 1, words.shape[2]), type)
    result[places[places >= 0]] = words[places >= 0]
    return result


def _aligned(raw: Bytes) -> Bytes:
    return np.pad(raw, (0, -raw.size % ALIGNMENT))


def _header(weight: Weight, rows: QuantisedRows, start: int, channels: int) -> list[NDArray[Any]]:
    """A block's header as words of 32 or 16 bits, or bytes, for each row, in the order of the lines."""
    storage, group = weight.stored, weight.group
    first, count = start // group, -(-channels // group)
    if storage.scales in (Scales.SIX_BITS, Scales.EIGHT_BITS, Scales.FOUR_BITS):
        assert rows.levels is not None
        return _two_levels(storage.scales, rows.levels, start // SUPER_BLOCK, slice(first, first + count))
    if storage.scales is Scales.FACTORS:
        assert rows.levels is not None and rows.levels.sub_minima is not None
        span, places = slice(first, first + count), 4 * np.arange(count, dtype=np.uint32)
        factors = rows.levels.sub_scales[:, span].astype(np.uint32) - np.uint32(LEAST_FACTOR)
        words = np.ascontiguousarray(rows.levels.super_scales[:, start // BLOCK], np.float32).view(np.uint32)
        words = words | np.bitwise_or.reduce(factors << places, axis=1)
        offsets = np.zeros((len(words), 4), np.uint8)
        offsets[:, :count] = rows.levels.sub_minima[:, span]
        return [words[:, None], offsets.view(np.uint32)]
    # A group's number in the source, whose groups may be larger.
    source = (start + group * np.arange(count)) // rows.scheme.group
    scales = np.ascontiguousarray(rows.scales[:, source], np.float32)
    zeros = rows.zeros[:, source]
    if storage.scales is Scales.WORDS:
        return [scales.view(np.uint32) | zeros]
    if storage.scales is Scales.E8M0:
        exponents = np.zeros((len(scales), 4), np.uint8)
        exponents[:, :count] = scales.view(np.uint32) >> 23
        return [exponents.view(np.uint32)]
    groups = BLOCK // group
    padded = np.zeros((len(scales), groups), np.float32)
    padded[:, :count] = scales
    parts: list[NDArray[Any]] = [padded]
    if storage.scales is Scales.HALF_MINIMA:
        assert rows.minima is not None
        minima = np.zeros((len(scales), groups), np.float32)
        minima[:, :count] = rows.minima[:, source]
        return [padded.astype(np.float16), minima.astype(np.float16)]
    if storage.scales is Scales.F16:
        parts = [padded.astype(np.float16)]
    elif storage.scales is Scales.BF16:
        parts = [(padded.view(np.uint32) >> 16).astype(np.uint16)]
    elif storage.codes is Codes.E2M1:
        parts = [padded * np.float32(0.5)]
    if storage.zeros:
        points = np.zeros((len(scales), 4 if groups == 4 else 2), np.uint8)
        points[:, :count] = zeros
        parts.append(points.view(np.uint32 if groups == 4 else np.uint16))
    return parts


def _two_levels(scales: Scales, levels: Levels, block: int, groups: slice) -> list[NDArray[Any]]:
    halves = levels.super_scales[:, block : block + 1].astype(np.float16)
    subs = levels.sub_scales[:, groups]
    if scales is Scales.EIGHT_BITS:
        factors = np.zeros((len(subs), 16), np.int8)
        factors[:, : subs.shape[1]] = subs
        return [factors.view(np.uint32), halves]
    pairs = np.zeros((len(subs), 2), np.float16)
    pairs[:, :1] = halves
    if scales is Scales.FOUR_BITS:
        assert levels.super_minima is not None and levels.sub_minima is not None
        pairs[:, 1] = levels.super_minima[:, block]
        both = np.zeros((len(subs), 16), np.uint8)
        both[:, : subs.shape[1]] = subs | levels.sub_minima[:, groups] << 4
        return [pairs.view(np.uint32), both.view(np.uint32)]
    six = np.zeros((len(subs), 16), np.uint8)
    six[:, : subs.shape[1]] = subs
    if levels.super_minima is not None and levels.sub_minima is not None:
        pairs[:, 1] = levels.super_minima[:, block]
        lows = levels.sub_minima[:, groups]
        six[:, 8 : 8 + lows.shape[1]] = lows
    packed = six[:, :12].copy()
    for part in range(3):
        packed[:, 4 * part : 4 * part + 4] |= (six[:, 12:] >> (2 * part) & 3) << 6
    return [pairs.view(np.uint32), packed.view(np.uint32)]


def _read_header(
    weight: Weight, at: int, take: Callable[[int, int, Any], NDArray[Any]]
) -> tuple[Floats, NDArray[np.int32], Floats | None]:
    """Scales, zero points and minima of a block's groups, missing ones included: what ``take`` gives from ``at`` on."""
    storage = weight.stored
    line = LINE_BYTES
    if storage.scales is Scales.WORDS:
        words = take(at, line, np.uint32)
        return (words & np.uint32(0xFFFFFF00)).view(np.float32), (words & 0xFF).astype(np.int32), None
    if storage.scales is Scales.SIX_BITS:
        pairs = take(at, line, np.uint32).view(np.float16).astype(np.float32)
        six = np.ascontiguousarray(take(at + line, 3 * line, np.uint32)).view(np.uint8)
        upper = six[:, :4] >> 6 | six[:, 4:8] >> 6 << 2 | six[:, 8:] >> 6 << 4
        six = np.concatenate([six & 63, upper], axis=1).astype(np.float32)
        return pairs[:, :1] * six[:, :8], np.zeros((len(six), 8), np.int32), pairs[:, 1:] * six[:, 8:]
    if storage.scales is Scales.FOUR_BITS:
        pairs = take(at, line, np.uint32).view(np.float16).astype(np.float32)
        nibbles = np.ascontiguousarray(take(at + line, 4 * line, np.uint32)).view(np.uint8)
        factors, lows = (nibbles & 15).astype(np.float32), (nibbles >> 4).astype(np.float32)
        return pairs[:, :1] * factors, np.zeros(factors.shape, np.int32), pairs[:, 1:] * lows
    if storage.scales is Scales.EIGHT_BITS:
        factors = np.ascontiguousarray(take(at, 4 * line, np.uint32)).view(np.int8).astype(np.float32)
        scales = take(at + 4 * line, line // 2, np.uint16).view(np.float16).astype(np.float32) * factors
        return scales, np.full(scales.shape, middle(storage.codes), np.int32), None
    if storage.scales is Scales.FACTORS:
        both = take(at, line, np.uint32)
        scale = (both & np.uint32(0xFFFF0000)).view(np.float32)
        factor = (both >> (4 * np.arange(4, dtype=np.uint32)) & np.uint32(15)).astype(np.float32) + np.float32(LEAST_FACTOR)
        offset = np.ascontiguousarray(take(at + line, line, np.uint32)).view(np.uint8).astype(np.float32)
        return scale * factor, np.zeros(factor.shape, np.int32), scale * offset
    if storage.scales is Scales.E8M0:
        exponents = np.ascontiguousarray(take(at, line, np.uint32)).view(np.uint8)
        scales = (exponents.astype(np.uint32) << 23).view(np.float32)
        return scales, np.zeros(scales.shape, np.int32), None
    groups = BLOCK // weight.group
    if storage.scales is Scales.HALF_MINIMA:
        both = take(at, groups * line, np.uint16).view(np.float16).astype(np.float32)
        scale, minimum = both[:, :groups], both[:, groups:]
        return scale, np.zeros(scale.shape, np.int32), minimum
    if storage.scales is Scales.F32:
        scales = take(at, groups * line, np.float32) * np.float32(2 if storage.codes is Codes.E2M1 else 1)
    else:
        halves = take(at, groups * line // 2, np.uint16)
        wide = (halves.astype(np.uint32) << 16).view(np.float32)
        scales = halves.view(np.float16).astype(np.float32) if storage.scales is Scales.F16 else wide
    if not storage.zeros:
        return scales, np.full(scales.shape, middle(storage.codes), np.int32), None
    type = np.uint32 if groups == 4 else np.uint16
    points = take(at + geometry(weight).scale_bytes, line if groups == 4 else line // 2, type)
    return scales, np.ascontiguousarray(points).view(np.uint8)[:, :groups].astype(np.int32), None


def _code_words(kind: Codes, codes: Bytes) -> Words:
    """[rows, channels] as [rows, lines]."""
    if kind in (Codes.INT8, Codes.E4M3):
        return codes.view(np.uint32)
    fours = codes.reshape(len(codes), -1, 4)
    if kind is Codes.INT2:
        shifted = fours.reshape(len(codes), -1, 4, 4) << np.array([0, 2, 4, 6], np.uint8)[:, None]
        return np.ascontiguousarray(np.bitwise_or.reduce(shifted, axis=2)).reshape(len(codes), -1).view(np.uint32)
    low = (fours[:, 0::2] & 15) | (fours[:, 1::2] & 15) << 4
    words = np.ascontiguousarray(low).reshape(len(codes), -1).view(np.uint32)
    if kind not in (Codes.INT5, Codes.INT6):
        return words
    eights, bits = (4, 1) if kind is Codes.INT5 else (2, 2)
    places = np.arange(2 * eights, dtype=np.uint8)[:, None] * np.uint8(bits)
    above = (fours >> 4).reshape(len(codes), -1, 2 * eights, 4) << places
    high = np.ascontiguousarray(np.bitwise_or.reduce(above, axis=2)).view(np.uint32)
    return np.concatenate([words.reshape(len(codes), -1, eights), high], axis=2).reshape(len(codes), -1)


def _codes(kind: Codes, words: Words) -> Bytes:
    """The other way."""
    rows = len(words)
    if kind in (Codes.INT8, Codes.E4M3):
        return np.ascontiguousarray(words).view(np.uint8)
    if kind is Codes.INT2:
        packed = np.ascontiguousarray(words).view(np.uint8).reshape(rows, -1, 1, 4)
        return (packed >> np.array([0, 2, 4, 6], np.uint8)[:, None] & np.uint8(3)).reshape(rows, -1)
    eights, bits = {Codes.INT5: (4, 1), Codes.INT6: (2, 2)}.get(kind, (1, 0))
    units = words.reshape(rows, -1, eights + (1 if bits else 0))
    fours = np.ascontiguousarray(units[:, :, :eights]).view(np.uint8).reshape(rows, -1, eights, 1, 4)
    codes = np.concatenate([fours & 15, fours >> 4], axis=3).reshape(rows, -1, 2 * eights, 4)
    if bits:
        high = np.ascontiguousarray(units[:, :, eights:]).view(np.uint8).reshape(rows, -1, 1, 4)
        places = np.arange(2 * eights, dtype=np.uint8)[:, None] * np.uint8(bits)
        codes = codes | (high >> places & ((1 << bits) - 1)) << 4
    return codes.reshape(rows, -1)
