"""LFM2 and its mixture of experts: attention in layers with KV heads, short convolutions in the others (most)."""

from __future__ import annotations

from typing import Any

from outrider.workers.models.formats.gguf.architectures.architecture import KNOWN, WHOLE, Architecture
from outrider.workers.models.formats.gguf.architectures.experts import (
    KNOWN_OF_EXPERTS,
    SIGMOID,
    check_scores,
    experts,
    scale,
)
from outrider.workers.models.formats.gguf.architectures.left_out import layers
from outrider.workers.models.formats.gguf.architectures.sizes import head_size, rope
from outrider.workers.models.formats.gguf.metadata import Metadata

PARTS = {
    "operator_norm": "attn_norm",
    "ffn_norm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.out_proj": "attn_output",
    "self_attn.q_layernorm": "attn_q_norm",
    "self_attn.k_layernorm": "attn_k_norm",
    "conv.conv": "shortconv.conv",
    "conv.in_proj": "shortconv.in_proj",
    "conv.out_proj": "shortconv.out_proj",
    "feed_forward.w1": "ffn_gate",
    "feed_forward.w3": "ffn_up",
    "feed_forward.w2": "ffn_down",
    "feed_forward.gate": "ffn_gate_inp",
    "feed_forward.expert_bias": "exp_probs_b.bias",
}
WHOLE_LFM2 = WHOLE | {"model.embedding_norm": "token_embd_norm"}
CONVOLUTIONS = {"shortconv.l_cache"}


def _shared(metadata: Metadata) -> dict[str, Any]:
    kv_heads = metadata.several("attention.head_count_kv", int, layers(metadata))
    different = set(kv_heads) - {0}
    if len(different) != 1:
        metadata.refuse_value("attention.head_count_kv")
    return {
        "num_hidden_layers": len(kv_heads),
        "hidden_size": metadata.get("embedding_length", int),
        "intermediate_size": metadata.get("feed_forward_length", int),
        "num_attention_heads": metadata.get("attention.head_count", int),
        "num_key_value_heads": different.pop(),
        "head_dim": head_size(metadata),
        "max_position_embeddings": metadata.get("context_length", int),
        "norm_eps": metadata.get("attention.layer_norm_rms_epsilon", float),
        "rope_parameters": rope(metadata),
        "layer_types": ["full_attention" if heads else "conv" for heads in kv_heads],
        "conv_L_cache": metadata.get("shortconv.l_cache", int),
    }


def _lfm2(metadata: Metadata) -> dict[str, Any]:
    return _shared(metadata) | {"model_type": "lfm2", "block_auto_adjust_ff_dim": False}


def _lfm2_moe(metadata: Metadata) -> dict[str, Any]:
    count, used = experts(metadata)
    check_scores(metadata, SIGMOID)
    config, dense = _shared(metadata), metadata.get("leading_dense_block_count", int, 0)
    return config | {
        "model_type": "lfm2_moe",
        "num_experts": count,
        "num_experts_per_tok": used,
        "moe_intermediate_size": metadata.get("expert_feed_forward_length", int),
        "num_dense_layers": dense,
        "use_expert_bias": metadata.has_tensor(f"blk.{dense}.exp_probs_b.bias"),
        "norm_topk_prob": True,
        "routed_scaling_factor": scale(metadata),
    }


ARCHITECTURES = {
    "lfm2": Architecture(_lfm2, KNOWN | CONVOLUTIONS, parts=PARTS, whole=WHOLE_LFM2),
    "lfm2moe": Architecture(
        _lfm2_moe,
        KNOWN_OF_EXPERTS | CONVOLUTIONS | {"expert_gating_func", "leading_dense_block_count", "expert_weights_scale"},
        parts=PARTS,
        whole=WHOLE_LFM2,
    ),
}
