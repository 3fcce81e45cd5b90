"""Tiny models on the native engine, and their logits."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from quantised_models import rewritten
from safetensors.torch import load_file
from tiny_models import tiny_model

from outrider.kernels.native import NativeFeed
from outrider.workers.engines.native import NativeEngine
from outrider.workers.messages import ModelSpec, Sampling
from outrider.workers.models.opening import open_model

TOKENS = [3, 141, 59, 26, 5, 35, 89, 79, 32, 38, 46, 26, 43, 38, 32, 79, 50, 28, 84, 197]
PRECISIONS = ("fp32", "bf16", "w8a8", "w4a8", "w4a8:g128")


def open_native(path: Path, precision: str, threads: int = 1) -> NativeEngine:
    engine = open_model(ModelSpec(str(path), "native", precision, threads=threads)).engine
    assert isinstance(engine, NativeEngine)
    return engine


def save_tiny(name: str, path: Path, seed: int = 0) -> Path:
    tiny_model(name, seed).save_pretrained(path)
    return path


def logits(engine: NativeEngine, tokens: Sequence[int] = TOKENS, pieces: Sequence[int] = ()) -> NDArray[np.float32]:
    """The logits after every token, fed whole, or in pieces of these sizes and the rest in one."""
    row = engine.model.open(Sampling(), len(tokens))
    parts, start = [], 0
    for size in [*pieces, len(tokens)]:
        part = tokens[start : start + size]
        if part:
            parts.append(engine.model.forward([NativeFeed(row, part, choose=0, logits=len(part))])[0].logits)
        start += len(part)
    engine.model.close_row(row)
    return np.concatenate(parts)


def pass_over_unused_keys(name: str, path: Path) -> None:
    """Saves a model whose last layers use an earlier layer's keys and values, and asserts that tensors for keys and values
    of their own, added to the checkpoint, change no logit."""
    save_tiny(name, path)
    found = logits(open_native(path, "bf16"))
    kept = load_file(path / "model.safetensors")
    own = [name for name in kept if ".layers.1.self_attn.k_" in name or ".layers.1.self_attn.v_" in name]
    rewritten(path, lambda tensors: tensors | {name.replace(".1.", ".3."): tensors[name].clone() for name in own})
    assert len(load_file(path / "model.safetensors")) == len(kept) + 3
    np.testing.assert_array_equal(logits(open_native(path, "bf16")), found)
