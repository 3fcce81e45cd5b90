"""Writes GGUF files from Hugging Face checkpoints, with the gguf package."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type
from numpy.typing import NDArray
from safetensors.torch import load_file
from tokenizers import Tokenizer

from outrider.workers.models.formats.gguf.blocks import BY_NAME

# GGUF's name of each part of a block, by Hugging Face's.
PARTS = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate": "ffn_gate_inp",
    "block_sparse_moe.gate": "ffn_gate_inp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
}
GPT_OSS_PARTS = {"mlp.router": "ffn_gate_inp", "post_attention_layernorm": "post_attention_norm"}
EXPERT = re.compile(r"model\.layers\.(\d+)\.(?:mlp|block_sparse_moe)\.experts\.(\d+)\.(\w+)\.weight")
FUSED = re.compile(r"model\.layers\.(\d+)\.mlp\.experts\.(gate_up|down)_proj(_bias)?")
EXPERTS = {"w1": "gate", "w2": "down", "w3": "up", "gate_proj": "gate", "up_proj": "up", "down_proj": "down"}
Matrix = NDArray[np.float32]
Choose = Callable[[str, Matrix], str]


# The byte offsets of the fp16 scales in a block, for types of few bits.
SCALES: dict[str, tuple[int, ...]] = {
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "TQ1_0": (52,),
    "TQ2_0": (64,),
    **dict.fromkeys(("Q1_0", "Q2_0", "IQ1_S", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_NL", "IQ4_XS"), (0,)),
    # (Its scale is in four parts.)
    "IQ1_M": (),
    # (Its scales are e4m3, whose weights are about one here.)
    "NVFP4": (),
}


def blocks_of(values: Matrix, type_: str) -> NDArray[np.uint8]:
    """Rows as blocks of a type, quantised by the gguf package, or here for K-quants, which the package only reads.

    Types of few bits get random blocks, whose scales make the weights about as large as the values.
    """
    if type_ in ("Q4_K", "Q5_K", "Q6_K"):
        return _super_blocks(values, type_)
    if type_ in SCALES:
        rows = values.reshape(-1, values.shape[-1])
        return blocks_by_chance(type_, rows.shape, float(rows.std()) or 1.0).reshape(*values.shape[:-1], -1)
    packed: NDArray[np.uint8] = gguf.quantize(values, getattr(Type, type_))
    return packed


def blocks_by_chance(type_: str, shape: tuple[int, ...], deviation: float, seed: int = 0) -> NDArray[np.uint8]:
    kind = BY_NAME[type_]
    assert kind.scheme is not None and kind.unpack is not None
    packed = np.random.default_rng(seed).integers(0, 256, (shape[0], shape[1] // kind.values, kind.bytes), np.uint8)
    if type_ == "NVFP4":
        packed[..., :4] = packed[..., :4] % 8 + 40
    _set_scales(packed, type_, 1.0)
    _set_scales(packed, type_, deviation / float(kind.unpack(kind.scheme, packed).dequantise().std()))
    return packed.reshape(shape[0], -1)


def _set_scales(packed: NDArray[np.uint8], type_: str, scale: float) -> None:
    (bits,) = np.array([scale], np.float16).view(np.uint16).tolist()
    for at in SCALES[type_]:
        packed[..., at : at + 2] = [bits & 255, bits >> 8]
    if type_ == "IQ1_M":
        parts = np.array([bits << 4, bits, bits >> 4, bits >> 8]) & 240
        packed[..., 49:56:2] = packed[..., 49:56:2] & 15 | parts


def _super_blocks(values: Matrix, type_: str) -> NDArray[np.uint8]:
    kind = BY_NAME[type_]
    rows = values.reshape(len(values), -1, 256)
    if type_ == "Q6_K":
        groups = rows.reshape(*rows.shape[:2], 16, 16)
        factor = np.abs(groups).max(axis=3) / 31
        scale = np.maximum(factor.max(axis=2, keepdims=True) / 127, 1e-12).astype(np.float16)
        factors = np.rint(factor / scale.astype(np.float32)).clip(1, 127).astype(np.int8)
        steps = scale.astype(np.float32) * factors
        codes = (np.rint(groups / steps[..., None]) + 32).clip(0, 63).astype(np.uint8).reshape(*rows.shape[:2], 2, 4, 32)
        low = codes & 15
        lower = np.concatenate([low[..., 0:2, :] | low[..., 2:4, :] << 4], axis=-2).reshape(*rows.shape[:2], 128)
        high = codes >> 4
        upper = high[..., 0, :] | high[..., 1, :] << 2 | high[..., 2, :] << 4 | high[..., 3, :] << 6
        parts = [lower, upper.reshape(*rows.shape[:2], 64), factors.view(np.uint8), scale.view(np.uint8)]
        return np.concatenate(parts, axis=2).reshape(len(values), -1)
    most = 15 if type_ == "Q4_K" else 31
    groups = rows.reshape(*rows.shape[:2], 8, 32)
    low = np.minimum(groups.min(axis=3), 0)
    step = (np.maximum(groups.max(axis=3), 0) - low) / most
    scale = np.maximum(step.max(axis=2, keepdims=True) / 63, 1e-12).astype(np.float16)
    minimum = np.maximum((-low).max(axis=2, keepdims=True) / 63, 1e-12).astype(np.float16)
    factors = np.rint(step / scale.astype(np.float32)).clip(1, 63).astype(np.uint8)
    minima = np.rint(-low / minimum.astype(np.float32)).clip(0, 63).astype(np.uint8)
    steps, lows = scale.astype(np.float32) * factors, minimum.astype(np.float32) * minima
    codes = np.rint((groups + lows[..., None]) / steps[..., None]).clip(0, most).astype(np.uint8)
    first = factors[..., :4] | factors[..., 4:] >> 4 << 6
    second = minima[..., :4] | minima[..., 4:] >> 4 << 6
    third = factors[..., 4:] & 15 | (minima[..., 4:] & 15) << 4
    low_bits = (codes[..., 0::2, :] & 15) | (codes[..., 1::2, :] & 15) << 4
    parts = [scale.view(np.uint8), minimum.view(np.uint8), first, second, third]
    if type_ == "Q5_K":
        parts.append(np.bitwise_or.reduce((codes >> 4) << np.arange(8, dtype=np.uint8)[:, None], axis=2))
    parts.append(low_bits.reshape(*rows.shape[:2], 128))
    packed = np.concatenate(parts, axis=2)
    assert packed.shape[2] == kind.bytes
    return packed.reshape(len(values), -1)


def permuted(values: NDArray[Any], heads: int) -> NDArray[Any]:
    """llama.cpp's order of the rows of queries and keys (code of its converter)."""
    shape = values.shape
    return values.reshape(heads, 2, shape[0] // heads // 2, *shape[1:]).swapaxes(1, 2).reshape(shape)


def mostly(type_: str, otherwise: str = "Q8_0") -> Choose:
    """Matrices in ``type_``, or in ``otherwise`` if a row has no whole number of blocks; vectors in F32."""

    def choose(name: str, values: Matrix) -> str:
        if values.ndim == 1 or name.endswith(".bias"):
            return "F32"
        return type_ if values.shape[-1] % BY_NAME[type_].values == 0 else otherwise

    return choose


def write_gguf(source: Path, out: Path, choose: Choose, architecture: str = "llama", **more: Any) -> Path:
    """``more`` are further metadata keys."""
    return write_with(gguf.GGUFWriter(str(out), architecture), source, out, choose, architecture, **more)


def write_split(source: Path, out: Path, choose: Choose, tensors: int, first_is_small: bool) -> list[Path]:
    """Writes files of ``tensors`` tensors each, split and named by the gguf package; a small first file has metadata
    only."""
    writer = gguf.GGUFWriter(str(out), "llama", split_max_tensors=tensors, small_first_shard=first_is_small)
    write_with(writer, source, out, choose)
    return sorted(out.parent.glob(f"{out.stem}-*-of-*{out.suffix}"))


def write_with(
    writer: gguf.GGUFWriter, source: Path, out: Path, choose: Choose, architecture: str = "llama", **more: Any
) -> Path:
    config = json.loads((source / "config.json").read_text())
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base((config.get("rope_parameters") or config)["rope_theta"])
    head = config.get("head_dim") or config["hidden_size"] // heads
    writer.add_key_length(head)
    writer.add_value_length(head)
    writer.add_rope_dimension_count(head)
    add_tokenizer(writer, source, config)
    if count := config.get("num_experts", config.get("num_local_experts", 0)):
        writer.add_expert_count(count)
        writer.add_expert_used_count(config["num_experts_per_tok"])
        # As llama.cpp's converters do: for Mixtral and OLMoE the key of the layer's width has the expert's.
        if architecture == "gpt-oss" or "moe_intermediate_size" in config:
            writer.add_expert_feed_forward_length(config.get("moe_intermediate_size", config["intermediate_size"]))
    if shared := config.get("shared_expert_intermediate_size"):
        writer.add_expert_shared_feed_forward_length(shared)
    for key, value in more.items():
        writer.add_key_value(key.replace("__", "."), value, *_value_types(value))
    tensors = {name: tensor.float().numpy() for name, tensor in load_file(source / "model.safetensors").items()}
    if architecture == "llama":
        for name in tensors:
            if "q_proj" in name or "k_proj" in name:
                tensors[name] = permuted(tensors[name], heads if "q_proj" in name else kv_heads)
    write_tensors(writer, stored_tensors(tensors, architecture), choose)
    return out


def write_tensors(writer: gguf.GGUFWriter, tensors: Mapping[str, Matrix], choose: Choose) -> None:
    """Writes tensors under GGUF's names, and closes the file."""
    for name, values in tensors.items():
        type_ = choose(name, values)
        if type_ in ("F32", "F16"):
            writer.add_tensor(name, np.ascontiguousarray(values, np.float16 if type_ == "F16" else np.float32))
        else:
            if type_ == "NVFP4":
                # A number for each matrix multiplies the scales in its blocks.
                scales = np.linspace(0.5, 1.5, len(values) if values.ndim == 3 else 1, dtype=np.float32) * values.std()
                writer.add_tensor(name.replace(".weight", ".scale"), scales)
                writer.add_tensor(name.replace(".weight", ".input_scale"), scales)
            packed = blocks_of(np.ascontiguousarray(values).reshape(-1, values.shape[-1]), type_)
            writer.add_tensor(name, packed.reshape(*values.shape[:-1], -1), raw_dtype=getattr(Type, type_))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def stored_tensors(tensors: Mapping[str, Matrix], architecture: str) -> dict[str, Matrix]:
    """The tensors as GGUF has them: the experts of a layer are stacked, a shared expert's gate is a vector."""
    stored: dict[str, Matrix] = {}
    experts: dict[str, dict[int, Matrix]] = {}
    for name, values in tensors.items():
        module, _, part = name.rpartition(".")
        if expert := EXPERT.fullmatch(name):
            joined = f"blk.{expert[1]}.ffn_{EXPERTS[expert[3]]}_exps.weight"
            experts.setdefault(joined, {})[int(expert[2])] = values
        elif fused := FUSED.fullmatch(name):
            # gpt-oss: columns are outputs, gate and up alternating.
            part = "bias" if fused[3] else "weight"
            rows = values if fused[3] else values.swapaxes(1, 2)
            kinds = {"gate": rows[:, 0::2], "up": rows[:, 1::2]} if fused[2] == "gate_up" else {"down": rows}
            stored |= {f"blk.{fused[1]}.ffn_{kind}_exps.{part}": each for kind, each in kinds.items()}
        elif name.endswith(".self_attn.sinks"):
            stored[f"blk.{name.split('.')[2]}.attn_sinks.weight"] = values
        else:
            found = values[0] if module.endswith("shared_expert_gate") else values
            stored[f"{_module(module, PARTS | (GPT_OSS_PARTS if architecture == 'gpt-oss' else {}))}.{part}"] = found
    return stored | {name: np.stack([each[number] for number in range(len(each))]) for name, each in experts.items()}


def _value_types(value: Any) -> tuple[Any, ...]:
    kinds = {str: gguf.GGUFValueType.STRING, int: gguf.GGUFValueType.UINT32, float: gguf.GGUFValueType.FLOAT32}
    return (kinds[type(value)],)


def _module(module: str, parts: Mapping[str, str]) -> str:
    whole = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    whole["rope_freqs"] = "rope_freqs"  # GGUF's own
    if module in whole:
        return whole[module]
    _, _, layer, part = module.split(".", 3)
    return f"blk.{layer}.{parts[part]}"


def add_tokenizer(writer: gguf.GGUFWriter, source: Path, config: dict[str, Any], cut: str = "gpt-2") -> None:
    """Writes a byte-level tokenizer's vocabulary and merges; a tiny model without one gets numbers as tokens."""
    file = source / "tokenizer.json"
    size = config["vocab_size"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(cut)
    if file.exists():
        described = json.loads(file.read_text())
        ids = Tokenizer.from_file(str(file)).get_vocab(with_added_tokens=True)
        tokens = [token for token, _ in sorted(ids.items(), key=lambda item: item[1])]
        special = {added["content"] for added in described["added_tokens"]}
        merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in described["model"]["merges"]]
    else:
        tokens, special, merges = [f"t{number}" for number in range(size)], set(), ["t 0"]
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.CONTROL if token in special else gguf.TokenType.NORMAL for token in tokens])
    writer.add_token_merges(merges)
    if isinstance(config.get("eos_token_id"), int):
        writer.add_eos_token_id(config["eos_token_id"])
        writer.add_bos_token_id(config["bos_token_id"])
    template = source / "chat_template.jinja"
    if template.exists():
        writer.add_chat_template(template.read_text())
