"""GGUF files of mixtures and hybrids, and of Granite with windows, as llama.cpp's converter writes them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf_converter import (
    Tensors,
    bailing_moe_2,
    convert,
    delta_nets,
    falcon_h1,
    flat_taps,
    granite,
    granite_alone,
    granite_swa,
    hy_v3,
    kimi_linear,
    mamba,
    mamba1,
)
from gguf_models import mostly
from heads_in_process import opened_draft
from mtp import with_mtp
from native_models import logits, open_native
from tiny_models import MIXTURES, TINY, tiny_model
from transformers.models.qwen3_5.tokenization_qwen3_5 import PRETOKENIZE_REGEX

from outrider.kernels.native import NativeFeed
from outrider.kernels.program import Tensor
from outrider.kernels.quantised import natural_order
from outrider.workers.engines.head import HeadEngine
from outrider.workers.errors import ModelError
from outrider.workers.messages import Sampling
from outrider.workers.models.config_file import read_config
from outrider.workers.models.formats.gguf.checkpoint import GgufCheckpoint
from outrider.workers.models.formats.gguf.pre_tokenizers import PRE_TOKENIZERS
from outrider.workers.models.formats.gguf.split import read_gguf
from outrider.workers.models.formats.gguf.tokenizer import gguf_tokenizer
from outrider.workers.models.head_pairs import has_mtp
from outrider.workers.models.model_info import read_model_info

# Of A_log a logarithm of its exponential is what comes back.
CLOSE = 1e-5
BASE: dict[str, Any] = {
    "block_count": 2,
    "context_length": 128,
    "embedding_length": 96,
    "feed_forward_length": 208,
    "attention.head_count": 6,
    "attention.head_count_kv": 2,
    "rope.freq_base": 10000.0,
    "attention.layer_norm_rms_epsilon": 1e-6,
}
HEADS_OF_24 = {"attention.key_length": 24, "attention.value_length": 24}
DELTA = BASE | {
    "block_count": 4,
    "attention.key_length": 32,
    "attention.value_length": 32,
    "ssm.state_size": 24,
    "ssm.group_count": 2,
    "ssm.time_step_rank": 4,
    "ssm.inner_size": 128,
    "attention.recurrent_layers": [True, True, True, False],
    "full_attention_interval": 4,
}
EPSILON = {"attention.layer_norm_rms_epsilon": 1e-5}
MAMBA_OF_GGUF = {
    "ssm.conv_kernel": 3,
    "ssm.state_size": 24,
    "ssm.group_count": 1,
    "ssm.time_step_rank": 8,
    "ssm.inner_size": 384,
}
# As llama.cpp wants it of Granite.
TWICE_AS_WIDE = {"mamba_expand": 2, "mamba_n_heads": 12, "mamba_d_head": 16}
OF_GRANITE = (
    BASE
    | MAMBA_OF_GGUF
    | {"ssm.inner_size": 192, "ssm.time_step_rank": 12}
    | {"feed_forward_length": 56, "rope.scaling.finetuned": False, "attention.scale": 0.11, "residual_scale": 0.4}
)
OF_MAMBA_1 = {
    "block_count": 3,
    "context_length": 1 << 20,
    "embedding_length": 48,
    "feed_forward_length": 0,
    "attention.head_count": 0,
    "ssm.conv_kernel": 3,
    "ssm.inner_size": 96,
    "ssm.state_size": 6,
    "attention.layer_norm_rms_epsilon": 1e-5,
}
OF_JAMBA = {key: value for key, value in BASE.items() if key != "rope.freq_base"} | {
    "ssm.conv_kernel": 4,
    "ssm.inner_size": 192,
    "ssm.time_step_rank": 6,
}
OF_NEMOTRON = (
    BASE
    | MAMBA_OF_GGUF
    | HEADS_OF_24
    | EPSILON
    | {"attention.layer_norm_epsilon": 1e-5}
    | {"ssm.conv_kernel": 4, "ssm.group_count": 2, "ssm.inner_size": 128, "rope.scaling.finetuned": False}
)
SHORT_FACTORS = [1.0 + 0.0625 * pair for pair in range(8)]
OF_DELTA = (TINY | MIXTURES)["qwen3-next"][1]


@dataclass(frozen=True)
class Case:
    """A tiny model, with changes, as a file of an architecture."""

    model: str
    architecture: str
    metadata: dict[str, Any]
    changes: dict[str, Any]
    prepare: Callable[[Tensors], Tensors] = lambda tensors: tensors
    exact: bool = True


CASES = {
    "glm4moe": Case(
        "glm4-moe",
        "glm4moe",
        BASE
        | HEADS_OF_24
        | {
            "attention.layer_norm_rms_epsilon": 1e-5,
            "expert_count": 8,
            "expert_used_count": 3,
            "expert_group_count": 4,
            "expert_group_used_count": 2,
            "rope.dimension_count": 12,
            "expert_feed_forward_length": 40,
            "expert_shared_count": 2,
            "leading_dense_block_count": 1,
            "expert_gating_func": 2,
            "expert_weights_scale": 1.5,
            "expert_weights_norm": True,
        },
        {},
    ),
    "glm4moe-plain": Case(
        "glm4-moe-plain",
        "glm4moe",
        BASE
        | {
            "attention.layer_norm_rms_epsilon": 1e-5,
            "attention.head_count_kv": 6,
            "rope.dimension_count": 8,
            "rope.dimension_sections": [2, 1, 1, 0],
            "expert_count": 6,
            "expert_used_count": 2,
            "expert_group_count": 1,
            "expert_group_used_count": 1,
            "expert_feed_forward_length": 32,
            "expert_shared_count": 1,
            "leading_dense_block_count": 0,
            "expert_gating_func": 2,
            "expert_weights_norm": False,
        },
        {},
    ),
    # Solar Open: rope turns heads whole, where GLM-4.5's turns the half of them.
    "glm4moe-solar": Case(
        "solar-open",
        "glm4moe",
        BASE
        | HEADS_OF_24
        | {
            "rope.freq_base": 1000000.0,
            "attention.layer_norm_rms_epsilon": 1e-5,
            "rope.dimension_count": 24,
            "expert_count": 6,
            "expert_used_count": 3,
            "expert_feed_forward_length": 40,
            "expert_shared_count": 2,
            "leading_dense_block_count": 0,
            "expert_gating_func": 2,
            "expert_weights_scale": 1.5,
            "expert_weights_norm": True,
        },
        {},
    ),
    "bailingmoe2": Case(
        "sarvam-moe",
        "bailingmoe2",
        BASE
        | HEADS_OF_24
        | {
            "rope.freq_base": 8000000.0,
            "rope.dimension_count": 24,
            "expert_count": 8,
            "expert_used_count": 3,
            "expert_group_count": 4,
            "expert_group_used_count": 2,
            "expert_gating_func": 2,
            "expert_feed_forward_length": 40,
            "expert_shared_feed_forward_length": 80,
            "expert_shared_count": 2,
            "leading_dense_block_count": 1,
            "expert_weights_scale": 1.5,
            "expert_weights_norm": True,
            "nextn_predict_layers": 0,
        },
        {},
        bailing_moe_2,
    ),
    "dots1": Case(
        "dots1",
        "dots1",
        BASE
        | {
            "block_count": 3,
            "expert_count": 6,
            "expert_used_count": 3,
            "expert_group_count": 1,
            "expert_group_used_count": 1,
            "expert_gating_func": 2,
            "expert_feed_forward_length": 40,
            "leading_dense_block_count": 1,
            "expert_shared_count": 1,
            "expert_weights_scale": 2.5,
            "expert_weights_norm": True,
        },
        # The converter has no key for windows, and the model that is published has none.
        {"sliding_window": None, "layer_types": ["full_attention"] * 3},
    ),
    "minimax-m2": Case(
        "minimax-m2",
        "minimax-m2",
        BASE
        | HEADS_OF_24
        | {
            "feed_forward_length": 40,
            "expert_count": 8,
            "expert_used_count": 6,
            "expert_gating_func": 2,
            "expert_feed_forward_length": 40,
            "rope.dimension_count": 12,
        },
        {},
    ),
    "afmoe": Case(
        "afmoe",
        "afmoe",
        BASE
        | HEADS_OF_24
        | {
            "attention.layer_norm_rms_epsilon": 1e-5,
            "block_count": 5,
            "expert_count": 6,
            "expert_used_count": 3,
            "expert_group_count": 1,
            "expert_group_used_count": 1,
            "vocab_size": 203,
            "rope.dimension_count": 24,
            "expert_shared_count": 2,
            "expert_feed_forward_length": 40,
            "leading_dense_block_count": 1,
            "expert_gating_func": 2,
            "expert_weights_scale": 1.5,
            "expert_weights_norm": True,
            "attention.sliding_window": 6,
        },
        {"global_attn_every_n_layers": 4, "num_hidden_layers": 5, "attention_bias": False},
        flat_taps,
    ),
    "ernie4_5-moe": Case(
        "ernie-moe",
        "ernie4_5-moe",
        BASE
        | HEADS_OF_24
        | {
            "block_count": 5,
            "rope.freq_base": 500000.0,
            "attention.layer_norm_rms_epsilon": 1e-5,
            "expert_count": 7,
            "expert_used_count": 2,
            "interleave_moe_layer_step": 2,
            "leading_dense_block_count": 1,
            "expert_feed_forward_length": 40,
            "expert_shared_count": 2,
            # As the converter has it, whatever the shared experts' width is.
            "expert_shared_feed_forward_length": 104,
        },
        {},
    ),
    "exaone-moe": Case(
        "exaone-moe",
        "exaone-moe",
        BASE
        | {
            "block_count": 4,
            "attention.layer_norm_rms_epsilon": 1e-5,
            "expert_count": 8,
            "expert_used_count": 3,
            "expert_group_count": 2,
            "expert_group_used_count": 1,
            "expert_gating_func": 2,
            "vocab_size": 203,
            "attention.sliding_window": 6,
            "attention.sliding_window_pattern": [True, False, True, False],
            "expert_feed_forward_length": 40,
            "expert_shared_count": 2,
            "expert_shared_feed_forward_length": 80,
            "expert_weights_scale": 2.5,
            "expert_weights_norm": True,
            "leading_dense_block_count": 1,
            "nextn_predict_layers": 0,
            "rope.scaling.type": "none",
        },
        {},
    ),
    "hy_v3": Case(
        "hy3",
        "hy_v3",
        BASE
        | HEADS_OF_24
        | {
            "block_count": 3,
            "rope.freq_base": 11158840.0,
            "attention.layer_norm_rms_epsilon": 1e-5,
            "expert_count": 6,
            "expert_used_count": 3,
            "expert_feed_forward_length": 40,
            "expert_shared_feed_forward_length": 80,
            "expert_weights_norm": True,
            "expert_weights_scale": 2.826,
            "expert_gating_func": 2,
        },
        {},
        hy_v3,
    ),
    "mellum": Case(
        "mellum",
        "mellum",
        BASE
        | HEADS_OF_24
        | {
            "block_count": 4,
            "rope.freq_base": 500000.0,
            "rope.freq_base_swa": 500.0,
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 4.0,
            "rope.scaling.original_context_length": 32,
            "expert_count": 6,
            "expert_used_count": 3,
            "expert_feed_forward_length": 40,
            "attention.sliding_window": 6,
            "attention.sliding_window_pattern": [True, False, True, False],
        },
        {
            "mlp_layer_types": ["sparse"] * 4,
            "rope_parameters": {
                "full_attention": {
                    "rope_type": "yarn",
                    "rope_theta": 5e5,
                    "factor": 4.0,
                    "original_max_position_embeddings": 32,
                },
                "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
            },
        },
    ),
    "granite_swa": Case(
        "granite-swa",
        "granite_swa",
        BASE
        | {
            "block_count": 4,
            "attention.layer_norm_rms_epsilon": 1e-5,
            "attention.sliding_window": 6,
            "attention.sliding_window_pattern": [False, True, True, True],
            "attention.rope_pattern": [True, False, True, True],
            "attention.scale": 0.2,
            "embedding_scale": 2.0,
            "residual_scale": 0.5,
            "logit_scale": 3.0,
        },
        {"layer_rope_theta": [1e4, 0, 1e4, 1e4], "bos_token_id": 0, "eos_token_id": 1},
        granite_swa(6, 2),
    ),
    "granite_swa-experts": Case(
        "granite-moe-swa",
        "granite_swa",
        BASE
        | {
            "block_count": 4,
            "feed_forward_length": 40,
            "expert_count": 5,
            "expert_used_count": 2,
            "expert_shared_feed_forward_length": 56,
            "attention.sliding_window": 6,
            "attention.sliding_window_pattern": [False, True, True, True],
            "attention.rope_pattern": [True, False, True, True],
            "attention.scale": 0.2,
            "embedding_scale": 2.0,
            "residual_scale": 0.4,
            "logit_scale": 3.0,
        },
        {"layer_rope_theta": [1e4, 0, 1e4, 1e4]},
        granite_swa(6, 2),
    ),
    "phimoe": Case(
        "phimoe",
        "phimoe",
        BASE
        | {
            "feed_forward_length": 40,
            "rope.freq_base": 1000000.0,
            "rope.dimension_count": 16,
            "rope.scaling.original_context_length": 4096,
            "attention.layer_norm_rms_epsilon": 1e-5,
            "attention.sliding_window": 0,
            "expert_count": 6,
            "expert_used_count": 2,
        },
        # GGUF has no key for it, and all models that are published have this one.
        {"router_jitter_noise": 0.01},
    ),
    "phimoe-long": Case(
        "phimoe-long",
        "phimoe",
        BASE
        | {
            "context_length": 131072,
            "feed_forward_length": 40,
            "attention.head_count_kv": 3,
            "rope.dimension_count": 16,
            "rope.scaling.type": "longrope",
            "rope.scaling.original_context_length": 4096,
            "rope.scaling.attn_factor": 1.190238,
            "attention.layer_norm_rms_epsilon": 1e-5,
            "attention.sliding_window": 30,
            "expert_count": 4,
            "expert_used_count": 2,
        },
        {
            "router_jitter_noise": 0.01,
            "max_position_embeddings": 131072,
            "original_max_position_embeddings": 4096,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "original_max_position_embeddings": 4096,
                "short_factor": SHORT_FACTORS,
                "long_factor": [2.0] * 8,
                "short_mscale": 1.243163121016122,
                "long_mscale": 1.243163121016122,
            },
        },
        lambda tensors: (
            tensors
            | {"rope_factors_short.weight": np.array(SHORT_FACTORS, np.float32)}
            | {"rope_factors_long.weight": np.full(8, 2, np.float32)}
        ),
    ),
    "cohere2moe": Case(
        "cohere2-moe",
        "cohere2moe",
        {key: value for key, value in BASE.items() if "rms" not in key}
        | HEADS_OF_24
        | {
            "block_count": 4,
            "feed_forward_length": 56,
            "attention.layer_norm_epsilon": 1e-5,
            "expert_count": 6,
            "expert_used_count": 3,
            "expert_gating_func": 2,
            "logit_scale": 0.0625,
            "attention.sliding_window": 6,
            "attention.sliding_window_pattern": [False, True, False, True],
            "vocab_size": 203,
            "expert_feed_forward_length": 40,
            "leading_dense_block_count": 1,
            "expert_weights_norm": True,
            "expert_shared_count": 2,
            "expert_shared_feed_forward_length": 80,
            "rope.dimension_count": 24,
            "rope.scaling.type": "none",
        },
        {"attention_bias": False},
    ),
    "granitemoe": Case(
        "granite-moe",
        "granitemoe",
        BASE
        | {
            "feed_forward_length": 40,
            "expert_count": 6,
            "expert_used_count": 2,
            "rope.dimension_count": 16,
            "attention.scale": 0.11,
            "embedding_scale": 3.0,
            "residual_scale": 0.4,
            "logit_scale": 2.0,
        },
        {},
        granite(6, 2),
    ),
    "granitemoe-shared": Case(
        "granite-moe-shared",
        "granitemoe",
        BASE
        | {
            "feed_forward_length": 40,
            "expert_count": 5,
            "expert_used_count": 2,
            "expert_shared_feed_forward_length": 56,
            "rope.dimension_count": 16,
            "attention.scale": 1.0,
            "embedding_scale": 1.0,
            "residual_scale": 0.4,
            "logit_scale": 1.0,
        },
        {},
        granite(6, 2),
    ),
    "hunyuan-moe": Case(
        "hunyuan-moe",
        "hunyuan-moe",
        BASE
        | HEADS_OF_24
        | {
            "feed_forward_length": 40,
            # The base is stretched: 10,000 * 1,000^(24 / 22).
            "rope.freq_base": 18738174.0,
            "attention.layer_norm_rms_epsilon": 1e-5,
            "expert_count": 6,
            "expert_used_count": 2,
            "expert_shared_feed_forward_length": 40,
            "expert_feed_forward_length": 40,
            "expert_shared_count": 1,
            "rope.scaling.type": "none",
            "rope.scaling.factor": 1.0,
            "rope.scaling.original_context_length": 262144,
        },
        {},
        exact=False,
    ),
    "qwen2vl": Case("qwen2", "qwen2vl", BASE | {"rope.dimension_sections": [2, 3, 3, 0]}, {}),
    "qwen3vl": Case(
        "qwen3",
        "qwen3vl",
        BASE
        | {"attention.key_length": 32, "attention.value_length": 32}
        | {"rope.dimension_sections": [6, 5, 5, 0], "n_deepstack_layers": 3},
        {},
    ),
    "qwen3vlmoe": Case(
        "qwen3-moe",
        "qwen3vlmoe",
        BASE
        | HEADS_OF_24
        | {"rope.dimension_sections": [4, 4, 4, 0], "n_deepstack_layers": 3}
        | {"expert_count": 20, "expert_used_count": 8, "expert_feed_forward_length": 24},
        {"decoder_sparse_step": 1, "num_hidden_layers": 2},
    ),
    "lfm2": Case(
        "lfm2",
        "lfm2",
        BASE
        | {
            "block_count": 3,
            "feed_forward_length": 144,
            "attention.head_count_kv": [0, 2, 0],
            "rope.freq_base": 1000000.0,
            "attention.layer_norm_rms_epsilon": 1e-5,
            "vocab_size": 203,
            "shortconv.l_cache": 3,
        },
        {},
        flat_taps,
    ),
    "lfm2moe": Case(
        "lfm2-moe",
        "lfm2moe",
        BASE
        | {
            "block_count": 4,
            "attention.head_count_kv": [0, 2, 0, 2],
            "rope.freq_base": 1000000.0,
            "attention.layer_norm_rms_epsilon": 1e-5,
            "expert_count": 7,
            "expert_used_count": 3,
            "expert_feed_forward_length": 40,
            "leading_dense_block_count": 1,
            "expert_gating_func": 2,
            "vocab_size": 203,
            "shortconv.l_cache": 3,
        },
        {"conv_bias": False, "routed_scaling_factor": 1.0},
        flat_taps,
    ),
    "granitehybrid": Case(
        "granite-mamba",
        "granitehybrid",
        OF_GRANITE
        | {"block_count": 3, "attention.head_count_kv": [0, 2, 0], "ssm.group_count": 4}
        | {"embedding_scale": 3.0},
        TWICE_AS_WIDE | {"mamba_proj_bias": False},
        mamba(4, granite_alone(6, 2)),
        exact=False,
    ),
    "granitehybrid-moe": Case(
        "granite-moe-mamba",
        "granitehybrid",
        OF_GRANITE
        | {"attention.head_count_kv": [0, 2], "feed_forward_length": 40, "expert_count": 5, "expert_used_count": 2}
        | {"expert_shared_feed_forward_length": 56},
        TWICE_AS_WIDE,
        mamba(1, granite(6, 2)),
        exact=False,
    ),
    "falcon-h1": Case(
        "falcon-h1-gated",
        "falcon-h1",
        BASE | MAMBA_OF_GGUF | {"attention.layer_norm_rms_epsilon": 1e-5},
        {},
        mamba(1),
        exact=False,
    ),
    "falcon-h1-scaled": Case(
        "falcon-h1",
        "falcon-h1",
        BASE | HEADS_OF_24 | MAMBA_OF_GGUF | {"ssm.inner_size": 128, "ssm.group_count": 2} | EPSILON,
        {"mamba_rms_norm": False},
        mamba(2, falcon_h1(TINY["falcon-h1"][1])),
        exact=False,
    ),
    "mamba": Case("mamba", "mamba", OF_MAMBA_1 | {"ssm.time_step_rank": 5}, {}, mamba1, exact=False),
    "falcon-mamba": Case(
        "falcon-mamba",
        "mamba",
        OF_MAMBA_1 | {"ssm.inner_size": 80, "ssm.time_step_rank": 3, "ssm.dt_b_c_rms": True},
        {},
        mamba1,
        exact=False,
    ),
    "mamba2": Case(
        "mamba2",
        "mamba2",
        OF_MAMBA_1 | {"ssm.time_step_rank": 6, "ssm.state_size": 24, "ssm.group_count": 2},
        {"use_bias": False},
        mamba(2),
        exact=False,
    ),
    "jamba": Case(
        "jamba",
        "jamba",
        OF_JAMBA
        | {"block_count": 4, "feed_forward_length": 72, "attention.head_count_kv": [0, 2, 0, 0], "ssm.state_size": 6}
        | {"ssm.time_step_rank": 5, "expert_count": 5, "expert_used_count": 2},
        {},
        mamba1,
        exact=False,
    ),
    "jamba-dense": Case(
        "jamba-dense",
        "jamba",
        OF_JAMBA
        | {"block_count": 3, "attention.head_count_kv": [0, 2, 0], "ssm.state_size": 16, "ssm.conv_kernel": 3}
        | {"expert_count": 1, "expert_used_count": 1},
        {},
        mamba1,
        exact=False,
    ),
    "nemotron_h": Case(
        "nemotron-h",
        "nemotron_h",
        OF_NEMOTRON | {"block_count": 4, "attention.head_count_kv": [0, 0, 2, 0], "feed_forward_length": [0, 208, 0, 0]},
        {"use_bias": False},
        mamba(2),
        exact=False,
    ),
    "nemotron_h_moe": Case(
        "nemotron-h-moe",
        "nemotron_h_moe",
        OF_NEMOTRON
        | {"block_count": 3, "attention.head_count_kv": [0, 0, 2], "feed_forward_length": [0, 40, 0], "expert_count": 6}
        | {"expert_used_count": 3, "expert_feed_forward_length": 40, "expert_shared_feed_forward_length": 56}
        | {"expert_shared_count": 1, "expert_weights_norm": True, "expert_group_count": 1, "expert_weights_scale": 1.5}
        | {"moe_latent_size": 48},
        {"n_group": 1, "layers_block_type": ["linear_attention", "moe", "full_attention"]},
        mamba(2),
        exact=False,
    ),
    "kimi-linear": Case(
        "kimi-linear",
        "kimi-linear",
        BASE
        | EPSILON
        | {"block_count": 4, "attention.head_count_kv": [0, 1, 0, 0], "kda.head_dim": 32, "ssm.conv_kernel": 3}
        | {"attention.kv_lora_rank": 24, "attention.key_length": 32, "attention.key_length_mla": 24}
        | {"attention.value_length_mla": 16, "rope.dimension_count": 8, "expert_count": 8, "expert_used_count": 3}
        | {"expert_feed_forward_length": 40, "expert_shared_count": 2, "leading_dense_block_count": 1}
        | {"expert_group_count": 4, "expert_group_used_count": 2, "expert_gating_func": 2, "expert_weights_scale": 2.446},
        {"linear_num_heads": 6},
        kimi_linear(6, 16),
        exact=False,
    ),
    "qwen3next": Case(
        "qwen3-next",
        "qwen3next",
        DELTA
        | {
            "expert_count": 6,
            "expert_used_count": 3,
            "expert_feed_forward_length": 40,
            "expert_shared_feed_forward_length": 56,
            "ssm.conv_kernel": 3,
            "rope.dimension_count": 8,
        },
        {"mlp_only_layers": []},
        delta_nets(OF_DELTA, False),
        exact=False,
    ),
    "qwen35": Case(
        "qwen3-5",
        "qwen35",
        DELTA
        | {
            "ssm.conv_kernel": 4,
            "ssm.time_step_rank": 6,
            "ssm.inner_size": 192,
            "rope.dimension_count": 16,
            "rope.dimension_sections": [4, 2, 2, 0],
        },
        # Three heads of values to each of keys: an order that is not its own reverse.
        {"linear_num_value_heads": 6},
        delta_nets(OF_DELTA | {"linear_num_value_heads": 6}, True),
        exact=False,
    ),
    "qwen35moe": Case(
        "qwen3-5-moe",
        "qwen35moe",
        {key: value for key, value in DELTA.items() if key != "feed_forward_length"}
        | {
            "expert_count": 5,
            "expert_used_count": 2,
            "expert_feed_forward_length": 32,
            "expert_shared_feed_forward_length": 48,
            "ssm.conv_kernel": 4,
            "rope.dimension_count": 16,
            "rope.dimension_sections": [4, 2, 2, 0],
        },
        {},
        delta_nets(OF_DELTA, True),
        exact=False,
    ),
}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of its own: the same file, read in another way, is another packed model."""
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))


def write(case: Case, path: Path, **more: Any) -> Path:
    """``more``: what `convert` takes beside the case's own."""
    tiny_model(case.model, **case.changes).save_pretrained(path)
    return convert(
        path, path / "model.gguf", case.architecture, **{"metadata": case.metadata, "prepare": case.prepare, **more}
    )


@pytest.mark.one_in(16)
@pytest.mark.parametrize("name", CASES)
def test_a_file_computes_what_its_checkpoint_does(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    path = write(case, tmp_path)
    wanted, found = logits(open_native(tmp_path, "fp32")), logits(open_native(path, "fp32"))
    if case.exact:
        assert (wanted == found).all()
    assert np.abs(wanted - found).max() < CLOSE * np.abs(wanted).max()


def further(tensors: Tensors) -> Tensors:
    """With a third layer, which guesses further tokens."""
    last = {name.replace(".1.", ".2.", 1): values for name, values in tensors.items() if name.startswith("model.layers.1.")}
    extra = {
        f"model.layers.2.{name}.weight": tensors["model.norm.weight"] for name in ("enorm", "hnorm", "shared_head.norm")
    }
    return tensors | last | extra | {"model.layers.2.eh_proj.weight": np.ones((96, 192), np.float32)}


def test_layers_that_guess_further_tokens_are_left_out(tmp_path: Path) -> None:
    case = CASES["glm4moe"]
    metadata = case.metadata | {"block_count": 3, "nextn_predict_layers": 1}
    path = write(case, tmp_path, metadata=metadata, prepare=further)
    assert any(name.startswith("blk.2.nextn.") for name in {each.name for each in gguf.GGUFReader(path).tensors})
    assert (logits(open_native(path, "fp32")) == logits(open_native(tmp_path, "fp32"))).all()
    unsaid = write(case, tmp_path, prepare=further)
    with pytest.raises(ModelError, match=r"holds 'model\.layers\.2\..*, which no part of this model asks for"):
        open_native(unsaid, "fp32")


@pytest.mark.parametrize("type_", ["F32", pytest.param("Q8_0", marks=pytest.mark.slow)])
def test_a_layer_for_multi_token_prediction_is_a_draft(type_: str, tmp_path: Path) -> None:
    """As the checkpoint's is that the file was made from."""
    case = CASES["glm4moe"]
    with_mtp("glm4-moe", tmp_path)
    metadata = case.metadata | {"block_count": 3, "nextn_predict_layers": 1}
    path = convert(tmp_path, tmp_path / "m.gguf", case.architecture, metadata, mostly(type_, "F32"), case.prepare)
    names = {each.name for each in gguf.GGUFReader(path).tensors}
    assert {"blk.2.nextn.eh_proj.weight", "blk.2.nextn.embed_tokens.weight"} <= names
    assert has_mtp(path)
    proposed = []
    for model in (tmp_path, path):
        engine = opened_draft(model / "mtp", model, "fp32").engine
        assert isinstance(engine, HeadEngine)
        row = engine.model.open(Sampling(), 8)
        engine.model.skip(row, [3])
        states = np.random.default_rng(0).standard_normal((7, 96)).astype(np.float32).view(np.uint32) >> 16
        feed = NativeFeed(row, [5, 7, 9, 11, 13, 17, 19], choose=7, logits=7, given=states.astype(np.uint16))
        proposed.append(engine.model.forward([feed])[0].logits)
    if type_ == "F32":
        np.testing.assert_array_equal(proposed[0], proposed[1])
    else:
        assert np.abs(proposed[0] - proposed[1]).max() < 0.05 * np.abs(proposed[0]).max()
        opened_draft(path / "mtp", path, "w8a8")


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("name", "type_"), [("glm4moe", "F32"), ("lfm2moe", "Q8_0")])
def test_gate_and_up_of_experts_may_be_one_tensor(name: str, type_: str, tmp_path: Path) -> None:
    """As llama.cpp's converter has them with --fuse-gate-up-exps."""
    case, choose = CASES[name], mostly(type_, "F32")
    apart = write(case, tmp_path, choose=choose)
    joined = convert(
        tmp_path, tmp_path / "j.gguf", case.architecture, case.metadata, choose, case.prepare, fuse_gate_and_up=True
    )
    assert any(each.endswith("ffn_gate_up_exps.weight") for each in read_gguf(joined).tensors)
    assert (logits(open_native(joined, "fp32")) == logits(open_native(apart, "fp32"))).all()
    assert (logits(open_native(joined, "w8af32")) == logits(open_native(apart, "w8af32"))).all()


@pytest.mark.slow
def test_corrections_may_be_a_row_or_a_vector(tmp_path: Path) -> None:
    """ERNIE's checkpoints have a row, and so have the converter's files, but not those that llama.cpp has quantised."""
    case = CASES["ernie4_5-moe"]

    def flat(tensors: Tensors) -> Tensors:
        return {name: values[0] if "e_score" in name else values for name, values in tensors.items()}

    row, vector = (
        write(case, tmp_path),
        convert(tmp_path, tmp_path / "v.gguf", case.architecture, case.metadata, prepare=flat),
    )
    shapes = [read_gguf(path).tensors["blk.1.exp_probs_b.bias"].shape for path in (row, vector)]
    assert shapes == [(1, 7), (7,)]
    assert (logits(open_native(row, "fp32")) == logits(open_native(vector, "fp32"))).all()


def together(tensors: Tensors) -> Tensors:
    """As the first files of Qwen3-Next have it: a delta net's projections in one tensor, in the checkpoint's own order."""
    found = delta_nets(OF_DELTA, False)(tensors)
    for name, values in tensors.items():
        if name.endswith("in_proj_qkvz.weight"):
            block = f"blk.{name.split('.')[2]}"
            del found[f"{block}.attn_qkv.weight"], found[f"{block}.attn_gate.weight"]
            found[f"{block}.ssm_in.weight"] = values
    return found


@pytest.mark.slow
def test_projections_of_delta_nets_may_lie_together(tmp_path: Path) -> None:
    case = CASES["qwen3next"]
    path = write(case, tmp_path, prepare=together)
    wanted, found = logits(open_native(tmp_path, "fp32")), logits(open_native(path, "fp32"))
    assert np.abs(wanted - found).max() < CLOSE * np.abs(wanted).max()


@pytest.mark.slow
def test_layers_without_a_delta_net_are_those_that_the_file_names(tmp_path: Path) -> None:
    case = CASES["qwen35"]
    named = write(case, tmp_path)
    assert read_config(named)["layer_types"] == ["linear_attention"] * 3 + ["full_attention"]
    metadata = {key: value for key, value in case.metadata.items() if not key.startswith("attention.recurrent")}
    assert read_config(write(case, tmp_path, metadata=metadata))["layer_types"][3] == "full_attention"
    # Of a layer that guesses further tokens it is said, too.
    further = {"block_count": 5, "nextn_predict_layers": 1, "attention.recurrent_layers": [True, True, False, True, False]}
    config = read_config(write(case, tmp_path, metadata=metadata | further))
    assert config["layer_types"] == ["linear_attention"] * 2 + ["full_attention", "linear_attention"]
    assert config["num_hidden_layers"] == 4
    every = write(case, tmp_path, metadata=metadata | {"full_attention_interval": 2})
    assert read_config(every)["layer_types"] == ["linear_attention", "full_attention"] * 2


@pytest.mark.slow
def test_codes_stay_as_they_are_where_columns_lie_in_another_order(tmp_path: Path) -> None:
    """Qwen3.5's heads of values: what goes into the last product of a delta net."""
    path = write(CASES["qwen35"], tmp_path, choose=mostly("Q8_0", "F32"))
    packed = {each.name: each for each in gguf.GGUFReader(path).tensors}["blk.0.ssm_out.weight"]
    stored = gguf.dequantize(packed.data, packed.tensor_type)
    checkpoint = GgufCheckpoint(path)
    tensor = Tensor("model.layers.0.linear_attn.out_proj.weight", (96, 192))
    matrix = checkpoint.matrix(tensor)
    assert matrix is not None and matrix.order is not None and matrix.scheme.ordered
    np.testing.assert_array_equal(matrix.rows(3, 96).dequantise(), stored[3:])
    # Heads 0 to 2 have the first head of keys, 3 to 5 the second; in the file 0 and 3 come first.
    wanted = stored.reshape(96, 3, 2, 32).swapaxes(1, 2).reshape(96, 192)
    np.testing.assert_array_equal(natural_order(matrix.rows(0, 96).dequantise(), matrix.order), wanted)
    np.testing.assert_array_equal(checkpoint.rows(tensor, 3, 96), wanted[3:])
    checkpoint.close()
    # Activations are not rounded here, and only keys and values are in bf16; heads in a wrong order give other logits.
    wanted, found = logits(open_native(path, "fp32")), logits(open_native(path, "w8af32"))
    assert np.sqrt(((wanted - found) ** 2).mean() / (wanted**2).mean()) < 0.02


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "another score of experts": ("glm4moe", {"expert_gating_func": 1}, "'glm4moe.expert_gating_func': 1, which"),
    "no width of experts": ("dots1", {"expert_feed_forward_length": None}, "no 'dots1.expert_feed_forward_length'"),
    "a window where none is known": (
        "dots1",
        {"attention.sliding_window": 9},
        "'dots1.attention.sliding_window': 9, which",
    ),
    "more further layers than layers": ("glm4moe", {"nextn_predict_layers": 2}, "'glm4moe.nextn_predict_layers': 2, which"),
    "a fourth direction": ("qwen35", {"rope.dimension_sections": [2, 2, 2, 2]}, r"'qwen35.rope.dimension_sections': \[2"),
    "no directions": ("qwen35", {"rope.dimension_sections": [2, 2]}, "where 4 values are needed"),
    "layers of no kind": ("qwen35", {"attention.recurrent_layers": [True]}, "where 4 values are needed"),
    "no interval": (
        "qwen35",
        {"attention.recurrent_layers": None, "full_attention_interval": 0},
        "'qwen35.full_attention_interval': 0, which",
    ),
    "Mamba in every layer": (
        "granitehybrid",
        {"attention.head_count_kv": [0, 0, 0]},
        "'granitehybrid.attention.head_count_kv'",
    ),
    "attention in every layer": (
        "granitehybrid",
        {"attention.head_count_kv": [2, 2, 2]},
        "'granitehybrid.attention.head_count_kv'",
    ),
    "rope beside Mamba": (
        "granitehybrid",
        {"rope.scaling.finetuned": True},
        "'granitehybrid.rope.scaling.finetuned': True",
    ),
    "heads of Mamba that do not divide": ("falcon-h1", {"ssm.time_step_rank": 7}, "has 7 heads of Mamba 2 for 384 columns"),
    "a width that is no multiple": ("granitehybrid", {"ssm.inner_size": 240}, "has Mamba 2 of 240 columns beside 96"),
    "widths of several kinds": (
        "nemotron_h",
        {"feed_forward_length": [0, 208, 0, 40]},
        "'nemotron_h.feed_forward_length'",
    ),
    "groups of Nemotron's experts": (
        "nemotron_h_moe",
        {"expert_group_count": 2},
        "'nemotron_h_moe.expert_group_count': 2, which",
    ),
    "Kimi's scores": ("kimi-linear", {"expert_gating_func": 1}, "'kimi-linear.expert_gating_func': 1, which"),
    "Kimi's turned columns": ("kimi-linear", {"rope.dimension_count": 24}, "'kimi-linear.rope.dimension_count': 24, which"),
    "heads that do not divide": ("qwen35moe", {"ssm.group_count": 3}, "a delta net of 3 heads of keys and 4 of values"),
    "different heads of keys": ("lfm2moe", {"attention.head_count_kv": [0, 2, 0, 1]}, "'lfm2moe.attention.head_count_kv'"),
    "one number of heads of keys": ("lfm2", {"attention.head_count_kv": 2}, "where a value of another kind is needed"),
    "a window of LFM2": ("lfm2", {"attention.sliding_window": 9}, "'lfm2.attention.sliding_window': 9, which"),
    "another pattern of windows": (
        "afmoe",
        {"attention.sliding_window_pattern": 2},
        "'afmoe.attention.sliding_window_pattern': 2, which",
    ),
    "groups of Trinity's": ("afmoe", {"expert_group_count": 2}, "'afmoe.expert_group_count': 2, which"),
    "weights that do not add up": ("afmoe", {"expert_weights_norm": False}, '"route_norm": False'),
    "experts and what stands beside them of two widths": (
        "hunyuan-moe",
        {"expert_feed_forward_length": 48},
        "experts of 48 columns, and not exactly one shared expert",
    ),
    "two shared experts": (
        "hunyuan-moe",
        {"expert_shared_count": 2},
        "experts of 40 columns, and not exactly one shared expert",
    ),
    "a width of shared experts": ("exaone-moe", {"expert_shared_feed_forward_length": 56}, "are not 2 of 40 columns"),
    "another base for windows": (
        "exaone-moe",
        {"rope.freq_base_swa": 500.0},
        "'exaone-moe.rope.freq_base_swa': 500.0, which",
    ),
    "a width of Command A's": ("cohere2moe", {"expert_shared_feed_forward_length": 56}, "are not 2 of 40 columns"),
    "no pattern of windows": (
        "cohere2moe",
        {"attention.sliding_window_pattern": None},
        "no 'cohere2moe.attention.sliding_window_pattern'",
    ),
    "pictures' directions": (
        "qwen3vl",
        {"rope.dimension_sections": [4, 4, 4, 4]},
        r"'qwen3vl.rope.dimension_sections': \[4",
    ),
    "no rope": ("granitemoe", {"rope.scaling.finetuned": False}, "'granitemoe.rope.scaling.finetuned': False, which"),
    "a scale that is not read": (
        "minimax-m2",
        {"expert_weights_scale": 2.0},
        "'minimax-m2.expert_weights_scale': 2.0, which",
    ),
    "shares of Hy 3's that do not add up": ("hy_v3", {"expert_weights_norm": False}, "'hy_v3.expert_weights_norm': False"),
    "a width beside Hy 3's": (
        "hy_v3",
        {"expert_shared_feed_forward_length": 56},
        "'hy_v3.expert_shared_feed_forward_length': 56, which",
    ),
    "another long rope": ("phimoe-long", {"context_length": 65536}, "has long rope from 4096 to 65536 tokens; of phimoe"),
    "more than two experts": ("phimoe", {"expert_used_count": 3}, '"num_experts_per_tok": 3'),
    "no word of which layers have rope": (
        "granite_swa",
        {"attention.rope_pattern": None},
        "no 'granite_swa.attention.rope_pattern'",
    ),
    "experts of Granite's with windows": ("granite_swa", {"expert_count": 4}, "no 'granite_swa.expert_used_count'"),
    "a base for Granite's windows": ("granite_swa", {"rope.freq_base_swa": 5.0}, "'granite_swa.rope.freq_base_swa': 5.0"),
    "a score of ERNIE's": ("ernie4_5-moe", {"expert_gating_func": 2}, "'ernie4_5-moe.expert_gating_func': 2, which"),
}


@pytest.mark.one_in(6)
@pytest.mark.parametrize("name", REFUSED)
def test_metadata_that_is_not_honoured_is_refused(name: str, tmp_path: Path) -> None:
    architecture, changes, said = REFUSED[name]
    case = CASES[architecture]
    metadata = {key: value for key, value in (case.metadata | changes).items() if value is not None}
    path = write(case, tmp_path, metadata=metadata)
    with pytest.raises(ModelError, match=said):
        open_native(path, "fp32") if '"' in said else read_model_info(str(path))


def test_a_rate_that_is_none_is_refused(tmp_path: Path) -> None:
    case = CASES["qwen35"]

    def prepare(tensors: Tensors) -> Tensors:
        return {name: abs(values) if "A_log" in name else values for name, values in case.prepare(tensors).items()}

    with pytest.raises(
        ModelError, match=r"the tensor 'blk\.0\.ssm_a' holds values that its model cannot have: not all are below 0"
    ):
        open_native(write(case, tmp_path, prepare=prepare), "fp32")


def cutting(cut: str, path: Path) -> Any:
    """The tokenizer of a file that names this way of cutting text."""
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(cut)
    writer.add_token_list(["a"])
    writer.add_token_merges([])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return gguf_tokenizer(path).backend_tokenizer


# To some a mark is a part of the letter that it stands at.
PIECES_OF: dict[str, list[str]] = {
    "qwen35": ["It", "'s", " ", "1", "2", "3", " (", "ok", ")", " ก\u0e35"],
    "hunyuan": ["It", "'s", " ", "1", "2", "3", " (", "ok", ")", " ก", "\u0e35"],
    "lfm2": ["It", "'s", " ", "123", " (", "ok", ")", " ก", "\u0e35"],
    "minimax-m2": ["It's", " ", "123", " (", "ok", ")", " ก\u0e35"],
    "cohere2moe": ["It's", " ", "123", " (", "ok", ")", " ก\u0e35"],
    "command-r": ["It", "'s", " ", "1", "2", "3", " (", "ok", ")", " ก", "\u0e35"],
}


@pytest.mark.parametrize("cut", PIECES_OF)
def test_a_text_is_cut_into_the_words_of_its_model(cut: str, tmp_path: Path) -> None:
    text, tokenizer = "It's 123 (ok) ก\u0e35", cutting(cut, tmp_path / "t.gguf")
    assert [text[start:stop] for _, (start, stop) in tokenizer.pre_tokenizer.pre_tokenize_str(text)] == PIECES_OF[cut]
    # Qwen's, Hunyuan's and Cohere's own tokenizers write a letter and its mark as one where there is one.
    composed = tokenizer.normalizer is not None and tokenizer.normalizer.normalize_str("e\u0301") == "\u00e9"
    assert composed == (cut in ("qwen35", "hunyuan", "cohere2moe", "command-r"))


def test_command_as_digits_are_cut_in_threes_from_the_last(tmp_path: Path) -> None:
    text, tokenizer = "1234567 12 1234x", cutting("tiny_aya", tmp_path / "t.gguf")
    found = [text[start:stop] for _, (start, stop) in tokenizer.pre_tokenizer.pre_tokenize_str(text)]
    # Before a letter no word ends, and three at a time are taken from the first.
    assert found == ["1", "234", "567", " ", "12", " ", "123", "4", "x"]


def test_qwen35s_cut_is_that_of_transformers() -> None:
    assert PRE_TOKENIZERS["qwen35"].steps == (PRETOKENIZE_REGEX,)
