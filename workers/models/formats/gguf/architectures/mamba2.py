"""Granite 4 H, Falcon H1 and Nemotron H: Mamba 2 in most layers, or in parallel to the attention of each layer.

llama.cpp's converter stores -exp(A_log) for A_log, norms of groups as a matrix with a row for each group, and Falcon H1's
matrices multiplied by its multipliers. The kind of a layer follows from arrays with a number for each layer: KV_HEADS, and
for Nemotron WIDTHS, the width of its feed-forward layer or of its experts.
"""

from __future__ import annotations

from typing import Any

from outrider.workers.models.formats.gguf.architectures.architecture import ATTENTION, GATED, KNOWN, WHOLE, Architecture
from outrider.workers.models.formats.gguf.architectures.delta_nets import a_log
from outrider.workers.models.formats.gguf.architectures.experts import (
    GROUP_COUNT,
    KNOWN_OF_EXPERTS,
    SHARED_WIDTH,
    experts,
    scale,
)
from outrider.workers.models.formats.gguf.architectures.granite import KNOWN_OF_GRANITE, multipliers
from outrider.workers.models.formats.gguf.architectures.left_out import FURTHER_LAYERS, layers
from outrider.workers.models.formats.gguf.architectures.rows import interleaved
from outrider.workers.models.formats.gguf.architectures.sizes import head_size, heads_of, llama_style, rms_epsilon
from outrider.workers.models.formats.gguf.metadata import Metadata

MAMBA, FULL, MLP, MOE = "linear_attention", "full_attention", "mlp", "moe"
OF_MAMBA = {"ssm.conv_kernel", "ssm.state_size", "ssm.group_count", "ssm.time_step_rank", "ssm.inner_size"}
KV_HEADS, WIDTHS = "attention.head_count_kv", "feed_forward_length"
SHARED_COUNT, NORMALISED, LATENT = "expert_shared_count", "expert_weights_norm", "moe_latent_size"
PARTS = {
    "in_proj": "ssm_in",
    "conv1d": "ssm_conv1d",
    "A_log": "ssm_a",
    "D": "ssm_d",
    "dt_bias": "ssm_dt.bias",
    "norm": "ssm_norm",
    "out_proj": "ssm_out",
}
NESTED = {f"mamba.{name}": stored for name, stored in PARTS.items()}
GRANITE = (
    NESTED
    | ATTENTION
    | GATED  # of a model without experts
    | {
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "block_sparse_moe.router": "ffn_gate_inp",
        "shared_mlp.gate_proj": "ffn_gate_shexp",
        "shared_mlp.up_proj": "ffn_up_shexp",
        "shared_mlp.down_proj": "ffn_down_shexp",
    }
)
FALCON = (
    NESTED
    | ATTENTION
    | {name.replace("mlp.", "feed_forward."): stored for name, stored in GATED.items()}
    # (The converter omits the ".weight" of the second.)
    | {"input_layernorm": "attn_norm", "pre_ff_layernorm.weight": "ffn_norm"}
)
NEMOTRON = (
    {f"mixer.{name}": stored for name, stored in PARTS.items()}
    | {name.replace("self_attn.", "mixer."): stored for name, stored in ATTENTION.items()}
    | {
        "norm": "attn_norm",
        "mixer.up_proj": "ffn_up",
        "mixer.down_proj": "ffn_down",
        "mixer.gate": "ffn_gate_inp",
        "mixer.gate.e_score_correction_bias": "exp_probs_b.bias",
        "mixer.fc1_latent_proj": "ffn_latent_down",
        "mixer.fc2_latent_proj": "ffn_latent_up",
        "mixer.shared_experts.up_proj": "ffn_up_shexp",
        "mixer.shared_experts.down_proj": "ffn_down_shexp",
    }
)
WHOLE_OF_FALCON = WHOLE | {"model.final_layernorm": "output_norm"}
WHOLE_OF_NEMOTRON = {"backbone.embeddings": "token_embd", "backbone.norm_f": "output_norm", "lm_head": "output"}


def _mamba(metadata: Metadata, layer: int) -> dict[str, Any]:
    """The sizes of Mamba 2; ``layer`` is one that has it."""
    heads, inner = metadata.get("ssm.time_step_rank", int), metadata.get("ssm.inner_size", int)
    if heads < 1 or inner % heads:
        metadata.refuse(f"has {heads} heads of Mamba 2 for {inner} columns")
    return {
        "mamba_n_heads": heads,
        "mamba_d_head": inner // heads,
        "mamba_n_groups": metadata.get("ssm.group_count", int),
        "mamba_d_state": metadata.get("ssm.state_size", int),
        "mamba_d_conv": metadata.get("ssm.conv_kernel", int),
        "mamba_conv_bias": metadata.has_tensor(f"blk.{layer}.ssm_conv1d.bias"),
    }


def kv_heads_of(metadata: Metadata, counts: list[int]) -> int:
    """The number of KV heads, which must be equal in all layers that have any."""
    different = set(counts) - {0}
    if len(different) != 1:
        metadata.refuse_value(KV_HEADS)
    return different.pop()


def _granite(metadata: Metadata) -> dict[str, Any]:
    count = layers(metadata)
    kv_heads = metadata.several(KV_HEADS, int, count)
    of_attention = kv_heads_of(metadata, kv_heads)
    if 0 not in kv_heads:
        metadata.refuse_value(KV_HEADS)
    # Files of Bamba have rope on a part of each head, whose rows the converter permutes wrongly.
    if metadata.get("rope.scaling.finetuned", bool, True):
        metadata.refuse_value("rope.scaling.finetuned")
    mamba, width, hidden = (
        _mamba(metadata, kv_heads.index(0)),
        metadata.get(WIDTHS, int),
        metadata.get("embedding_length", int),
    )
    config = mamba | multipliers(metadata) | rms_epsilon(metadata)
    inner = mamba["mamba_n_heads"] * mamba["mamba_d_head"]
    if inner % hidden:
        metadata.refuse(f"has Mamba 2 of {inner} columns beside {hidden}, which granitemoehybrid does not know")
    config |= {
        "model_type": "granitemoehybrid",
        "mamba_expand": inner // hidden,
        "layer_types": [FULL if heads else MAMBA for heads in kv_heads],
        "num_hidden_layers": count,
        "hidden_size": hidden,
        "intermediate_size": width,
        "num_attention_heads": heads_of(metadata),
        "num_key_value_heads": of_attention,
        "head_dim": head_size(metadata),
        "max_position_embeddings": metadata.get("context_length", int),
        "attention_bias": metadata.has_tensor(f"blk.{kv_heads.index(of_attention)}.attn_q.bias"),
        "fused_projections": False,
    }
    if metadata.get("expert_count", int, 0):
        chosen, used = experts(metadata)
        beside = metadata.get(SHARED_WIDTH, int)
        return config | {"num_local_experts": chosen, "num_experts_per_tok": used, "shared_intermediate_size": beside}
    return config | {"num_local_experts": 0, "shared_intermediate_size": width}


def _falcon(metadata: Metadata) -> dict[str, Any]:
    return (
        llama_style(metadata)
        | _mamba(metadata, 0)
        | {
            "model_type": "falcon_h1",
            "mamba_d_ssm": metadata.get("ssm.inner_size", int),
            "mamba_rms_norm": metadata.has_tensor("blk.0.ssm_norm.weight"),
            "mamba_norm_before_gate": False,
            "attention_bias": metadata.has_tensor("blk.0.attn_q.bias"),
        }
    )


def _nemotron(metadata: Metadata, behind: str) -> dict[str, Any]:
    """``behind``: the kind of layers with neither attention nor Mamba 2."""
    count, every = layers(metadata), metadata.get("block_count", int)
    kv_heads, widths = (metadata.several(key, int, every)[:count] for key in (KV_HEADS, WIDTHS))
    kinds = [FULL if heads else behind if width else MAMBA for heads, width in zip(kv_heads, widths, strict=True)]
    if MAMBA not in kinds or len(set(widths) - {0}) > 1:
        metadata.refuse_value(WIDTHS)
    mamba = _mamba(metadata, kinds.index(MAMBA))
    key = "attention.layer_norm_rms_epsilon"
    return {
        "model_type": "nemotron_h",
        "layers_block_type": kinds,
        "hidden_size": metadata.get("embedding_length", int),
        "intermediate_size": max(widths),
        "num_attention_heads": heads_of(metadata),
        "num_key_value_heads": kv_heads_of(metadata, kv_heads),
        "head_dim": head_size(metadata),
        "max_position_embeddings": metadata.get("context_length", int),
        "layer_norm_epsilon": metadata.get(key if metadata.has(key) else "attention.layer_norm_epsilon", float),
        "mamba_num_heads": mamba["mamba_n_heads"],
        "mamba_head_dim": mamba["mamba_d_head"],
        "n_groups": mamba["mamba_n_groups"],
        "ssm_state_size": mamba["mamba_d_state"],
        "conv_kernel": mamba["mamba_d_conv"],
        "use_conv_bias": mamba["mamba_conv_bias"],
        "mlp_bias": any(metadata.has_tensor(f"blk.{layer}.ffn_up.bias") for layer in range(count)),
    }


def _nemotron_dense(metadata: Metadata) -> dict[str, Any]:
    return _nemotron(metadata, MLP)


def _nemotron_moe(metadata: Metadata) -> dict[str, Any]:
    count, used = experts(metadata)
    if metadata.get(GROUP_COUNT, int, 1) > 1:
        metadata.refuse_value(GROUP_COUNT)  # the file has no key for the number of groups that are chosen from
    return _nemotron(metadata, MOE) | {
        "n_routed_experts": count,
        "num_experts_per_tok": used,
        "moe_intermediate_size": metadata.get("expert_feed_forward_length", int),
        "moe_shared_expert_intermediate_size": metadata.get(SHARED_WIDTH, int),
        "moe_latent_size": metadata.get(LATENT, int, 0) or None,
        "norm_topk_prob": metadata.get(NORMALISED, bool, False),
        "routed_scaling_factor": scale(metadata),
    }


OF_NEMOTRON_EXPERTS = {SHARED_WIDTH, SHARED_COUNT, NORMALISED, LATENT, GROUP_COUNT, "expert_weights_scale"}
ARCHITECTURES = {
    "granitehybrid": Architecture(
        _granite,
        KNOWN_OF_GRANITE | KNOWN_OF_EXPERTS | OF_MAMBA | {SHARED_WIDTH},
        parts=GRANITE,
        order=interleaved,
        changes={"mamba.A_log": a_log},
    ),
    "falcon-h1": Architecture(
        _falcon, KNOWN | OF_MAMBA, parts=FALCON, whole=WHOLE_OF_FALCON, changes={"mamba.A_log": a_log}
    ),
    "nemotron_h": Architecture(
        _nemotron_dense,
        KNOWN | OF_MAMBA,
        layers="backbone.layers.",
        parts=NEMOTRON,
        whole=WHOLE_OF_NEMOTRON,
        changes={"mixer.A_log": a_log},
    ),
    "nemotron_h_moe": Architecture(
        _nemotron_moe,
        KNOWN_OF_EXPERTS | OF_MAMBA | OF_NEMOTRON_EXPERTS | {FURTHER_LAYERS},
        layers="backbone.layers.",
        parts=NEMOTRON,
        whole=WHOLE_OF_NEMOTRON,
        changes={"mixer.A_log": a_log},
    ),
}
