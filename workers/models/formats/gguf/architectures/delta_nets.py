"""Qwen3-Next and Qwen3.5: gated delta nets in most layers.

llama.cpp's converter stores 1 + w for norms and -exp(A_log) for A_log, and permutes Qwen3.5's value heads: with n value
heads for each key head, head n k + i of the checkpoint (the i-th of key head k) is head i K + k of the file, where K is the
number of key heads.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.kernels import arithmetic
from outrider.workers.models.formats.gguf.architectures.architecture import (
    ATTENTION,
    GATED,
    KNOWN,
    Architecture,
    Floats,
    Values,
    less_one,
)
from outrider.workers.models.formats.gguf.architectures.experts import KNOWN_OF_EXPERTS, ROUTER, SHARED_WIDTH, experts
from outrider.workers.models.formats.gguf.architectures.left_out import FURTHER_LAYERS, SECTIONS, check_sections, layers
from outrider.workers.models.formats.gguf.architectures.sizes import llama_style
from outrider.workers.models.formats.gguf.metadata import Metadata

RECURRENT = "attention.recurrent_layers"
OF_DELTA_NETS = {
    *("ssm.conv_kernel", "ssm.state_size", "ssm.group_count", "ssm.time_step_rank", "ssm.inner_size"),
    *(RECURRENT, "full_attention_interval", SECTIONS, FURTHER_LAYERS),
}
OF_EXPERTS = KNOWN_OF_EXPERTS | {SHARED_WIDTH}
PARTS = ATTENTION | {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "post_attention_norm",
    "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.in_proj_ba": "ssm_ba",
    # In older files, before the converter split it.
    "linear_attn.in_proj_qkvz": "ssm_in",
    "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.A_log": "ssm_a",
    "linear_attn.dt_bias": "ssm_dt.bias",
    "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out",
}
SPARSE = ROUTER | {
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
}
# Modules with a row for each column of a value head, and those with a row for each value head.
BY_COLUMN = ("linear_attn.in_proj_z",)
BY_HEAD = ("linear_attn.in_proj_a", "linear_attn.in_proj_b", "linear_attn.A_log", "linear_attn.dt_bias")
# Modules in which the rows of value heads come after those of queries and keys.
BEHIND = ("linear_attn.in_proj_qkv", "linear_attn.conv1d")


def _delta_nets(metadata: Metadata) -> dict[str, Any]:
    check_sections(metadata)
    values, width = metadata.get("ssm.time_step_rank", int), metadata.get("ssm.inner_size", int)
    keys = metadata.get("ssm.group_count", int)
    if not (0 < keys <= values and values % keys == 0 and width > 0 and width % values == 0):
        metadata.refuse(f"has a delta net of {keys} heads of keys and {values} of values, {width} columns in all")
    count = layers(metadata)
    return llama_style(metadata, metadata.get(SHARED_WIDTH, int, 0) or None, partial=True) | {
        "layer_types": _layer_types(metadata, count),
        "linear_conv_kernel_dim": metadata.get("ssm.conv_kernel", int),
        "linear_key_head_dim": metadata.get("ssm.state_size", int),
        "linear_num_key_heads": keys,
        "linear_num_value_heads": values,
        "linear_value_head_dim": width // values,
        "attention_bias": any(metadata.has_tensor(f"blk.{layer}.attn_q.bias") for layer in range(count)),
        "hidden_act": "silu",
    }


def _layer_types(metadata: Metadata, count: int) -> list[str]:
    if metadata.has(RECURRENT):
        recurrent = metadata.several(RECURRENT, bool, metadata.get("block_count", int))[:count]
    else:
        interval = metadata.get("full_attention_interval", int, 4)
        if interval < 1:
            metadata.refuse_value("full_attention_interval")
        recurrent = [(layer + 1) % interval != 0 for layer in range(count)]
    return ["linear_attention" if each else "full_attention" for each in recurrent]


def _mixture(metadata: Metadata) -> dict[str, Any]:
    count, used = experts(metadata)
    config = _delta_nets(metadata)
    return config | {
        "num_experts": count,
        "num_experts_per_tok": used,
        "moe_intermediate_size": metadata.get("expert_feed_forward_length", int),
        "shared_expert_intermediate_size": metadata.get(SHARED_WIDTH, int, config["intermediate_size"]),
        "norm_topk_prob": True,
    }


def _qwen3_next(metadata: Metadata) -> dict[str, Any]:
    fused = any(name.endswith(".ssm_in.weight") for name in metadata.file.tensors)
    return _mixture(metadata) | {"model_type": "qwen3_next", "fused_projections": fused}


def _qwen35(metadata: Metadata) -> dict[str, Any]:
    return _delta_nets(metadata) | {"model_type": "qwen3_5_text"}


def _qwen35_moe(metadata: Metadata) -> dict[str, Any]:
    return _mixture(metadata) | {"model_type": "qwen3_5_moe_text"}


def _heads(config: Values, width: int) -> NDArray[np.int64]:
    """The permutation of rows of value heads with ``width`` rows each."""
    keys = config["linear_num_key_heads"]
    head, within = np.divmod(np.arange(config["linear_num_value_heads"] * width), width)
    key, which = np.divmod(head, config["linear_num_value_heads"] // keys)
    places: NDArray[np.int64] = (which * keys + key) * width + within
    return places


def _order(config: Values, part: str, rows: int) -> NDArray[np.int64] | None:
    if part in BY_HEAD:
        return _heads(config, 1)
    if part in BY_COLUMN:
        return _heads(config, config["linear_value_head_dim"])
    if part in BEHIND:
        before = 2 * config["linear_num_key_heads"] * config["linear_key_head_dim"]
        return np.concatenate([np.arange(before), before + _heads(config, config["linear_value_head_dim"])])
    return None


def _columns(config: Values, part: str, columns: int) -> NDArray[np.int64] | None:
    if part != "linear_attn.out_proj" or config["linear_num_key_heads"] == config["linear_num_value_heads"]:
        return None
    return np.argsort(_heads(config, config["linear_value_head_dim"]))


def a_log(values: Floats) -> Floats:
    """A_log from -exp(A_log): log(-values)."""
    if not (np.isfinite(values) & (values < 0.0)).all():
        raise ValueError("not all are below 0")
    found: Floats = arithmetic.log(-values.astype(np.float64)).astype(np.float32)
    return found


NORMS = ("input_layernorm", "post_attention_layernorm", "self_attn.q_norm", "self_attn.k_norm", "model.norm")
CHANGES = dict.fromkeys(NORMS, less_one) | {"linear_attn.A_log": a_log}
KNOWN_OF_NETS = KNOWN | OF_DELTA_NETS
ARCHITECTURES = {
    "qwen3next": Architecture(_qwen3_next, KNOWN_OF_NETS | OF_EXPERTS, parts=PARTS | SPARSE, changes=CHANGES),
    "qwen35": Architecture(_qwen35, KNOWN_OF_NETS, parts=PARTS | GATED, order=_order, columns=_columns, changes=CHANGES),
    "qwen35moe": Architecture(
        _qwen35_moe,
        KNOWN_OF_NETS | OF_EXPERTS,
        parts=PARTS | SPARSE,
        order=_order,
        columns=_columns,
        changes=CHANGES,
    ),
}
