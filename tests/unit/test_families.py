"""The families' programs against transformers' own models."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from tiny_models import TINY, saved_tensors, tiny_config, tiny_model
from torch_program import run

from outrider.kernels.program import Format, Kind
from outrider.workers.errors import ModelError
from outrider.workers.models.families import build_program

TOKENS = [3, 141, 59, 26, 5, 35, 89, 79, 32, 38, 46, 26, 43, 38, 32, 79, 50, 28, 84, 197]


@pytest.mark.one_in(10)
@torch.no_grad()
@pytest.mark.parametrize("name", TINY)
def test_program_computes_what_transformers_computes(name: str) -> None:
    model = tiny_model(name)
    expected = model(input_ids=torch.tensor([TOKENS]), use_cache=False).logits[0]
    program = build_program(json.loads(model.config.to_json_string()), Format.FP32)
    logits = run(program, saved_tensors(model), TOKENS)
    distance = (logits - expected).abs().max() / expected.abs().max()
    assert distance < 1e-5, f"{name}: logits differ by {distance:.2e} of the largest"


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"model_type": "gemma9"}, "does not know the family 'gemma9'"),
        ({"attn_logit_softcapping": 50.0}, 'does not know "attn_logit_softcapping": 50.0'),
        # Neither says "not used": without a word, tokens see only those before them.
        ({"is_causal": False}, 'with "is_causal": False tokens attend to later ones'),
        ({"is_causal": None}, 'with "is_causal": None tokens attend to later ones'),
        ({"partial_rotary_factor": 0.5}, 'does not know "partial_rotary_factor": 0.5'),
        ({"rope_parameters": {"rope_type": "longrope", "factor": 2}}, "does not know the rope type 'longrope'"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 500.0}}}, "by type of layer ('full_attention')"),
        ({"rope_parameters": {"rope_theta": 500.0, "long": {"rope_theta": 10.0}}}, "by type of layer ('long')"),
        ({"rope_parameters": {"sliding_attention": None}}, "by type of layer ('sliding_attention')"),
        ({"hidden_act": "quick_gelu"}, 'does not know the activation "quick_gelu"'),
        ({"hidden_size": -4}, '"hidden_size" must be a positive whole number, got -4'),
        ({"hidden_size": None}, 'has no "hidden_size"'),
        ({"num_key_value_heads": 4}, "cannot lay this model out"),
        ({"head_dim": 12}, "cannot lay this model out"),
    ],
)
def test_what_the_native_engine_does_not_know_is_refused(changes: dict, sentence: str) -> None:
    config = {"model_type": "llama", **TINY["llama"][1], **changes}
    with pytest.raises(ModelError) as refusal:
        build_program(config, Format.BF16)
    assert sentence in str(refusal.value)


def test_settings_of_generate_change_no_logit() -> None:
    """Checkpoints of before state them here, and neither engine follows them: they say nothing against this one."""
    settings = {"suppress_tokens": [0], "bad_words_ids": [[3]], "forced_eos_token_id": 2, "typical_p": 0.9, "num_beams": 4}
    assert build_program({"model_type": "llama", **TINY["llama"][1], **settings}, Format.BF16).weights


@pytest.mark.parametrize(
    ("name", "changes", "sentence"),
    [
        ("lfm3", {"layer_types": ["sliding_attention"] * 2, "sliding_window": None}, 'without a "sliding_window"'),
        ("lfm3", {"layer_types": ["conv"]}, """cannot follow "layer_types": ['conv']"""),
        (
            "lfm3",
            {"rope_parameters": {"full_attention": {"rope_theta": 1e4}}, "layer_types": ["conv", "sliding_attention"]},
            '"rope_parameters" has no "rope_theta" for layers of the type "sliding_attention"',
        ),
        ("olmo", {"clip_qkv": 0.0}, '"clip_qkv" must be greater than 0, got 0.0'),
        ("ministral3", {"rope_parameters": {"rope_type": "default"}}, '"rope_parameters" has no "llama_4_scaling_beta"'),
        (
            "ministral3",
            {"rope_parameters": {"rope_type": "default", "llama_4_scaling_beta": 0.1}},
            '"rope_parameters" has no "original_max_position_embeddings"',
        ),
        ("apertus", {"mlp_bias": True}, 'does not know "mlp_bias": True'),
        ("helium", {"head_dim": 24}, 'does not know "head_dim": 24'),
        ("cwm", {"attention_bias": True}, 'does not know "attention_bias": True'),
        ("exaone4", {"sliding_window_pattern": "LLG"}, '"sliding_window_pattern" must be a positive whole number'),
        ("hunyuan_v1_dense", {"use_qk_norm": False}, 'does not know "use_qk_norm": False'),
        ("hunyuan_v1_dense", {"use_cla": True}, 'does not know "use_cla": True'),
        ("hunyuan_v1_dense", {"rope_scaling": {"type": "dynamic", "alpha": "x"}}, "misstates 'alpha': 'x'"),
        (
            "llama",
            {"rope_scaling": {"type": "dynamic", "alpha": 9.0}},
            "does not know \"alpha\" of the rope type 'dynamic'",
        ),
        ("glm", {"partial_rotary_factor": 0.45}, "partial rotary embeddings like these"),
        ("ernie4_5", {"partial_rotary_factor": 0.5}, 'does not know "partial_rotary_factor": 0.5'),
        ("exaone", {"num_layers": 1}, 'does not know "num_layers": 1'),
        ("exaone", {"hidden_act": "silu", "activation_function": "gelu"}, "does not know \"hidden_act\": 'silu'"),
        ("granitemoe", {"attention_multiplier": None}, 'does not know "attention_multiplier": null; the hf engine does'),
        ("granitemoeshared", {"attention_multiplier": None}, 'does not know "attention_multiplier": null'),
        # By these transformers itself gives no numbers.
        ("gemma2", {"query_pre_attn_scalar": -1}, '"query_pre_attn_scalar" must be greater than 0, got -1'),
        ("granite", {"attention_multiplier": 0.0}, '"attention_multiplier" must be greater than 0, got 0.0'),
    ],
)
def test_what_a_family_alone_may_say_otherwise_is_refused(name: str, changes: dict, sentence: str) -> None:
    config = {"model_type": name, **TINY["llama"][1], "head_dim": 16}
    build_program(config, Format.BF16)
    with pytest.raises(ModelError) as refusal:
        build_program(config | changes, Format.BF16)
    assert sentence in str(refusal.value)


@pytest.mark.parametrize(
    ("name", "changes", "sentence"),
    [
        ("dbrx", {"ffn_config": {"ffn_act_fn": "silu"}}, """"ffn_act_fn" must be an object, got 'silu'"""),
        ("step-3-plain", {"rope_parameters": "default"}, """does not know "rope_parameters": 'default'"""),
        ("kimi-linear", {"num_expert_group": math.nan}, "must be a positive whole number, got nan"),
        ("ling-3-unbounded", {"num_expert_group": math.nan}, "must be a positive whole number, got nan"),
    ],
)
def test_values_of_a_wrong_type_are_refused_by_name(name: str, changes: dict, sentence: str) -> None:
    """They ended the process that reads models with a KeyError or an AttributeError."""
    with pytest.raises(ModelError) as refusal:
        build_program(tiny_config(name).to_dict() | changes, Format.BF16)
    assert sentence in str(refusal.value)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"num_key_value_heads": 3}, 'does not know "num_key_value_heads": 3'),
        ({"head_dim": 24}, 'does not know "head_dim": 24'),
        ({"qk_head_dim": 32}, 'does not know "qk_head_dim": 32'),
        ({"qk_rope_head_dim": 7, "head_dim": None, "qk_head_dim": None}, 'does not know "qk_rope_head_dim": 7'),
        ({"qk_rope_head_dim": 4, "head_dim": None, "qk_head_dim": None}, '_head_dim": 4, which is no multiple of 8'),
        ({"kv_lora_rank": 20}, 'does not know "kv_lora_rank": 20, which is no multiple of 8'),
        (
            {"rope_scaling": {"type": "yarn", "factor": "4", "mscale_all_dim": 1.0}},
            "the rope type 'yarn' misstates 'factor': '4'",
        ),
        ({"rope_scaling": {"type": "linear", "factor": 4.0, "mscale_all_dim": 1.0}}, 'does not know "mscale_all_dim"'),
    ],
)
def test_latent_attention_of_other_sizes_is_refused(changes: dict, sentence: str) -> None:
    config = tiny_config("youtu-wide").to_dict()
    with pytest.raises(ModelError) as refusal:
        build_program(config | changes, Format.BF16)
    assert sentence in str(refusal.value)


@pytest.mark.parametrize("name", ["seed_oss", "glm", "mistral", "qwen3"])
def test_heads_without_a_number_or_size_of_their_own_follow_from_the_others(name: str) -> None:
    """null says that, as in transformers; without a word it is the family's usual number."""
    sizes = TINY["llama"][1]
    config = {"model_type": name, **sizes, "num_key_value_heads": None, "head_dim": None}
    attention = [op for op in build_program(config, Format.BF16).ops if op.kind is Kind.ATTENTION]
    assert {(op.heads, op.kv_heads, op.head_size) for op in attention} == {(6, 6, 16)}


def test_cwm_without_rope_has_its_usual_one() -> None:
    stated = {"rope_type": "llama3", "factor": 16.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    rope = stated | {"rope_theta": 1e6, "original_max_position_embeddings": 8192}
    config = {"model_type": "cwm", **TINY["llama"][1]}
    usual = build_program(config, Format.BF16)
    assert build_program(config | {"rope_parameters": None}, Format.BF16) == usual
    assert build_program(config | {"rope_parameters": rope}, Format.BF16) == usual
    assert build_program(config | {"rope_parameters": {"rope_theta": 1e6}}, Format.BF16) != usual


@pytest.mark.parametrize(
    ("name", "changes", "sentence"),
    [
        ("starcoder2", {"norm_type": "rms_norm"}, "does not know \"norm_type\": 'rms_norm'"),
        ("starcoder2", {"mlp_type": "gated"}, "does not know \"mlp_type\": 'gated'"),
        ("cohere2", {"layer_types": ["chunked_attention"] * 4}, 'cannot follow "layer_types"'),
        ("cohere2", {"sliding_window": None}, 'without a "sliding_window"'),
        ("cohere2", {"use_parallel_block": 2}, 'does not know "use_parallel_block": 2'),
        ("phi", {"head_dim": 8}, 'does not know "head_dim": 8'),
        ("gpt2", {"add_cross_attention": True}, 'does not know "add_cross_attention": True'),
        ("gptj", {"rotary_dim": 24}, 'does not know "rotary_dim": 24 with heads of 16'),
        ("gptj", {"rotary_dim": None}, 'does not know "rotary_dim": None with heads of 16'),
        ("codegen", {"n_head": 6}, 'does not know "n_head" that is no multiple of 4'),
        ("falcon", {"num_ln_in_parallel_attn": 2}, '"num_ln_in_parallel_attn": 2 with "new_decoder_architecture": False'),
        ("falcon-new", {"parallel_attn": False}, 'with "new_decoder_architecture": True and "parallel_attn": False'),
        ("falcon-serial", {"num_kv_heads": 3}, 'does not know "num_kv_heads": 3'),
        (
            "gpt-neo",
            {"attention_types": [[["global"], 3]]},
            "does not know \"attention_types\": [[['global'], 3]] of 4 layers",
        ),
        ("gpt-neo", {"attention_types": 4}, 'does not know "attention_types": 4 of 4 layers'),
        ("gpt-neo", {"attention_layers": ["local"] * 4}, 'does not know "attention_layers"'),
    ],
)
def test_values_that_a_family_of_layer_norms_does_not_know_are_refused(name: str, changes: dict, sentence: str) -> None:
    """transformers breaks on most of them, and passes over the others."""
    kind, settings = TINY[name]
    build_program({"model_type": kind, **settings}, Format.BF16)
    with pytest.raises(ModelError) as refusal:
        build_program({"model_type": kind, **settings, **changes}, Format.BF16)
    assert sentence in str(refusal.value)


@pytest.mark.parametrize("name", ["olmo3", "gemma3_text"])
def test_a_ramp_that_is_not_truncated_is_refused_by_type_of_layer(name: str) -> None:
    """transformers overlooks the key there, and truncates; OLMo 3's logits were 2% off."""
    yarn = {"rope_type": "yarn", "rope_theta": 777.0, "factor": 4.0, "original_max_position_embeddings": 32}
    config = {"model_type": name, **TINY["llama"][1]}
    build_program(config | {"rope_parameters": {"full_attention": yarn}}, Format.BF16)
    for rope in (
        {"rope_parameters": {"full_attention": yarn | {"truncate": False}}},
        {"rope_parameters": {"sliding_attention": yarn | {"truncate": False}}},
        {"rope_scaling": yarn | {"truncate": False}},
    ):
        with pytest.raises(ModelError, match=r'does not know "truncate" in "rope_parameters" by type of layer'):
            build_program(config | rope, Format.BF16)


SAYING_ALONE = ("gemma2", "gemma3_text", "olmo3", "gpt_oss", "smollm3")
ASKING = ("qwen2", "qwen3", "qwen2_moe")


@pytest.mark.parametrize("name", [*SAYING_ALONE, *ASKING])
def test_a_layer_with_a_window_of_no_size_is_refused(name: str) -> None:
    """transformers cannot run it either; without the window it would be another model."""
    stated = {"sliding_window": 7, "layer_types": ["sliding_attention", "full_attention"]}
    asked = {"use_sliding_window": True} if name in ASKING else {}
    rope = {"rope_scaling": {"rope_type": "default"}} if name == "gpt_oss" else {}
    config = {"model_type": name, **TINY["llama"][1], **stated, **asked, **rope}
    assert {op.window for op in build_program(config, Format.BF16).ops if op.kind is Kind.ATTENTION} == {0, 7}
    without: list[dict] = [{"sliding_window": None}, *({key: False} for key in asked)]
    for changes in without:
        with pytest.raises(ModelError, match=r'cannot follow "layer_types".* without a "sliding_window"'):
            build_program({**config, **changes}, Format.BF16)


def test_tokens_may_be_said_to_see_those_before_them_only() -> None:
    config = {"model_type": "llama", **TINY["llama"][1]}
    said = build_program(config | {"is_causal": True}, Format.BF16)
    assert said == build_program(config, Format.BF16)


ALL = {"initializer_range": 0.02, "use_cache": True, "torch_dtype": "bfloat16", "bos_token_id": 1, "eos_token_id": [1, 2]}
FACTORS = {"long_factor": [2.0] * 48, "short_factor": [1.0] * 48}
# What is particular in configurations as they are published, with sizes that take no time.
PUBLISHED: dict[str, dict[str, Any]] = {
    "gemma-2-2b-it": {
        "model_type": "gemma2",
        "attention_bias": False,
        "attn_logit_softcapping": 50.0,
        "cache_implementation": "hybrid",
        "final_logit_softcapping": 30.0,
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "rope_theta": 10000.0,
    },
    "gemma-3-1b-it": {
        "model_type": "gemma3_text",
        "attn_logit_softcapping": None,
        "cache_implementation": "hybrid",
        "final_logit_softcapping": None,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 256,
        "rope_local_base_freq": 10000,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": 512,
        "sliding_window_pattern": 6,
    },
    "phi-4-mini": {
        "model_type": "phi3",
        "attention_bias": False,
        "embd_pdrop": 0.0,
        "full_attn_mod": 1,
        "interpolate_factor": 1,
        "lm_head_bias": False,
        "mlp_bias": False,
        "original_max_position_embeddings": 4096,
        "max_position_embeddings": 131072,
        "head_dim": 128,
        "partial_rotary_factor": 0.75,
        "resid_pdrop": 0.0,
        "rope_scaling": {"type": "longrope", **FACTORS},
        "rope_theta": 10000.0,
        "sliding_window": 262144,
        "tie_word_embeddings": True,
    },
    "smollm3": {
        "model_type": "smollm3",
        "max_window_layers": 28,
        "no_rope_layer_interval": 4,
        "no_rope_layers": [1, 1, 1, 0],
        "layer_types": ["full_attention"] * 4,
        "pretraining_tp": 2,
        "rope_theta": 5000000.0,
        "sliding_window": None,
        "use_sliding_window": False,
    },
    "LFM2-1.2B": {
        "model_type": "lfm2",
        "block_auto_adjust_ff_dim": True,
        "block_dim": 256,
        "block_ff_dim": 384,
        "block_ffn_dim_multiplier": 1.0,
        "block_mlp_init_scale": 1.0,
        "block_multiple_of": 256,
        "block_norm_eps": 1e-05,
        "block_out_init_scale": 1.0,
        "block_use_swiglu": True,
        "block_use_xavier_init": True,
        "conv_L_cache": 3,
        "conv_bias": False,
        "conv_dim": 256,
        "conv_dim_out": 256,
        "conv_use_xavier_init": True,
        "full_attn_idxs": [2],
        "norm_eps": 1e-05,
        "num_heads": 32,
        "rope_theta": 1000000.0,
        "tie_embedding": True,
        "use_pos_enc": True,
    },
    "Qwen3-Next-80B-A3B-Instruct": {
        "model_type": "qwen3_next",
        "attention_bias": False,
        "decoder_sparse_step": 1,
        "full_attention_interval": 4,
        "head_dim": 64,
        "hidden_act": "silu",
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 32,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_value_head_dim": 32,
        "mlp_only_layers": [],
        "moe_intermediate_size": 64,
        "norm_topk_prob": True,
        "num_experts": 16,
        "num_experts_per_tok": 10,
        "partial_rotary_factor": 0.25,
        "rope_scaling": None,
        "rope_theta": 10000000,
        "router_aux_loss_coef": 0.001,
        "shared_expert_intermediate_size": 64,
        "use_sliding_window": False,
    },
    "gpt-neox-20b": {
        "model_type": "gpt_neox",
        "attention_probs_dropout_prob": 0,
        "hidden_dropout_prob": 0,
        "layer_norm_eps": 1e-05,
        "rotary_emb_base": 10000,
        "rotary_pct": 0.25,
        "use_parallel_residual": True,
        "num_key_value_heads": None,
    },
    "gpt-oss-20b": {
        "model_type": "gpt_oss",
        "attention_bias": True,
        "experts_per_token": 4,
        "initial_context_length": 4096,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_experts_per_tok": 4,
        "num_local_experts": 32,
        "output_router_logits": False,
        "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]},
        "rope_scaling": {
            "rope_type": "yarn",
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "truncate": False,
        },
        "rope_theta": 150000,
        "router_aux_loss_coef": 0.9,
        "sliding_window": 128,
        "swiglu_limit": 7.0,
    },
    "Qwen3-30B-A3B": {
        "model_type": "qwen3_moe",
        "attention_bias": False,
        "decoder_sparse_step": 1,
        "max_window_layers": 48,
        "mlp_only_layers": [],
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "rope_scaling": None,
        "rope_theta": 1000000.0,
        "router_aux_loss_coef": 0.001,
        "sliding_window": None,
        "use_sliding_window": False,
    },
}
SMALL = {"hidden_size": 256, "intermediate_size": 192, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 300}


@pytest.mark.parametrize("name", PUBLISHED)
def test_configurations_as_they_are_published_are_understood(name: str) -> None:
    common = ALL | SMALL | {"num_key_value_heads": 2, "max_position_embeddings": 8192}
    program = build_program(common | PUBLISHED[name], Format.W4A8)
    convolutions = sum(op.kind is Kind.CONVOLVE for op in program.ops)
    assert (program.layers, convolutions) == ((1, 3) if name.startswith(("LFM2", "Qwen3-Next")) else (4, 0))
    assert (max(op.longest for op in program.ops) == 4096) is (name == "phi-4-mini")
