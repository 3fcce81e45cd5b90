"""Llama, Mistral, Qwen's dense models, and others with small differences: SmolLM 3, Arcee, Seed-OSS, Hunyuan."""

from __future__ import annotations

from typing import Any

from outrider.workers.models.formats.gguf.architectures.architecture import KNOWN, LLAMA_PARTS, Architecture
from outrider.workers.models.formats.gguf.architectures.rows import interleaved, interleaved_with_norms
from outrider.workers.models.formats.gguf.architectures.sizes import LOG_FACTOR, biased, llama_style, mlp_biased
from outrider.workers.models.formats.gguf.architectures.windows import WINDOW
from outrider.workers.models.formats.gguf.metadata import Metadata

TEMPERATURE = "attention.temperature_scale"


def _llama(metadata: Metadata) -> dict[str, Any]:
    has_bias = biased(metadata)
    config = llama_style(metadata) | {"hidden_act": "silu", "attention_bias": has_bias, "mlp_bias": mlp_biased(metadata)}
    window = metadata.get(WINDOW, int, 0)
    if window and (has_bias or config["mlp_bias"]):
        metadata.refuse("has a sliding window and biases, which no family has that the native engine knows")
    if window:
        del config["attention_bias"], config["mlp_bias"]
        return config | {"model_type": "mistral", "sliding_window": window}
    return config | {"model_type": "llama"}


def _mistral3(metadata: Metadata) -> dict[str, Any]:
    """Mistral Small 3, which is read as Llama, and Ministral 3, which also scales queries by their positions."""
    if not (beta := metadata.get(TEMPERATURE, float, 0.0)):
        if metadata.has(LOG_FACTOR):
            metadata.refuse_value(LOG_FACTOR)
        return _llama(metadata)
    config = llama_style(metadata)
    if config["rope_parameters"]["rope_type"] != "yarn" or biased(metadata) or mlp_biased(metadata):
        metadata.refuse_value(TEMPERATURE)
    config["rope_parameters"] |= {
        "llama_4_scaling_beta": beta,
        "mscale": 1.0,
        "mscale_all_dim": metadata.get(LOG_FACTOR, float, 0.0),
    }
    window = metadata.get(WINDOW, int, 0) or None
    return config | {"model_type": "ministral3", "hidden_act": "silu", "sliding_window": window}


def _qwen2(metadata: Metadata) -> dict[str, Any]:
    return llama_style(metadata) | {"model_type": "qwen2", "hidden_act": "silu"}


def _qwen3(metadata: Metadata) -> dict[str, Any]:
    return llama_style(metadata) | {"model_type": "qwen3", "hidden_act": "silu", "attention_bias": biased(metadata)}


def _smollm3(metadata: Metadata) -> dict[str, Any]:
    """Every fourth layer has no rope. GGUF has no key for it; llama.cpp has the same constant."""
    return llama_style(metadata) | {
        "model_type": "smollm3",
        "hidden_act": "silu",
        "attention_bias": biased(metadata),
        "no_rope_layer_interval": 4,
    }


def _arcee(metadata: Metadata) -> dict[str, Any]:
    return llama_style(metadata) | {
        "model_type": "arcee",
        "hidden_act": "relu2",
        "attention_bias": biased(metadata),
        "mlp_bias": mlp_biased(metadata),
    }


def _seed_oss(metadata: Metadata) -> dict[str, Any]:
    return llama_style(metadata) | {
        "model_type": "seed_oss",
        "hidden_act": "silu",
        "attention_bias": biased(metadata),
        "attention_out_bias": metadata.has_tensor("blk.0.attn_output.bias"),
        "mlp_bias": mlp_biased(metadata),
    }


def _hunyuan(metadata: Metadata) -> dict[str, Any]:
    """Files state the base of rope after scaling."""
    return llama_style(metadata) | {
        "model_type": "hunyuan_v1_dense",
        "hidden_act": "silu",
        "attention_bias": biased(metadata),
    }


ARCEE_PARTS = {name: stored for name, stored in LLAMA_PARTS.items() if name != "mlp.gate_proj"}
SEED_OSS_PARTS = LLAMA_PARTS | {"post_attention_layernorm": "post_attention_norm"}
HUNYUAN_PARTS = LLAMA_PARTS | {"self_attn.query_layernorm": "attn_q_norm", "self_attn.key_layernorm": "attn_k_norm"}
ARCHITECTURES = {
    "llama": Architecture(_llama, KNOWN | {WINDOW}, order=interleaved),
    "qwen2": Architecture(_qwen2),
    "qwen3": Architecture(_qwen3),
    "mistral3": Architecture(_mistral3, KNOWN | {WINDOW, TEMPERATURE, LOG_FACTOR}, order=interleaved),
    "internlm2": Architecture(_llama, KNOWN | {WINDOW}, order=interleaved),
    "smollm3": Architecture(_smollm3, order=interleaved),
    "arcee": Architecture(_arcee, parts=ARCEE_PARTS, order=interleaved),
    "seed_oss": Architecture(_seed_oss, parts=SEED_OSS_PARTS),
    "hunyuan-dense": Architecture(_hunyuan, parts=HUNYUAN_PARTS),
    # Norms of heads after rope, as in Hunyuan; rope rotates neighbouring columns.
    "maincoder": Architecture(_hunyuan, parts=HUNYUAN_PARTS, order=interleaved_with_norms),
}
