"""Mamba, Falcon Mamba, Mamba 2 and Jamba.

llama.cpp's converter stores -exp(A_log) for A_log. It does not store the epsilon of Falcon Mamba's norms of steps, B and C,
for which transformers' default is taken: no published model has another.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from outrider.workers.models.formats.gguf.architectures.architecture import ATTENTION, GATED, KNOWN, WHOLE, Architecture
from outrider.workers.models.formats.gguf.architectures.delta_nets import a_log
from outrider.workers.models.formats.gguf.architectures.experts import experts
from outrider.workers.models.formats.gguf.architectures.left_out import layers
from outrider.workers.models.formats.gguf.architectures.mamba2 import KV_HEADS, OF_MAMBA, kv_heads_of
from outrider.workers.models.formats.gguf.architectures.mamba2 import PARTS as OF_MAMBA_2
from outrider.workers.models.formats.gguf.architectures.sizes import head_size, heads_of, rms_epsilon
from outrider.workers.models.formats.gguf.metadata import Metadata

NORMED = "ssm.dt_b_c_rms"
OF_MAMBA_1 = {
    "in_proj": "ssm_in",
    "conv1d": "ssm_conv1d",
    "x_proj": "ssm_x",
    "dt_proj": "ssm_dt",
    "A_log": "ssm_a",
    "D": "ssm_d",
    "out_proj": "ssm_out",
}
NORM = {"norm": "attn_norm"}
MAMBA = {f"mixer.{name}": stored for name, stored in OF_MAMBA_1.items()} | NORM
MAMBA_2 = {f"mixer.{name}": stored for name, stored in OF_MAMBA_2.items()} | NORM
WHOLE_OF_MAMBA = {"backbone.embeddings": "token_embd", "backbone.norm_f": "output_norm", "lm_head": "output"}
NORMS = {"mamba.dt_layernorm": "ssm_dt_norm", "mamba.b_layernorm": "ssm_b_norm", "mamba.c_layernorm": "ssm_c_norm"}
JAMBA = (
    {f"mamba.{name}": stored for name, stored in OF_MAMBA_1.items()}
    | NORMS
    | ATTENTION
    | {name.replace("mlp.", "feed_forward."): stored for name, stored in GATED.items()}
    | {"input_layernorm": "attn_norm", "pre_ff_layernorm": "ffn_norm", "feed_forward.router": "ffn_gate_inp"}
)


def _sizes(metadata: Metadata) -> dict[str, Any]:
    """What Mamba and Mamba 2 have in common."""
    return {
        "num_hidden_layers": layers(metadata),
        "hidden_size": metadata.get("embedding_length", int),
        "max_position_embeddings": metadata.get("context_length", int),
        "layer_norm_epsilon": metadata.get("attention.layer_norm_rms_epsilon", float),
        "state_size": metadata.get("ssm.state_size", int),
        "conv_kernel": metadata.get("ssm.conv_kernel", int),
        "use_conv_bias": metadata.has_tensor("blk.0.ssm_conv1d.bias"),
        "use_bias": metadata.has_tensor("blk.0.ssm_in.bias"),
    }


def _mamba(metadata: Metadata) -> dict[str, Any]:
    return _sizes(metadata) | {
        "model_type": "falcon_mamba" if metadata.get(NORMED, bool, False) else "mamba",
        "intermediate_size": metadata.get("ssm.inner_size", int),
        "time_step_rank": metadata.get("ssm.time_step_rank", int),
    }


def _mamba2(metadata: Metadata) -> dict[str, Any]:
    config = _sizes(metadata)
    heads, inner, hidden = (
        metadata.get("ssm.time_step_rank", int),
        metadata.get("ssm.inner_size", int),
        config["hidden_size"],
    )
    if heads < 1 or inner % heads or hidden < 1 or inner % hidden:
        metadata.refuse(f"has {heads} heads of Mamba 2 for {inner} columns, beside {hidden}")
    return config | {
        "model_type": "mamba2",
        "expand": inner // hidden,
        "num_heads": heads,
        "head_dim": inner // heads,
        "n_groups": metadata.get("ssm.group_count", int),
    }


def _jamba(metadata: Metadata) -> dict[str, Any]:
    count, hidden, inner = layers(metadata), metadata.get("embedding_length", int), metadata.get("ssm.inner_size", int)
    kv_heads = metadata.several(KV_HEADS, int, count)
    if hidden < 1 or inner % hidden:
        metadata.refuse(f"has Mamba of {inner} columns beside {hidden}, which jamba does not know")
    period, offset = _every(metadata, "attention", [heads > 0 for heads in kv_heads])
    first = kv_heads.index(0) if 0 in kv_heads else 0
    config = {
        "model_type": "jamba",
        "num_hidden_layers": count,
        "hidden_size": hidden,
        "intermediate_size": metadata.get("feed_forward_length", int),
        "num_attention_heads": heads_of(metadata),
        "num_key_value_heads": kv_heads_of(metadata, kv_heads),
        "head_dim": head_size(metadata),
        "max_position_embeddings": metadata.get("context_length", int),
        "attn_layer_period": period,
        "attn_layer_offset": offset,
        "num_experts": 1,
        "num_experts_per_tok": 1,
        "mamba_expand": inner // hidden,
        "mamba_d_state": metadata.get("ssm.state_size", int),
        "mamba_d_conv": metadata.get("ssm.conv_kernel", int),
        "mamba_dt_rank": metadata.get("ssm.time_step_rank", int),
        "mamba_conv_bias": metadata.has_tensor(f"blk.{first}.ssm_conv1d.bias"),
        "mamba_proj_bias": metadata.has_tensor(f"blk.{first}.ssm_in.bias"),
    } | rms_epsilon(metadata)
    sparse = [metadata.has_tensor(f"blk.{layer}.ffn_gate_inp.weight") for layer in range(count)]
    if any(sparse):
        period, offset = _every(metadata, "experts", sparse)
        number, used = experts(metadata)
        config |= {"expert_layer_period": period, "expert_layer_offset": offset}
        config |= {"num_experts": number, "num_experts_per_tok": used}
    return config


def _every(metadata: Metadata, what: str, present: Sequence[bool]) -> tuple[int, int]:
    """(period, offset) of the layers that have something."""
    places = [layer for layer, has in enumerate(present) if has]
    if not places:
        metadata.refuse(f"has no layer with {what}, which jamba does not know")
    period = places[1] - places[0] if len(places) > 1 else max(len(present), places[0] + 1)
    if places != list(range(places[0], len(present), period)) or places[0] >= period:
        metadata.refuse(f"has {what} in the layers {places}, which jamba does not know")
    return period, places[0]


ARCHITECTURES = {
    "mamba": Architecture(
        _mamba,
        KNOWN | OF_MAMBA | {NORMED},
        layers="backbone.layers.",
        parts=MAMBA,
        whole=WHOLE_OF_MAMBA,
        changes={"mixer.A_log": a_log},
    ),
    "mamba2": Architecture(
        _mamba2,
        KNOWN | OF_MAMBA,
        layers="backbone.layers.",
        parts=MAMBA_2,
        whole=WHOLE_OF_MAMBA,
        changes={"mixer.A_log": a_log},
    ),
    "jamba": Architecture(
        _jamba,
        KNOWN | OF_MAMBA | {"expert_count", "expert_used_count"},
        parts=JAMBA,
        whole=WHOLE | {"model.final_layernorm": "output_norm"},
        changes={"mamba.A_log": a_log},
    ),
}
