"""Weights of a given shape that mean nothing: what a pass costs does not depend on their values."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors_writer import Recipe, to_bits

from outrider.kernels.program import Format, Tensor
from outrider.workers.models.families import build_program

TABLE = 1 << 22
BLOCK_VALUES = 1 << 21
# What OPT and GPTBigCode begin their training from.
SPREAD = 0.02


def random_recipes(config: dict[str, Any], dtype: str, seed: int) -> list[Recipe]:
    """Every tensor that the family's program names: matrices and biases near zero, gains near one."""
    program = build_program(config, Format.BF16)
    tensors = {tensor.name: Tensor(tensor.name, tensor.shape) for w in program.weights for tensor in w.sources}
    generator = np.random.default_rng(seed)
    table = (generator.standard_normal(TABLE, dtype=np.float32) * np.float32(SPREAD)).reshape(1, -1)
    bits = to_bits(table, dtype)[0]
    return [_recipe(tensor, bits, dtype, generator) for tensor in tensors.values()]


def _recipe(tensor: Tensor, bits: NDArray[np.uint16], dtype: str, generator: np.random.Generator) -> Recipe:
    gain = len(tensor.shape) == 1 and tensor.name.endswith("weight")

    def rows() -> Iterator[NDArray[Any]]:
        if gain:
            yield 1 + np.float32(SPREAD) * generator.standard_normal(tensor.shape, dtype=np.float32)
            return
        left = int(np.prod(tensor.shape, dtype=np.int64))
        while left:
            count = min(left, BLOCK_VALUES)
            start = int(generator.integers(0, TABLE - count + 1))
            yield bits[start : start + count]
            left -= count

    return Recipe(tensor.name, tensor.shape, rows, dtype)
