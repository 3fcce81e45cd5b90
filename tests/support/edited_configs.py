"""Edits of a config.json, as people or tools make them: older names of keys, keys left out, other values."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

GONE = object()
# Keys that determine shapes of tensors: with another value every engine refuses the checkpoint.
SHAPES = frozenset(
    ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
)
FIXED = frozenset(("transformers_version", "architectures", "model_type"))
ACTIVATIONS = ("gelu", "relu", "gelu_new", "quick_gelu", "gelu_pytorch_tanh", "swish", "relu2", "GELU")
ANYWHERE: tuple[dict[str, Any], ...] = (
    {"dtype": GONE, "torch_dtype": "float16"},
    {"dtype": GONE},
    {"attn_implementation": "eager"},
    {"_attn_implementation": "eager"},
    {"use_cache": False},
    {"sliding_window": 5},
    {"sliding_window": 5, "use_sliding_window": False},
    {"sliding_window": 5, "use_sliding_window": True, "max_window_layers": 1},
    {"sliding_window": 5, "use_sliding_window": True, "max_window_layers": 0},
    {"sliding_window": None, "use_sliding_window": True},
    {"pad_token_id": -1},
    {"pad_token_id": None},
    {"eos_token_id": [2, 3]},
    {"tie_word_embeddings": True},
    {"tie_word_embeddings": False},
    {"tie_word_embeddings": GONE},
    {"num_layers": 1},
    {"head_dim": None},
    {"num_key_value_heads": None},
    {"quantization_config": None},
    {"final_logit_softcapping": 1.0},
    {"attn_logit_softcapping": 1.0},
    {"attention_multiplier": 0.3},
    {"logit_scale": 0.3},
    {"logits_scaling": 3.0},
    {"embedding_multiplier": 3.0},
    {"residual_multiplier": 0.3},
    {"attention_bias": True},
    {"use_qk_norm": True},
    {"hidden_act": "relu"},
    {"hidden_activation": None},
    {"rms_norm_eps": 0.1},
    {"layer_norm_eps": 0.1},
    {"partial_rotary_factor": 0.5},
    {"rope_theta": 777.0},
    {"text_config": {"num_hidden_layers": 1}},
    {"num_experts_per_tok": 1},
    {"norm_topk_prob": True},
    {"is_decoder": True},
    {"torchscript": True},
)
# Values of "rope_scaling", which "rope_parameters" replaced.
SCALINGS: tuple[dict[str, Any], ...] = (
    {"type": "linear", "factor": 4.0},
    {"type": "dynamic", "factor": 4.0},
    {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    {"type": "yarn", "factor": 4.0},
    {"type": "su", "factor": 4.0},
    {"type": "ntk", "factor": 4.0},
    {"type": "mrope", "mrope_section": [2, 3, 3]},
    {"type": "linear", "rope_type": "default", "factor": 4.0},
    {"type": "default", "rope_type": "linear", "factor": 4.0},
    {"rope_type": "linear", "factor": 0.5},
    {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    {"rope_type": "yarn", "factor": 4.0, "beta_fast": 8, "beta_slow": 2, "mscale": 0.7, "mscale_all_dim": 1.2},
    {"rope_type": "yarn", "factor": 4.0, "mscale": 0.7},
    {"rope_type": "yarn", "factor": 1.0},
)


def edits(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The keys to change, with their new values; ``GONE``: the key is deleted."""
    yield from ANYWHERE
    for key, value in config.items():
        if key in FIXED:
            continue
        yield {key: GONE}
        yield {key: None}
        yield from ({key: new} for new in _other_values(key, value) if new != value or type(new) is not type(value))
    rope = config.get("rope_parameters")
    if isinstance(rope, dict) and "rope_type" in rope:
        yield from _ropes(rope)
    elif rope:  # by type of layer
        for scaling in SCALINGS:
            yield {"rope_scaling": scaling}
            yield {"rope_parameters": GONE, "rope_scaling": scaling}


def _other_values(key: str, value: Any) -> list[Any]:
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int | float) and key not in SHAPES:
        return [0, -1, value * 2, value / 2 if isinstance(value, float) else value + 1]
    if isinstance(value, list) and value:
        return [value[:-1], value[::-1]]
    return list(ACTIVATIONS) if "act" in key and isinstance(value, str) else []


def _ropes(rope: dict[str, Any]) -> Iterator[dict[str, Any]]:
    theta = rope.get("rope_theta")
    part = {key: rope[key] for key in ("partial_rotary_factor",) if key in rope}
    yield {"rope_parameters": {"type" if key == "rope_type" else key: value for key, value in rope.items()}}
    yield from ({"rope_parameters": {key: rope[key] for key in rope if key != gone}} for gone in rope)
    yield {"rope_parameters": rope | {"partial_rotary_factor": 0.5}}
    yield {"rope_scaling": {"type": "linear", "factor": 2.0}}
    yield {"rope_scaling": None, "rope_theta": 777.0}
    for scaling in SCALINGS:
        yield {"rope_parameters": GONE, "rope_theta": theta, "rope_scaling": scaling, **part}
        yield {"rope_parameters": rope | {"rope_type": "default"} | scaling}
    yield {
        "rope_parameters": GONE,
        "rope_theta": 500.0,
        "original_max_position_embeddings": 40,
        "rope_scaling": SCALINGS[2],
    }


def edited(config: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in (config | change).items() if value is not GONE}
