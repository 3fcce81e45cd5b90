"""Gemma 4: heads of two sizes, an embedding for each layer, late layers that use the keys and values of earlier ones."""

from __future__ import annotations

from typing import Any

from outrider.workers.models.formats.gguf.architectures.architecture import KNOWN, ROPE_FACTORS, WHOLE, Architecture
from outrider.workers.models.formats.gguf.architectures.gemma import AROUND, IMAGES
from outrider.workers.models.formats.gguf.architectures.sizes import base, biased, factors, rms_epsilon
from outrider.workers.models.formats.gguf.architectures.windows import FULL, KNOWN_OF_WINDOWS, SLIDING, WINDOW, layer_types
from outrider.workers.models.formats.gguf.metadata import Metadata
from outrider.workers.models.headers import quoted

SHARED, BY_LAYER = "attention.shared_kv_layers", "embedding_length_per_layer_input"
KEYS = {FULL: "attention.key_length", SLIDING: "attention.key_length_swa"}
VALUES = {FULL: "attention.value_length", SLIDING: "attention.value_length_swa"}
TURNED = {FULL: "rope.dimension_count", SLIDING: "rope.dimension_count_swa"}
EXPERTS = {
    "expert_count": "num_experts",
    "expert_used_count": "top_k_experts",
    "expert_feed_forward_length": "moe_intermediate_size",
}
KNOWN_OF_GEMMA4 = (
    KNOWN
    | KNOWN_OF_WINDOWS
    | {KEYS[SLIDING], VALUES[SLIDING], TURNED[SLIDING], SHARED, BY_LAYER, IMAGES, "final_logit_softcapping", *EXPERTS}
)
TABLE = "per_layer_token_embd.weight"
# Files divide the frequencies of the columns that rope does not rotate by this.
NEVER = 1e30
PARTS = AROUND | {
    "router.proj": "ffn_gate_inp",
    "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale",
    "pre_feedforward_layernorm_2": "pre_ffw_norm_2",
    "post_feedforward_layernorm_1": "post_ffw_norm_1",
    "post_feedforward_layernorm_2": "post_ffw_norm_2",
    "per_layer_input_gate": "inp_gate",
    "per_layer_projection": "proj",
    "post_per_layer_input_norm": "post_norm",
    "layer_scalar": "layer_output_scale.weight",
}
WHOLE_GEMMA4 = WHOLE | {
    "model.embed_tokens_per_layer": "per_layer_token_embd",
    "model.per_layer_model_projection": "per_layer_model_proj",
    "model.per_layer_projection_norm": "per_layer_proj_norm",
}


def _gemma4(metadata: Metadata) -> dict[str, Any]:
    types = layer_types(metadata, 6)
    shared = metadata.get(SHARED, int, 0)
    first = types.index(FULL) if FULL in types else 0
    width = metadata.get(BY_LAYER, int, 0)
    return (
        rms_epsilon(metadata)
        | _ffn(metadata, len(types) - shared)
        | _heads(metadata, types)
        | {
            "model_type": "gemma4_text",
            "hidden_activation": "gelu_pytorch_tanh",
            "num_hidden_layers": len(types),
            "hidden_size": metadata.get("embedding_length", int),
            "max_position_embeddings": metadata.get("context_length", int),
            "attention_bias": biased(metadata),
            "attention_k_eq_v": not metadata.has_tensor(f"blk.{first}.attn_v.weight"),
            "num_kv_shared_layers": shared,
            "layer_types": types,
            "sliding_window": metadata.get(WINDOW, int),
            "rope_parameters": _ropes(metadata),
            "final_logit_softcapping": metadata.get("final_logit_softcapping", float, 0.0) or None,
            "hidden_size_per_layer_input": width,
        }
        | of_layers_table(metadata, width)
        | _experts(metadata)
    )


def _experts(metadata: Metadata) -> dict[str, Any]:
    """Experts in addition to the feed-forward layer, in all layers or none."""
    if not metadata.get("expert_count", int, 0):
        return {"enable_moe_block": False}
    return {"enable_moe_block": True} | {name: metadata.get(key, int) for key, name in EXPERTS.items()}


def of_layers_table(metadata: Metadata, width: int) -> dict[str, Any]:
    if not width:
        return {}
    if not metadata.has_tensor(TABLE):
        metadata.refuse(f"lacks the tensor {quoted(TABLE)}")
    return {"vocab_size_per_layer_input": metadata.file.tensors[TABLE].shape[0]}


def by_layer(metadata: Metadata, key: str, layers: int) -> list[int]:
    """A value for each layer; the file may have one for all."""
    if isinstance(metadata.values.get(f"{metadata.architecture}.{key}"), list):
        return metadata.several(key, int, layers)
    return [metadata.get(key, int)] * layers


def _ffn(metadata: Metadata, own: int) -> dict[str, Any]:
    """The feed-forward width. Layers after the first ``own``, which share earlier layers' keys, may be twice as wide."""
    key = "feed_forward_length"
    widths = by_layer(metadata, key, metadata.get("block_count", int))
    double = widths[-1] == 2 * widths[0]
    if widths != [widths[0]] * own + [widths[0] * (2 if double else 1)] * (len(widths) - own):
        metadata.refuse_value(key)
    return {"intermediate_size": widths[0], "use_double_wide_mlp": double}


def _heads(metadata: Metadata, types: list[str]) -> dict[str, Any]:
    counts = by_layer(metadata, "attention.head_count_kv", len(types))
    sizes = {kind: metadata.get(key, int) for kind, key in KEYS.items()}
    for kind, size in sizes.items():
        for key in (VALUES[kind], TURNED[kind]):
            if metadata.get(key, int, size) != size:
                metadata.refuse_value(key)
    each = {
        str(layer): {"head_dim": sizes[kind], "num_key_value_heads": count}
        for layer, (kind, count) in enumerate(zip(types, counts, strict=True))
    }
    return {
        "num_attention_heads": metadata.get("attention.head_count", int),
        "num_key_value_heads": counts[0],
        "head_dim": sizes[SLIDING],
        "per_layer_config": each,
    }


def _ropes(metadata: Metadata) -> dict[str, Any]:
    """Full-attention layers rotate a part of each head: in the file the divisors of the other frequencies are NEVER."""
    if metadata.has("rope.scaling.type") or metadata.has("rope.scaling.factor"):
        metadata.refuse("has a scaling of rope, which the native engine does not know of this architecture")
    share = 1.0
    if metadata.has_tensor(ROPE_FACTORS):
        found = factors(metadata.file, ROPE_FACTORS)
        turned = found.count(1.0)
        if any(value < NEVER / 2 for value in found[turned:]) or found[:turned] != [1.0] * turned or not turned:
            metadata.refuse(f"has a {quoted(ROPE_FACTORS)} that does not tell which part of each head is turned")
        share = turned / len(found)
    return {
        FULL: {"rope_type": "proportional", "partial_rotary_factor": share, "rope_theta": base(metadata)},
        SLIDING: {"rope_type": "default", "rope_theta": metadata.get("rope.freq_base_swa", float, 10000.0)},
    }


ARCHITECTURES = {"gemma4": Architecture(_gemma4, KNOWN_OF_GEMMA4, parts=PARTS, whole=WHOLE_GEMMA4)}
