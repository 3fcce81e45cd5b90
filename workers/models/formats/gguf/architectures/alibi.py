"""BLOOM and MPT, whose attention has biases by distance (ALiBi)."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.workers.models.formats.gguf.architectures.architecture import KNOWN, Architecture, Values
from outrider.workers.models.formats.gguf.architectures.gpt import FALCON, FALCON_WHOLE, whole_heads
from outrider.workers.models.formats.gguf.architectures.sizes import sizes
from outrider.workers.models.formats.gguf.metadata import Metadata

BLOOM = {name: stored for name, stored in FALCON.items() if not name.startswith("ln_")} | {
    "post_attention_layernorm": "ffn_norm"
}
BLOOM_WHOLE = FALCON_WHOLE | {"transformer.word_embeddings_layernorm": "token_embd_norm"}
MPT = {
    "attn.Wqkv": "attn_qkv",
    "attn.out_proj": "attn_output",
    "attn.q_ln": "attn_q_norm",
    "attn.k_ln": "attn_k_norm",
    "ffn.up_proj": "ffn_up",
    "ffn.down_proj": "ffn_down",
    "norm_1": "attn_norm",
    "norm_2": "ffn_norm",
}
MPT_WHOLE = {
    "transformer.wte": "token_embd",
    "transformer.wpe": "position_embd",
    "transformer.norm_f": "output_norm",
    "lm_head": "output",
}
# MPT's keys: the bound of queries, keys and values; and the exponent of ALiBi's last slope, 0 without ALiBi.
BOUND, SLOPES = "attention.clamp_kqv", "attention.max_alibi_bias"


def _sizes(metadata: Metadata, most: int) -> dict[str, Any]:
    """Refuses a feed-forward layer whose width is another multiple of the model's than ``most`` (0: any)."""
    config = sizes(metadata)
    width, ffn = config["hidden_size"], config["intermediate_size"]
    if ffn % width or (most and ffn != most * width):
        metadata.refuse_value("feed_forward_length")
    if config["num_key_value_heads"] != config["num_attention_heads"]:
        metadata.refuse_value("attention.head_count_kv")
    if config["head_dim"] * config["num_attention_heads"] != width:
        metadata.refuse_value("attention.key_length")
    return config


def _bloom(metadata: Metadata) -> dict[str, Any]:
    config = _sizes(metadata, 4)
    return {
        "model_type": "bloom",
        "hidden_size": config["hidden_size"],
        "n_layer": config["num_hidden_layers"],
        "n_head": config["num_attention_heads"],
        "seq_length": config["max_position_embeddings"],
        "layer_norm_epsilon": metadata.get("attention.layer_norm_epsilon", float),
    }


def _mpt(metadata: Metadata) -> dict[str, Any]:
    config = _sizes(metadata, 0)
    most = metadata.get(SLOPES, float, 0.0)
    if most < 0.0 or not most.is_integer():
        metadata.refuse_value(SLOPES)
    return {
        "model_type": "mpt",
        "d_model": config["hidden_size"],
        "n_layers": config["num_hidden_layers"],
        "n_heads": config["num_attention_heads"],
        "max_seq_len": config["max_position_embeddings"],
        "expansion_ratio": config["intermediate_size"] // config["hidden_size"],
        "layer_norm_epsilon": metadata.get("attention.layer_norm_epsilon", float),
        "no_bias": not metadata.has_tensor("output_norm.bias"),
        "learned_pos_emb": metadata.has_tensor("position_embd.weight"),
        "attn_config": {
            "alibi": most > 0.0,
            "alibi_bias_max": int(most) or 8,
            "clip_qkv": metadata.get(BOUND, float, 0.0),
            "qk_ln": metadata.has_tensor("blk.0.attn_q_norm.weight"),
        },
    }


def _bloom_order(config: Values, part: str, count: int) -> NDArray[np.int64] | None:
    heads = config["n_head"]
    return whole_heads(heads, 1, count // (3 * heads)) if part == "self_attention.query_key_value" else None


ARCHITECTURES = {
    "bloom": Architecture(_bloom, layers="transformer.h.", parts=BLOOM, whole=BLOOM_WHOLE, order=_bloom_order),
    "mpt": Architecture(_mpt, KNOWN | {BOUND, SLOPES}, layers="transformer.blocks.", parts=MPT, whole=MPT_WHOLE),
}
