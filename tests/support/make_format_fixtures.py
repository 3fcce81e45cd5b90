"""Writes format_fixtures.safetensors: words of random bits, and the weights that auto-round's layers dequantise from them;
and tiny models whose layers auto-round packed (tiny_awq.safetensors, tiny_gptq.safetensors).

    pip install --no-deps auto-round accelerate py-cpuinfo     # 0.16.1 made what is checked in
    cd tests/support && python make_format_fixtures.py

A layer of the library is fed an identity matrix, so its output is its weights, [inputs, outputs] in fp16.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from auto_round.export.export_to_awq.utils import WQLinear_GEMM, dequantize_gemm
from auto_round_extension.torch.qlinear_torch import QuantLinear as SecondVersion
from auto_round_extension.torch.qlinear_torch_zp import QuantLinear as FirstVersion
from quantised_models import SMALL
from safetensors.torch import save_file
from tiny_models import tiny_model

INPUTS, OUTPUTS, GROUP = 128, 32, 32
OUT = Path(__file__).with_name("format_fixtures.safetensors")


def words(*shape: int) -> torch.Tensor:
    return torch.randint(-(1 << 31), 1 << 31, shape, dtype=torch.int64).to(torch.int32)


def scales() -> torch.Tensor:
    return (torch.rand(INPUTS // GROUP, OUTPUTS) * 0.1 + 0.001).half()


def awq() -> dict[str, torch.Tensor]:
    parts = {"qweight": words(INPUTS, OUTPUTS // 8), "qzeros": words(INPUTS // GROUP, OUTPUTS // 8), "scales": scales()}
    expected = dequantize_gemm(parts["qweight"], parts["qzeros"], parts["scales"], 4, GROUP)
    return {f"awq.{name}": value for name, value in (parts | {"expected": expected}).items()}


def gptq(name: str, kind: Any, bits: int, ordered: bool) -> dict[str, torch.Tensor]:
    layer = kind(bits, GROUP, INPUTS, OUTPUTS, bias=False, g_idx=True)
    in_word = 32 // bits
    layer.qweight = words(INPUTS // in_word, OUTPUTS)
    zeros = torch.randint(0, (1 << bits) - 1, (INPUTS // GROUP, OUTPUTS // in_word, in_word))
    # The largest zero point is left out: libraries differ in the result of adding 1 to it.
    layer.qzeros = (zeros << (bits * torch.arange(in_word))).sum(dim=2).to(torch.int64)
    layer.qzeros = torch.where(layer.qzeros >= 1 << 31, layer.qzeros - (1 << 32), layer.qzeros).to(torch.int32)
    layer.scales = scales()
    groups = torch.arange(INPUTS, dtype=torch.int32) // GROUP
    layer.g_idx = groups[torch.randperm(INPUTS)] if ordered else groups
    expected = layer(torch.eye(INPUTS)).half()
    parts = {"qweight": layer.qweight, "qzeros": layer.qzeros, "scales": layer.scales, "g_idx": layer.g_idx}
    return {f"{name}.{part}": value.contiguous() for part, value in (parts | {"expected": expected}).items()}


def model(kind: str) -> dict[str, torch.Tensor]:
    """The tensors of a tiny Llama whose linear layers the library packed with asymmetric codes."""
    tensors: dict[str, torch.Tensor] = {}
    for name, parameter in tiny_model("llama", **SMALL).state_dict().items():
        module = name.removesuffix(".weight")
        if not module.endswith("_proj"):
            tensors[name] = parameter.half()
            continue
        layer = torch.nn.Linear(parameter.shape[1], parameter.shape[0], bias=False)
        layer.weight.data = parameter.float()
        grouped = layer.weight.data.reshape(parameter.shape[0], -1, GROUP)
        low, high = grouped.amin(dim=2).clamp(max=0), grouped.amax(dim=2).clamp(min=0)
        scale = ((high - low) / 15).half().float()
        # GPTQ's version 1 cannot store a zero point of 0.
        zero = (-low / scale).round().clamp(1, 15)
        if kind == "awq":
            packed = WQLinear_GEMM.from_linear(layer, 4, GROUP, scales=scale.t().contiguous(), zeros=zero.t().contiguous())
        else:
            packed = FirstVersion(4, GROUP, parameter.shape[1], parameter.shape[0], bias=False, g_idx=True)
            packed.pack(layer, scale, zero)
        tensors |= {f"{module}.{part}": value for part, value in packed.state_dict().items() if value is not None}
    return tensors


if __name__ == "__main__":
    torch.manual_seed(0)
    for kind in ("awq", "gptq"):
        save_file(
            {name: value.contiguous() for name, value in model(kind).items()}, OUT.with_name(f"tiny_{kind}.safetensors")
        )
    tensors = awq()
    for bits in (4, 8):
        tensors |= gptq(f"gptq-v1-{bits}", FirstVersion, bits, ordered=False)
        tensors |= gptq(f"gptq-v2-{bits}", SecondVersion, bits, ordered=False)
    tensors |= gptq("gptq-v1-4-ordered", FirstVersion, 4, ordered=True)
    tensors |= gptq("gptq-v2-8-ordered", SecondVersion, 8, ordered=True)
    save_file({name: value.contiguous() for name, value in tensors.items()}, OUT)
