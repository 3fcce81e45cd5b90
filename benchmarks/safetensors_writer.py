"""Writes a checkpoint as sharded safetensors, one block of rows at a time: tensors of bf16 or fp16, bytes or integers."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

SHARD_BYTES = 4 << 30
BYTES = {"U8": 1, "BF16": 2, "F16": 2, "I64": 8}

Matrix = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Recipe:
    """A tensor to write. ``rows`` yields blocks of its rows in order: float32, which is rounded, or the stored type."""

    name: str
    shape: tuple[int, ...]
    rows: Callable[[], Iterator[NDArray[Any]]]
    dtype: str = "BF16"

    @property
    def size(self) -> int:
        return BYTES[self.dtype] * int(np.prod(self.shape, dtype=np.int64))


def write_sharded(out: Path, recipes: Sequence[Recipe]) -> None:
    shards = _divide(recipes)
    names = {}
    for number, shard in enumerate(shards, start=1):
        one = len(shards) == 1
        file = out / ("model.safetensors" if one else f"model-{number:05d}-of-{len(shards):05d}.safetensors")
        _write(file, shard)
        names |= {recipe.name: file.name for recipe in shard}
    if len(shards) > 1:
        total = sum(recipe.size for recipe in recipes)
        index = {"metadata": {"total_size": total}, "weight_map": names}
        (out / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n")


def _divide(recipes: Sequence[Recipe]) -> list[list[Recipe]]:
    shards: list[list[Recipe]] = [[]]
    size = 0
    for recipe in recipes:
        if shards[-1] and size + recipe.size > SHARD_BYTES:
            shards.append([])
            size = 0
        shards[-1].append(recipe)
        size += recipe.size
    return shards


def _write(file: Path, recipes: Sequence[Recipe]) -> None:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for recipe in recipes:
        header[recipe.name] = {"dtype": recipe.dtype, "shape": recipe.shape, "data_offsets": [end, end + recipe.size]}
        end += recipe.size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as stream:
        stream.write(struct.pack("<Q", len(text)) + text)
        for recipe in recipes:
            start = stream.tell()
            for block in recipe.rows():
                as_it_is = block.dtype in (np.uint16, np.uint8, np.int64)
                stream.write((block if as_it_is else to_bits(block, recipe.dtype)).data)
            if stream.tell() - start != recipe.size:
                raise AssertionError(f"{recipe.name}: {stream.tell() - start} bytes for shape {recipe.shape}")


def to_bits(values: Matrix, dtype: str) -> NDArray[np.uint16]:
    """Rounds to nearest, ties to even. By torch, since NumPy is a hundred times slower at subnormals of fp16."""
    kind = torch.float16 if dtype == "F16" else torch.bfloat16
    return torch.from_numpy(np.ascontiguousarray(values)).to(kind).view(torch.uint16).numpy()
