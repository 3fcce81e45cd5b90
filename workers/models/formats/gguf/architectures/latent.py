"""Latent attention: DeepSeek V2 and V3, models like them (Moonlight, Kimi, GLM-4.7-Flash, Youtu), Mistral Small 4, and
MiniCPM 3."""

from __future__ import annotations

from typing import Any

from outrider.workers.models.formats.gguf.architectures.architecture import GATED, KNOWN, NORMS_BEFORE, Architecture
from outrider.workers.models.formats.gguf.architectures.corrected_mixtures import GROUPS, KNOWN_OF_CORRECTED, WEIGHTS
from outrider.workers.models.formats.gguf.architectures.experts import (
    CORRECTED,
    GROUP_COUNT,
    SHARED,
    SIGMOID,
    SOFTMAX,
    experts,
    groups,
    scale,
)
from outrider.workers.models.formats.gguf.architectures.left_out import FURTHER_LAYERS, layers
from outrider.workers.models.formats.gguf.architectures.llama import TEMPERATURE
from outrider.workers.models.formats.gguf.architectures.phi import LONG, SHORT, long_rope
from outrider.workers.models.formats.gguf.architectures.sizes import LOG_FACTOR, heads_of, rms_epsilon, scaled_rope
from outrider.workers.models.formats.gguf.metadata import Metadata
from outrider.workers.models.headers import quoted

QUERY_RANK, RANK = "attention.q_lora_rank", "attention.kv_lora_rank"
# The sizes of a head's keys and values, in files whose "key_length" and "value_length" are those of the latent vector.
KEY_SIZE, VALUE_SIZE = "attention.key_length_mla", "attention.value_length_mla"
DENSE_LAYERS = "leading_dense_block_count"
SCORES = "expert_gating_func"
CORRECTIONS = "exp_probs_b.bias"
# Mistral Small 4's.
USUAL_TEMPERATURE = 0.1
PARTS = (
    GATED
    | NORMS_BEFORE
    | CORRECTED
    | SHARED
    | {
        "self_attn.q_proj": "attn_q",
        "self_attn.q_a_proj": "attn_q_a",
        "self_attn.q_a_layernorm": "attn_q_a_norm",
        "self_attn.q_b_proj": "attn_q_b",
        "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
        "self_attn.kv_a_layernorm": "attn_kv_a_norm",
        # One tensor, or two (keys_and_values.py).
        "self_attn.kv_b_proj": "attn_kv_b",
        "self_attn.o_proj": "attn_output",
    }
)
# (groups, groups that are chosen from) by the number of experts, for files that older converters wrote without them.
GROUPS_OF_SOFTMAX = {160: (8, 3)}  # V2
GROUPS_OF_SIGMOID = {
    64: (1, 1),  # Moonlight, GLM-4.7-Flash
    256: (8, 4),  # V3, R1
    384: (1, 1),  # Kimi K2
}
# The layers and vocabulary of GLM-4.7-Flash, whose files lack the key SCORES. llama.cpp recognises it by these, too.
FLASH_LAYERS, FLASH_TOKENS = (47, 48), 154880


def _deepseek2(metadata: Metadata) -> dict[str, Any]:
    config = _attention(metadata)
    count, dense = metadata.get("expert_count", int, 0), metadata.get(DENSE_LAYERS, int, 0)
    if not count:
        if dense < config["num_hidden_layers"]:
            metadata.refuse(f"has no experts, and {dense} of {config['num_hidden_layers']} layers that need none")
        return config | {"model_type": "youtu"}
    count, used = experts(metadata)
    scores = _scores(metadata)
    found, kept = _groups(metadata, count, scores)
    config |= {
        "n_routed_experts": count,
        "num_experts_per_tok": used,
        "moe_intermediate_size": metadata.get("expert_feed_forward_length", int),
        "n_shared_experts": metadata.get("expert_shared_count", int),
        "first_k_dense_replace": dense,
        "norm_topk_prob": metadata.get("expert_weights_norm", bool, False),
        "routed_scaling_factor": scale(metadata),
        "n_group": found,
        "topk_group": kept,
    }
    if scores == SIGMOID:
        return config | {"model_type": "deepseek_v3"}
    return config | {"model_type": "deepseek_v2", "topk_method": "group_limited_greedy" if found > 1 else "greedy"}


def _mistral4(metadata: Metadata) -> dict[str, Any]:
    """llama.cpp's converter writes no factor of queries; that of the published model is the usual one."""
    count, used = experts(metadata)
    config = _attention(metadata)
    if metadata.get(SCORES, int, SOFTMAX) != SOFTMAX:
        metadata.refuse_value(SCORES)
    if config["rope_parameters"]["rope_type"] != "yarn":
        metadata.refuse("has no rope of the type yarn, by which the factors of queries go")
    config["rope_parameters"]["llama_4_scaling_beta"] = metadata.get(TEMPERATURE, float, USUAL_TEMPERATURE)
    found, kept = _groups(metadata, count, SOFTMAX)
    return config | {
        "model_type": "mistral4",
        "n_routed_experts": count,
        "num_experts_per_tok": used,
        "moe_intermediate_size": metadata.get("expert_feed_forward_length", int),
        "n_shared_experts": metadata.get("expert_shared_count", int),
        "first_k_dense_replace": metadata.get(DENSE_LAYERS, int, 0),
        "norm_topk_prob": metadata.get("expert_weights_norm", bool, False),
        "routed_scaling_factor": scale(metadata),
        "n_group": found,
        "topk_group": kept,
    }


def _attention(metadata: Metadata) -> dict[str, Any]:
    heads, rank, width = heads_of(metadata), metadata.get(RANK, int), metadata.get("embedding_length", int)
    turned = metadata.get("rope.dimension_count", int)
    narrow = metadata.has(KEY_SIZE) or metadata.has(VALUE_SIZE)
    key = metadata.get(KEY_SIZE if narrow else "attention.key_length", int)
    value = metadata.get(VALUE_SIZE if narrow else "attention.value_length", int, None if narrow else width // heads)
    if not 0 < turned < key:
        metadata.refuse_value("rope.dimension_count")
    expected = (
        {"head_count_kv": 1, "key_length": rank + turned, "value_length": rank} if narrow else {"head_count_kv": heads}
    )
    for name, number in expected.items():
        if metadata.get(f"attention.{name}", int, number) != number:
            metadata.refuse_value(f"attention.{name}")
    return {
        "num_hidden_layers": layers(metadata),
        "hidden_size": width,
        "intermediate_size": metadata.get("feed_forward_length", int),
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "q_lora_rank": metadata.get(QUERY_RANK, int, 0) or None,
        "kv_lora_rank": rank,
        "qk_nope_head_dim": key - turned,
        "qk_rope_head_dim": turned,
        "v_head_dim": value,
        "max_position_embeddings": metadata.get("context_length", int),
        "attention_bias": metadata.has_tensor("blk.0.attn_kv_a_mqa.bias"),
        "hidden_act": "silu",
        "rope_parameters": scaled_rope(metadata) | _factor_of_scores(metadata),
        **rms_epsilon(metadata),
    }


def _minicpm3(metadata: Metadata) -> dict[str, Any]:
    """GGUF has no keys for the multipliers of embeddings, layers and logits: they are constants in llama.cpp, and defaults
    of the family."""
    if metadata.has(KEY_SIZE) or metadata.has(VALUE_SIZE):
        metadata.refuse_value(KEY_SIZE if metadata.has(KEY_SIZE) else VALUE_SIZE)
    config = _attention(metadata)
    if metadata.has_tensor(LONG):
        original = metadata.get("rope.scaling.original_context_length", int, config["max_position_embeddings"])
        scaling = long_rope(metadata) | {"original_max_position_embeddings": original}
        # None: the factor of sines and cosines follows from the two lengths. It is 1, since the family refuses a context
        # beyond the original length.
        config["rope_parameters"] = scaling | {"attention_factor": None}
    return config | {"model_type": "minicpm3"}


def _factor_of_scores(metadata: Metadata) -> dict[str, Any]:
    """yarn's mscale from the file, which has mscale / 10 in float32. The factor of sines and cosines is 1 (mscale equals
    mscale_all_dim)."""
    if not metadata.has(LOG_FACTOR):
        return {}
    if metadata.get("rope.scaling.type", str, "") != "yarn":
        metadata.refuse_value(LOG_FACTOR)
    factor = round(10 * metadata.get(LOG_FACTOR, float), 6)
    return {"mscale": factor, "mscale_all_dim": factor}


def _scores(metadata: Metadata) -> int:
    if not metadata.has(SCORES):
        flash = metadata.get("block_count", int) in FLASH_LAYERS and _tokens(metadata) == FLASH_TOKENS
        return SIGMOID if flash else SOFTMAX
    stated = metadata.get(SCORES, int)
    if stated not in (SOFTMAX, SIGMOID):
        metadata.refuse_value(SCORES)
    return int(stated)


def _tokens(metadata: Metadata) -> int:
    embedding = metadata.file.tensors.get("token_embd.weight")
    return embedding.shape[0] if embedding is not None else 0


def _groups(metadata: Metadata, count: int, scores: int) -> tuple[int, int]:
    if metadata.has(GROUP_COUNT):
        stated = groups(metadata)
        return stated["n_group"], stated["topk_group"]
    if scores == SOFTMAX:
        return GROUPS_OF_SOFTMAX.get(count, (1, 1))
    if count not in GROUPS_OF_SIGMOID:
        metadata.refuse(
            f"has no {quoted(f'{metadata.architecture}.{GROUP_COUNT}')}, and {count} experts, of which no model is known; "
            "a newer converter of llama.cpp writes it"
        )
    return GROUPS_OF_SIGMOID[count]


ARCHITECTURES = {
    "deepseek2": Architecture(
        _deepseek2,
        KNOWN_OF_CORRECTED | WEIGHTS | GROUPS | {FURTHER_LAYERS, QUERY_RANK, RANK, KEY_SIZE, VALUE_SIZE, LOG_FACTOR},
        parts=PARTS,
    ),
    "mistral4": Architecture(
        _mistral4,
        KNOWN_OF_CORRECTED
        | WEIGHTS
        | GROUPS
        | {FURTHER_LAYERS, QUERY_RANK, RANK, KEY_SIZE, VALUE_SIZE, LOG_FACTOR, TEMPERATURE},
        parts=PARTS,
    ),
    "minicpm3": Architecture(
        _minicpm3,
        KNOWN | {QUERY_RANK, RANK, KEY_SIZE, VALUE_SIZE},
        parts=PARTS,
        in_config=frozenset({SHORT, LONG}),
    ),
}
