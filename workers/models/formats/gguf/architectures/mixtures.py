"""Mixtures of experts: Llama's layers, the gated one chosen from many."""

from __future__ import annotations

from typing import Any

from outrider.workers.models.formats.gguf.architectures.architecture import KNOWN, LLAMA_PARTS, Architecture
from outrider.workers.models.formats.gguf.architectures.rows import interleaved
from outrider.workers.models.formats.gguf.architectures.sizes import biased, llama_style
from outrider.workers.models.formats.gguf.metadata import Metadata

KNOWN_OF_MIXTURES = KNOWN | {
    "expert_count",
    "expert_used_count",
    "expert_feed_forward_length",
    "expert_shared_feed_forward_length",
}
# The experts themselves lie together (names.py).
PARTS = LLAMA_PARTS | {
    "mlp.gate": "ffn_gate_inp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
}
GPT_OSS_PARTS = PARTS | {
    "mlp.router": "ffn_gate_inp",
    "post_attention_layernorm": "post_attention_norm",
    "self_attn.sinks": "attn_sinks.weight",
}


def mixture(metadata: Metadata) -> dict[str, Any]:
    """Llama's, and the experts. All layers have them: llama.cpp knows no other files of these architectures."""
    count, used = metadata.get("expert_count", int), metadata.get("expert_used_count", int)
    if not 0 < used <= count:
        metadata.refuse(f"has {count} experts, of which a token is to use {used}")
    wide = metadata.get("feed_forward_length", int, 0)
    ffn = metadata.get("expert_feed_forward_length", int, wide // used)
    return llama_style(metadata, ffn) | {
        "num_experts": count,
        "num_experts_per_tok": used,
        "moe_intermediate_size": ffn,
        "hidden_act": "silu",
    }


def _mixtral(metadata: Metadata) -> dict[str, Any]:
    config = mixture(metadata)
    del config["moe_intermediate_size"]
    count = config.pop("num_experts")
    window = metadata.get("attention.sliding_window", int, 0) or None
    return config | {"model_type": "mixtral", "num_local_experts": count, "sliding_window": window}


def _qwen2_moe(metadata: Metadata) -> dict[str, Any]:
    shared = metadata.get("expert_shared_feed_forward_length", int, metadata.get("feed_forward_length", int, 0))
    return mixture(metadata) | {
        "model_type": "qwen2_moe",
        "norm_topk_prob": False,
        "shared_expert_intermediate_size": shared,
    }


def _qwen3_moe(metadata: Metadata) -> dict[str, Any]:
    return mixture(metadata) | {
        "model_type": "qwen3_moe",
        "norm_topk_prob": True,
        "attention_bias": biased(metadata),
    }


def _olmoe(metadata: Metadata) -> dict[str, Any]:
    config = mixture(metadata) | {"model_type": "olmoe", "norm_topk_prob": False}
    # Its files have the width of an expert as that of the layer.
    del config["moe_intermediate_size"]
    return config


def _gpt_oss(metadata: Metadata) -> dict[str, Any]:
    config = mixture(metadata)
    count, ffn = config.pop("num_experts"), config.pop("moe_intermediate_size")
    return config | {
        "model_type": "gpt_oss",
        "num_local_experts": count,
        "intermediate_size": ffn,
        "sliding_window": metadata.get("attention.sliding_window", int),
        # As the model was trained, and its config.json says; GGUF has no key for it.
        "rope_parameters": config["rope_parameters"] | {"truncate": False},
    }


MIXTRAL = Architecture(_mixtral, KNOWN_OF_MIXTURES, parts=PARTS, order=interleaved)
ARCHITECTURES = {
    "qwen2moe": Architecture(_qwen2_moe, KNOWN_OF_MIXTURES, parts=PARTS),
    "qwen3moe": Architecture(_qwen3_moe, KNOWN_OF_MIXTURES, parts=PARTS),
    "olmoe": Architecture(_olmoe, KNOWN_OF_MIXTURES, parts=PARTS),
    "gpt-oss": Architecture(_gpt_oss, KNOWN_OF_MIXTURES, parts=GPT_OSS_PARTS),
}
