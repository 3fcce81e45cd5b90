"""A GGUF file's metadata as the config.json that the model was converted from would have it."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from typing import Any, NoReturn

from outrider.workers.errors import ModelError
from outrider.workers.models.formats.gguf.end_tokens import TOKENIZER, end_tokens
from outrider.workers.models.formats.gguf.file import GgufFile
from outrider.workers.models.formats.raw import RawTensors
from outrider.workers.models.headers import quoted

# What says nothing about logits, or what other keys say as well; behind the architecture's name.
KNOWN_NAMES = """
block_count context_length embedding_length feed_forward_length vocab_size attention.head_count attention.head_count_kv
attention.key_length attention.value_length attention.layer_norm_rms_epsilon attention.layer_norm_epsilon
attention.sliding_window rope.dimension_count rope.freq_base rope.scaling.type rope.scaling.factor
rope.scaling.original_context_length rope.scaling.finetuned rope.scaling.attn_factor rope.scaling.yarn_beta_fast
rope.scaling.yarn_beta_slow
"""
KNOWN = frozenset(KNOWN_NAMES.split())
KNOWN_OF_MIXTURES = KNOWN | {
    "expert_count",
    "expert_used_count",
    "expert_feed_forward_length",
    "expert_shared_feed_forward_length",
}
# These would change what is computed; without a value, or with the usual one, they do not.
USUAL: dict[str, Any] = {
    "expert_count": 0,
    "expert_used_count": 0,
    "attention.causal": True,
    "use_parallel_residual": False,
}
ROPE_FACTORS = "rope_freqs.weight"
SPLIT = "split.count"


class Metadata:
    """Read key by key under the architecture's name."""

    def __init__(self, file: GgufFile) -> None:
        self.file = file
        self.values = file.metadata
        architecture = self.values.get("general.architecture")
        if not isinstance(architecture, str):
            self.refuse('has no "general.architecture": is it a language model?')
        self.architecture = architecture

    def refuse(self, what: str) -> NoReturn:
        raise ModelError(f"{self.file.path} {what}")

    def get(self, key: str, kind: type, default: Any = None) -> Any:
        name = f"{self.architecture}.{key}"
        value = self.values.get(name, default)
        if kind is float and type(value) is int:
            value = float(value)
        if value is not None and type(value) is not kind:
            self.refuse(f"has {quoted(name)}: {quoted(value)}, where a value of another kind is needed")
        if value is None:
            self.refuse(f"has no {quoted(name)}")
        return value

    def has(self, key: str) -> bool:
        return f"{self.architecture}.{key}" in self.values

    def check_known(self, known: Collection[str]) -> None:
        prefix = f"{self.architecture}."
        for name, value in self.values.items():
            key = name.removeprefix(prefix)
            if name.startswith(prefix) and key not in known and USUAL.get(key, ...) != value:
                self.refuse_value(key)

    def refuse_value(self, key: str) -> NoReturn:
        name = f"{self.architecture}.{key}"
        self.refuse(f"has {quoted(name)}: {quoted(self.values[name])}, which the native engine does not know")


def config_of(file: GgufFile) -> dict[str, Any]:
    metadata = Metadata(file)
    if file.metadata.get(SPLIT, 1) not in (0, 1):
        metadata.refuse(f"is one of {file.metadata[SPLIT]} parts: join them first (llama-gguf-split --merge)")
    families = DENSE | MIXTURES
    if metadata.architecture not in families:
        known = ", ".join(sorted(families))
        metadata.refuse(f"is of the architecture {quoted(metadata.architecture)}; of GGUF files, {known} are run")
    family = families[metadata.architecture]
    if family is _llama and metadata.get("expert_count", int, 0):
        family = _mixtral
    mixture = family is _mixtral or metadata.architecture in MIXTURES
    metadata.check_known(KNOWN_OF_MIXTURES if mixture else KNOWN)
    return family(metadata) | _shared(metadata)


def _shared(metadata: Metadata) -> dict[str, Any]:
    tokens = metadata.values.get(f"{TOKENIZER}tokens")
    embedding = metadata.file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        metadata.refuse('lacks the tensor "token_embd.weight"')
    if not isinstance(tokens, list):
        metadata.refuse(f'has no "{TOKENIZER}tokens"')
    return {
        "vocab_size": embedding.shape[0],
        "tie_word_embeddings": "output.weight" not in metadata.file.tensors,
        "eos_token_id": end_tokens(metadata.values) or None,
        # fp16, which the kernels do not have, is kept as fp32.
        "dtype": "bfloat16" if any(entry.type == "BF16" for entry in metadata.file.tensors.values()) else "float32",
    }


def _llama_style(metadata: Metadata, ffn: int | None = None) -> dict[str, Any]:
    """``ffn`` is what stands for a width that the file does not give."""
    heads, width = metadata.get("attention.head_count", int), metadata.get("embedding_length", int)
    if not 0 < heads <= width:
        metadata.refuse(f"has {heads} heads for a width of {width}")
    head_size = metadata.get("attention.key_length", int, width // heads)
    if metadata.get("attention.value_length", int, head_size) != head_size:
        metadata.refuse("has keys and values of different sizes, which the native engine does not know")
    if metadata.get("rope.dimension_count", int, head_size) != head_size:
        metadata.refuse("rotates a part of each head only, which the native engine does not know")
    return {
        "num_hidden_layers": metadata.get("block_count", int),
        "hidden_size": width,
        "intermediate_size": metadata.get("feed_forward_length", int, ffn),
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.get("attention.head_count_kv", int, heads),
        "head_dim": head_size,
        "max_position_embeddings": metadata.get("context_length", int),
        "rms_norm_eps": metadata.get("attention.layer_norm_rms_epsilon", float),
        "rope_parameters": _rope(metadata),
    }


def _rope(metadata: Metadata) -> dict[str, Any]:
    theta = metadata.get("rope.freq_base", float, 10000.0)
    # llama.cpp's reading: a factor without a type is that of a linear one, and 0 says nothing.
    kind = metadata.get("rope.scaling.type", str, "linear")
    if kind == "linear" and metadata.get("rope.scaling.factor", float, 0.0) in (0.0, 1.0):
        kind = "none"
    if metadata.get("rope.scaling.attn_factor", float, 1.0) != 1.0:
        metadata.refuse_value("rope.scaling.attn_factor")
    if ROPE_FACTORS in metadata.file.tensors:
        if kind != "none":
            metadata.refuse(f"has both a {quoted(ROPE_FACTORS)} and the rope scaling {quoted(kind)}")
        return {"rope_type": "factors", "rope_theta": theta, "factors": _rope_factors(metadata.file)}
    if kind == "none":
        return {"rope_type": "default", "rope_theta": theta}
    factor = metadata.get("rope.scaling.factor", float)
    if not 0.0 < factor < math.inf:
        metadata.refuse_value("rope.scaling.factor")
    if kind == "linear":
        return {"rope_type": "linear", "rope_theta": theta, "factor": factor}
    if kind == "yarn":
        original = metadata.get("rope.scaling.original_context_length", int)
        return {
            "rope_type": "yarn",
            "rope_theta": theta,
            "factor": factor,
            "original_max_position_embeddings": original,
            "beta_fast": metadata.get("rope.scaling.yarn_beta_fast", float, 32.0),
            "beta_slow": metadata.get("rope.scaling.yarn_beta_slow", float, 1.0),
        }
    return metadata.refuse(f"has the rope scaling {quoted(kind)}, which the native engine does not know")


def _llama(metadata: Metadata) -> dict[str, Any]:
    biased = "blk.0.attn_q.bias" in metadata.file.tensors
    config = _llama_style(metadata) | {"hidden_act": "silu", "attention_bias": biased}
    window = metadata.get("attention.sliding_window", int, 0)
    if window and biased:
        metadata.refuse("has a sliding window and biases, which no family has that the native engine knows")
    if window:
        del config["attention_bias"]
        return config | {"model_type": "mistral", "sliding_window": window}
    return config | {"model_type": "llama"}


def _qwen2(metadata: Metadata) -> dict[str, Any]:
    return _llama_style(metadata) | {"model_type": "qwen2", "hidden_act": "silu"}


def _qwen3(metadata: Metadata) -> dict[str, Any]:
    biased = "blk.0.attn_q.bias" in metadata.file.tensors
    return _llama_style(metadata) | {"model_type": "qwen3", "hidden_act": "silu", "attention_bias": biased}


def _starcoder(metadata: Metadata) -> dict[str, Any]:
    heads = metadata.get("attention.head_count", int)
    kv_heads = metadata.get("attention.head_count_kv", int, heads)
    if kv_heads != 1:
        metadata.refuse(f"has {kv_heads} heads of keys, where this family has one")
    return {
        "model_type": "gpt_bigcode",
        "n_layer": metadata.get("block_count", int),
        "n_embd": metadata.get("embedding_length", int),
        "n_inner": metadata.get("feed_forward_length", int),
        "n_head": heads,
        "n_positions": metadata.get("context_length", int),
        "layer_norm_epsilon": metadata.get("attention.layer_norm_epsilon", float),
        "activation_function": "gelu_pytorch_tanh",
    }


def _mixture(metadata: Metadata) -> dict[str, Any]:
    """Llama's, and the experts. All layers have them: llama.cpp knows no other files of these architectures."""
    count, used = metadata.get("expert_count", int), metadata.get("expert_used_count", int)
    if not 0 < used <= count:
        metadata.refuse(f"has {count} experts, of which a token is to use {used}")
    wide = metadata.get("feed_forward_length", int, 0)
    ffn = metadata.get("expert_feed_forward_length", int, wide // used)
    return _llama_style(metadata, ffn) | {
        "num_experts": count,
        "num_experts_per_tok": used,
        "moe_intermediate_size": ffn,
        "hidden_act": "silu",
    }


def _mixtral(metadata: Metadata) -> dict[str, Any]:
    config = _mixture(metadata)
    del config["moe_intermediate_size"]
    count = config.pop("num_experts")
    window = metadata.get("attention.sliding_window", int, 0) or None
    return config | {"model_type": "mixtral", "num_local_experts": count, "sliding_window": window}


def _qwen2_moe(metadata: Metadata) -> dict[str, Any]:
    shared = metadata.get("expert_shared_feed_forward_length", int, metadata.get("feed_forward_length", int, 0))
    return _mixture(metadata) | {
        "model_type": "qwen2_moe",
        "norm_topk_prob": False,
        "shared_expert_intermediate_size": shared,
    }


def _qwen3_moe(metadata: Metadata) -> dict[str, Any]:
    biased = "blk.0.attn_q.bias" in metadata.file.tensors
    return _mixture(metadata) | {"model_type": "qwen3_moe", "norm_topk_prob": True, "attention_bias": biased}


def _olmoe(metadata: Metadata) -> dict[str, Any]:
    config = _mixture(metadata) | {"model_type": "olmoe", "norm_topk_prob": False}
    # Its files have the width of an expert as that of the layer.
    del config["moe_intermediate_size"]
    return config


def _gpt_oss(metadata: Metadata) -> dict[str, Any]:
    config = _mixture(metadata)
    count, ffn = config.pop("num_experts"), config.pop("moe_intermediate_size")
    return config | {
        "model_type": "gpt_oss",
        "num_local_experts": count,
        "intermediate_size": ffn,
        "sliding_window": metadata.get("attention.sliding_window", int),
        # As the model was trained, and its config.json says; GGUF has no key for it.
        "rope_parameters": config["rope_parameters"] | {"truncate": False},
    }


Family = Callable[[Metadata], dict[str, Any]]
DENSE: dict[str, Family] = {"llama": _llama, "qwen2": _qwen2, "qwen3": _qwen3, "starcoder": _starcoder}
MIXTURES: dict[str, Family] = {
    "qwen2moe": _qwen2_moe,
    "qwen3moe": _qwen3_moe,
    "olmoe": _olmoe,
    "gpt-oss": _gpt_oss,
}


def _rope_factors(file: GgufFile) -> list[float]:
    """What each frequency is divided by."""
    entry = file.tensors[ROPE_FACTORS]
    if entry.type != "F32" or len(entry.shape) != 1:
        raise ModelError(f"{file.path}: {quoted(ROPE_FACTORS)} must be a vector of F32, it is {entry.type} {entry.shape}")
    raw = RawTensors(file.tensors)
    try:
        return [float(value) for value in raw.whole(ROPE_FACTORS)]
    finally:
        raw.close()
