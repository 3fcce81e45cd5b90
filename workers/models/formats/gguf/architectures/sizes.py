"""Sizes and rope, for which most architectures use the same keys."""

from __future__ import annotations

import math
from typing import Any

from outrider.workers.errors import ModelError
from outrider.workers.models.formats.gguf.architectures.architecture import ROPE_FACTORS
from outrider.workers.models.formats.gguf.architectures.left_out import layers
from outrider.workers.models.formats.gguf.file import GgufFile
from outrider.workers.models.formats.gguf.metadata import Metadata
from outrider.workers.models.formats.raw import RawTensors
from outrider.workers.models.headers import quoted

# The factor of sines and cosines, if it does not follow from the scaling.
YARN_FACTOR = "rope.scaling.yarn_attn_factor"
# A further factor of attention scores with a scaled length.
LOG_FACTOR = "rope.scaling.yarn_log_multiplier"


def llama_style(metadata: Metadata, ffn: int | None = None, partial: bool = False) -> dict[str, Any]:
    """``ffn`` is the default feed-forward width. ``partial``: rope may rotate a part of each head."""
    return sizes(metadata, ffn) | rms_epsilon(metadata) | {"rope_parameters": rope(metadata, partial)}


def rms_epsilon(metadata: Metadata) -> dict[str, Any]:
    return {"rms_norm_eps": metadata.get("attention.layer_norm_rms_epsilon", float)}


def sizes(metadata: Metadata, ffn: int | None = None) -> dict[str, Any]:
    heads = heads_of(metadata)
    return {
        "num_hidden_layers": layers(metadata),
        "hidden_size": metadata.get("embedding_length", int),
        "intermediate_size": metadata.get("feed_forward_length", int, ffn),
        "num_attention_heads": heads,
        "num_key_value_heads": _kv_heads(metadata, heads),
        "head_dim": head_size(metadata),
        "max_position_embeddings": metadata.get("context_length", int),
    }


def heads_of(metadata: Metadata) -> int:
    heads, width = metadata.get("attention.head_count", int), metadata.get("embedding_length", int)
    if not 0 < heads <= width:
        metadata.refuse(f"has {heads} heads for a width of {width}")
    return int(heads)


def _kv_heads(metadata: Metadata, heads: int) -> int:
    """The number of KV heads. The file has one number, or a list with a number for each layer, which must be equal."""
    key = "attention.head_count_kv"
    stated = metadata.values.get(f"{metadata.architecture}.{key}")
    if not isinstance(stated, list):
        return int(metadata.get(key, int, heads))
    counts = set(metadata.several(key, int, metadata.get("block_count", int)))
    if len(counts) != 1:
        metadata.refuse_value(key)
    return int(counts.pop())


def head_size(metadata: Metadata) -> int:
    size = metadata.get("attention.key_length", int, metadata.get("embedding_length", int) // heads_of(metadata))
    if metadata.get("attention.value_length", int, size) != size:
        metadata.refuse("has keys and values of different sizes, which the native engine does not know")
    return int(size)


def biased(metadata: Metadata) -> bool:
    """Whether queries, keys and values have biases."""
    return metadata.has_tensor("blk.0.attn_q.bias") or metadata.has_tensor("blk.0.attn_qkv.bias")


def mlp_biased(metadata: Metadata) -> bool:
    """Whether the feed-forward layer has biases."""
    return metadata.has_tensor("blk.0.ffn_up.bias")


def rope(metadata: Metadata, partial: bool = False) -> dict[str, Any]:
    """``partial``: rope may rotate a part of each head."""
    return scaled_rope(metadata) | turned_part(metadata, partial)


def turned_part(metadata: Metadata, partial: bool = True) -> dict[str, Any]:
    """The share of each head that rope rotates; with ``partial`` it is always stated, since families' defaults differ."""
    size = head_size(metadata)
    turned = metadata.get("rope.dimension_count", int, size)
    if turned == size:
        return {"partial_rotary_factor": 1.0} if partial else {}
    if not partial:
        metadata.refuse("rotates a part of each head only, which the native engine does not know")
    if not 0 < turned < size:
        metadata.refuse_value("rope.dimension_count")
    # int(size * share) must be ``turned`` again.
    share = turned / size
    return {"partial_rotary_factor": share if int(size * share) == turned else (turned + 0.5) / size}


def base(metadata: Metadata) -> float:
    return float(metadata.get("rope.freq_base", float, 10000.0))


def scaled_rope(metadata: Metadata) -> dict[str, Any]:
    """Rope's parameters without the share of each head."""
    theta = base(metadata)
    # As in llama.cpp, a factor without a type is of type linear, and a factor of 0 stands for no scaling.
    kind = metadata.get("rope.scaling.type", str, "linear")
    if kind == "linear" and metadata.get("rope.scaling.factor", float, 0.0) in (0.0, 1.0):
        kind = "none"
    if metadata.get("rope.scaling.attn_factor", float, 1.0) != 1.0:
        metadata.refuse_value("rope.scaling.attn_factor")
    if metadata.has_tensor(ROPE_FACTORS):
        if kind != "none":
            metadata.refuse(f"has both a {quoted(ROPE_FACTORS)} and the rope scaling {quoted(kind)}")
        return {"rope_type": "factors", "rope_theta": theta, "factors": factors(metadata.file, ROPE_FACTORS)}
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
            "attention_factor": metadata.get(YARN_FACTOR, float) if metadata.has(YARN_FACTOR) else None,
        }
    return metadata.refuse(f"has the rope scaling {quoted(kind)}, which the native engine does not know")


def factors(file: GgufFile, name: str) -> list[float]:
    """The divisors of rope's frequencies."""
    entry = file.tensors[name]
    if entry.type != "F32" or len(entry.shape) != 1:
        raise ModelError(f"{file.path}: {quoted(name)} must be a vector of F32, it is {entry.type} {entry.shape}")
    raw = RawTensors(file.tensors)
    try:
        return [float(value) for value in raw.whole(name)]
    finally:
        raw.close()
