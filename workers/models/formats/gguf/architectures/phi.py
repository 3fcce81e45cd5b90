"""Phi 1 to 2, and Phi 3 and 4 with their fused projections."""

from __future__ import annotations

from typing import Any

from outrider.workers.models.formats.gguf.architectures.architecture import (
    ATTENTION,
    KNOWN,
    NORMS_BEFORE,
    ROPE_FACTORS,
    WHOLE,
    Architecture,
)
from outrider.workers.models.formats.gguf.architectures.sizes import (
    base,
    factors,
    rms_epsilon,
    rope,
    sizes,
    turned_part,
)
from outrider.workers.models.formats.gguf.architectures.windows import WINDOW
from outrider.workers.models.formats.gguf.metadata import Metadata
from outrider.workers.models.headers import quoted

SHORT, LONG = "rope_factors_short.weight", "rope_factors_long.weight"
FUSED = {
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
PLAIN = ATTENTION | {
    "self_attn.dense": "attn_output",
    "mlp.fc1": "ffn_up",
    "mlp.fc2": "ffn_down",
    "input_layernorm": "attn_norm",
}


def _phi2(metadata: Metadata) -> dict[str, Any]:
    return sizes(metadata) | {
        "model_type": "phi",
        "hidden_act": "gelu_new",
        "layer_norm_eps": metadata.get("attention.layer_norm_epsilon", float),
        "rope_parameters": rope(metadata, partial=True),
    }


def _phi3(metadata: Metadata) -> dict[str, Any]:
    """Here 0 is no window. (llama.cpp itself computes without those that files state.)"""
    return (
        sizes(metadata)
        | rms_epsilon(metadata)
        | {
            "model_type": "phi3",
            "hidden_act": "silu",
            "sliding_window": metadata.get(WINDOW, int, 0) or None,
            "rope_parameters": _long_rope(metadata) if metadata.has_tensor(LONG) else rope(metadata, partial=True),
            "original_max_position_embeddings": _original(metadata),
        }
    )


def _original(metadata: Metadata) -> int:
    return int(metadata.get("rope.scaling.original_context_length", int, metadata.get("context_length", int)))


def _long_rope(metadata: Metadata) -> dict[str, Any]:
    if not metadata.has_tensor(SHORT):
        metadata.refuse(f"has a {quoted(LONG)} and no {quoted(SHORT)}")
    kind = metadata.get("rope.scaling.type", str, "longrope")
    if kind != "longrope" or metadata.has_tensor(ROPE_FACTORS):
        metadata.refuse(f"has both a {quoted(LONG)} and another rope scaling")
    return turned_part(metadata) | {
        "rope_type": "longrope",
        "rope_theta": base(metadata),
        "short_factor": factors(metadata.file, SHORT),
        "long_factor": factors(metadata.file, LONG),
        "attention_factor": metadata.get("rope.scaling.attn_factor", float, 1.0),
    }


ARCHITECTURES = {
    "phi2": Architecture(_phi2, parts=PLAIN, whole=WHOLE | {"model.final_layernorm": "output_norm"}),
    "phi3": Architecture(_phi3, KNOWN | {WINDOW}, parts=FUSED | NORMS_BEFORE, in_config=frozenset({SHORT, LONG})),
}
