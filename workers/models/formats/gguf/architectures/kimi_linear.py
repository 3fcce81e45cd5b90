"""Kimi Linear: delta nets with a decay for each row of the state in layers without KV heads, latent attention in others."""

from __future__ import annotations

from typing import Any

from outrider.workers.models.formats.gguf.architectures.architecture import Architecture
from outrider.workers.models.formats.gguf.architectures.corrected_mixtures import GROUPS, KNOWN_OF_CORRECTED, WEIGHTS
from outrider.workers.models.formats.gguf.architectures.delta_nets import a_log
from outrider.workers.models.formats.gguf.architectures.experts import SIGMOID, check_scores, experts, groups, scale
from outrider.workers.models.formats.gguf.architectures.latent import (
    DENSE_LAYERS,
    KEY_SIZE,
    PARTS,
    QUERY_RANK,
    RANK,
    VALUE_SIZE,
)
from outrider.workers.models.formats.gguf.architectures.left_out import layers
from outrider.workers.models.formats.gguf.architectures.sizes import heads_of, rms_epsilon
from outrider.workers.models.formats.gguf.metadata import Metadata

KV_HEADS, TAPS, HEAD_SIZE, TURNED = "attention.head_count_kv", "ssm.conv_kernel", "kda.head_dim", "rope.dimension_count"
DELTA_NET = {
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.q_conv1d": "ssm_conv1d_q",
    "self_attn.k_conv1d": "ssm_conv1d_k",
    "self_attn.v_conv1d": "ssm_conv1d_v",
    "self_attn.f_a_proj": "ssm_f_a",
    "self_attn.f_b_proj": "ssm_f_b",
    "self_attn.b_proj": "ssm_beta",
    "self_attn.A_log": "ssm_a",
    "self_attn.dt_bias": "ssm_dt.bias",
    "self_attn.g_a_proj": "ssm_g_a",
    "self_attn.g_b_proj": "ssm_g_b",
    "self_attn.o_norm": "ssm_norm",
}


def _kimi(metadata: Metadata) -> dict[str, Any]:
    heads, count = heads_of(metadata), layers(metadata)
    kv_heads = metadata.several(KV_HEADS, int, count)
    turned, key = metadata.get(TURNED, int), metadata.get(KEY_SIZE, int)
    if not 0 < turned < key:
        metadata.refuse_value(TURNED)
    check_scores(metadata, SIGMOID)
    number, used = experts(metadata)
    return {
        "model_type": "kimi_linear",
        "layer_types": ["full_attention" if each else "linear_attention" for each in kv_heads],
        "num_hidden_layers": count,
        "hidden_size": metadata.get("embedding_length", int),
        "intermediate_size": metadata.get("feed_forward_length", int),
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "q_lora_rank": metadata.get(QUERY_RANK, int, 0) or None,
        "kv_lora_rank": metadata.get(RANK, int),
        "qk_nope_head_dim": key - turned,
        "qk_rope_head_dim": turned,
        "v_head_dim": metadata.get(VALUE_SIZE, int),
        "max_position_embeddings": metadata.get("context_length", int),
        "linear_num_heads": heads,
        "linear_head_dim": metadata.get(HEAD_SIZE, int),
        "linear_conv_kernel_dim": metadata.get(TAPS, int),
        "flat_rates": True,
        "num_experts": number,
        "num_experts_per_tok": used,
        "moe_intermediate_size": metadata.get("expert_feed_forward_length", int),
        "n_shared_experts": metadata.get("expert_shared_count", int),
        "first_k_dense_replace": metadata.get(DENSE_LAYERS, int, 0),
        "routed_scaling_factor": scale(metadata),
        "norm_topk_prob": True,
        **groups(metadata),
        **rms_epsilon(metadata),
    }


ARCHITECTURES = {
    "kimi-linear": Architecture(
        _kimi,
        KNOWN_OF_CORRECTED | WEIGHTS | GROUPS | {QUERY_RANK, RANK, KEY_SIZE, VALUE_SIZE, TAPS, HEAD_SIZE},
        parts=PARTS | DELTA_NET,
        changes={"self_attn.A_log": a_log},
    ),
}
