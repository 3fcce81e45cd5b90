"""Tiny models with random weights of every family that the native engine knows, with the shapes that trip kernels up."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

LLAMA: dict[str, Any] = {
    "vocab_size": 203,
    "hidden_size": 96,
    "intermediate_size": 208,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
OPT: dict[str, Any] = {
    "vocab_size": 203,
    "hidden_size": 96,
    "ffn_dim": 200,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "max_position_embeddings": 128,
}
BIGCODE: dict[str, Any] = {"vocab_size": 203, "n_embd": 96, "n_layer": 2, "n_head": 6, "n_positions": 128, "n_inner": 200}


def _rope(kind: str, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **more}}


# name: (model_type, configuration)
TINY: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", LLAMA),
    "llama-tied-biased": ("llama", LLAMA | {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    "llama-gqa-8": ("llama", LLAMA | {"hidden_size": 128, "num_attention_heads": 8, "num_key_value_heads": 1}),
    "llama-352": (
        "llama",
        LLAMA | {"hidden_size": 352, "intermediate_size": 520, "num_attention_heads": 22, "num_key_value_heads": 11},
    ),
    "llama-head-dim": ("llama", LLAMA | {"head_dim": 40, "hidden_act": "gelu_pytorch_tanh", "rms_norm_eps": 1e-3}),
    "llama-linear": ("llama", LLAMA | _rope("linear", factor=4.0)),
    "llama-dynamic": ("llama", LLAMA | _rope("dynamic", factor=2.0)),
    "llama-llama3": (
        "llama",
        LLAMA | _rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64),
    ),
    "llama-yarn": ("llama", LLAMA | {"head_dim": 32} | _rope("yarn", factor=4.0, original_max_position_embeddings=32)),
    "mistral": ("mistral", LLAMA | {"sliding_window": 7}),
    "mistral-open": ("mistral", LLAMA | {"sliding_window": None, "head_dim": 24}),
    "qwen2": ("qwen2", LLAMA | {"tie_word_embeddings": True}),
    "qwen2-windows": ("qwen2", LLAMA | {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
    "qwen3": ("qwen3", LLAMA | {"head_dim": 32, "attention_bias": True}),
    "opt": ("opt", OPT),
    "opt-350m": ("opt", OPT | {"word_embed_proj_dim": 48, "do_layer_norm_before": False}),
    "opt-plain": ("opt", OPT | {"enable_bias": False, "activation_function": "gelu", "tie_word_embeddings": False}),
    "bigcode": ("gpt_bigcode", BIGCODE),
    "bigcode-mha": ("gpt_bigcode", BIGCODE | {"multi_query": False, "scale_attn_weights": False}),
}


def tiny_model(name: str, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A float32 model whose logits, norms and biases are all far from trivial."""
    kind, settings = TINY[name]
    config = AutoConfig.for_model(kind, **(settings | changes))
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            parameter.normal_(0.0, 1.0 / parameter.shape[-1] ** 0.5 if parameter.dim() == 2 else 0.1)
            if "norm" in parameter_name or ".ln_" in parameter_name:
                parameter.add_(1.0 if parameter_name.endswith("weight") else 0.0)
    return model
