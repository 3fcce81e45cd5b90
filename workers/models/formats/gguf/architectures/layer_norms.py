"""Architectures with Llama's names and layer norms: StarCoder 2, StableLM, Nemotron and Jais 2."""

from __future__ import annotations

from typing import Any

from outrider.workers.models.formats.gguf.architectures.architecture import (
    ATTENTION,
    KNOWN,
    LLAMA_PARTS,
    NORMS_BEFORE,
    Architecture,
    less_one,
)
from outrider.workers.models.formats.gguf.architectures.sizes import biased, mlp_biased, rope, sizes
from outrider.workers.models.formats.gguf.architectures.windows import WINDOW
from outrider.workers.models.formats.gguf.metadata import Metadata

STARCODER2 = ATTENTION | NORMS_BEFORE | {"mlp.c_fc": "ffn_up", "mlp.c_proj": "ffn_down"}
NEMOTRON = ATTENTION | NORMS_BEFORE | {"mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down"}
# The norms of all heads are in one tensor (names.py).
STABLELM = LLAMA_PARTS | {"self_attn.q_layernorm": "attn_q_norm", "self_attn.k_layernorm": "attn_k_norm"}
NEMOTRON_NORMS = ("input_layernorm.weight", "post_attention_layernorm.weight", "model.norm.weight")


def _style(metadata: Metadata) -> dict[str, Any]:
    return sizes(metadata) | {"rope_parameters": rope(metadata, partial=True)}


def _epsilon(metadata: Metadata) -> float:
    return float(metadata.get("attention.layer_norm_epsilon", float))


def _starcoder2(metadata: Metadata) -> dict[str, Any]:
    return _style(metadata) | {
        "model_type": "starcoder2",
        "hidden_act": "gelu_pytorch_tanh",
        "norm_epsilon": _epsilon(metadata),
        "use_bias": biased(metadata),
        "sliding_window": metadata.get(WINDOW, int, 0) or None,
    }


def _stablelm(metadata: Metadata) -> dict[str, Any]:
    """Attention and feed-forward are parallel if the feed-forward layer has no norm of its own."""
    return _style(metadata) | {
        "model_type": "stablelm",
        "hidden_act": "silu",
        "layer_norm_eps": _epsilon(metadata),
        "use_qkv_bias": biased(metadata),
        "use_parallel_residual": not metadata.has_tensor("blk.0.ffn_norm.weight"),
        "qk_layernorm": metadata.has_tensor("blk.0.attn_q_norm.weight"),
    }


def _jais2(metadata: Metadata) -> dict[str, Any]:
    return (
        sizes(metadata)
        | {"rope_parameters": rope(metadata)}
        | {
            "model_type": "jais2",
            "hidden_act": "relu2",
            "layer_norm_eps": _epsilon(metadata),
            "attention_bias": biased(metadata),
            "mlp_bias": mlp_biased(metadata),
        }
    )


def _nemotron(metadata: Metadata) -> dict[str, Any]:
    return _style(metadata) | {
        "model_type": "nemotron",
        "hidden_act": "relu2",
        "norm_eps": _epsilon(metadata),
        "attention_bias": biased(metadata),
        "mlp_bias": mlp_biased(metadata),
    }


ARCHITECTURES = {
    "starcoder2": Architecture(_starcoder2, KNOWN | {WINDOW}, parts=STARCODER2),
    "stablelm": Architecture(_stablelm, KNOWN | {"use_parallel_residual"}, parts=STABLELM),
    "jais2": Architecture(_jais2, parts=NEMOTRON),
    "nemotron": Architecture(_nemotron, parts=NEMOTRON, changes=dict.fromkeys(NEMOTRON_NORMS, less_one)),
}
