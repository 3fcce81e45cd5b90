"""Granite and MiniCPM: Llama's layers with multipliers; and Granite with windows and attention sinks, maybe experts."""

from __future__ import annotations

from typing import Any

from outrider.workers.models.formats.gguf.architectures.architecture import KNOWN, LLAMA_PARTS, Architecture
from outrider.workers.models.formats.gguf.architectures.experts import KNOWN_OF_EXPERTS, SHARED_WIDTH, experts
from outrider.workers.models.formats.gguf.architectures.rows import interleaved
from outrider.workers.models.formats.gguf.architectures.sizes import (
    base,
    biased,
    head_size,
    llama_style,
    mlp_biased,
)
from outrider.workers.models.formats.gguf.architectures.windows import PATTERN, WINDOW, layer_types, same_base
from outrider.workers.models.formats.gguf.metadata import Metadata

# GGUF's key -> the key of config.json.
MULTIPLIERS = {
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
}
KNOWN_OF_GRANITE = KNOWN | MULTIPLIERS.keys() | {"attention.scale"}


def multipliers(metadata: Metadata) -> dict[str, Any]:
    """0 stands for no multiplier, as in llama.cpp."""
    found = {name: metadata.get(key, float, 0.0) or 1.0 for key, name in MULTIPLIERS.items()}
    return found | {"attention_multiplier": metadata.get("attention.scale", float, 0.0) or head_size(metadata) ** -0.5}


def granite_style(metadata: Metadata) -> dict[str, Any]:
    # In these architectures the key is false where there is no rope at all.
    if not metadata.get("rope.scaling.finetuned", bool, True):
        metadata.refuse_value("rope.scaling.finetuned")
    return llama_style(metadata) | multipliers(metadata) | {"hidden_act": "silu", "attention_bias": biased(metadata)}


def _granite(metadata: Metadata) -> dict[str, Any]:
    return granite_style(metadata) | {"model_type": "granite", "mlp_bias": mlp_biased(metadata)}


def _minicpm(metadata: Metadata) -> dict[str, Any]:
    """MiniCPM 1, 2 and 4 compute as Granite does. Old files without the multipliers are refused: llama.cpp has its own
    defaults for them."""
    for key in MULTIPLIERS:
        metadata.get(key, float)
    if metadata.get("expert_count", int, 0):
        metadata.refuse_value("expert_count")
    return _granite(metadata)


# The shared expert has its gate and up in one tensor.
SWA_PARTS = LLAMA_PARTS | {
    "self_attn.sinks": "attn_sinks.weight",
    "block_sparse_moe.router": "ffn_gate_inp",
    "shared_mlp.input_linear": "ffn_up_shexp",
    "shared_mlp.output_linear": "ffn_down_shexp",
}
# For each layer whether it has rope.
ROPE_PATTERN = "attention.rope_pattern"


def _granite_swa(metadata: Metadata) -> dict[str, Any]:
    """The file has one base of rope for all layers with rope."""
    same_base(metadata)
    config = granite_style(metadata)
    turned = metadata.several(ROPE_PATTERN, bool, config["num_hidden_layers"])
    if metadata.get("expert_count", int, 0):
        count, used = experts(metadata)
        shared = metadata.get(SHARED_WIDTH, int, 0)
        kind = {"num_local_experts": count, "num_experts_per_tok": used, "shared_intermediate_size": shared}
        config |= kind | {"model_type": "granitemoe_swa"}
    else:
        config |= {"model_type": "granite_swa", "mlp_bias": mlp_biased(metadata)}
    return config | {
        "sliding_window": metadata.get(WINDOW, int),
        "layer_types": layer_types(metadata, 4),
        "layer_rope_theta": [base(metadata) if each else 0 for each in turned],
    }


# Files of Granite 4 without recurrent layers have the keys of such layers all the same.
RECURRENT_NAMES = "ssm.conv_kernel ssm.state_size ssm.group_count ssm.inner_size ssm.time_step_rank"
RECURRENT = frozenset(RECURRENT_NAMES.split())
KNOWN_OF_DENSE = KNOWN_OF_GRANITE | RECURRENT | {"expert_shared_feed_forward_length"}
ARCHITECTURES = {
    "granite": Architecture(_granite, KNOWN_OF_DENSE, order=interleaved),
    "minicpm": Architecture(_minicpm, KNOWN | MULTIPLIERS.keys(), order=interleaved),
    "granite_swa": Architecture(
        _granite_swa,
        KNOWN_OF_GRANITE | KNOWN_OF_EXPERTS | {SHARED_WIDTH, WINDOW, PATTERN, ROPE_PATTERN, "rope.freq_base_swa"},
        parts=SWA_PARTS,
        order=interleaved,
    ),
}
