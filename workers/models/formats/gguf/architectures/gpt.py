"""GPT-2, GPT-NeoX and Falcon: queries, keys and values in one tensor, whose rows llama.cpp's converter permutes."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.workers.models.formats.gguf.architectures.architecture import KNOWN, Architecture, Values
from outrider.workers.models.formats.gguf.architectures.sizes import rope, sizes
from outrider.workers.models.formats.gguf.architectures.starcoder import PARTS as GPT2
from outrider.workers.models.formats.gguf.architectures.starcoder import WHOLE as GPT2_WHOLE
from outrider.workers.models.formats.gguf.metadata import Metadata

NEOX = {
    "attention.query_key_value": "attn_qkv",
    "attention.dense": "attn_output",
    "mlp.dense_h_to_4h": "ffn_up",
    "mlp.dense_4h_to_h": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
NEOX_WHOLE = {
    "gpt_neox.embed_in": "token_embd",
    "gpt_neox.final_layer_norm": "output_norm",
    "lm_head": "output",
}
FALCON = {
    "self_attention.query_key_value": "attn_qkv",
    "self_attention.dense": "attn_output",
    "mlp.dense_h_to_4h": "ffn_up",
    "mlp.dense_4h_to_h": "ffn_down",
    "input_layernorm": "attn_norm",
    "ln_mlp": "attn_norm",
    "ln_attn": "attn_norm_2",
}
FALCON_WHOLE = {"transformer.word_embeddings": "token_embd", "transformer.ln_f": "output_norm", "lm_head": "output"}
# The name of the order of Falcon's queries, keys and values in llama.cpp's converter.
LAYOUT = "jploski"
# GPT-NeoX-20B has another activation than Pythia and other models of the family; GGUF has no key for it.
LAYERS_OF_20B = 44


def _epsilon(metadata: Metadata) -> float:
    return float(metadata.get("attention.layer_norm_epsilon", float))


def _gpt2(metadata: Metadata) -> dict[str, Any]:
    heads = metadata.get("attention.head_count", int)
    if metadata.get("attention.head_count_kv", int, heads) != heads:
        metadata.refuse_value("attention.head_count_kv")
    return {
        "model_type": "gpt2",
        "n_layer": metadata.get("block_count", int),
        "n_embd": metadata.get("embedding_length", int),
        "n_inner": metadata.get("feed_forward_length", int),
        "n_head": heads,
        "n_positions": metadata.get("context_length", int),
        "layer_norm_epsilon": _epsilon(metadata),
        "activation_function": "gelu_new",
    }


def _gpt_neox(metadata: Metadata) -> dict[str, Any]:
    config = sizes(metadata)
    if config.pop("num_key_value_heads") != config["num_attention_heads"]:
        metadata.refuse_value("attention.head_count_kv")
    return config | {
        "model_type": "gpt_neox",
        "hidden_act": "gelu_fast" if config["num_hidden_layers"] == LAYERS_OF_20B else "gelu",
        "layer_norm_eps": _epsilon(metadata),
        "use_parallel_residual": metadata.get("use_parallel_residual", bool),
        "attention_bias": metadata.has_tensor("blk.0.attn_qkv.bias"),
        "rope_parameters": rope(metadata, partial=True),
    }


def _falcon(metadata: Metadata) -> dict[str, Any]:
    """The largest models have a norm each before attention and feed-forward, and grouped-query attention."""
    if metadata.get("tensor_data_layout", str, LAYOUT) != LAYOUT:
        metadata.refuse_value("tensor_data_layout")
    config = sizes(metadata)
    kv_heads, ffn = config.pop("num_key_value_heads"), config.pop("intermediate_size")
    two = metadata.has_tensor("blk.0.attn_norm_2.weight")
    return config | {
        "model_type": "falcon",
        "activation": "gelu",
        "ffn_hidden_size": ffn,
        "layer_norm_epsilon": _epsilon(metadata),
        "new_decoder_architecture": two or kv_heads > 1,
        "num_ln_in_parallel_attn": 2 if two else 1,
        "num_kv_heads": kv_heads,
        "bias": False,
        "rope_parameters": rope(metadata),
    }


def whole_heads(groups: int, queries: int, size: int) -> NDArray[np.int64]:
    """The permutation from rows stored by group (its queries, its key, its value) to all queries, all keys, all values."""
    row = np.arange(groups * (queries + 2) * size)
    group, head, within = row // ((queries + 2) * size), row // size % (queries + 2), row % size
    query, key, value = group * queries + head, groups * queries + group, groups * (queries + 1) + group
    places: NDArray[np.int64] = np.where(head < queries, query, np.where(head == queries, key, value)) * size + within
    return places


def _neox_order(config: Values, part: str, count: int) -> NDArray[np.int64] | None:
    heads = config["num_attention_heads"]
    return whole_heads(heads, 1, count // (3 * heads)) if part == "attention.query_key_value" else None


def _falcon_order(config: Values, part: str, count: int) -> NDArray[np.int64] | None:
    heads, groups = config["num_attention_heads"], config["num_kv_heads"]
    if part != "self_attention.query_key_value":
        return None
    return whole_heads(groups, heads // groups, count // (heads + 2 * groups))


ARCHITECTURES = {
    "gpt2": Architecture(_gpt2, layers="transformer.h.", parts=GPT2, whole=GPT2_WHOLE),
    "gptneox": Architecture(
        _gpt_neox,
        KNOWN | {"use_parallel_residual"},
        layers="gpt_neox.layers.",
        parts=NEOX,
        whole=NEOX_WHOLE,
        order=_neox_order,
    ),
    "falcon": Architecture(
        _falcon,
        KNOWN | {"tensor_data_layout"},
        layers="transformer.h.",
        parts=FALCON,
        whole=FALCON_WHOLE,
        order=_falcon_order,
    ),
}
