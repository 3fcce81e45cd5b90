"""Mixtures of experts whose routers add corrections (a bias for the choice only) to the scores: GLM-4.5, dots.llm1,
K-EXAONE, MiniMax-M2, Trinity, ERNIE, Hy 3, Sarvam-30B and Ling 2.
"""

from __future__ import annotations

from typing import Any

from outrider.workers.models.formats.gguf.architectures.architecture import LLAMA_PARTS, Architecture
from outrider.workers.models.formats.gguf.architectures.experts import (
    CORRECTED,
    KNOWN_OF_EXPERTS,
    SHARED,
    SHARED_WIDTH,
    SIGMOID,
    SOFTMAX,
    check_scores,
    experts,
    groups,
    scale,
)
from outrider.workers.models.formats.gguf.architectures.left_out import FURTHER_LAYERS, SECTIONS, check_sections
from outrider.workers.models.formats.gguf.architectures.sizes import biased, llama_style
from outrider.workers.models.formats.gguf.architectures.windows import KNOWN_OF_WINDOWS, WINDOW, layer_types, same_base
from outrider.workers.models.formats.gguf.metadata import Metadata

KNOWN_OF_CORRECTED = KNOWN_OF_EXPERTS | {"expert_gating_func", "leading_dense_block_count", "expert_shared_count"}
WEIGHTS = {"expert_weights_norm", "expert_weights_scale"}
GROUPS = {"expert_group_count", "expert_group_used_count"}
PARTS = LLAMA_PARTS | CORRECTED | SHARED
NORM_BEHIND = {"post_attention_layernorm": "post_attention_norm"}
MINIMAX_PARTS = LLAMA_PARTS | CORRECTED | {"mlp.e_score_correction_bias": "exp_probs_b.bias"}
AFMOE_PARTS = PARTS | {
    "post_attention_layernorm": "post_attention_norm",
    "pre_mlp_layernorm": "ffn_norm",
    "post_mlp_layernorm": "post_ffw_norm",
    "self_attn.gate_proj": "attn_gate",
    "mlp.router.gate": "ffn_gate_inp",
    "mlp.expert_bias": "exp_probs_b.bias",
}
# (This name has no ".bias".)
HY_V3_PARTS = PARTS | {"mlp.e_score_correction_bias": "exp_probs_b"}
ERNIE_PARTS = PARTS | {"mlp.gate.moe_statics.e_score_correction_bias": "exp_probs_b.bias"}
# Every fourth layer of Trinity has no window: llama.cpp supports no other pattern.
EVERY = 4


def _deepseek(metadata: Metadata, *, partial: bool = False) -> dict[str, Any]:
    """The configuration of families with DeepSeek V3's router."""
    count, used = experts(metadata)
    check_scores(metadata, SIGMOID)
    return llama_style(metadata, partial=partial) | {
        "n_routed_experts": count,
        "num_experts_per_tok": used,
        "moe_intermediate_size": metadata.get("expert_feed_forward_length", int),
        "n_shared_experts": metadata.get("expert_shared_count", int),
        "first_k_dense_replace": metadata.get("leading_dense_block_count", int, 0),
        "norm_topk_prob": metadata.get("expert_weights_norm", bool, False),
        "routed_scaling_factor": scale(metadata),
        "attention_bias": biased(metadata),
        "hidden_act": "silu",
        **groups(metadata),
    }


def _glm4_moe(metadata: Metadata) -> dict[str, Any]:
    check_sections(metadata)
    normed = metadata.has_tensor("blk.0.attn_q_norm.weight")
    return _deepseek(metadata, partial=True) | {"model_type": "glm4_moe", "use_qk_norm": normed}


def _bailing_moe_2(metadata: Metadata) -> dict[str, Any]:
    """Sarvam-30B, and Ling 2, whose rope rotates a part of each head. The key SHARED_WIDTH has the width of one shared
    expert, or of all together."""
    config = _deepseek(metadata, partial=True)
    width, shared = config["moe_intermediate_size"], config["n_shared_experts"]
    if metadata.get(SHARED_WIDTH, int, width) not in (width, shared * width):
        metadata.refuse_value(SHARED_WIDTH)
    normed = metadata.has_tensor("blk.0.attn_q_norm.weight")
    return config | {"model_type": "sarvam_moe", "use_qk_norm": normed}


def _dots1(metadata: Metadata) -> dict[str, Any]:
    return _deepseek(metadata) | {"model_type": "dots1", "sliding_window": None}


def _exaone_moe(metadata: Metadata) -> dict[str, Any]:
    """Layers without a window have no rope if others have a window, in llama.cpp too."""
    same_base(metadata)
    config = _deepseek(metadata)
    count, width, bias = (config.pop(key) for key in ("n_routed_experts", "moe_intermediate_size", "attention_bias"))
    shared = config.pop("n_shared_experts")
    if bias or metadata.get(SHARED_WIDTH, int, shared * width) != shared * width:
        metadata.refuse(f"has biases of attention, or shared experts that are not {shared} of {width} columns")
    return config | {
        "model_type": "exaone_moe",
        "num_experts": count,
        "moe_intermediate_size": width,
        "num_shared_experts": shared,
        "sliding_window": metadata.get(WINDOW, int),
        "layer_types": layer_types(metadata, 4),
    }


def _minimax_m2(metadata: Metadata) -> dict[str, Any]:
    count, used = experts(metadata)
    check_scores(metadata, SIGMOID)
    return llama_style(metadata, partial=True) | {
        "model_type": "minimax_m2",
        "intermediate_size": metadata.get("expert_feed_forward_length", int),
        "num_local_experts": count,
        "num_experts_per_tok": used,
        "hidden_act": "silu",
    }


def _hy_v3(metadata: Metadata) -> dict[str, Any]:
    """GGUF has no key for the layers with experts, nor for the number of shared experts, which are stored as one
    feed-forward layer of width SHARED_WIDTH."""
    count, used = experts(metadata)
    check_scores(metadata, SIGMOID)
    if not metadata.get("expert_weights_norm", bool, True):
        metadata.refuse_value("expert_weights_norm")
    width = metadata.get("expert_feed_forward_length", int)
    shared = metadata.get(SHARED_WIDTH, int, width)
    if shared % width:
        metadata.refuse_value(SHARED_WIDTH)
    config = llama_style(metadata)
    sparse = [metadata.has_tensor(f"blk.{layer}.ffn_gate_inp.weight") for layer in range(config["num_hidden_layers"])]
    return config | {
        "model_type": "hy_v3",
        "num_experts": count,
        "num_experts_per_tok": used,
        "moe_intermediate_size": width,
        "num_shared_experts": shared // width,
        "mlp_layer_types": ["sparse" if each else "dense" for each in sparse],
        "router_scaling_factor": scale(metadata),
        "attention_bias": biased(metadata),
        "hidden_act": "silu",
    }


def _afmoe(metadata: Metadata) -> dict[str, Any]:
    count, used = experts(metadata)
    check_scores(metadata, SIGMOID)
    if groups(metadata)["n_group"] > 1:
        metadata.refuse_value("expert_group_count")
    return llama_style(metadata) | {
        "model_type": "afmoe",
        "num_experts": count,
        "num_experts_per_tok": used,
        "moe_intermediate_size": metadata.get("expert_feed_forward_length", int),
        "num_shared_experts": metadata.get("expert_shared_count", int),
        "num_dense_layers": metadata.get("leading_dense_block_count", int, 0),
        "route_norm": metadata.get("expert_weights_norm", bool, True),
        "route_scale": scale(metadata),
        "sliding_window": metadata.get(WINDOW, int),
        "global_attn_every_n_layers": EVERY,
        "mup_enabled": True,
        "attention_bias": biased(metadata),
        "hidden_act": "silu",
    }


def _ernie4_5_moe(metadata: Metadata) -> dict[str, Any]:
    count, used = experts(metadata)
    check_scores(metadata, SOFTMAX)
    config = llama_style(metadata)
    # GGUF has no key for the last layer with experts.
    layers = range(config["num_hidden_layers"])
    last = max((layer for layer in layers if metadata.has_tensor(f"blk.{layer}.ffn_gate_inp.weight")), default=0)
    return config | {
        "model_type": "ernie4_5_moe",
        "moe_num_experts": count,
        "moe_k": used,
        "moe_intermediate_size": metadata.get("expert_feed_forward_length", int),
        "moe_num_shared_experts": metadata.get("expert_shared_count", int, 0),
        "moe_layer_interval": metadata.get("interleave_moe_layer_step", int),
        "moe_layer_start_index": metadata.get("leading_dense_block_count", int, 0),
        "moe_layer_end_index": last,
        "hidden_act": "silu",
    }


ARCHITECTURES = {
    "glm4moe": Architecture(
        _glm4_moe,
        KNOWN_OF_CORRECTED | WEIGHTS | GROUPS | {FURTHER_LAYERS, SECTIONS},
        parts=PARTS | NORM_BEHIND,
    ),
    "bailingmoe2": Architecture(
        _bailing_moe_2,
        KNOWN_OF_CORRECTED | WEIGHTS | GROUPS | {SHARED_WIDTH, FURTHER_LAYERS},
        parts=PARTS | {"self_attn.qkv_proj": "attn_qkv"},
    ),
    "dots1": Architecture(_dots1, KNOWN_OF_CORRECTED | WEIGHTS | GROUPS, parts=PARTS),
    "exaone-moe": Architecture(
        _exaone_moe,
        KNOWN_OF_CORRECTED | WEIGHTS | GROUPS | KNOWN_OF_WINDOWS | {FURTHER_LAYERS, SHARED_WIDTH},
        parts=PARTS,
    ),
    "minimax-m2": Architecture(_minimax_m2, KNOWN_OF_EXPERTS | {"expert_gating_func"}, parts=MINIMAX_PARTS),
    "hy_v3": Architecture(
        _hy_v3, KNOWN_OF_EXPERTS | WEIGHTS | {"expert_gating_func", SHARED_WIDTH, FURTHER_LAYERS}, parts=HY_V3_PARTS
    ),
    "afmoe": Architecture(_afmoe, KNOWN_OF_CORRECTED | WEIGHTS | GROUPS | {WINDOW}, parts=AFMOE_PARTS),
    "ernie4_5-moe": Architecture(
        _ernie4_5_moe,
        KNOWN_OF_CORRECTED | {"interleave_moe_layer_step", SHARED_WIDTH},
        parts=ERNIE_PARTS,
    ),
}
