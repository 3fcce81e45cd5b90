"""The packed weight formats: this file is their definition, and what the compiled packer is tested against.

A matrix is stored in tiles of 32 rows (outputs), one tile after the other; a tile is a sequence of lines of 32 words of 32
bits, one word for each of its rows. The last tile's missing rows are zero. Of a gated matrix (gate over up) a tile has 16
rows of the gate, then the same 16 rows of up.

- FP32: line c is column c.
- BF16: line c holds columns 2c (lower half of the word) and 2c + 1 (upper half).
- W4A8: for every group of channels one line of headers, then one line for every 8 channels: byte b of a word has channel b
  in its lower and channel b + 4 in its upper nibble. A header is the group's scale, an fp32 whose lower 8 bits are replaced
  by the zero point 0..15. A weight is (nibble - zero point) * scale. The last group may be shorter.
- W8A8: likewise with two lines for every 8 channels, channels 0..3 and 4..7; the zero point is always 128.

At group 128 that is 4.25 bits a weight for W4A8. Tables and vectors are plain rows of fp32 or bf16.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from outrider.kernels.program import Format, Program, Weight

TILE_ROWS = 32
HALF_TILE = 16
ALIGNMENT = 64
# Below this a group is as good as zero, and a division by its scale would overflow.
SMALLEST_SCALE = np.float32(1e-30)

Matrix = NDArray[np.float32]
Words = NDArray[np.uint32]


def to_bf16(x: Matrix) -> NDArray[np.uint16]:
    """To nearest, ties to even."""
    words = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((words + np.uint32(0x7FFF) + ((words >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)).astype(np.uint16)


def from_bf16(halves: NDArray[np.uint16]) -> Matrix:
    return (halves.astype(np.uint32) << np.uint32(16)).view(np.float32)


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


def quantise(rows: Matrix, format: Format, group: int) -> tuple[NDArray[np.uint8], Words]:
    """Unsigned weights [rows, columns] and headers [rows, groups]. Rounds to nearest; the range always contains zero."""
    groups = -(-rows.shape[1] // group)
    padded = np.zeros((rows.shape[0], groups * group), np.float32)
    padded[:, : rows.shape[1]] = rows
    blocks = padded.reshape(rows.shape[0], groups, group)
    low, high = np.minimum(blocks.min(axis=2), np.float32(0)), np.maximum(blocks.max(axis=2), np.float32(0))
    four = format is Format.W4A8
    wanted = (high - low) / np.float32(15) if four else np.maximum(high, -low) / np.float32(127)
    empty = ~(wanted > SMALLEST_SCALE)
    # Rounded upwards, so that the range still fits.
    words = (np.ascontiguousarray(wanted).view(np.uint32) + np.uint32(0xFF)) & np.uint32(0xFFFFFF00)
    words = np.where(empty, np.uint32(0), words)
    scale = np.where(empty, np.float32(1), words.view(np.float32))
    zero = np.clip(np.rint(-low / scale), 0, 15) if four else np.full_like(scale, 128)
    zero = np.where(empty, np.float32(0 if four else 128), zero).astype(np.float32)
    bounds = (0, 15) if four else (1, 255)
    values = np.clip(np.rint(blocks / scale[..., None]) + zero[..., None], *bounds)
    values = np.where(empty[..., None], zero[..., None], values)
    headers = words | zero.astype(np.uint32)
    return values.reshape(rows.shape[0], -1)[:, : rows.shape[1]].astype(np.uint8), headers


def pack(weight: Weight, matrix: Matrix) -> NDArray[np.uint8]:
    """The packed bytes of a whole weight (rows of a matrix stacked, gate over up)."""
    if weight.table:
        flat = np.ascontiguousarray(matrix, np.float32).reshape(-1)
        raw = (flat if weight.format is Format.FP32 else to_bf16(flat)).view(np.uint8)
        return np.pad(raw, (0, -raw.size % ALIGNMENT))
    order = tile_order(weight)
    tiles = np.where((order < 0)[..., None], np.uint32(0), _lines(weight, matrix)[order])
    return np.ascontiguousarray(tiles.swapaxes(1, 2)).view(np.uint8).reshape(-1)


def _lines(weight: Weight, matrix: Matrix) -> Words:
    """The words of every row, in the order of the lines: shape (rows, lines)."""
    rows, columns = matrix.shape
    if weight.format is Format.FP32:
        return np.ascontiguousarray(matrix, np.float32).view(np.uint32)
    if weight.format is Format.BF16:
        halves = np.zeros((rows, -(-columns // 2) * 2), np.uint16)
        halves[:, :columns] = to_bf16(matrix)
        return halves.view(np.uint32)
    values, headers = quantise(matrix, weight.format, weight.group)
    padded = np.zeros((rows, -(-columns // 8) * 8), np.uint8)
    padded[:, :columns] = values
    pieces = []
    for index, start in enumerate(range(0, columns, weight.group)):
        pieces.append(headers[:, index : index + 1])
        channels = padded[:, start : start + weight.group]
        if weight.format is Format.W4A8:
            eights = channels.reshape(rows, -1, 2, 4)
            channels = (eights[:, :, 0] | (eights[:, :, 1] << 4)).reshape(rows, -1)
        pieces.append(np.ascontiguousarray(channels).view(np.uint32))
    return np.concatenate(pieces, axis=1)


def unpack(weight: Weight, packed: NDArray[np.uint8]) -> Matrix:
    """The matrix that the packed bytes stand for."""
    if weight.table:
        fp32 = weight.format is Format.FP32
        flat = packed.view(np.float32) if fp32 else from_bf16(packed.view(np.uint16))
        return flat[: weight.rows * weight.columns].reshape(weight.rows, weight.columns)
    order = tile_order(weight)
    tiles = packed.view(np.uint32).reshape(order.shape[0], -1, TILE_ROWS).swapaxes(1, 2)
    lines = np.zeros((weight.rows, tiles.shape[2]), np.uint32)
    lines[order[order >= 0]] = tiles[order >= 0]
    if weight.format is Format.FP32:
        return lines.view(np.float32)
    if weight.format is Format.BF16:
        return from_bf16(lines.view(np.uint16))[:, : weight.columns]
    values, scales, zeros = split(weight, lines)
    return (values - zeros) * scales


def split(weight: Weight, lines: Words) -> tuple[Matrix, Matrix, Matrix]:
    """Unsigned weights, scales and zero points of integer lines, each spread to (rows, columns)."""
    values, scales, zeros = [], [], []
    line = 0
    for start in range(0, weight.columns, weight.group):
        channels = min(weight.group, weight.columns - start)
        header = np.repeat(lines[:, line : line + 1], channels, axis=1)
        scales.append((header & np.uint32(0xFFFFFF00)).view(np.float32))
        zeros.append((header & np.uint32(0xFF)).astype(np.float32))
        count = -(-channels // 8) * (1 if weight.format is Format.W4A8 else 2)
        body = np.ascontiguousarray(lines[:, line + 1 : line + 1 + count]).view(np.uint8)
        if weight.format is Format.W4A8:
            fours = body.reshape(body.shape[0], -1, 4)
            body = np.concatenate([fours & 15, fours >> 4], axis=2).reshape(body.shape[0], -1)
        values.append(body[:, :channels].astype(np.float32))
        line += 1 + count
    return np.concatenate(values, axis=1), np.concatenate(scales, axis=1), np.concatenate(zeros, axis=1)


def packed_size(weight: Weight) -> int:
    """Bytes of the packed form."""
    if weight.table:
        size = weight.rows * weight.columns * (4 if weight.format is Format.FP32 else 2)
        return size + -size % ALIGNMENT
    groups = -(-weight.columns // weight.group) if weight.group else 0
    eights = -(-weight.columns // 8)
    lines = {
        Format.FP32: weight.columns,
        Format.BF16: -(-weight.columns // 2),
        Format.W4A8: groups + eights,
        Format.W8A8: groups + 2 * eights,
    }[weight.format]
    return len(tile_order(weight)) * lines * TILE_ROWS * 4


def layout(program: Program) -> tuple[list[int], int]:
    """Where each weight lies in one piece of memory that holds them all, and that memory's size."""
    offsets: list[int] = []
    end = 0
    for weight in program.weights:
        offsets.append(end)
        size = packed_size(weight)
        end += size + -size % ALIGNMENT
    return offsets, end


def pack_program(program: Program, matrices: Sequence[Matrix]) -> NDArray[np.uint8]:
    """All weights of a program packed into one array, slowly: for tests and small models."""
    offsets, size = layout(program)
    # The array starts at a multiple of 64 bytes, as the kernels ask.
    raw = np.zeros(size + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    memory = raw[start : start + size]
    for weight, offset, matrix in zip(program.weights, offsets, matrices, strict=True):
        packed = pack(weight, matrix)
        memory[offset : offset + packed.size] = packed
    return memory
