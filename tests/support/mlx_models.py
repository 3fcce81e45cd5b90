"""Tiny models in MLX's layout, by a second implementation of it (mlx_fixtures.safetensors is from the library itself)."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from quantised_families import Layout, Packed, quantised, sizes_of, usual
from quantised_models import Tensors, rewritten, set_config
from tiny_models import tiny_model

from outrider.kernels.quantised import E2M1

MODES = {"mxfp4": (4, 32), "nvfp4": (4, 16), "mxfp8": (8, 32)}


def words(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Packs each row of codes without gaps into 32-bit words, the first code in the lowest bits."""
    places = torch.arange(bits)
    taken = ((codes[..., None] >> places) & 1).to(torch.uint8).flatten(1)
    return torch.from_numpy(np.packbits(taken.numpy(), axis=1, bitorder="little").view(np.uint32))


def affine(bits: int, group: int = 32, dtype: torch.dtype = torch.bfloat16) -> Callable[[str, torch.Tensor], Packed]:
    """Affine quantisation as in MLX: zero and the end of a group that is farther from zero are represented exactly, so
    scales may be negative."""

    def pack(module: str, matrix: torch.Tensor) -> Packed:
        groups, most = matrix.unflatten(1, (-1, group)), (1 << bits) - 1
        low, high = groups.amin(2), groups.amax(2)
        lower = low.abs() > high.abs()
        scales = ((high - low) / most).clamp(min=1e-7)
        scales, edge = torch.where(lower, scales, -scales), torch.where(lower, low, high)
        steps = (edge / scales).round()
        scales = torch.where(steps != 0, edge / steps, scales).to(dtype)
        biases = torch.where(steps == 0, 0, edge).to(dtype)
        scale, bias = scales.float()[..., None], biases.float()[..., None]
        codes = ((groups - bias) / scale).round().clamp(0, most)
        parts = {"weight": words(codes.flatten(1).long(), bits), "scales": scales, "biases": biases}
        return parts, (codes * scale + bias).flatten(1)

    return pack


def of_floats(mode: str) -> Callable[[str, torch.Tensor], Packed]:
    bits, group = MODES[mode]

    def pack(module: str, matrix: torch.Tensor) -> Packed:
        groups = matrix.unflatten(1, (-1, group))
        largest = groups.abs().amax(2) / (448 if bits == 8 else 6)
        if mode == "nvfp4":
            stored = largest.to(torch.float8_e4m3fn)
            scales, stored = stored.float(), stored.view(torch.uint8)
        else:
            exponents = largest.clamp(min=1e-30).log2().ceil().clamp(-126, 127)
            scales, stored = exponents.exp2(), (exponents + 127).to(torch.uint8)
        apart = groups / scales.clamp(min=1e-30)[..., None]
        if bits == 8:
            values = apart.to(torch.float8_e4m3fn)
            codes, numbers = values.view(torch.uint8), values.float()
        else:
            of_values = torch.from_numpy(E2M1)
            codes = (apart[..., None] - of_values).abs().argmin(-1)
            numbers = of_values[codes]
        return {"weight": words(codes.flatten(1), bits), "scales": stored}, (numbers * scales[..., None]).flatten(1)

    return pack


SINGLE = re.compile(r"(.*?)(\.experts)\.(\d+)\.(\w+)\.(\w+)")
TWO = {"up_proj": "fc1", "down_proj": "fc2"}
OURS = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}


WHOLE_NORMS = (
    "input_layernorm.weight",
    "post_attention_layernorm.weight",
    "model.norm.weight",
    "q_norm.weight",
    "k_norm.weight",
)


def as_mlx_has_it(name: str, tensors: Tensors) -> Tensors:
    """The tensors as mlx-lm's conversion names and changes them, for the tiny model ``name``."""
    experts = "experts" if name in ("dots1", "afmoe") else "switch_mlp"
    found, apart = {}, {}
    for key, value in tensors.items():
        single = SINGLE.fullmatch(key)
        if single is not None:
            block, _, number, matrix, part = single.groups()
            matrix = TWO[matrix] if name.startswith("nemotron-h") else matrix
            apart.setdefault(f"{block}.{experts}.{OURS.get(matrix, matrix)}.{part}", {})[int(number)] = value
        elif key.endswith(("conv.conv.weight", "conv1d.weight")):
            found[key] = value.transpose(1, 2)
        elif name == "lfm2-moe" and ".feed_forward.w" in key:
            block, _, rest = key.partition(".feed_forward.")
            found[f"{block}.feed_forward.{OURS[rest[:2]]}{rest[2:]}"] = value
        elif name == "granite-mamba" and ".shared_mlp." in key:
            block, _, rest = key.partition(".shared_mlp.")
            parts = value.chunk(2) if rest.startswith("input") else [value]
            names = ("gate_proj", "up_proj") if rest.startswith("input") else ("down_proj",)
            found |= {f"{block}.mlp.{each}.{rest.partition('.')[2]}": part for each, part in zip(names, parts, strict=True)}
        elif name == "qwen3-next" and key.endswith(WHOLE_NORMS):
            found[key] = value + 1
        else:
            found[key] = value
    stacked = {key: torch.stack([values[each] for each in sorted(values)]) for key, values in apart.items()}
    return found | stacked


def by_heads(model: Path, pack: Callable[[str, torch.Tensor], Packed] | None) -> None:
    """Replaces kv_b_proj by ``embed_q`` and ``unembed_out``, each with the matrices of all heads in one tensor.

    ``pack`` quantises these, and the plain checkpoint gets the dequantised weights.
    """
    config = json.loads((model / "config.json").read_text())
    plain, value = config["qk_nope_head_dim"], config["v_head_dim"]
    numbers: Tensors = {}

    def change(tensors: Tensors) -> Tensors:
        found: Tensors = {}
        for name, tensor in tensors.items():
            if not name.endswith(".kv_b_proj.weight"):
                found[name] = tensor
                continue
            block, of_numbers = name.removesuffix(".kv_b_proj.weight"), []
            made: dict[str, list[torch.Tensor]] = {}
            for head in tensor.float().unflatten(0, (-1, plain + value)):
                of_head = []
                for kind, matrix in (("embed_q", head[:plain].T.contiguous()), ("unembed_out", head[plain:])):
                    parts, stands_for = ({"weight": matrix}, matrix) if pack is None else pack("", matrix)
                    of_head.append(stands_for.T if kind == "embed_q" else stands_for)
                    for part, each in parts.items():
                        made.setdefault(f"{block}.{kind}.{part}", []).append(each)
                of_numbers += of_head
            found |= {name: torch.stack(each) for name, each in made.items()}
            numbers[name] = torch.cat(of_numbers)
        return found

    rewritten(model, change)
    rewritten(model.with_name("plain"), lambda tensors: tensors | numbers)


def mlx_model(
    path: Path,
    name: str,
    pack: Callable[[str, torch.Tensor], Packed],
    settings: dict[str, Any],
    chosen: Callable[[str], bool] = usual,
    changes: dict[str, Any] | None = None,
) -> Path:
    """Writes the MLX checkpoint, and beside it as "plain" the dequantised weights under transformers' names."""
    model = tiny_model(name, **(sizes_of(name) | (changes or {})))
    model.save_pretrained(path / "model")
    assert quantised(path / "model", path / "plain", Layout(pack, {}), chosen)
    rewritten(path / "model", partial(as_mlx_has_it, name))
    set_config(path / "model", quantization=settings, quantization_config=settings)
    return path / "model"
