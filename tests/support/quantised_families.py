"""Quantised checkpoints of tiny models of any family in each format's layout, and their dequantised weights, by definitions
that are independent of the readers under test."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from quantised_models import AWQ, GPTQ, Tensors, extremes, rewritten, set_config
from safetensors.torch import load_file
from tiny_models import MIXTURES, TINY

GROUP, BLOCK = 32, 32
# A packed matrix [outputs, inputs]: (its tensors, by the last part of their names; its dequantised weights).
Packed = tuple[Tensors, torch.Tensor]
# Tensors of layers that quantising tools leave unchanged: routers, norms, convolutions, gates of one row.
PLAIN = re.compile(
    r"norm|\.router\b|(mlp|_moe|feed_forward|mixer)\.gate\b|\.gate\.wg\b|shared_expert_gate|conv\.conv|conv1d|in_proj_(ba|a|b)\b|\.[ab]_proj\b|"
    r"layers\.\d+\.gate\b"
)


@dataclass(frozen=True)
class Layout:
    """``pack`` makes the tensors of a layer, ``settings`` is the checkpoint's ``quantization_config``."""

    pack: Callable[[str, torch.Tensor], Packed]
    settings: dict[str, Any]


def _whole_blocks(matrix: torch.Tensor, block: int = BLOCK) -> torch.Tensor:
    rows, columns = matrix.shape
    return torch.nn.functional.pad(matrix, (0, -columns % block, 0, -rows % block))


def fp8_by_block(module: str, matrix: torch.Tensor, block: int = BLOCK) -> Packed:
    rows, columns = matrix.shape
    blocks = _whole_blocks(matrix, block).unflatten(1, (-1, block)).unflatten(0, (-1, block))
    scales = blocks.abs().amax(dim=(1, 3)) / 448
    wide = scales.repeat_interleave(block, 0).repeat_interleave(block, 1)[:rows, :columns]
    codes = (matrix / wide).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale_inv": scales}, codes.float() * wide


def fp8_static(module: str, matrix: torch.Tensor) -> Packed:
    """Mistral's fp8: one scale for the matrix and one for its inputs, both in bf16."""
    scale = (matrix.abs().max() / 448).bfloat16()
    codes = (matrix / scale.float()).clamp(-448, 448).to(torch.float8_e4m3fn)
    parts = {"weight": codes, "weight_scale_inv": scale, "activation_scale": torch.tensor(0.02).bfloat16()}
    return parts, codes.float() * scale.float()


def _integers(
    matrix: torch.Tensor, bits: int, least_zero: int, group: int = GROUP
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes [N, K], scales [N, K/G] and zero points [N, K/G] of asymmetric groups."""
    columns = matrix.shape[1]
    groups, most = torch.nn.functional.pad(matrix, (0, -columns % group)).unflatten(1, (-1, group)), (1 << bits) - 1
    low, high = groups.amin(2).clamp(max=0), groups.amax(2).clamp(min=0)
    scales = ((high - low) / most).half()
    zeros = (-low / scales.float()).round().clamp(least_zero, most)
    codes = (groups / scales.float()[..., None] + zeros[..., None]).round().clamp(0, most)
    return codes.flatten(1)[:, :columns].long(), scales, zeros.long()


def _numbers(codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor, group: int = GROUP) -> torch.Tensor:
    zero, scale = (each.repeat_interleave(group, 1)[:, : codes.shape[1]] for each in (zeros, scales.float()))
    return (codes - zero).float() * scale


def _words(values: torch.Tensor, bits: int, order: tuple[int, ...] = ()) -> torch.Tensor:
    """Packs neighbouring values of a row into words, the first in the lowest bits, or permuted by ``order``."""
    if bits == 3:
        return _across_words(values)
    in_word = 32 // bits
    apart = values.unflatten(1, (-1, in_word))
    if order:
        apart = apart[..., list(order)]
    return (apart << bits * torch.arange(in_word)).sum(2).to(torch.uint32).view(torch.int32)


def _across_words(values: torch.Tensor) -> torch.Tensor:
    """Packs 32 codes of 3 bits into 3 words as gptqmodel does: the 11th and the 22nd code each span two words."""
    apart, words = values.unflatten(1, (-1, 32)), []
    tens = 3 * torch.arange(10)
    words.append((apart[..., :10] << tens).sum(2) + (apart[..., 10] << 30))
    words.append((apart[..., 10] >> 2) + (apart[..., 11:21] << tens + 1).sum(2) + (apart[..., 21] << 31))
    words.append((apart[..., 21] >> 1) + (apart[..., 22:] << tens + 2).sum(2))
    return (torch.stack(words, 2).flatten(1) & 0xFFFFFFFF).to(torch.uint32).view(torch.int32)


def awq(module: str, matrix: torch.Tensor) -> Packed:
    codes, scales, zeros = _integers(matrix, 4, 0)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    parts = {"qweight": _words(codes.T, 4, order), "qzeros": _words(zeros.T, 4, order), "scales": scales.T}
    return parts, _numbers(codes, scales, zeros)


def gptq(bits: int, less: int, ordered: bool = False, group: int = GROUP) -> Callable[[str, torch.Tensor], Packed]:
    """``less`` is subtracted from stored zero points (1 in version 1). ``ordered``: groups of permuted columns, with a
    permutation for each input of a layer."""

    def pack(module: str, matrix: torch.Tensor) -> Packed:
        columns = matrix.shape[1]
        order = torch.arange(columns)
        if ordered:
            order = torch.randperm(columns, generator=torch.Generator().manual_seed(_input_of(module)))
        codes, scales, zeros = _integers(matrix[:, order], bits, less, group)
        groups, back = (torch.arange(columns) // group).int(), order.argsort()
        parts = {
            "qweight": _words(codes[:, back].contiguous(), bits).T,
            "qzeros": _words((zeros - less).T, bits),
            "scales": scales.T,
            "g_idx": groups[back],
        }
        return parts, _numbers(codes, scales, zeros, group)[:, back]

    return pack


# Modules with the same input, whose columns GPTQ therefore permutes alike.
ALIKE = (
    ("q_proj", "k_proj", "v_proj", "q_a_proj", "kv_a_proj_with_mqa"),
    ("gate_proj", "up_proj", "linear_gate", "w1", "w3"),
)


def _input_of(module: str) -> int:
    block, _, name = module.rpartition(".")
    for alike in ALIKE:
        name = alike[0] if name in alike else name
    return sum(ord(letter) * (place + 1) for place, letter in enumerate(f"{block}.{name}"))


def auto_round(pack: Callable[[str, torch.Tensor], Packed], packing: str) -> Layout:
    """The layout of auto-round: without g_idx, and with the keys that its exporter writes."""

    def without_order(module: str, matrix: torch.Tensor) -> Packed:
        parts, numbers = pack(module, matrix)
        return {name: part for name, part in parts.items() if name != "g_idx"}, numbers

    settings = {"quant_method": "auto-round", "packing_format": packing, "bits": 4, "group_size": GROUP, "sym": False}
    more = {"data_type": "int", "autoround_version": "0.16.1", "iters": 0, "block_name_to_quantize": "model.layers"}
    return Layout(without_order, settings | more)


def compressed(format: str, activations: Any = None, **weights: Any) -> Layout:
    """A layout of compressed-tensors, packed and dequantised by its own compressor."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams

    args = QuantizationArgs(**weights)
    scheme = QuantizationScheme(targets=["Linear"], weights=args, input_activations=activations)
    compressor = BaseCompressor.get_value_from_registry(format)

    def pack(module: str, matrix: torch.Tensor) -> Packed:
        low, high = extremes(_whole_blocks(matrix) if weights["strategy"] == "block" else matrix, weights)
        scale, zero = calculate_qparams(low, high, args)
        parts = {"weight": matrix.bfloat16(), "weight_scale": scale.bfloat16(), "weight_zero_point": zero}
        stored = compressor.compress(parts, scheme)
        # The dequantised weights are computed from scales in fp32, whatever type the library would use.
        in_fp32 = {
            key: value.float() if key == "weight_scale" and value.dtype.is_floating_point else value
            for key, value in stored.items()
        }
        return stored, compressor.decompress(in_fp32, scheme)["weight"].float()

    described = {"targets": ["Linear"], "weights": args.model_dump(mode="json"), "input_activations": activations}
    settings = {"quant_method": "compressed-tensors", "format": format, "quantization_status": "compressed"}
    return Layout(pack, settings | {"config_groups": {"group_0": described}, "ignore": ["lm_head"]})


def nvfp4(module: str, matrix: torch.Tensor, of_modelopt: bool = False) -> Packed:
    """Two levels of scales: e4m3 for every 16 columns, and one float for the matrix."""
    groups = matrix.unflatten(1, (-1, 16))
    whole = 448 * 6 / matrix.abs().max().reshape(1)
    scales = (groups.abs().amax(2) / 6 * whole).to(torch.float8_e4m3fn)
    each = scales.float() * (1 / whole) if of_modelopt else scales.float() / whole
    codes = (groups / each.clamp(min=1e-12)[..., None]).flatten(1)
    of_values = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    nearest = (codes.abs()[..., None] - of_values).abs().argmin(2)
    numbers = of_values[nearest] * codes.sign() * each.repeat_interleave(16, 1)
    nibbles = nearest + 8 * (codes < 0)
    packed = (nibbles[:, ::2] + 16 * nibbles[:, 1::2]).to(torch.uint8)
    if of_modelopt:
        one = {"weight_scale_2": 1 / whole[0], "input_scale": torch.tensor(0.02)}
        return {"weight": packed, "weight_scale": scales} | one, numbers
    parts = {"weight_packed": packed, "weight_scale": scales, "weight_global_scale": whole}
    return parts | {"input_global_scale": torch.ones(1)}, numbers


# The sixteen numbers of bitsandbytes' nf4.
NF4_VALUES = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334),
    *(-0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)


def nf4(module: str, matrix: torch.Tensor, block: int = BLOCK) -> Packed:
    values, blocks = torch.tensor(NF4_VALUES), matrix.reshape(-1, block)
    largest = blocks.abs().amax(1)
    nearest = (blocks[..., None] / largest[:, None, None] - values).abs().argmin(2).flatten().to(torch.uint8)
    state = {"quant_type": "nf4", "blocksize": block, "dtype": "float32", "shape": list(matrix.shape)}
    parts = {
        "weight": (16 * nearest[::2] + nearest[1::2])[:, None],
        "weight.absmax": largest,
        "weight.quant_map": values,
        "weight.quant_state.bitsandbytes__nf4": torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8),
    }
    return parts, (values[nearest.long()].reshape(-1, block) * largest[:, None]).reshape(matrix.shape)


NF4 = Layout(nf4, {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"})


def fp8_of_modelopt(module: str, matrix: torch.Tensor) -> Packed:
    scale = matrix.abs().max() / 448
    codes = (matrix / scale).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale": scale, "input_scale": torch.tensor(0.02)}, codes.float() * scale


def modelopt(algorithm: str) -> dict[str, Any]:
    """The settings as ModelOpt's exporter writes them, with keys and values in fp8 as well."""
    producer = {"name": "modelopt", "version": "0.29.0"}
    scheme = {"dynamic": False, "num_bits": 8, "type": "float"}
    settings = {"quant_method": "modelopt", "quant_algo": algorithm, "producer": producer, "kv_cache_scheme": scheme}
    return settings | {"ignore": ["lm_head", "model.layers.*.mlp.gate"], "config_groups": {}}


DYNAMIC: dict[str, Any] = {"num_bits": 8, "strategy": "token", "dynamic": True, "symmetric": True}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [BLOCK, BLOCK]}
NVFP4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "symmetric": True}
INT4: dict[str, Any] = {"num_bits": 4, "strategy": "group", "group_size": GROUP}
LAYOUTS: dict[str, Layout] = {
    "fp8 by block": Layout(fp8_by_block, FP8 | {"modules_to_not_convert": ["gate", "e_score_correction_bias", "lm_head"]}),
    "fp8, static": Layout(
        fp8_static,
        {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None, "dequantize": False}
        | {"modules_to_not_convert": ["lm_head"]},
    ),
    "awq": Layout(awq, AWQ | {"modules_to_not_convert": ["gate"]}),
    "gptq": Layout(gptq(4, 1), GPTQ | {"checkpoint_format": "gptq"}),
    "gptq, in activation order": Layout(gptq(4, 1, ordered=True), GPTQ | {"desc_act": True}),
    "gptq, version 2": Layout(gptq(4, 0), GPTQ | {"checkpoint_format": "gptq_v2"}),
    "gptq, 2 bits": Layout(gptq(2, 1), GPTQ | {"bits": 2}),
    "auto-round, as gptq": auto_round(gptq(4, 1), "auto_round:auto_gptq"),
    "auto-round, as gptq 2": auto_round(gptq(4, 0), "auto_round"),
    "auto-round, as awq": auto_round(awq, "auto_round:auto_awq"),
    "gptq, 8 bits": Layout(gptq(8, 1), GPTQ | {"bits": 8}),
    "compressed int4": compressed("pack-quantized", **INT4),
    "compressed int4, asymmetric": compressed("pack-quantized", **INT4, symmetric=False),
    "compressed int8": compressed("int-quantized", DYNAMIC | {"type": "int"}, num_bits=8, strategy="channel"),
    "compressed fp8": compressed(
        "float-quantized", DYNAMIC | {"type": "float"}, num_bits=8, type="float", strategy="channel"
    ),
    "compressed fp8 by block": compressed(
        "float-quantized", num_bits=8, type="float", strategy="block", block_structure=[BLOCK, BLOCK]
    ),
    "compressed mxfp4": compressed(
        "mxfp4-pack-quantized", num_bits=4, type="float", strategy="group", group_size=32, scale_dtype=torch.uint8
    ),
    "compressed mxfp8": compressed(
        "mxfp8-quantized", num_bits=8, type="float", strategy="group", group_size=32, scale_dtype=torch.uint8
    ),
    "modelopt fp8": Layout(fp8_of_modelopt, modelopt("FP8")),
    "modelopt nvfp4": Layout(partial(nvfp4, of_modelopt=True), modelopt("NVFP4")),
    "compressed nvfp4": Layout(
        nvfp4,
        {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized", "quantization_status": "compressed"}
        | {"config_groups": {"group_0": {"targets": ["Linear"], "weights": NVFP4, "input_activations": NVFP4}}},
    ),
}
# Values of size keys that blocks and groups divide.
SIZES = {
    "hidden_size_per_layer_input": 32,
    "expert_ffn_hidden_size": 32,
    "ffn_hidden_size": 192,
    "head_dim": 32,
    "intermediate_size": 192,
    "intermediate_size_mlp": 96,
    "kv_lora_rank": 32,
    "mamba_dt_rank": 32,
    "moe_hidden_size": 64,
    "moe_intermediate_size": 32,
    "moe_latent_size": 32,
    "moe_shared_expert_intermediate_size": 64,
    "prefix_dense_intermediate_size": 64,
    "share_expert_dim": 64,
    "shared_expert_intermediate_size": 64,
    "shared_intermediate_size": 64,
    "v_head_dim": 16,
}


def sizes_of(name: str) -> dict[str, Any]:
    kind, settings = (TINY | MIXTURES)[name]
    latent = "kv_lora_rank" in settings
    found: dict[str, Any] = {key: size for key, size in SIZES.items() if key in settings}
    if latent and settings["q_lora_rank"]:
        found["q_lora_rank"] = 64
    if kind in ("mamba", "falcon_mamba"):
        found |= {"hidden_size": 96, "time_step_rank": 32, "state_size": 16}
    if kind == "mamba2":
        found |= {"hidden_size": 128, "num_heads": 16, "expand": 4}
    if kind == "bailing_hybrid":
        # Gates are rows, and sixteen zero points two words, since the library cannot unpack one. With the usual 1e-6, the
        # norm of a head whose output nearly vanishes multiplies roundings by hundreds, in transformers as here: both are
        # then up to 1e-5 from what float64 gives, now up to 3e-6.
        found |= {"num_attention_heads": 16, "num_key_value_heads": 16, "rms_norm_eps": 1e-4}
    if kind == "longcat_flash":
        found["head_dim"] = settings["qk_rope_head_dim"]
    if kind == "step3p5":
        found |= {"num_attention_heads": 8, "num_sliding_attention_heads": 16}  # gates are rows
    if "index_topk" in settings:
        found["index_n_heads"] = 16  # eight zero points are one word, which the library cannot unpack
    if kind == "qwen4_exp_text":
        # The rows that give a weight for each stream, and those of an indexer, fill words.
        found |= {"hc_count": 8, "hc_lowrank": 64, "indexer_head_dim": 32}
    if kind == "minimax_m3_vl_text":
        found |= {"dense_intermediate_size": 64, "rotary_dim": 16, "index_head_dim": 32}
    if "mamba_dt_rank" in settings:
        found["mamba_d_state"] = 16  # a matrix has rows for the steps and for both vectors of a state
    return found


# The names of tensors with gate and up of all experts of a layer.
BOTH = ("gate_up_proj", "input_linear", "experts.fc1")


def usual(module: str) -> bool:
    return any(layers in module for layers in (".layers.", ".h.", ".blocks.")) and not PLAIN.search(module)


def quantised(path: Path, plain: Path, layout: Layout, chosen: Callable[[str], bool] = usual) -> list[str]:
    """Quantises the ``chosen`` modules of a plain checkpoint in place, and returns their names.

    ``plain`` becomes the checkpoint with the dequantised weights.
    """
    shutil.copytree(path, plain)
    numbers: Tensors = {}
    names: list[str] = []

    def one(module: str, matrix: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        names.append(module)
        parts, values = layout.pack(module, matrix.float())
        return {f"{module}.{part}": each for part, each in parts.items()}, values

    def change(tensors: Tensors) -> Tensors:
        result: Tensors = {}
        for name, value in tensors.items():
            module = name.removesuffix(".weight")
            if value.dim() == 3 and chosen(module):
                # Llama 4 and Aria store [inputs, outputs].
                turned = any(part in " ".join(tensors) for part in ("feed_forward.router.weight", ".experts.fc1."))
                whole = value.transpose(1, 2) if turned else value
                found = [one(each, matrix) for each, matrix in _apart(module, whole)]
                result |= {part: tensor for parts, _ in found for part, tensor in parts.items()}
                matrices = [matrix for _, matrix in found]
                if module.endswith(BOTH):
                    matrices = [torch.cat(pair) for pair in zip(matrices[::2], matrices[1::2], strict=True)]
                stacked = torch.stack(matrices)
                numbers[name] = stacked.transpose(1, 2).contiguous() if turned else stacked
            elif value.dim() == 2 and name.endswith(".weight") and chosen(module):
                parts, numbers[name] = one(module, value)
                result |= parts
            else:
                numbers[name] = result[name] = value
        return result

    set_config(rewritten(path, change), quantization_config=layout.settings)
    rewritten(plain, lambda tensors: numbers)
    return names


def _apart(module: str, tensor: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """The matrices of single experts, by the names that quantising tools give them."""
    experts = module.rpartition(".")[0]
    experts = experts if experts.endswith("experts") else f"{experts}.experts"
    if module.endswith(BOTH):
        return [
            (f"{experts}.{number}.{name}_proj", half)
            for number, both in enumerate(tensor)
            for name, half in zip(("gate", "up"), both.chunk(2), strict=True)
        ]
    return [(f"{experts}.{number}.down_proj", each) for number, each in enumerate(tensor)]


def stored(path: Path) -> Tensors:
    return load_file(path / "model.safetensors")
