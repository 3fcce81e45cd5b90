"""Mixtures of experts: Llama's layers with experts in place of the gated feed-forward layer."""

from __future__ import annotations

from typing import Any

from outrider.workers.models.formats.gguf.architectures.architecture import LLAMA_PARTS, Architecture
from outrider.workers.models.formats.gguf.architectures.experts import KNOWN_OF_EXPERTS, SHARED_WIDTH, experts
from outrider.workers.models.formats.gguf.architectures.granite import KNOWN_OF_GRANITE, granite_style
from outrider.workers.models.formats.gguf.architectures.rows import interleaved
from outrider.workers.models.formats.gguf.architectures.sizes import base, biased, llama_style, scaled_rope
from outrider.workers.models.formats.gguf.architectures.windows import KNOWN_OF_WINDOWS, SLIDING, WINDOW, layer_types
from outrider.workers.models.formats.gguf.metadata import Metadata

KNOWN_OF_MIXTURES = KNOWN_OF_EXPERTS | {SHARED_WIDTH}
# The experts of a layer are in one tensor (names.py).
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
    """Llama's configuration, and experts in all layers: llama.cpp supports no other files of these architectures."""
    count, used = experts(metadata)
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
    window = metadata.get(WINDOW, int, 0) or None
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


def _mellum(metadata: Metadata) -> dict[str, Any]:
    """If the file has no window, all layers attend to all tokens. Rope is not scaled in layers with a window."""
    window = metadata.get(WINDOW, int, 0)
    config = _qwen3_moe(metadata)
    types = layer_types(metadata, 4) if window else ["full_attention"] * config["num_hidden_layers"]
    of_windows = {"rope_type": "default", "rope_theta": metadata.get("rope.freq_base_swa", float, base(metadata))}
    return config | {
        "model_type": "mellum",
        "sliding_window": window or None,
        "layer_types": types,
        "rope_parameters": {"full_attention": scaled_rope(metadata), SLIDING: of_windows},
    }


def _olmoe(metadata: Metadata) -> dict[str, Any]:
    config = mixture(metadata) | {"model_type": "olmoe", "norm_topk_prob": False}
    # "feed_forward_length" is the width of an expert in its files.
    del config["moe_intermediate_size"]
    return config


def _gpt_oss(metadata: Metadata) -> dict[str, Any]:
    config = mixture(metadata)
    count, ffn = config.pop("num_experts"), config.pop("moe_intermediate_size")
    return config | {
        "model_type": "gpt_oss",
        "num_local_experts": count,
        "intermediate_size": ffn,
        "sliding_window": metadata.get(WINDOW, int),
        # The value in the model's config.json; GGUF has no key for it.
        "rope_parameters": config["rope_parameters"] | {"truncate": False},
    }


def _granite_moe(metadata: Metadata) -> dict[str, Any]:
    count, used = experts(metadata)
    shared = metadata.get(SHARED_WIDTH, int, 0)
    config = granite_style(metadata) | {"num_local_experts": count, "num_experts_per_tok": used}
    if not shared:
        return config | {"model_type": "granitemoe"}
    beside = {"shared_intermediate_size": shared, "fused_projections": False}
    return config | beside | {"model_type": "granitemoeshared"}


def _hunyuan_moe(metadata: Metadata) -> dict[str, Any]:
    """Experts and the shared expert have one width. Files state the base of rope after scaling."""
    count, used = experts(metadata)
    width = metadata.get("expert_feed_forward_length", int)
    others = {metadata.get(key, int, width) for key in ("feed_forward_length", SHARED_WIDTH)}
    if others != {width} or metadata.get(SHARED_COUNT, int, 1) != 1:
        metadata.refuse(f"has experts of {width} columns, and not exactly one shared expert of that width")
    return llama_style(metadata) | {
        "model_type": "hunyuan_v1_moe",
        "num_experts": count,
        "num_experts_per_tok": used,
        "attention_bias": biased(metadata),
        "hidden_act": "silu",
    }


SHARED_COUNT = "expert_shared_count"
GRANITE_PARTS = LLAMA_PARTS | {
    "block_sparse_moe.router": "ffn_gate_inp",
    "shared_mlp.gate_proj": "ffn_gate_shexp",
    "shared_mlp.up_proj": "ffn_up_shexp",
    "shared_mlp.down_proj": "ffn_down_shexp",
}
HUNYUAN_PARTS = LLAMA_PARTS | {
    "self_attn.query_layernorm": "attn_q_norm",
    "self_attn.key_layernorm": "attn_k_norm",
    "mlp.gate.wg": "ffn_gate_inp",
    "mlp.shared_mlp.gate_proj": "ffn_gate_shexp",
    "mlp.shared_mlp.up_proj": "ffn_up_shexp",
    "mlp.shared_mlp.down_proj": "ffn_down_shexp",
}
KNOWN_OF_GRANITE_MIXTURES = KNOWN_OF_GRANITE | KNOWN_OF_EXPERTS | {SHARED_WIDTH}
MIXTRAL = Architecture(_mixtral, KNOWN_OF_MIXTURES | {WINDOW}, parts=PARTS, order=interleaved)
ARCHITECTURES = {
    "qwen2moe": Architecture(_qwen2_moe, KNOWN_OF_MIXTURES, parts=PARTS),
    "qwen3moe": Architecture(_qwen3_moe, KNOWN_OF_MIXTURES, parts=PARTS),
    "mellum": Architecture(_mellum, KNOWN_OF_MIXTURES | KNOWN_OF_WINDOWS, parts=PARTS),
    "olmoe": Architecture(_olmoe, KNOWN_OF_MIXTURES, parts=PARTS),
    "granitemoe": Architecture(_granite_moe, KNOWN_OF_GRANITE_MIXTURES, parts=GRANITE_PARTS, order=interleaved),
    "hunyuan-moe": Architecture(_hunyuan_moe, KNOWN_OF_EXPERTS | {SHARED_WIDTH, SHARED_COUNT}, parts=HUNYUAN_PARTS),
    "gpt-oss": Architecture(_gpt_oss, KNOWN_OF_MIXTURES | {WINDOW}, parts=GPT_OSS_PARTS),
}
