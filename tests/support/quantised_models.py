"""Quantises tiny models and other checkpoints with the formats' own libraries."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tiny_models import tiny_model

from outrider.workers.models.model_info import find

HERE = Path(__file__).parent
# Groups of 32 divide all widths, and do not divide the vocabulary.
SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": False,
}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False, "desc_act": False}
Tensors = dict[str, torch.Tensor]


def save_small(path: Path, seed: int = 0, **changes: Any) -> Path:
    """Saves the plain checkpoint in bf16."""
    tiny_model("llama", seed, **(SMALL | changes)).to(torch.bfloat16).save_pretrained(path)
    return path


def copied_pocket(path: Path) -> Path:
    """A copy of the bundled target, which the test may change."""
    shutil.copytree(find("pocket"), path)
    return path


def packed_small(path: Path, kind: str, **settings: Any) -> Path:
    """The tiny Llama that auto-round has packed (make_format_fixtures.py): "awq" or "gptq"."""
    save_small(path)
    shutil.copy(HERE / f"tiny_{kind}.safetensors", path / "model.safetensors")
    set_config(path, dtype="float16", quantization_config=(AWQ if kind == "awq" else GPTQ) | settings)
    return path


def set_config(path: Path, **values: Any) -> None:
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def rewritten(path: Path, change: Callable[[Tensors], Tensors]) -> Path:
    """Replaces the tensors of the checkpoint by ``change(tensors)``."""
    save_file(
        {name: value.contiguous() for name, value in change(load_file(path / "model.safetensors")).items()},
        path / "model.safetensors",
    )
    return path


def is_linear(name: str) -> bool:
    return name.endswith(("_proj.weight", ".w1.weight", ".w2.weight", ".w3.weight", "_with_mqa.weight"))


def compressed(path: Path, *, format: str = "pack-quantized", activations: Any = None, **weights: Any) -> Path:
    """Quantises every linear layer of a plain checkpoint by rounding to nearest; compressed-tensors packs the codes."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams

    args = QuantizationArgs(**weights)
    scheme = QuantizationScheme(targets=["Linear"], weights=args, input_activations=activations)
    compressor = BaseCompressor.get_value_from_registry(format)

    def change(tensors: Tensors) -> Tensors:
        result: Tensors = {}
        for name, value in tensors.items():
            if not is_linear(name):
                result[name] = value
                continue
            low, high = extremes(value.float(), weights)
            scale, zero = calculate_qparams(low, high, args)
            parts = {"weight": value, "weight_scale": scale.to(value.dtype), "weight_zero_point": zero}
            module = name.removesuffix("weight")
            result |= {f"{module}{part}": each for part, each in compressor.compress(parts, scheme).items()}
        return result

    described = {"targets": ["Linear"], "weights": json.loads(args.model_dump_json()), "input_activations": activations}
    config = {"quant_method": "compressed-tensors", "format": format, "quantization_status": "compressed"}
    set_config(
        rewritten(path, change),
        quantization_config=config | {"config_groups": {"group_0": described}, "ignore": ["lm_head"]},
    )
    return path


def extremes(value: torch.Tensor, weights: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """The minimum and the maximum of the weights that share a scale."""
    if weights["strategy"] == "tensor":
        return value.min().reshape(1), value.max().reshape(1)
    if weights["strategy"] == "block":
        rows, columns = weights["block_structure"]
        blocks = value.unflatten(1, (-1, columns)).unflatten(0, (-1, rows))
        return blocks.amin(dim=(1, 3)), blocks.amax(dim=(1, 3))
    groups = value.reshape(value.shape[0], -1, weights.get("group_size") or value.shape[1])
    return groups.amin(dim=2), groups.amax(dim=2)


def block_fp8(path: Path, block: int = 32) -> Path:
    """fp8 as DeepSeek and Qwen publish it: a scale for each square block; the last blocks may be incomplete."""

    def change(tensors: Tensors) -> Tensors:
        result: Tensors = {}
        for name, value in tensors.items():
            if not is_linear(name):
                result[name] = value
                continue
            rows, columns = value.shape
            whole = torch.nn.functional.pad(value.float(), (0, -columns % block, 0, -rows % block))
            blocks = whole.unflatten(1, (-1, block)).unflatten(0, (-1, block))
            scale = blocks.abs().amax(dim=(1, 3), keepdim=True) / 448
            codes = (blocks / scale).flatten(0, 1).flatten(1, 2)[:rows, :columns]
            result[name] = codes.to(torch.float8_e4m3fn)
            result[f"{name}_scale_inv"] = scale[:, 0, :, 0]
        return result

    settings = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [block, block]}
    set_config(rewritten(path, change), quantization_config=settings | {"modules_to_not_convert": ["lm_head"]})
    return path
