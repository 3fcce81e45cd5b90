"""Tiny models with random weights of every family of the native engine, in shapes that are difficult for kernels."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any, ClassVar

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.glm5_next.configuration_glm5_next import Glm5NextTextConfig
from transformers.models.glm5_next.modeling_glm5_next import Glm5NextPreTrainedModel, Glm5NextTextModel
from transformers.models.mistral4 import Mistral4Config, Mistral4ForCausalLM
from transformers.models.mistral_large4 import MistralLarge4PreTrainedModel, MistralLarge4TextConfig, MistralLarge4TextModel
from transformers.models.muse_spark.configuration_muse_spark import MuseSparkTextConfig
from transformers.models.muse_spark.modeling_muse_spark import MuseSparkPreTrainedModel, MuseSparkTextModel
from transformers.models.step3p7.configuration_step3p7 import Step3p7TextConfig
from transformers.models.step3p7.modeling_step3p7 import Step3p7PreTrainedModel, Step3p7TextModel

from outrider.workers.models.twins import attention_of

# transformers 5.24 has it, but opens it within Mistral 3 alone.
AutoModelForCausalLM.register(Mistral4Config, Mistral4ForCausalLM, exist_ok=True)


def _alone(
    config_class: type[PretrainedConfig],
    family: Any,
    decoder: Any,
    last: Callable[[torch.Tensor, Any], torch.Tensor] = lambda logits, config: logits,
) -> None:
    """Lets transformers open a language model alone that it opens only within the model that sees. ``last``: what is done
    to logits, with the configuration."""

    class Alone(family, GenerationMixin):
        _tied_weights_keys: ClassVar = {"lm_head.weight": "model.embed_tokens.weight"}

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.model = decoder(config)
            self.lm_head = torch.nn.Linear(config.hidden_size, config.vocab_size, bias=False)
            self.post_init()

        def forward(self, input_ids: torch.Tensor, logits_to_keep: int = 0, **more: Any) -> CausalLMOutputWithPast:
            made = self.model(input_ids, **more)
            logits = last(self.lm_head(made.last_hidden_state[:, -logits_to_keep:]), self.config)
            return CausalLMOutputWithPast(logits=logits, cache=made.cache, hidden_states=made.hidden_states)

    Alone.config_class, Alone.__name__ = config_class, decoder.__name__.replace("TextModel", "ForCausalLM")
    AutoModelForCausalLM.register(config_class, Alone, exist_ok=True)


def _capped(logits: torch.Tensor, config: Any) -> torch.Tensor:
    logits, cap = logits * getattr(config, "output_multiplier", 1.0), config.final_logit_softcapping
    return cap * torch.tanh(logits / cap)


_alone(Glm5NextTextConfig, Glm5NextPreTrainedModel, Glm5NextTextModel)
_alone(MistralLarge4TextConfig, MistralLarge4PreTrainedModel, MistralLarge4TextModel, _capped)
_alone(MuseSparkTextConfig, MuseSparkPreTrainedModel, MuseSparkTextModel, _capped)
_alone(Step3p7TextConfig, Step3p7PreTrainedModel, Step3p7TextModel)

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
GPT: dict[str, Any] = {"vocab_size": 203, "n_embd": 96, "n_layer": 2, "n_head": 6, "n_positions": 128}
BIGCODE: dict[str, Any] = GPT | {"n_inner": 200}


def _rope(kind: str, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **more}}


FALCON: dict[str, Any] = {
    "vocab_size": 203,
    "hidden_size": 96,
    "ffn_hidden_size": 200,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "max_position_embeddings": 128,
}
LAYERED = {"num_hidden_layers": 4, "num_attention_heads": 4, "head_dim": 24}
NEOX: dict[str, Any] = {
    "vocab_size": 203,
    "hidden_size": 96,
    "intermediate_size": 200,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "max_position_embeddings": 128,
}
JAPANESE = {key: size for key, size in NEOX.items() if key != "intermediate_size"} | {"intermediate_multiple_size": 2}


def _long_rope(pairs: int, original: int = 48) -> dict[str, Any]:
    short, long = [1.0 + 0.05 * i for i in range(pairs)], [2.0 + 0.7 * i for i in range(pairs)]
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": short, "long_factor": long}
    return {"rope_parameters": rope, "original_max_position_embeddings": original, "max_position_embeddings": 192}


# Two value heads for each key head, and values of another size than keys.
DELTA = LLAMA | {
    "num_hidden_layers": 4,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 24,
    "linear_value_head_dim": 32,
}
# Several heads share a key.
MAMBA = {
    "mamba_n_heads": 8,
    "mamba_d_head": 48,
    "mamba_expand": 4,
    "mamba_d_state": 24,
    "mamba_d_conv": 3,
    "mamba_chunk_size": 8,
}
# transformers applies the lower bound "time_step_min" only in passes over several tokens, so it is almost 0 here.
NEMOTRON_H = {
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "n_groups": 2,
    "ssm_state_size": 24,
    "chunk_size": 8,
    "head_dim": 24,
    "time_step_min": 1e-9,
}
MROPE = {
    "rope_type": "default",
    "rope_theta": 1e4,
    "partial_rotary_factor": 0.5,
    "mrope_section": [4, 2, 2],
    "mrope_interleaved": True,
}

QSA = {
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 24,
    "indexer_budget": 128,
    "indexer_compress_ratio": 8,
}

# The last three layers use the keys and values of the second and the third layer.
GEMMA4 = LLAMA | {
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "head_dim": 24,
    "global_head_dim": 40,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "sliding_window": 7,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 3,
    "use_double_wide_mlp": True,
    "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": 407,
    "final_logit_softcapping": 3.0,
}
# The last two layers use the keys and values of the first and the third layer; the layers' table lacks tokens from 190 on.
GEMMA3N: dict[str, Any] = LLAMA | {
    "num_hidden_layers": 5,
    "intermediate_size": [208, 144, 208, 208, 104],
    "num_attention_heads": 4,
    "head_dim": 24,
    "sliding_window": 7,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention", "full_attention"],
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": 190,
    "laurel_rank": 12,
    "activation_sparsity_pattern": [0.8, 0.0, 0.95, 0.3, 0.0],
    "final_logit_softcapping": 3.0,
}
# Values of another size than keys; a part of each key has rope.
LATENT: dict[str, Any] = LLAMA | {
    "num_key_value_heads": 6,
    "q_lora_rank": 40,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}
LONGCAT: dict[str, Any] = {key: size for key, size in LATENT.items() if key != "num_hidden_layers"}
YARN: dict[str, Any] = {"factor": 4.0, "original_max_position_embeddings": 32, "mscale": 0.7, "mscale_all_dim": 0.7}

BLOOM: dict[str, Any] = {"vocab_size": 203, "hidden_size": 96, "n_layer": 2, "n_head": 6}
MPT: dict[str, Any] = {"vocab_size": 203, "d_model": 96, "n_layers": 2, "n_heads": 6, "max_seq_len": 128}
FALCON_RW = FALCON | {"alibi": True, "bias": True, "multi_query": False, "parallel_attn": False}

# 80 columns are divided by 16 only; transformers takes the width that is stated, not the one that "expand" says.
ZAMBA2 = {
    "vocab_size": 203,
    "hidden_size": 96,
    "intermediate_size": 200,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "max_position_embeddings": 128,
    "layers_block_type": ["hybrid", "linear_attention", "hybrid", "hybrid"],
    "n_mamba_heads": 4,
    "mamba_d_state": 24,
    "mamba_d_conv": 3,
    "chunk_size": 8,
    "adapter_rank": 16,
    "num_mem_blocks": 2,
    "time_step_min": 1e-9,
}
MAMBA1: dict[str, Any] = {"vocab_size": 203, "hidden_size": 48, "num_hidden_layers": 3, "state_size": 6, "conv_kernel": 3}

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
    "gemma": ("gemma", LLAMA | {"head_dim": 24, "num_attention_heads": 4}),
    "gemma2": ("gemma2", LLAMA | LAYERED | {"sliding_window": 7, "query_pre_attn_scalar": 16}),
    "gemma2-caps": (
        "gemma2",
        LLAMA
        | LAYERED
        | {"sliding_window": 19, "attn_logit_softcapping": 1.5, "final_logit_softcapping": 2.0, "attention_bias": True},
    ),
    "gemma3": ("gemma3_text", LLAMA | LAYERED | {"sliding_window": 9, "_sliding_window_pattern": 2}),
    "gemma3-bases": (
        "gemma3_text",
        LLAMA
        | LAYERED
        | {
            "sliding_window": 5,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
                "full_attention": {"rope_type": "linear", "rope_theta": 20000.0, "factor": 8.0},
            },
            "final_logit_softcapping": 3.0,
            "tie_word_embeddings": False,
        },
    ),
    "gemma3n": ("gemma3n_text", GEMMA3N),
    "gemma3n-plain": (
        "gemma3n_text",
        GEMMA3N
        | {"num_kv_shared_layers": 0, "activation_sparsity_pattern": None, "layer_types": None, "intermediate_size": 104}
        | {"altup_num_inputs": 3, "altup_active_idx": 1, "attention_bias": True, "tie_word_embeddings": False}
        | {"vocab_size_per_layer_input": 407},
    ),
    "gemma4": ("gemma4_text", GEMMA4),
    "gemma4-plain": (
        "gemma4_text",
        GEMMA4
        | {"num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0, "tie_word_embeddings": False}
        | {"attention_bias": True, "layer_types": None, "use_bidirectional_attention": "vision"},
    ),
    "gemma4-by-layer": ("gemma4_text", GEMMA4 | {"attention_k_eq_v": False, "final_logit_softcapping": None}),
    "gemma4-unified": (
        "gemma4_unified_text",
        {key: value for key, value in GEMMA4.items() if "per_layer_input" not in key} | {"num_kv_shared_layers": 2},
    ),
    "phi3": ("phi3", LLAMA | {"sliding_window": 11, "pad_token_id": 0}),
    "phi3-partial": (
        "phi3",
        LLAMA
        | {
            "pad_token_id": 0,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.75},
        },
    ),
    "phi3-long": ("phi3", LLAMA | {"pad_token_id": 0, "num_key_value_heads": 3} | _long_rope(8)),
    "granite": (
        "granite",
        LLAMA
        | {
            "embedding_multiplier": 12.0,
            "attention_multiplier": 0.11,
            "residual_multiplier": 0.22,
            "logits_scaling": 6.0,
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": True,
        },
    ),
    "granite-swa": (
        "granite_swa",
        LLAMA
        | {"num_hidden_layers": 4, "sliding_window": 6, "attention_multiplier": 0.2, "logits_scaling": 3.0}
        | {"layer_rope_theta": [500.0, 0, 10000, 500.0], "embedding_multiplier": 2.0, "residual_multiplier": 0.5},
    ),
    "granite-hybrid": (
        "granitemoehybrid",
        LLAMA
        | {"layer_types": ["full_attention"] * 2, "num_local_experts": 0, "num_experts_per_tok": 0, "mamba_n_heads": 1}
        | {"shared_intermediate_size": 56, "position_embedding_type": "rope", "residual_multiplier": 0.4}
        | {"embedding_multiplier": 3.0, "attention_multiplier": 0.11, "logits_scaling": 2.0},
    ),
    "granite-mamba": (
        "granitemoehybrid",
        LLAMA
        | MAMBA
        | {"num_local_experts": 0, "num_experts_per_tok": 0, "shared_intermediate_size": 56, "mamba_n_groups": 4}
        | {"layer_types": ["linear_attention", "full_attention", "linear_attention"], "num_hidden_layers": 3}
        | {"residual_multiplier": 0.4, "embedding_multiplier": 3.0, "attention_multiplier": 0.11, "mamba_proj_bias": True},
    ),
    "bamba": (
        "bamba",
        LLAMA | MAMBA | {"num_hidden_layers": 3, "attn_layer_indices": [1], "mamba_n_groups": 2, "attention_bias": True},
    ),
    "falcon-h1-plain": (
        "falcon_h1",
        LLAMA | MAMBA | {"mamba_d_ssm": None, "tie_word_embeddings": True, "attention_bias": True},
    ),
    "falcon-h1": (
        "falcon_h1",
        LLAMA
        | MAMBA
        | {"mamba_d_ssm": 128, "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_rms_norm": True}
        | {"ssm_multipliers": [0.7, 1.3, 0.8, 1.2, 0.6], "ssm_in_multiplier": 1.4, "ssm_out_multiplier": 0.6}
        | {"attention_in_multiplier": 0.8, "attention_out_multiplier": 1.3, "key_multiplier": 0.7, "head_dim": 24}
        | {"mlp_multipliers": [0.8, 1.4], "embedding_multiplier": 3.0, "lm_head_multiplier": 0.3},
    ),
    "falcon-h1-gated": (
        "falcon_h1",
        LLAMA | MAMBA | {"mamba_d_ssm": None, "mamba_rms_norm": True, "mamba_norm_before_gate": False},
    ),
    "nemotron-h": (
        "nemotron_h",
        LLAMA
        | NEMOTRON_H
        | {"layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention"], "mlp_bias": True}
        | {"use_bias": True},
    ),
    "mamba": ("mamba", MAMBA1 | {"use_bias": True, "use_conv_bias": False, "time_step_rank": 5}),
    "falcon-mamba": ("falcon_mamba", MAMBA1 | {"tie_word_embeddings": False, "expand": 16, "intermediate_size": 80}),
    "mamba2": (
        "mamba2",
        MAMBA1
        | {"num_heads": 6, "head_dim": 16, "n_groups": 2, "state_size": 24, "use_bias": True, "chunk_size": 8}
        | {"tie_word_embeddings": True},
    ),
    "hyperclovax": ("hyperclovax", LLAMA | {"head_dim": 24, "embedding_multiplier": 3.0, "logits_scaling": 0.25}),
    "hyperclovax-before": (
        "hyperclovax",
        LLAMA | {"use_post_norm": False, "residual_multiplier": 0.5, "attention_multiplier": 0.2, "attention_bias": True},
    ),
    "ministral": (
        "ministral",
        LLAMA | {"sliding_window": 6, "layer_types": ["full_attention", "sliding_attention"], "head_dim": 24},
    ),
    "ministral3": (
        "ministral3",
        LLAMA
        | {"head_dim": 32}
        | _rope(
            "yarn",
            factor=16.0,
            original_max_position_embeddings=8,
            llama_4_scaling_beta=0.4,
            mscale=1.0,
            mscale_all_dim=1.0,
            beta_fast=32.0,
            beta_slow=1.0,
        ),
    ),
    "ministral3-window": ("ministral3", LLAMA | {"head_dim": 24, "sliding_window": 6, "max_position_embeddings": 192}),
    "internlm3": ("internlm3", LLAMA | {"head_dim": 24, "attention_bias": True, "mlp_bias": True}),
    "iquestcoder": ("iquestcoder", LLAMA | {"head_dim": 24}),
    "smollm3": ("smollm3", LLAMA | {"num_hidden_layers": 5, "no_rope_layer_interval": 2, "pad_token_id": 0}),
    "smollm3-windows": (
        "smollm3",
        LLAMA
        | {"num_hidden_layers": 3, "no_rope_layers": [1, 0, 1], "use_sliding_window": True, "sliding_window": 6}
        | {"tie_word_embeddings": False, "pad_token_id": 0, "head_dim": 24},
    ),
    "olmo2": ("olmo2", LLAMA | {"attention_bias": True, "pad_token_id": 0}),
    "olmo3": ("olmo3", LLAMA | {"num_hidden_layers": 4, "sliding_window": 8, "pad_token_id": 0}),
    "olmo": ("olmo", LLAMA | {"attention_bias": True, "pad_token_id": 0}),
    "olmo-clipped": ("olmo", LLAMA | {"clip_qkv": 0.7, "pad_token_id": 0}),
    "seed-oss": (
        "seed_oss",
        LLAMA | {"head_dim": 24, "attention_out_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    ),
    "cwm": ("cwm", LLAMA | {"num_hidden_layers": 5, "head_dim": 24, "sliding_window": 6, "mlp_bias": True}),
    "hunyuan": (
        "hunyuan_v1_dense",
        LLAMA
        | {"head_dim": 24, "attention_bias": True, "tie_word_embeddings": True}
        | _rope("dynamic", alpha=1000.0, factor=1.0, beta_fast=32, beta_slow=1, mscale=1.0, mscale_all_dim=1.0),
    ),
    "exaone": ("exaone", LLAMA | {"head_dim": 24, "tie_word_embeddings": True}),
    "exaone4": ("exaone4", LLAMA | {"num_hidden_layers": 5, "sliding_window": 6, "sliding_window_pattern": 2}),
    "exaone4-open": ("exaone4", LLAMA | {"sliding_window": None, "layer_types": ["full_attention"] * 2, "head_dim": 24}),
    "vaultgemma": (
        "vaultgemma",
        LLAMA
        | LAYERED
        | {"sliding_window": 7, "attn_logit_softcapping": 1.5, "final_logit_softcapping": 2.0, "attention_bias": True},
    ),
    "glm": ("glm", LLAMA | {"head_dim": 24, "pad_token_id": 0}),
    "glm4": ("glm4", LLAMA | {"head_dim": 32, "pad_token_id": 0, "tie_word_embeddings": True}),
    "ernie": ("ernie4_5", LLAMA | {"head_dim": 24, "use_bias": True}),
    "helium": ("helium", LLAMA | {"head_dim": 16, "attention_bias": True, "mlp_bias": True}),
    "youtu": ("youtu", LATENT | {"q_lora_rank": None, "attention_bias": True} | _rope("yarn", **YARN)),
    "youtu-wide": ("youtu", LATENT | {"v_head_dim": 40, "rope_interleave": False, "tie_word_embeddings": False}),
    "minicpm3": (
        "minicpm3",
        LATENT | {"v_head_dim": None, "scale_emb": 3.0, "dim_model_base": 24, "scale_depth": 0.9} | _rope("default"),
    ),
    "minicpm3-long": (
        "minicpm3",
        LATENT
        | {"q_lora_rank": None, "scale_depth": None, "dim_model_base": None, "attention_bias": True}
        | {"tie_word_embeddings": False}
        | {key: value for key, value in _long_rope(4, 192).items() if key != "original_max_position_embeddings"},
    ),
    "neox": ("gpt_neox", NEOX),
    "neox-japanese": ("gpt_neox_japanese", JAPANESE),
    "neox-japanese-part": (
        "gpt_neox_japanese",
        JAPANESE
        | {"tie_word_embeddings": False, "hidden_act": "relu"}
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5}},
    ),
    "neox-serial": (
        "gpt_neox",
        NEOX
        | {"use_parallel_residual": False, "attention_bias": False, "hidden_act": "gelu_new", "tie_word_embeddings": True}
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5}},
    ),
    "opt": ("opt", OPT),
    "opt-350m": ("opt", OPT | {"word_embed_proj_dim": 48, "do_layer_norm_before": False}),
    "opt-plain": ("opt", OPT | {"enable_bias": False, "activation_function": "gelu", "tie_word_embeddings": False}),
    "bitnet": ("bitnet", LLAMA),
    "bitnet-biased": (
        "bitnet",
        LLAMA | {"attention_bias": True, "tie_word_embeddings": True, "hidden_act": "silu"},
    ),
    "biogpt": ("biogpt", NEOX),
    "biogpt-untied": ("biogpt", NEOX | {"tie_word_embeddings": False, "scale_embedding": False, "hidden_act": "relu"}),
    "ettin": (
        "modernbert-decoder",
        NEOX | {"num_hidden_layers": 4, "local_attention": 14, "pad_token_id": 0},
    ),
    "ettin-biased": (
        "modernbert-decoder",
        NEOX
        | {"num_hidden_layers": 4, "local_attention": 10, "pad_token_id": 0, "norm_bias": True, "attention_bias": True}
        | {"mlp_bias": True, "classifier_bias": True, "classifier_activation": "silu", "tie_word_embeddings": False}
        | {"hidden_activation": "gelu_new", "global_attn_every_n_layers": 2},
    ),
    "lfm2": (
        "lfm2",
        LLAMA | {"layer_types": ["conv", "full_attention", "conv"], "num_hidden_layers": 3, "block_multiple_of": 16},
    ),
    "lfm2-biased": (
        "lfm2",
        LLAMA
        | {"full_attn_idxs": [2], "num_hidden_layers": 4, "conv_L_cache": 4, "conv_bias": True, "head_dim": 24}
        | {"tie_word_embeddings": False, "block_auto_adjust_ff_dim": False},
    ),
    "lfm3": (
        "lfm3",
        LLAMA
        | {"layer_types": ["conv", "sliding_attention", "full_attention", "conv"], "num_hidden_layers": 4, "head_dim": 24}
        | {"pad_token_id": 0, "num_attention_heads": 16, "num_key_value_heads": 4}
        | {"sliding_window": 7, "conv_bias": True, "attention_bias": True, "tie_word_embeddings": False, "conv_L_cache": 4},
    ),
    "lfm3-plain": (
        "lfm3",
        LLAMA
        | {"num_hidden_layers": 5, "head_dim": 16, "sliding_window": 20, "use_sandwich_norm": False}
        | {"use_attention_gate": False, "pad_token_id": 0}
        | {
            "rope_parameters": {
                "sliding_attention": {"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0},
                "full_attention": {"rope_type": "default", "rope_theta": 10000.0},
            }
        },
    ),
    "hrm-text": (
        "hrm_text",
        LLAMA | {"num_key_value_heads": 6, "head_dim": 24, "embedding_scale": 3.0, "tie_word_embeddings": True},
    ),
    "hrm-text-deep": (
        "hrm_text",
        LLAMA
        | {"num_key_value_heads": 6, "head_dim": 16, "num_hidden_layers": 1, "H_cycles": 3, "L_cycles": 1}
        | {"initializer_range": 0.5, "prefix_lm": False, "hidden_act": "gelu"},
    ),
    "olmo-hybrid": (
        "olmo_hybrid",
        # transformers 5.24 splits the three convolutions into equal parts when it saves them, so they must be equally wide.
        DELTA
        | {"linear_allow_neg_eigval": False, "pad_token_id": 0, "attention_bias": True}
        | {"linear_num_key_heads": 4, "linear_key_head_dim": 32},
    ),
    "olmo-hybrid-open": (
        "olmo_hybrid",
        DELTA
        | {"pad_token_id": 0, "num_hidden_layers": 2, "tie_word_embeddings": True}
        | {"rope_parameters": {"rope_type": "default", "rope_theta": None}, "linear_conv_kernel_dim": 3}
        | {"linear_num_key_heads": None, "linear_num_value_heads": None, "linear_key_head_dim": 16}
        | {"linear_value_head_dim": 16},
    ),
    "qwen3-5": ("qwen3_5_text", DELTA | {"rope_parameters": MROPE}),
    "bigcode": ("gpt_bigcode", BIGCODE),
    "bigcode-mha": ("gpt_bigcode", BIGCODE | {"multi_query": False, "scale_attn_weights": False}),
    "starcoder2-plain": (
        "starcoder2",
        LLAMA | {"use_bias": False, "tie_word_embeddings": False, "hidden_act": "gelu", "head_dim": 24},
    ),
    "starcoder2": ("starcoder2", LLAMA | {"sliding_window": 7}),
    "cohere-untied": ("cohere", LLAMA | {"tie_word_embeddings": False, "head_dim": 24}),
    "cohere": ("cohere", LLAMA | {"use_qk_norm": True, "attention_bias": True, "logit_scale": 0.25}),
    "cohere2": (
        "cohere2",
        LLAMA | {"num_hidden_layers": 4, "sliding_window": 6, "sliding_window_pattern": 3, "attention_bias": True},
    ),
    "cohere-compass": (
        "cohere_compass_text",
        LLAMA
        | {"num_hidden_layers": 4, "sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"] * 2}
        | {"attention_bias": True, "logit_scale": 0.25}
        | {"rope_parameters": {"full_attention": None, "sliding_attention": {"rope_theta": 500.0, "rope_type": "default"}}},
    ),
    "cohere-compass-open": (
        "cohere_compass_text",
        LLAMA
        | {"tie_word_embeddings": False}
        | {"rope_parameters": {"full_attention": {"rope_theta": 1e4, "rope_type": "linear", "factor": 4.0}}},
    ),
    "phi": ("phi", LLAMA | {"num_key_value_heads": 6}),
    "phi-normed": ("phi", LLAMA | {"qk_layernorm": True, "tie_word_embeddings": True}),
    "gpt2": ("gpt2", BIGCODE),
    "gpt2-by-layer": (
        "gpt2",
        BIGCODE | {"scale_attn_by_inverse_layer_idx": True, "n_inner": None, "tie_word_embeddings": False},
    ),
    "gpt": ("openai-gpt", GPT),
    "gpt-untied": ("openai-gpt", GPT | {"afn": "relu", "tie_word_embeddings": False}),
    "zamba2": ("zamba2", ZAMBA2),
    "zamba2-adapted": (
        "zamba2",
        ZAMBA2
        | {"use_shared_attention_adapter": True, "use_mem_rope": True, "mamba_ngroups": 2, "add_bias_linear": True}
        | {"hidden_act": "silu"},
    ),
    "stablelm": ("stablelm", LLAMA | {"use_qkv_bias": True}),
    "stablelm-parallel": ("stablelm", LLAMA | {"use_parallel_residual": True, "qk_layernorm": True}),
    "gptj": ("gptj", BIGCODE | {"rotary_dim": 8}),
    "codegen": ("codegen", BIGCODE | {"rotary_dim": 16, "n_head": 4}),
    "falcon": ("falcon", FALCON),
    "falcon-serial": (
        "falcon",
        FALCON | {"multi_query": False, "parallel_attn": False, "bias": True, "tie_word_embeddings": False},
    ),
    "falcon-rw": ("falcon", FALCON_RW),
    "falcon-one-norm": (
        "falcon",
        FALCON | {"new_decoder_architecture": True, "num_kv_heads": 3, "num_ln_in_parallel_attn": 1},
    ),
    "falcon-new": ("falcon", FALCON | {"new_decoder_architecture": True, "num_kv_heads": 2, "bias": True}),
    "bloom": ("bloom", BLOOM),
    "bloom-of-norms": ("bloom", BLOOM | {"n_head": 4, "apply_residual_connection_post_layernorm": True}),
    "mpt": ("mpt", MPT),
    "mpt-clipped": (
        "mpt",
        MPT | {"n_heads": 4, "attn_config": {"clip_qkv": 0.7, "softmax_scale": 0.3}, "tie_word_embeddings": False},
    ),
    "jamba-dense": (
        "jamba",
        LLAMA
        | {"num_experts": 1, "num_hidden_layers": 3, "attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 16}
        | {"mamba_proj_bias": True, "mamba_conv_bias": False, "mamba_d_conv": 3, "num_experts_per_tok": 1},
    ),
    "persimmon": ("persimmon", NEOX),
    "persimmon-gelu": ("persimmon", NEOX | {"hidden_act": "gelu_new", "qk_layernorm": False, "tie_word_embeddings": True}),
    "gpt-neo": (
        "gpt_neo",
        {"vocab_size": 203, "hidden_size": 96, "intermediate_size": 200, "num_layers": 4, "num_heads": 6}
        | {"max_position_embeddings": 128, "window_size": 7, "attention_types": [[["global", "local"], 2]]},
    ),
    "apertus": ("apertus", LLAMA | {"head_dim": 24, "attention_bias": True}),
    "apertus-1.5": ("apertus1p5_text", LLAMA | {"head_dim": 24}),
    "apertus-gelu": ("apertus", LLAMA | {"hidden_act": "gelu", "tie_word_embeddings": True} | _rope("default")),
    "arcee": ("arcee", LLAMA | {"mlp_bias": True, "attention_bias": True, "head_dim": 24, "tie_word_embeddings": True}),
    "nemotron": ("nemotron", LLAMA | {"mlp_bias": True, "attention_bias": True}),
    "jais2": ("jais2", LLAMA),
    "jais2-plain": ("jais2", LLAMA | {"attention_bias": False, "mlp_bias": False, "head_dim": 24, "hidden_act": "gelu"}),
    "nanochat": ("nanochat", LLAMA | {"head_dim": 24, "attention_bias": True, "final_logit_softcapping": 2.0}),
    "nanochat-uncapped": ("nanochat", LLAMA | {"final_logit_softcapping": None, "tie_word_embeddings": True}),
    "nemotron-plain": ("nemotron", LLAMA | {"head_dim": 24, "tie_word_embeddings": True}),
}

MIXTURE = LLAMA | {"num_experts_per_tok": 2, "pad_token_id": 0}
# As TINY, for mixtures of experts: transformers holds all experts in one tensor, most checkpoints have one for each.
MIXTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "kolibri": (
        "kolibri1",
        MIXTURE
        | {"num_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 40, "shared_expert_intermediate_size": 56}
        | {"num_hidden_layers": 5, "sliding_window": 7, "head_dim": 24},
    ),
    "kolibri-shares": (
        "kolibri1",
        MIXTURE
        | {"num_experts": 5, "moe_intermediate_size": 40, "shared_expert_intermediate_size": 24, "head_dim": 16}
        | {"norm_topk_prob": True, "sliding_window": 9, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "laguna-elements": (
        "laguna",
        MIXTURE
        | {"num_experts": 5, "moe_intermediate_size": 40, "shared_expert_intermediate_size": 24, "head_dim": 16}
        | {"gating": "per-element", "attention_bias": True},
    ),
    "laguna": (
        "laguna",
        MIXTURE
        | {"num_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 40, "shared_expert_intermediate_size": 56}
        | {"num_hidden_layers": 3, "num_attention_heads_per_layer": [6, 4, 2], "head_dim": 24, "sliding_window": 7}
        | {"layer_types": ["full_attention", "sliding_attention", "full_attention"]}
        | {"moe_router_logit_softcapping": 2.0, "moe_routed_scaling_factor": 1.7},
    ),
    "jamba": (
        "jamba",
        MIXTURE
        | {"num_experts": 5, "num_hidden_layers": 4, "attn_layer_period": 3, "attn_layer_offset": 1, "mamba_d_state": 6}
        | {"mamba_dt_rank": 5, "intermediate_size": 72},
    ),
    "mixtral": ("mixtral", MIXTURE | {"num_local_experts": 5, "sliding_window": 9, "intermediate_size": 72}),
    "qwen2-moe": (
        "qwen2_moe",
        MIXTURE
        | {"num_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 40, "shared_expert_intermediate_size": 56}
        | {"num_hidden_layers": 3, "mlp_only_layers": [1], "num_key_value_heads": 6},
    ),
    "qwen2-moe-windows": (
        "qwen2_moe",
        MIXTURE
        | {"num_experts": 4, "moe_intermediate_size": 48, "shared_expert_intermediate_size": 24, "norm_topk_prob": True}
        | {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 2},
    ),
    "qwen3-moe": (
        "qwen3_moe",
        MIXTURE
        | {"num_experts": 20, "num_experts_per_tok": 8, "moe_intermediate_size": 24, "norm_topk_prob": True, "head_dim": 24}
        | {"tie_word_embeddings": True, "decoder_sparse_step": 2, "num_hidden_layers": 4, "attention_bias": True},
    ),
    "qwen3-next": (
        "qwen3_next",
        MIXTURE
        | DELTA
        | {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 40, "shared_expert_intermediate_size": 56}
        | {"mlp_only_layers": [2], "attention_bias": True, "linear_conv_kernel_dim": 3},
    ),
    "beam-plain": (
        "beam",
        MIXTURE
        | {
            "num_experts": 6,
            "moe_intermediate_size": 32,
            "head_dim": 16,
            "sliding_window": 9,
            "n_group": 1,
            "topk_group": 1,
        }
        | {"mlp_layer_types": ["sparse", "sparse"], "layer_types": ["full_attention", "sliding_attention"]}
        | {"norm_topk_prob": False, "attention_bias": True, "final_logit_softcapping": None, "tie_word_embeddings": True}
        | {
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0},
                "sliding_attention": None,
            }
        }
        | {"routed_scaling_factor": 1.5},
    ),
    "beam": (
        "beam",
        MIXTURE
        | {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 40, "head_dim": 24, "sliding_window": 7}
        | {"num_hidden_layers": 5, "n_group": 4, "topk_group": 2},
    ),
    "lara-plain": (
        "lara_mini",
        MIXTURE
        | DELTA
        | {"num_experts": 5, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 48, "sliding_window": 9}
        | {"layer_types": ["sliding_attention", "linear_attention", "full_attention", "linear_attention"]}
        | {"norm_topk_prob": False, "attention_bias": True, "tie_word_embeddings": False},
    ),
    "lara": (
        "lara_mini",
        MIXTURE
        | DELTA
        | {"num_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 40, "shared_expert_intermediate_size": 56}
        | {"num_hidden_layers": 5, "sliding_window": 6, "linear_conv_kernel_dim": 3},
    ),
    "qwen3-5-moe": (
        "qwen3_5_moe_text",
        MIXTURE
        | DELTA
        | {"num_experts": 5, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 48}
        | {"rope_parameters": MROPE},
    ),
    "qwen4-exp-plain": (
        "qwen4_exp_text",
        MIXTURE
        | DELTA
        | QSA
        | {"num_experts": 5, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 48, "norm_topk_prob": False}
        | {"rope_parameters": MROPE, "tie_word_embeddings": True, "hc_lowrank": 20, "hc_count": 3},
    ),
    "qwen4-exp": (
        "qwen4_exp_text",
        MIXTURE
        | DELTA
        | QSA
        | {"num_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 40, "shared_expert_intermediate_size": 56}
        | {"rope_parameters": MROPE, "hc_lowrank": 40, "output_gate_type": "sigmoid", "attention_bias": True}
        | {"layer_types": ["linear_attention", "full_attention"] * 2},
    ),
    "olmoe": ("olmoe", MIXTURE | {"num_experts": 9, "num_experts_per_tok": 4, "intermediate_size": 40}),
    "gpt-oss": (
        "gpt_oss",
        MIXTURE
        | {"num_local_experts": 6, "num_experts_per_tok": 3, "intermediate_size": 96, "head_dim": 16, "sliding_window": 7}
        | {"num_hidden_layers": 3},
    ),
    "gpt-oss-clamped": (
        "gpt_oss",
        MIXTURE
        | {"num_local_experts": 4, "intermediate_size": 64, "head_dim": 24, "sliding_window": 30, "swiglu_limit": 0.4}
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    ),
    "flex-olmo": (
        "flex_olmo",
        MIXTURE | {"num_experts": 6, "num_experts_per_tok": 3, "intermediate_size": 40, "norm_topk_prob": True},
    ),
    "granite-moe": (
        "granitemoe",
        MIXTURE
        | {"num_local_experts": 6, "intermediate_size": 40, "embedding_multiplier": 3.0, "attention_multiplier": 0.11}
        | {"residual_multiplier": 0.4, "logits_scaling": 2.0, "attention_bias": True, "tie_word_embeddings": True},
    ),
    "granite-moe-shared": (
        "granitemoeshared",
        MIXTURE
        | {"num_local_experts": 5, "intermediate_size": 40, "shared_intermediate_size": 56, "residual_multiplier": 0.4},
    ),
    "granite-moe-swa": (
        "granitemoe_swa",
        MIXTURE
        | {"num_local_experts": 5, "intermediate_size": 40, "shared_intermediate_size": 56, "residual_multiplier": 0.4}
        | {"num_hidden_layers": 4, "sliding_window": 6, "attention_multiplier": 0.2, "logits_scaling": 3.0}
        | {"layer_rope_theta": [500.0, 0, 10000, 500.0], "embedding_multiplier": 2.0},
    ),
    "granite-moe-hybrid": (
        "granitemoehybrid",
        MIXTURE
        | {"layer_types": ["full_attention"] * 2, "num_local_experts": 5, "intermediate_size": 40, "mamba_n_heads": 1}
        | {"shared_intermediate_size": 56, "residual_multiplier": 0.4, "attention_multiplier": 0.11, "head_dim": 24}
        | {"attention_bias": True},
    ),
    "granite-moe-mamba": (
        "granitemoehybrid",
        MIXTURE
        | MAMBA
        | {"layer_types": ["linear_attention", "full_attention"], "num_local_experts": 5, "intermediate_size": 40}
        | {"shared_intermediate_size": 56, "residual_multiplier": 0.4, "attention_multiplier": 0.11},
    ),
    "nemotron-h-moe": (
        "nemotron_h",
        MIXTURE
        | NEMOTRON_H
        | {"n_routed_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 40, "n_group": 2, "topk_group": 1}
        | {"moe_shared_expert_intermediate_size": 56, "routed_scaling_factor": 1.5, "moe_latent_size": 48}
        | {"layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"]},
    ),
    "nemotron-h-moe-plain": (
        "nemotron_h",
        MIXTURE
        | NEMOTRON_H
        | {"n_routed_experts": 5, "moe_intermediate_size": 40, "norm_topk_prob": False, "use_conv_bias": False}
        | {"moe_shared_expert_intermediate_size": 56, "layers_block_type": ["linear_attention", "moe", "full_attention"]},
    ),
    "ling-3-unbounded": (
        "bailing_hybrid",
        MIXTURE
        | LATENT
        | {"num_local_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_group": 1, "topk_group": 1}
        | {"layer_types": ["full_attention", "linear_attention"], "first_k_dense_replace": 0, "head_dim": 16}
        | {"kda_safe_gate": False, "q_lora_rank": None, "norm_topk_prob": False},
    ),
    "ling-3": (
        "bailing_hybrid",
        MIXTURE
        | LATENT
        | {"num_local_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 40, "n_group": 4, "topk_group": 2}
        | {"num_hidden_layers": 4, "layer_group_size": 3, "first_k_dense_replace": 1, "head_dim": 32, "n_shared_experts": 2}
        | {"kda_lower_bound": -3.0, "short_conv_kernel_size": 3},
    ),
    "kimi-linear": (
        "kimi_linear",
        MIXTURE
        | LATENT
        | {
            "num_experts": 8,
            "num_experts_per_token": 3,
            "moe_intermediate_size": 40,
            "num_expert_group": 4,
            "topk_group": 2,
        }
        | {"num_hidden_layers": 4, "linear_num_heads": 3, "linear_head_dim": 32, "linear_conv_kernel_dim": 3}
        | {"layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"]}
        | {"q_lora_rank": None, "num_shared_experts": 2, "model_max_length": 128},
    ),
    "glm4-moe": (
        "glm4_moe",
        MIXTURE
        | {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 40, "n_group": 4, "topk_group": 2}
        | {
            "n_shared_experts": 2,
            "routed_scaling_factor": 1.5,
            "use_qk_norm": True,
            "attention_bias": True,
            "head_dim": 24,
        },
    ),
    "glm4-moe-plain": (
        "glm4_moe",
        MIXTURE
        | {"n_routed_experts": 6, "moe_intermediate_size": 32, "norm_topk_prob": False, "first_k_dense_replace": 0}
        | {"num_key_value_heads": 6, "head_dim": 16},
    ),
    "dbrx": (
        "dbrx",
        {"vocab_size": 203, "d_model": 96, "n_heads": 6, "n_layers": 2, "max_seq_len": 128}
        | {"attn_config": {"kv_n_heads": 2, "clip_qkv": 0.9, "rope_theta": 10000.0}}
        | {"ffn_config": {"ffn_hidden_size": 40, "moe_num_experts": 5, "moe_top_k": 3}},
    ),
    "dbrx-plain": (
        "dbrx",
        {"vocab_size": 203, "d_model": 96, "n_heads": 4, "n_layers": 2, "max_seq_len": 128}
        | {"attn_config": {"rope_theta": 500.0, "kv_n_heads": 4, "clip_qkv": 8}, "rope_theta": 500.0}
        | {"ffn_config": {"ffn_hidden_size": 56, "moe_top_k": 2, "moe_normalize_expert_weights": None}},
    ),
    "dots1": (
        "dots1",
        MIXTURE
        | {"n_routed_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 40, "n_shared_experts": 1}
        | {"num_hidden_layers": 3, "sliding_window": 6, "max_window_layers": 1, "first_k_dense_replace": 1}
        | {"attention_bias": True, "norm_topk_prob": True, "routed_scaling_factor": 2.5},
    ),
    "deepseek-v2": (
        "deepseek_v2",
        MIXTURE
        | LATENT
        | {"n_routed_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 40, "first_k_dense_replace": 1}
        | {"q_lora_rank": None, "num_hidden_layers": 3, "attention_bias": True}
        | _rope("yarn", **YARN),
    ),
    "deepseek-v2-groups": (
        "deepseek_v2",
        MIXTURE
        | LATENT
        | {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 40, "n_shared_experts": 1}
        | {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.5}
        | {"v_head_dim": 24},
    ),
    "deepseek-v3-halves": (
        "deepseek_v3",
        MIXTURE
        | LATENT
        | {"n_routed_experts": 6, "moe_intermediate_size": 32, "n_group": 1, "topk_group": 1, "norm_topk_prob": False}
        | {"first_k_dense_replace": 0, "rope_interleave": False, "attention_bias": True, "q_lora_rank": None},
    ),
    "deepseek-v3": (
        "deepseek_v3",
        MIXTURE
        | LATENT
        | {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 40, "n_group": 4, "topk_group": 2}
        | {"first_k_dense_replace": 1, "num_hidden_layers": 3, "v_head_dim": 8}
        | _rope("yarn", **YARN),
    ),
    "deepseek-v32": (
        "deepseek_v32",
        MIXTURE
        | LATENT
        | {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 40, "n_group": 4, "topk_group": 2}
        | {"first_k_dense_replace": 1, "num_hidden_layers": 3, "attention_bias": True}
        | {"index_topk": 128, "index_n_heads": 8, "index_head_dim": 48}
        | _rope("yarn", **YARN),
    ),
    "glm-moe-dsa": (
        "glm_moe_dsa",
        MIXTURE
        | LATENT
        | {"n_routed_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 40, "v_head_dim": 24}
        | {"first_k_dense_replace": 1, "num_hidden_layers": 3, "n_shared_experts": 2, "rms_norm_eps": 0.1}
        | {"index_topk": 128, "index_n_heads": 8, "index_head_dim": 48, "index_topk_freq": 2},
    ),
    "glm5-next-unbounded": (
        "glm5_next_text",
        MIXTURE
        | LATENT
        | {"n_routed_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": False}
        | {"qk_rope_head_dim": 0, "hc_mult": 2, "hc_sinkhorn_iters": 1, "linear_lower_bound": None, "index_topk": 128}
        | {"linear_num_heads": 3, "linear_head_dim": 32, "mlp_layer_types": ["sparse", "sparse"], "pad_token_id": 0}
        | {"layer_types": ["indexed_attention", "linear_attention"], "tie_word_embeddings": True},
    ),
    "glm5-next": (
        "glm5_next_text",
        MIXTURE
        | LATENT
        | {"n_routed_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 40, "v_head_dim": 24, "n_group": 2}
        | {
            "qk_rope_head_dim": 0,
            "num_hidden_layers": 5,
            "n_shared_experts": 2,
            "attention_bias": True,
            "rms_norm_eps": 1e-3,
        }
        | {"swiglu_limit": 0.4, "hc_eps": 0.01, "hc_sinkhorn_iters": 4, "linear_lower_bound": -3.0, "index_topk": 128}
        | {"linear_num_heads": 3, "linear_head_dim": 32, "linear_conv_kernel_dim": 3, "pad_token_id": 0}
        | {"index_n_heads": 8, "index_head_dim": 24},
    ),
    "muse-spark-dense": (
        "muse_spark_text",
        MIXTURE
        | {"head_dim": 24, "mlp_layer_types": ["dense", "sparse"], "num_local_experts": 4, "moe_intermediate_size": 32}
        | {"attention_bias": True, "tie_word_embeddings": True, "moe_hidden_size": 48, "layer_rope_theta": [1.0, 0]}
        | {"layer_types": ["sliding_attention", "sliding_attention"], "sliding_window": 11, "hidden_act": "gelu"},
    ),
    "muse-spark": (
        "muse_spark_text",
        MIXTURE
        | {"head_dim": 16, "num_hidden_layers": 5, "num_local_experts": 7, "num_experts_per_tok": 3, "sliding_window": 9}
        | {"moe_intermediate_size": 40, "moe_hidden_size": 56, "routed_scaling_factor": 1.7, "final_logit_softcapping": 2.0}
        | {"qk_scale_factor": 1.5, "output_multiplier": 0.8, "post_norm_eps": 1e-3, "residual_gate_temperature": 0.6},
    ),
    "longcat-plain": (
        "longcat_flash",
        LONGCAT
        | {"num_layers": 1, "n_routed_experts": 5, "zero_expert_num": 0, "moe_topk": 2}
        | {"expert_ffn_hidden_size": 32, "head_dim": 8, "tie_word_embeddings": True, "attention_bias": True}
        | _rope("yarn", **YARN),
    ),
    "longcat": (
        "longcat_flash",
        LONGCAT
        | {"num_layers": 2, "n_routed_experts": 5, "zero_expert_num": 3, "moe_topk": 4}
        | {"expert_ffn_hidden_size": 40, "head_dim": 8, "v_head_dim": 24, "routed_scaling_factor": 2.5},
    ),
    "step-3-plain": (
        "step3p5",
        MIXTURE
        | {
            "num_hidden_layers": 5,
            "head_dim": 24,
            "n_routed_experts": 5,
            "moe_intermediate_size": 32,
            "share_expert_dim": 40,
        }
        | {"mlp_bias": True, "attention_bias": True, "tie_word_embeddings": True, "query_pre_attn_scalar": 40}
        | {"sliding_window": 9},
    ),
    "step-3": (
        "step3p5",
        MIXTURE
        | {"num_hidden_layers": 5, "head_dim": 16, "n_routed_experts": 7, "num_experts_per_tok": 3}
        | {"moe_intermediate_size": 32, "share_expert_dim": 40, "moe_router_scaling_factor": 1.6}
        | {"layer_types": ["full_attention", *["sliding_attention"] * 3, "full_attention"], "sliding_window": 9}
        | {"num_sliding_attention_heads": 8, "mlp_layer_types": ["dense", "sparse", "dense", "sparse", "sparse"]}
        | {"swiglu_limits": [0, 0.2, 0, 0, 0.1], "swiglu_limits_shared": [0.3, 0, None, 0.2, 0.15]}
        | {"rope_theta": [10000.0, 500.0, 500.0, 500.0, 10000.0], "partial_rotary_factors": [0.5, 1.0, 1.0, 1.0, 0.5]},
    ),
    "mistral-large-4-own": (
        "mistral_large4_text",
        MIXTURE
        | LATENT
        | {"n_routed_experts": 5, "moe_intermediate_size": 32, "mlp_layer_types": ["sparse", "sparse"], "index_topk": 128}
        | {"no_rope_layers": [0, 1], "tie_word_embeddings": True, "attention_bias": True, "q_lora_rank": None}
        | _rope("default"),
    ),
    "mistral-large-4": (
        "mistral_large4_text",
        MIXTURE
        | LATENT
        | {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 40, "v_head_dim": 24, "n_group": 4}
        | {
            "topk_group": 2,
            "n_shared_experts": 2,
            "num_hidden_layers": 7,
            "no_rope_layer_interval": 3,
            "rms_norm_eps": 1e-2,
        }
        | {"kv_source_layers": [0, 0, 2, 3, 3, 2, 3], "routed_scaling_factor": 1.3, "final_logit_softcapping": 1.5}
        | {"q_lora_rank": None, "index_topk": 128, "index_n_heads": 8, "index_head_dim": 24, "index_topk_freq": 2}
        | _rope("yarn", **YARN),
    ),
    "hy4-plain": (
        "hy_v4",
        MIXTURE
        | LATENT
        | {"n_routed_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": False}
        | {"mlp_layer_types": ["sparse", "sparse"], "hc_mult": 3, "index_topk": 128, "tie_word_embeddings": True},
    ),
    "hy4": (
        "hy_v4",
        MIXTURE
        | LATENT
        | {"n_routed_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 40, "v_head_dim": 24}
        | {"num_hidden_layers": 3, "n_shared_experts": 2, "attention_bias": True, "swiglu_limit": 0.4, "index_topk": 128}
        | {"index_n_heads": 8, "index_head_dim": 24, "hc_magnitude": 1.5, "hc_eps": 0.01, "n_group": 2}
        | _rope("yarn", **YARN),
    ),
    "axk2-light": (
        "axk2",
        MIXTURE
        | LATENT
        | {"n_routed_experts": 6, "moe_intermediate_size": 32, "norm_topk_prob": False}
        | {"mlp_layer_types": ["sparse", "dense"], "index_topk": 128, "index_n_heads": 8, "index_head_dim": 48}
        | {"gated_norm_rank": 12, "v_head_dim": 24},
    ),
    "axk2": (
        "axk2",
        MIXTURE
        | LATENT
        | {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 40, "n_group": 4, "topk_group": 2}
        | {"attention_bias": True, "index_topk": 128, "index_n_heads": 8, "index_head_dim": 48, "n_shared_experts": 2}
        | _rope("yarn", **YARN),
    ),
    "axk1": (
        "axk1",
        MIXTURE
        | LATENT
        | {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 40, "n_group": 4, "topk_group": 2}
        | {"num_hidden_layers": 3, "n_shared_experts": 2, "attention_bias": True, "num_key_value_heads": 6}
        | _rope("yarn", **YARN),
    ),
    "mistral4-plain": (
        "mistral4",
        MIXTURE
        | LATENT
        | {"n_routed_experts": 5, "moe_intermediate_size": 32, "norm_topk_prob": False, "q_lora_rank": None}
        | {"attention_bias": True, "rope_interleave": False, "routed_scaling_factor": 1.5, "first_k_dense_replace": 1}
        | _rope("yarn", **YARN, llama_4_scaling_beta=0.4),
    ),
    "mistral4": (
        "mistral4",
        MIXTURE
        | LATENT
        | {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 40, "n_group": 4, "topk_group": 2}
        | {"v_head_dim": 24, "n_shared_experts": 2}
        | _rope("yarn", **YARN | {"original_max_position_embeddings": 8}, llama_4_scaling_beta=0.3),
    ),
    "mimo-v2-flash": (
        "mimo_v2_flash",
        MIXTURE
        | {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 40, "n_group": 4, "topk_group": 2}
        | {"num_hidden_layers": 4, "num_attention_heads": 8, "head_dim": 24, "v_head_dim": 16, "sliding_window": 7}
        | {"layer_types": ["full_attention", "sliding_attention"] * 2, "attention_bias": True},
    ),
    "mimo-plain": (
        "mimo_v2_flash",
        MIXTURE
        | {"n_routed_experts": 4, "moe_intermediate_size": 32, "norm_topk_prob": False, "attention_value_scale": None}
        | {"num_attention_heads": 8, "head_dim": 16, "v_head_dim": 24, "sliding_window": 20, "routed_scaling_factor": 1.5}
        | {
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0, "partial_rotary_factor": 0.5},
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 1.0},
            }
        },
    ),
    "glm4-moe-lite": (
        "glm4_moe_lite",
        MIXTURE
        | LATENT
        | {"n_routed_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 40, "v_head_dim": 24}
        | {"mlp_layer_types": ["sparse", "dense"], "n_shared_experts": 2},
    ),
    "sarvam-mla": (
        "sarvam_mla",
        MIXTURE
        | LATENT
        | {"n_routed_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 40, "num_key_value_heads": None}
        | {"q_lora_rank": None, "num_hidden_layers": 3}
        | _rope("yarn", **YARN),
    ),
    "sarvam-moe": (
        "sarvam_moe",
        MIXTURE
        | {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 40, "n_group": 4, "topk_group": 2}
        | {"num_shared_experts": 2, "use_qkv_bias": True, "head_dim": 24, "routed_scaling_factor": 1.5},
    ),
    "exaone-moe": (
        "exaone_moe",
        MIXTURE
        | {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 40, "n_group": 2, "topk_group": 1}
        | {"num_hidden_layers": 4, "sliding_window": 6, "sliding_window_pattern": 2, "num_shared_experts": 2},
    ),
    "minimax-m3": (
        "minimax_m3_vl_text",
        MIXTURE
        | {"num_local_experts": 8, "num_experts_per_tok": 3, "intermediate_size": 40, "head_dim": 24, "rotary_dim": 12}
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}}
        | {"num_hidden_layers": 3, "mlp_layer_types": ["dense", "sparse", "sparse"], "swiglu_limit": 0.7}
        | {"layer_types": ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"], "index_block_size": 16}
        | {"dense_intermediate_size": 72, "shared_intermediate_size": 56, "index_n_heads": 2, "index_head_dim": 24}
        | {"index_topk_blocks": 8},
    ),
    "minimax-m2": (
        "minimax_m2",
        MIXTURE
        | {"num_local_experts": 8, "num_experts_per_tok": 6, "intermediate_size": 40, "head_dim": 24}
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
    ),
    "afmoe": (
        "afmoe",
        MIXTURE
        | {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 40, "head_dim": 24, "mup_enabled": True}
        | {"num_hidden_layers": 4, "sliding_window": 6, "global_attn_every_n_layers": 2, "route_scale": 1.5}
        | {"attention_bias": True},
    ),
    "ernie-moe": (
        "ernie4_5_moe",
        MIXTURE
        | {"moe_num_experts": 7, "moe_k": 3, "moe_intermediate_size": 40, "num_hidden_layers": 5, "head_dim": 24}
        | {"moe_layer_interval": 2, "moe_layer_start_index": 1, "moe_layer_end_index": 2},
    ),
    "ernie-moe-biased": (
        "ernie4_5_moe",
        MIXTURE
        | {"moe_num_experts": 5, "moe_k": 2, "moe_intermediate_size": 32, "use_bias": True, "tie_word_embeddings": False},
    ),
    "hy3": (
        "hy_v3",
        MIXTURE
        | {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 40, "num_shared_experts": 2}
        | {"head_dim": 24, "attention_bias": True, "num_hidden_layers": 3},
    ),
    "solar-open": (
        "solar_open",
        MIXTURE
        | {"n_routed_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 40, "n_shared_experts": 2}
        | {"attention_bias": True, "head_dim": 24, "routed_scaling_factor": 1.5},
    ),
    "mellum": (
        "mellum",
        MIXTURE
        | {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 40, "num_hidden_layers": 4, "head_dim": 24}
        | {"sliding_window": 6, "attention_bias": True, "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"]}
        | {"layer_types": ["sliding_attention", "full_attention"] * 2},
    ),
    "flint": (
        "flint",
        MIXTURE
        | {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 40, "shared_expert_intermediate_size": 56}
        | {"num_hidden_layers": 5, "sliding_window": 6, "head_dim": 24, "attention_bias": True, "mlp_only_layers": [0]},
    ),
    "flint-plain": (
        "flint",
        MIXTURE
        | {"num_experts": 5, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 24, "norm_topk_prob": False}
        | {"num_hidden_layers": 4, "sliding_window": 9, "head_dim": 16, "tie_word_embeddings": True},
    ),
    "lfm2-moe": (
        "lfm2_moe",
        MIXTURE
        | {"num_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 40, "num_hidden_layers": 4}
        | {"layer_types": ["conv", "full_attention", "conv", "full_attention"], "num_dense_layers": 1, "conv_bias": True}
        | {"routed_scaling_factor": 1.5},
    ),
    "lfm2-moe-plain": (
        "lfm2_moe",
        MIXTURE
        | {"num_experts": 4, "moe_intermediate_size": 24, "use_expert_bias": False, "norm_topk_prob": False}
        | {"layer_types": ["full_attention", "conv"], "num_dense_layers": 0, "tie_word_embeddings": False},
    ),
    "hunyuan-moe": (
        "hunyuan_v1_moe",
        MIXTURE
        | {"num_experts": 6, "moe_topk": 3, "intermediate_size": 40, "head_dim": 24, "attention_bias": True}
        | _rope("dynamic", alpha=1000.0, factor=1.0),
    ),
    "gemma4-moe": (
        "gemma4_text",
        GEMMA4
        | {"enable_moe_block": True, "num_experts": 6, "top_k_experts": 3, "moe_intermediate_size": 40, "pad_token_id": 0}
        | {"num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0, "use_bidirectional_attention": "vision"},
    ),
    "phimoe": ("phimoe", MIXTURE | {"num_local_experts": 6, "intermediate_size": 40, "router_jitter_noise": 0.3}),
    "phimoe-long": (
        "phimoe",
        MIXTURE
        | {"num_local_experts": 4, "intermediate_size": 40, "attention_bias": True, "lm_head_bias": True}
        | {"sliding_window": 30, "num_key_value_heads": 3, "original_max_position_embeddings": 20}
        | _rope(
            "longrope",
            short_factor=[1.0 + 0.05 * pair for pair in range(8)],
            long_factor=[2.0 + 0.7 * pair for pair in range(8)],
            short_mscale=1.1,
            long_mscale=1.1,
            original_max_position_embeddings=20,
        ),
    ),
    "cohere2-moe": (
        "cohere2_moe",
        MIXTURE
        | {"num_experts": 6, "num_experts_per_tok": 3, "intermediate_size": 40, "head_dim": 24, "num_hidden_layers": 4}
        | {"expert_selection_fn": "sigmoid", "num_shared_experts": 2, "sliding_window": 6, "attention_bias": True}
        | {"mlp_layer_types": ["dense", "sparse", "sparse", "sparse"], "prefix_dense_intermediate_size": 56}
        | {"layer_types": ["full_attention", "sliding_attention", "full_attention", "sliding_attention"]},
    ),
    "cohere2-moe-rms": (
        "cohere2_moe",
        MIXTURE
        | {"num_experts": 5, "intermediate_size": 40, "head_dim": 16, "rms_norm_eps": 1e-6, "sliding_window_pattern": 2}
        | {"num_shared_experts": 1, "shared_expert_combination_strategy": "sum", "tie_word_embeddings": False},
    ),
    "aria": (
        "aria_text",
        LLAMA
        | {"moe_num_experts": 5, "moe_topk": 3, "intermediate_size": 40, "moe_num_shared_experts": 3, "head_dim": 24}
        | {"attention_bias": True, "mlp_bias": True, "pad_token_id": 0},
    ),
    "llama4": (
        "llama4_text",
        MIXTURE
        | {"num_local_experts": 5, "num_experts_per_tok": 1, "intermediate_size": 40, "intermediate_size_mlp": 72}
        | {"num_hidden_layers": 4, "head_dim": 24, "attention_chunk_size": 7, "interleave_moe_layer_step": 2}
        | {"no_rope_layer_interval": 2, "floor_scale": 6, "attn_scale": 0.3, "attention_bias": True}
        | _rope("llama3", factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32),
    ),
    "llama4-plain": (
        "llama4_text",
        MIXTURE
        | {"num_local_experts": 4, "num_experts_per_tok": 1, "intermediate_size": 48, "intermediate_size_mlp": 72}
        | {"num_hidden_layers": 4, "head_dim": 16, "attention_chunk_size": 20, "moe_layers": [0, 3], "use_qk_norm": False}
        | {"attn_temperature_tuning": False, "tie_word_embeddings": True},
    ),
}

# Models with layers of several kinds, some of them recurrent.
OF_SEVERAL_KINDS = (
    "lfm2",
    "lfm3",
    "olmo-hybrid",
    "qwen3-5",
    "bamba",
    "falcon-h1",
    "granite-mamba",
    "nemotron-h",
    "jamba",
    "mamba",
    "falcon-mamba",
    "zamba2",
)
# Buffers of routers that correct the choice of experts; untrained ones are zero.
CORRECTIONS = ("e_score_correction_bias", "expert_bias")


def one_by_one(model: PreTrainedModel) -> None:
    """Computes experts by separate matrix products, since torch's grouped products support only certain sizes."""
    if any(hasattr(model.config, key) for key in ("num_experts_per_tok", "moe_topk")) or getattr(
        model.config, "top_k_experts", None
    ):
        model.set_experts_implementation("eager")


def saved_tensors(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """The tensors under transformers' names and under those in checkpoints, which may differ (EXAONE 3); the LM head as
    "lm_head.weight"."""
    tensors = model.state_dict() | revert_weight_conversion(model, dict(model.state_dict()))
    return tensors | {"lm_head.weight": model.get_output_embeddings().weight}


def tiny_config(name: str, **changes: Any) -> PretrainedConfig:
    """That of the model below, which takes ten times as long to make."""
    kind, settings = (TINY | MIXTURES)[name]
    return AutoConfig.for_model(kind, **deepcopy(settings | changes))  # Mistral 4's writes into its rope_parameters


def tiny_model(name: str, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A float32 model whose logits, norms and biases are all far from trivial."""
    kind, config = (TINY | MIXTURES)[name][0], tiny_config(name, **changes)
    torch.manual_seed(seed)
    attention = attention_of(config, fused=False)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention).float().eval()
    one_by_one(model)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            parameter_name = parameter_name.replace("norm_attn_norm.attn.", "attn.")  # DBRX's, no norm
            wide = parameter.dim() == 2 or parameter_name.endswith(("conv.weight", "conv1d.weight"))
            parameter.normal_(0.0, 1.0 / parameter.shape[-1] ** 0.5 if wide else 0.1)
            of_router = "router." in parameter_name and parameter.dim() == 1  # factors of the router's norm, and of experts
            if of_router or "norm" in parameter_name or ".ln_" in parameter_name:
                # Gemma's norms multiply by 1 + w, and so do norms of families with delta nets, except the delta net's own.
                centred = (
                    kind.startswith(
                        (
                            "gemma",
                            "vaultgemma",
                            "nemotron",
                            "qwen3_next",
                            "qwen3_5",
                            "qwen4_exp",
                            "minimax_m3",
                            "step3p5",
                            "muse_spark",
                        )
                    )
                    and not kind.startswith(("gemma3n", "gemma4", "nemotron_h"))
                    and "linear_attn" not in parameter_name
                )
                centred = centred and (kind, parameter_name) != ("muse_spark_text", "model.norm.weight")
                one = parameter_name.endswith(("weight", "scale")) and not centred
                parameter.add_(1.0 if one else 0.0)
            if parameter_name.endswith(("correct_output_scale", "_hc.scale", "hc_scale")):
                parameter.add_(1.0)
            if "softmax_scaling" in parameter_name:
                parameter.add_(0.2 if parameter_name.endswith("scale") else 0.5)
            if parameter_name.endswith("rotary_emb.alpha"):
                parameter.mul_(5.0)
            if parameter_name.endswith("residual_gate.gate"):
                parameter.mul_(10.0)
            if kind.startswith(("gemma3n", "gemma4")) and "q_norm" in parameter_name:
                # These families do not scale attention scores otherwise.
                parameter.mul_(parameter.shape[0] ** -0.5)
            if parameter_name.endswith("A_log"):
                # Decays from states that last for one token to states that last for many.
                parameter.uniform_(-5.0, 1.0)
        for buffer_name, buffer in model.named_buffers():
            if buffer_name.endswith(CORRECTIONS):
                buffer.normal_(0.0, 0.1)
            if buffer_name.endswith("layer_scalar"):
                buffer.uniform_(0.5, 1.5)
    return model
