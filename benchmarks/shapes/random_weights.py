"""Weights of a given shape that mean nothing: what a pass costs does not depend on their values."""

from __future__ import annotations

import re
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
# Exponents of the powers of two that codes of MXFP4 are multiplied with: numbers of about that size.
LEAST_EXPONENT, MOST_EXPONENT = 117, 121
GROUP = 32
EXPERT = re.compile(r"(.*\.experts)\.\d+\.\w+\.\w+")


def random_recipes(config: dict[str, Any], dtype: str, seed: int) -> list[Recipe]:
    """Every tensor that the family's program names: matrices and biases near zero, gains near one."""
    # Experts' codes have no matrices of their own in this list.
    plain = {key: value for key, value in config.items() if key != "quantization_config"}
    program = build_program(plain, Format.BF16)
    sources = [tensor for weight in program.weights for tensor in weight.sources]
    tensors = {tensor.name: Tensor(tensor.name, tensor.stored or tensor.shape) for tensor in sources}
    generator = np.random.default_rng(seed)
    table = (generator.standard_normal(TABLE, dtype=np.float32) * np.float32(SPREAD)).reshape(1, -1)
    bits = to_bits(table, dtype)[0]
    if config["model_type"] != "gpt_oss":
        return [_recipe(tensor, bits, dtype, generator) for tensor in tensors.values()]
    layers = dict.fromkeys(found[1] for name in tensors if (found := EXPERT.fullmatch(name)))
    apart = [tensor for name, tensor in tensors.items() if not EXPERT.fullmatch(name)]
    experts, hidden, ffn = (config[key] for key in ("num_local_experts", "hidden_size", "intermediate_size"))
    recipes = [_recipe(tensor, bits, dtype, generator) for tensor in apart]
    for layer in layers:
        for name, rows, columns in ((f"{layer}.gate_up_proj", 2 * ffn, hidden), (f"{layer}.down_proj", hidden, ffn)):
            recipes += _in_mxfp4(name, experts, rows, columns, generator)
            recipes.append(_recipe(Tensor(f"{name}_bias", (experts, rows)), bits, dtype, generator))
    return recipes


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


def _in_mxfp4(name: str, experts: int, rows: int, columns: int, generator: np.random.Generator) -> list[Recipe]:
    groups = columns // GROUP

    def blocks() -> Iterator[NDArray[Any]]:
        for _ in range(experts):
            yield generator.integers(0, 256, rows * columns // 2, dtype=np.uint8)

    def scales() -> Iterator[NDArray[Any]]:
        for _ in range(experts):
            yield generator.integers(LEAST_EXPONENT, MOST_EXPONENT, rows * groups, dtype=np.uint8)

    return [
        Recipe(f"{name}_blocks", (experts, rows, groups, GROUP // 2), blocks, "U8"),
        Recipe(f"{name}_scales", (experts, rows, groups), scales, "U8"),
    ]
