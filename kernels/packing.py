"""The packed weight formats: this file is their definition, and what the compiled packer is tested against.

A matrix is stored in tiles of 32 rows (outputs), one tile after the other; a tile is a sequence of lines of 32 words of 32
bits, one word for each of its rows. The last tile's missing rows are zero. Of a gated matrix (gate over up) a tile has 16
rows of the gate, then the same 16 rows of up.

- FP32: line c is column c.
- BF16, FP16: line c holds columns 2c (lower half of the word) and 2c + 1 (upper half).
- Formats with codes (W4A8, W8A8, W4ABF16, W8AF32) store unsigned codes with a scale for every group of channels, in one of
  the ways that storage.py defines. Floats are rounded to the first of these, WORDS: (code - zero point) * scale, with codes
  of 4 bits and a zero point 0..15, or of 8 bits and one of 128. At group 128 that is 4.25 bits a weight, or 8.25. In groups
  of 32 codes of 4 bits have their scales in BF16 beside zero points: 4.75 bits. They can also be rounded to FACTORS, by a
  search: 4.5 bits.

Tables and vectors are plain rows of fp32, bf16 or fp16.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from outrider.kernels import storage
from outrider.kernels.program import FACTORS, INT4_GROUPS_OF_32, Codes, Format, Program, Scales, Weight
from outrider.kernels.quantised import Levels, QuantisedRows, Scheme
from outrider.kernels.storage import ALIGNMENT, BLOCK, BY_FACTORS, LEAST_FACTOR, MOST_FACTOR, TILE_ROWS, tile_order

# A group with a smaller scale is treated as zero, since dividing by the scale would overflow.
SMALLEST_SCALE = np.float32(1e-30)

# The values tried for the largest factor of a block's groups.
LARGEST_FACTORS = np.array([17, 16, 15], np.float32)
# The numbers of steps tried for a group's range.
TRIES = np.float32(14) + np.float32(0.2) * np.arange(11, dtype=np.float32)

Matrix = NDArray[np.float32]
Words = NDArray[np.uint32]


def to_bf16(x: Matrix) -> NDArray[np.uint16]:
    """To nearest, ties to even."""
    words = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((words + np.uint32(0x7FFF) + ((words >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)).astype(np.uint16)


def from_bf16(halves: NDArray[np.uint16]) -> Matrix:
    return (halves.astype(np.uint32) << np.uint32(16)).view(np.float32)


def to_halves(format: Format, x: Matrix) -> NDArray[np.uint16]:
    return to_bf16(x) if format is Format.BF16 else np.ascontiguousarray(x, np.float32).astype(np.float16).view(np.uint16)


def from_halves(format: Format, halves: NDArray[np.uint16]) -> Matrix:
    return from_bf16(halves) if format is Format.BF16 else halves.view(np.float16).astype(np.float32)


def quantise(rows: Matrix, codes: Codes, group: int, scales: Scales = Scales.WORDS) -> QuantisedRows:
    """Round to nearest, with scales as WORDS or BF16 store them; each group's range contains zero."""
    groups = -(-rows.shape[1] // group)
    padded = np.zeros((rows.shape[0], groups * group), np.float32)
    padded[:, : rows.shape[1]] = rows
    blocks = padded.reshape(rows.shape[0], groups, group)
    low, high = np.minimum(blocks.min(axis=2), np.float32(0)), np.maximum(blocks.max(axis=2), np.float32(0))
    four = codes is Codes.INT4
    wanted = (high - low) / np.float32(15) if four else np.maximum(high, -low) / np.float32(127)
    empty = ~(wanted > SMALLEST_SCALE)
    # Scales are rounded up, so that the range still fits.
    dropped = np.uint32(0xFF if scales is Scales.WORDS else 0xFFFF)
    words = (np.ascontiguousarray(wanted).view(np.uint32) + dropped) & ~dropped
    words = np.where(empty, np.uint32(0), words)
    scale = np.where(empty, np.float32(1), words.view(np.float32))
    zero = np.clip(np.rint(-low / scale), 0, 15) if four else np.full_like(scale, 128)
    zero = np.where(empty, np.float32(0 if four else 128), zero).astype(np.float32)
    bounds = (0, 15) if four else (1, 255)
    values = np.clip(np.rint(blocks / scale[..., None]) + zero[..., None], *bounds)
    values = np.where(empty[..., None], zero[..., None], values)
    scale_type = "F32" if scales is Scales.WORDS else "BF16"
    scheme = Scheme("rounded to nearest", 4 if four else 8, group, symmetric=False, scale_type=scale_type)
    flat = values.reshape(rows.shape[0], -1)[:, : rows.shape[1]].astype(np.uint8)
    return QuantisedRows(scheme, flat, words.view(np.float32), zero.astype(np.uint8))


def quantise_factors(rows: Matrix) -> QuantisedRows:
    """Four bits in groups of 32, as (code * factor - offset) * scale, with one scale for 128 channels.

    Each group's scale and minimum are fitted first. Then the block's scale is chosen among those for which the largest
    factor is one of LARGEST_FACTORS: the one with the smallest error. A weight's squared error counts weight² +
    mean(weight²) of its group.
    """
    count, columns = rows.shape
    groups, blocks = -(-columns // 32), -(-columns // BLOCK)
    padded = np.zeros((count, blocks * BLOCK), np.float32)
    padded[:, :columns] = rows
    x = padded.reshape(count, blocks, 4, 32)
    scales, minima = (each.reshape(count, blocks, 4) for each in _fit(padded.reshape(count, -1, 32)))
    largest: Matrix = np.abs(x).max(axis=(2, 3))
    unit: Matrix = np.where(largest > 0, largest, np.float32(1))
    z: Matrix = np.divide(x, unit[..., None, None], dtype=np.float32)
    weight: Matrix = (_lane_sum(z * z) / np.float32(32))[..., None] + z * z
    least: Matrix = np.full((count, blocks), np.inf, np.float32)
    scale: Matrix = np.zeros((count, blocks), np.float32)
    factors: Matrix = np.full(scales.shape, LEAST_FACTOR, np.float32)
    offsets: Matrix = np.zeros(scales.shape, np.float32)
    codes: Matrix = np.zeros(x.shape, np.float32)
    for most in LARGEST_FACTORS:
        wanted: Matrix = np.maximum(scales.max(axis=2) / most, minima.max(axis=2) / np.float32(255))
        there = wanted > SMALLEST_SCALE
        tried: Matrix = np.where(there, from_bf16(to_bf16(wanted)), np.float32(1))
        factor: Matrix = np.clip(np.rint(scales / tried[..., None]), LEAST_FACTOR, MOST_FACTOR)
        offset: Matrix = np.clip(np.rint(minima / tried[..., None]), 0, 255)
        code: Matrix = np.rint((x / tried[..., None, None] + offset[..., None]) / factor[..., None])
        code = np.clip(code, 0, 15)
        gone: Matrix = (code * factor[..., None] - offset[..., None]) * (tried / unit)[..., None, None] - z
        errors, error = _lane_sum(weight * (gone * gone)), np.zeros_like(least)
        for group in range(4):
            error = error + errors[..., group]
        better = there & (error < least)
        least, scale = np.where(better, error, least), np.where(better, tried, scale)
        factors = np.where(better[..., None], factor, factors)
        offsets = np.where(better[..., None], offset, offsets)
        codes = np.where(better[..., None, None], code, codes)
    by_group: Matrix = np.repeat(scale, 4, axis=1)[:, :groups]
    factors, offsets = (each.reshape(count, -1)[:, :groups] for each in (factors, offsets))
    flat = codes.reshape(count, -1)[:, :columns].astype(np.uint8)
    levels = Levels(scale, factors.astype(np.int16), sub_minima=offsets.astype(np.int16))
    zeros = np.zeros((count, groups), np.uint8)
    return QuantisedRows(BY_FACTORS, flat, by_group * factors, zeros, by_group * offsets, levels)


def _fit(blocks: Matrix) -> tuple[Matrix, Matrix]:
    """Scales and minima of groups [..., 32]."""
    low, high = np.minimum(blocks.min(axis=2), np.float32(0)), np.maximum(blocks.max(axis=2), np.float32(0))
    unit = (high - low) / np.float32(15)
    empty = ~(unit > SMALLEST_SCALE)
    unit = np.where(empty, np.float32(1), unit)
    y, start = (blocks / unit[..., None]).astype(np.float32), low / unit
    weight: Matrix = ((_lane_sum(y * y) / np.float32(32))[..., None] + y * y).astype(np.float32)
    sw, sx = _lane_sum(weight), _lane_sum(weight * y)
    best = np.full_like(unit, -np.inf)
    best_scale, best_minimum = np.ones_like(unit), -start
    for steps in TRIES:
        codes = np.clip(np.rint((y - start[..., None]) * (steps / np.float32(15))), 0, 15).astype(np.float32)
        weighed = weight * codes
        sl, sl2, sxl = _lane_sum(weighed), _lane_sum(weighed * codes), _lane_sum(weighed * y)
        determinant = sw * sl2 - sl * sl
        solvable = determinant > 0
        determinant = np.where(solvable, determinant, np.float32(1))
        s, m = (sw * sxl - sx * sl) / determinant, (sl * sxl - sl2 * sx) / determinant
        s = np.where(m < 0, sxl / np.where(sl2 > 0, sl2, np.float32(1)), s)
        m = np.where(m < 0, np.float32(0), m)
        # The squared error of weights of 0, minus that of this fit.
        gain = np.float32(2) * (s * sxl - m * sx) - (s * s * sl2 - np.float32(2) * s * m * sl + m * m * sw)
        better = solvable & (gain > best) & (s > 0)
        best = np.where(better, gain, best)
        best_scale, best_minimum = np.where(better, s, best_scale), np.where(better, m, best_minimum)
    nothing = np.float32(0)
    return np.where(empty, nothing, best_scale * unit), np.where(empty, nothing, best_minimum * unit)


def _lane_sum(values: Matrix) -> Matrix:
    """The sum over the last axis in the kernels' order: sixteen lanes, then folded in halves."""
    lanes = values.reshape(*values.shape[:-1], -1, 16)
    total = np.zeros((*lanes.shape[:-2], 16), np.float32)
    for index in range(lanes.shape[-2]):
        total = total + lanes[..., index, :]
    while total.shape[-1] > 1:
        half = total.shape[-1] // 2
        total = total[..., :half] + total[..., half:]
    return np.asarray(total[..., 0])


def pack(weight: Weight, matrix: Matrix) -> NDArray[np.uint8]:
    """The packed bytes of a whole weight (rows of a matrix stacked, gate over up)."""
    if weight.table:
        flat = np.ascontiguousarray(matrix, np.float32).reshape(-1)
        raw = (flat if weight.format is Format.FP32 else to_halves(weight.format, flat)).view(np.uint8)
        return np.pad(raw, (0, -raw.size % ALIGNMENT))
    if weight.stored.codes is not Codes.NONE:
        if weight.stored == FACTORS:
            return storage.pack(weight, quantise_factors(matrix))
        if weight.stored.scales is not Scales.WORDS and weight.stored != INT4_GROUPS_OF_32:
            raise ValueError(f"floats are not rounded to {weight.stored}")
        return storage.pack(weight, quantise(matrix, weight.stored.codes, weight.group, weight.stored.scales))
    order = tile_order(weight)
    tiles = np.where((order < 0)[..., None], np.uint32(0), _lines(weight, matrix)[order])
    return np.ascontiguousarray(tiles.swapaxes(1, 2)).view(np.uint8).reshape(-1)


def _lines(weight: Weight, matrix: Matrix) -> Words:
    """The words of every row, in the order of the lines: shape (rows, lines)."""
    rows, columns = matrix.shape
    if weight.format is Format.FP32:
        return np.ascontiguousarray(matrix, np.float32).view(np.uint32)
    halves = np.zeros((rows, -(-columns // 2) * 2), np.uint16)
    halves[:, :columns] = to_halves(weight.format, matrix)
    return halves.view(np.uint32)


def unpack(weight: Weight, packed: NDArray[np.uint8]) -> Matrix:
    """The matrix that the packed bytes stand for."""
    if weight.table:
        fp32 = weight.format is Format.FP32
        flat = packed.view(np.float32) if fp32 else from_halves(weight.format, packed.view(np.uint16))
        return flat[: weight.rows * weight.columns].reshape(weight.rows, weight.columns)
    if weight.stored.codes is not Codes.NONE:
        numbers = storage.unpack(weight, packed)
        return numbers if weight.format.integer else from_bf16(to_bf16(numbers))
    order = tile_order(weight)
    tiles = packed.view(np.uint32).reshape(order.shape[0], -1, TILE_ROWS).swapaxes(1, 2)
    lines = np.zeros((weight.rows, tiles.shape[2]), np.uint32)
    lines[order[order >= 0]] = tiles[order >= 0]
    if weight.format is Format.FP32:
        return lines.view(np.float32)
    return from_halves(weight.format, lines.view(np.uint16))[:, : weight.columns]


def packed_size(weight: Weight) -> int:
    """Bytes of the packed form."""
    if weight.table:
        size = weight.rows * weight.columns * (4 if weight.format is Format.FP32 else 2)
        return size + -size % ALIGNMENT
    if weight.stored.codes is not Codes.NONE:
        return storage.packed_size(weight)
    lines = weight.columns if weight.format is Format.FP32 else -(-weight.columns // 2)
    return len(tile_order(weight)) * lines * TILE_ROWS * 4


def weight_offsets(program: Program) -> tuple[list[int], int]:
    """The offset of each weight in one piece of memory for all of them, and the size of that memory."""
    offsets: list[int] = []
    end = 0
    for weight in program.weights:
        offsets.append(end)
        size = packed_size(weight)
        end += size + -size % ALIGNMENT
    return offsets, end
