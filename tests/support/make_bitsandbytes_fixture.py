"""Writes bitsandbytes_fixtures.safetensors: matrices that bitsandbytes quantised, and its dequantised weights; and tiny
models that transformers saved with it, and their logits.

    pip install --no-deps bitsandbytes accelerate     # 0.50.2 made what is checked in
    cd tests/support && python make_bitsandbytes_fixture.py
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from bitsandbytes import functional
from quantised_models import SMALL
from safetensors.torch import load_file, save_file
from tiny_models import tiny_model
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

OUT = Path(__file__).with_name("bitsandbytes_fixtures.safetensors")
ROWS, COLUMNS = 24, 128
TOKENS = [3, 1, 4, 1, 5, 9, 2, 6]
MODELS: dict[str, dict[str, Any]] = {
    "nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
    "int8": {"load_in_8bit": True, "llm_int8_threshold": 0.0},
}


def four_bits(kind: str, nested: bool) -> dict[str, torch.Tensor]:
    weights = torch.randn(ROWS, COLUMNS) * 0.05
    packed, state = functional.quantize_4bit(weights, blocksize=64, compress_statistics=nested, quant_type=kind)
    parts = {"weight": packed} | {f"weight.{name}": value for name, value in state.as_dict(packed=True).items()}
    return parts | {"expected": functional.dequantize_4bit(packed, state)}


def eight_bits() -> dict[str, torch.Tensor]:
    codes, largest, _ = functional.int8_vectorwise_quant((torch.randn(ROWS, COLUMNS) * 0.05).half())
    return {"weight": codes, "SCB": largest, "expected": functional.int8_vectorwise_dequant(codes, largest)}


def model(settings: dict[str, Any]) -> dict[str, torch.Tensor]:
    with tempfile.TemporaryDirectory() as folder:
        tiny_model("llama", **SMALL).save_pretrained(f"{folder}/plain")
        config = BitsAndBytesConfig(**settings)
        found = AutoModelForCausalLM.from_pretrained(f"{folder}/plain", quantization_config=config, device_map="cpu")
        found.save_pretrained(f"{folder}/quantised")
        with torch.no_grad():
            logits = found(torch.tensor([TOKENS])).logits[0].float()
        return load_file(f"{folder}/quantised/model.safetensors") | {"expected": logits}


def main() -> None:
    torch.manual_seed(0)
    found = {f"{kind}.{nested}": four_bits(kind, nested) for kind in ("nf4", "fp4") for nested in (False, True)}
    found |= {"int8": eight_bits()} | {f"model {name}": model(settings) for name, settings in MODELS.items()}
    tensors = {f"{name}/{part}": value.contiguous() for name, parts in found.items() for part, value in parts.items()}
    save_file(tensors, OUT)


if __name__ == "__main__":
    main()
