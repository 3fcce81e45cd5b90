"""Small random programs whose matrices are stored as codes, one for each scheme of quantised checkpoints."""

from dataclasses import replace

import numpy as np
from kernel_models import Packed, Shape, build, random_matrices
from quantised_rows import random_rows

from outrider.kernels import packing, storage
from outrider.kernels.program import Format
from outrider.kernels.quantised import Scheme

ODD = Shape(width=352, heads=22, kv_heads=22, inner=200, layers=1)
WHOLE = Shape(width=256, heads=8, kv_heads=4, inner=512, layers=1, vocabulary=90)


def model_of(scheme: Scheme, format: Format, ordered: bool = False) -> tuple[Shape, Packed]:
    shape = WHOLE if scheme.super_group == 256 or scheme.group > 128 else ODD
    program = build(shape, format)
    generator = np.random.default_rng(11)
    weights, pieces = [], []
    for weight, matrix in zip(program.weights, random_matrices(program), strict=True):
        if weight.table:
            weights.append(weight)
            pieces.append(packing.pack(weight, matrix))
            continue
        kept, group = storage.storage_for(scheme, weight.columns)
        weight = replace(weight, storage=kept, group=group, ordered=ordered)
        order = generator.permutation(weight.columns).astype(np.int32) if ordered else None
        rows = random_rows(scheme, weight.rows, weight.columns, len(weights))
        weights.append(weight)
        pieces.append(storage.pack(weight, rows, order))
    program = replace(program, weights=tuple(weights))
    offsets, size = packing.weight_offsets(program)
    raw = np.zeros(size + packing.ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % packing.ALIGNMENT
    memory = raw[start : start + size]
    for offset, piece in zip(offsets, pieces, strict=True):
        memory[offset : offset + piece.size] = piece
    return shape, Packed(program, memory)
