"""Every causal family of transformers, and the kinds of models within one that differ in what they compute.

The sizes are those of each family's own configuration, or of published models where that leaves them open. Tiny
checkpoints are made of them (``workers/models/twins.py``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from transformers import AutoConfig, PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

# What a family's configuration leaves open, or has in a way that no published model of the family has.
SETTINGS: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1, 3], "mamba_d_head": 64},
    "bloom": {"seq_length": 2048},
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
        "num_hidden_layers": 6,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            "full_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    },
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "kv_n_heads": 8, "clip_qkv": 8}},
    "deepseek_v2": {"num_experts_per_tok": 6, "n_group": 2, "topk_group": 1},
    "dots1": {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1, "max_window_layers": 2},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"] * 16},
    "gemma4_assistant": {"text_config": {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}},
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128},
    "lfm2": {"layer_types": ["conv", "conv", "full_attention", "conv"] * 8, "full_attn_idxs": None},
    "lfm2_moe": {"layer_types": ["conv", "conv", "full_attention", "conv"] * 8},
    "ministral": {"head_dim": 128},
    "nemotron": {"num_key_value_heads": 8, "head_dim": 128},
    "qwen4_exp": {},
    "xmod": {"default_language": "en_XX"},
    "xlm": {"causal": True, "asm": False},
}
INDEXER = dict(indexer_n_heads=16, indexer_kv_heads=1, indexer_head_dim=256, indexer_budget=8, indexer_compress_ratio=2)
SETTINGS["qwen4_exp_text"] = INDEXER
SETTINGS["qwen4_exp"] = {"text_config": INDEXER}
LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "original_max_position_embeddings": 4096,
    "short_factor": [1.0] * 48,
    "long_factor": [4.0] * 48,
}
ROPES: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0},
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 4096,
    },
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 4096,
    },
}
# Kinds within a family, by a name of their own: (family, settings over the family's).
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "phi3, long rope": ("phi3", {"rope_parameters": LONG_ROPE}),
    "phimoe, long rope": ("phimoe", {"rope_parameters": LONG_ROPE | {"short_mscale": 1.1, "long_mscale": 1.3}}),
    "minicpm3, long rope": ("minicpm3", {"rope_parameters": LONG_ROPE}),
    "llama, long rope": ("llama", {"rope_parameters": LONG_ROPE}),
    **{f"llama, rope {name}": ("llama", {"rope_parameters": rope}) for name, rope in ROPES.items()},
    "llama4_text, no temperature": ("llama4_text", {"attn_temperature_tuning": False}),
    "mistral, window": ("mistral", {"sliding_window": 4096}),
    "mixtral, window": ("mixtral", {"sliding_window": 4096}),
    "qwen2, windows": ("qwen2", {"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 1}),
    "qwen3, windows": ("qwen3", {"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 1}),
    "phi3, window": ("phi3", {"sliding_window": 2047}),
    "starcoder2, window": ("starcoder2", {"sliding_window": 4096}),
    "bamba, few attentions": ("bamba", {"attn_layer_indices": [9, 18, 27]}),
    "falcon, alibi": ("falcon", {"alibi": True}),
    "falcon, one key head": ("falcon", {"new_decoder_architecture": False, "multi_query": True}),
    "gpt_bigcode, many key heads": ("gpt_bigcode", {"multi_query": False}),
    "opt, norm behind": ("opt", {"do_layer_norm_before": False}),
    "bert, both ways": ("bert", {"is_decoder": False}),
}


def families() -> list[str]:
    return [*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *KINDS]


def configuration(name: str) -> PretrainedConfig:
    """The full-size configuration of a family or of a kind within one."""
    family, more = KINDS.get(name, (name, {}))
    settings = {**SETTINGS.get(family, {}), **more}
    decoder = {} if "is_decoder" in settings else {"is_decoder": True}
    config = AutoConfig.for_model(family, **settings)
    for key, value in decoder.items():
        if hasattr(config, key):
            setattr(config, key, value)
    return config


def features(config: PretrainedConfig) -> Iterator[str]:
    """What of a configuration is worth a word in the table."""
    text: Mapping[str, Any] = config.get_text_config(decoder=True).to_dict()
    kinds = set(text.get("layer_types") or text.get("layers_block_type") or ())
    rope = text.get("rope_parameters") or {}
    ropes = {str(each.get("rope_type")) for each in (rope, *rope.values()) if isinstance(each, dict)} - {"None", "default"}
    if text.get("sliding_window") or "sliding_attention" in kinds:
        yield "window"
    if "chunked_attention" in kinds:
        yield "chunks"
    if text.get("attn_logit_softcapping"):
        yield "soft cap"
    if kinds & {"linear_attention", "recurrent", "hybrid", "mamba"}:
        yield "recurrent state"
    if "conv" in kinds:
        yield "convolution"
    if ropes:
        yield f"rope {', '.join(sorted(ropes))}"
