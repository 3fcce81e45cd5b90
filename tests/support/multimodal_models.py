"""Tiny random checkpoints of multimodal models, one of each kind whose language model the native engine runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForMultimodalLM, PreTrainedModel

VOCABULARY = 512
_SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
_QWEN_VISION: dict[str, Any] = {
    "depth": 1,
    "embed_dim": 32,
    "hidden_size": 64,
    "num_heads": 2,
    "patch_size": 14,
    "out_hidden_size": 64,
    "intermediate_size": 48,
    "fullatt_block_indexes": [0],
    "window_size": 28,
    "deepstack_visual_indexes": [0],
    "num_position_embeddings": 16,
}
_LATENT_MIXTURE: dict[str, Any] = {
    "n_routed_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "mlp_layer_types": ["dense", "sparse"],
    "q_lora_rank": 40,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 16,
}
_GLM: dict[str, Any] = {
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e4,
        "partial_rotary_factor": 0.5,
        "mrope_section": [1, 1, 2],
    },
    "pad_token_id": 0,
}
_GLM_VISION = _QWEN_VISION | {"hidden_size": 32, "out_hidden_size": 64, "image_size": 28}

_DELTA = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "full_attention_interval": 2,
}


def _multimodal(language: dict[str, Any], vision: dict[str, Any] = _VISION, **more: Any) -> dict[str, Any]:
    return {"text_config": _SIZES | language, "vision_config": vision, **more}


def _qwen(language: dict[str, Any] | None = None, **rope: Any) -> dict[str, Any]:
    three = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e6}
    return _multimodal({"rope_parameters": three | rope} | (language or {}), _QWEN_VISION)


_WINDOWS = {"sliding_window": 16, "sliding_window_pattern": 2}

# The tokenizers of images and of sound in Apertus 1.5.
_PICTURES: dict[str, Any] = {
    "codebook_size": 16,
    "embed_dim": 8,
    "latent_channels": 8,
    "base_channels": 32,
    "channel_multiplier": [1],
    "num_res_blocks": 1,
    "attn_resolutions": [],
}
_SOUND: dict[str, Any] = {
    "model_type": "wavtokenizer_encoder",
    "num_filters": 2,
    "hidden_size": 8,
    "codebook_size": 16,
    "codebook_dim": 8,
    "num_lstm_layers": 1,
    "upsampling_ratios": [2],
    "decoder_hidden_size": 32,
}

_AUDIO: dict[str, Any] = {"d_model": 32, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 48}
_OMNI_AUDIO = _AUDIO | {"output_dim": 64, "num_mel_bins": 16, "max_source_positions": 32, "n_window": 4}


KINDS: dict[str, dict[str, Any]] = {
    "apertus1p5": _multimodal(
        {"output_vocab_size": 480},
        _PICTURES,
        audio_config=_SOUND,
        image_token_offset=480,
        audio_token_offset=496,
    ),
    "aria": _multimodal(
        {"moe_num_experts": 4, "moe_topk": 2, "moe_num_shared_experts": 1, "pad_token_id": 0},
        _VISION | {"model_type": "idefics3_vision"},
        projector_patch_to_query_dict={4: 2},
    ),
    "aya_vision": _multimodal({"model_type": "cohere2"} | _WINDOWS, _VISION | {"model_type": "siglip_vision_model"}),
    "cohere2_vision": _multimodal({"model_type": "cohere2"} | _WINDOWS, _VISION | {"model_type": "siglip_vision_model"}),
    "cohere_compass": _multimodal(
        {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 16, "logit_scale": 0.25}
        | {
            "rope_parameters": {
                "full_attention": None,
                "sliding_attention": {"rope_theta": 1e4, "mrope_section": [2, 3, 3]},
            }
        },
        _QWEN_VISION,
    ),
    "deepseek_vl": _multimodal({"model_type": "llama"}, _VISION | {"model_type": "siglip_vision_model"}),
    "ernie4_5_vl_moe": _multimodal(
        {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": [32, 16], "moe_num_shared_experts": 1}
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5, "mrope_section": [3, 3, 2]}}
        | {"num_hidden_layers": 3},
        _QWEN_VISION | {"hidden_size": 32},
    ),
    "exaone4_5": _multimodal({"model_type": "exaone4"} | _WINDOWS, _QWEN_VISION | {"num_key_value_heads": 2}),
    "gemma3": _multimodal({"sliding_window": 16}, mm_tokens_per_image=4),
    "gemma4": _multimodal(
        {"global_head_dim": 24, "num_kv_shared_layers": 2, "num_hidden_layers": 4, "hidden_size_per_layer_input": 8}
        | {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 16}
        | {"vocab_size_per_layer_input": VOCABULARY},
        _VISION | {"num_key_value_heads": 2, "head_dim": 16},
    ),
    "gemma4_unified": _multimodal(
        {"global_head_dim": 24, "attention_k_eq_v": True, "sliding_window": 16, "use_bidirectional_attention": "vision"},
    ),
    "glm46v": _multimodal(_GLM, _GLM_VISION),
    "glm4v": _multimodal(_GLM, _GLM_VISION),
    "glm4v_moe": _multimodal(
        _GLM
        | {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "first_k_dense_replace": 1}
        | {"routed_scaling_factor": 1.5},
        _GLM_VISION,
    ),
    "idefics3": _multimodal({"model_type": "llama"}, _VISION | {"model_type": "idefics3_vision"}),
    "internvl": _multimodal(
        {"model_type": "qwen2"}, _VISION | {"model_type": "internvl_vision", "image_size": [28, 28], "patch_size": [14, 14]}
    ),
    "kimi_k25": _multimodal(
        {"model_type": "deepseek_v3", "num_key_value_heads": 4, "n_routed_experts": 8, "num_experts_per_tok": 3}
        | {"n_group": 4, "topk_group": 2, "moe_intermediate_size": 24, "kv_lora_rank": 24, "q_lora_rank": 40}
        | {"qk_rope_head_dim": 8, "qk_nope_head_dim": 24, "v_head_dim": 16, "first_k_dense_replace": 1, "head_dim": 8},
        _VISION,
        projection_hidden_size=32,
    ),
    "lfm2_vl": _multimodal(
        {
            "model_type": "lfm2",
            "layer_types": ["conv", "full_attention"],
            "conv_L_cache": 3,
            "block_auto_adjust_ff_dim": False,
        },
        _VISION | {"model_type": "siglip2_vision_model", "num_patches": 4},
    ),
    "lfm3_vl": _multimodal(
        {"layer_types": ["conv", "sliding_attention", "full_attention"], "num_hidden_layers": 3, "sliding_window": 16}
        | {"pad_token_id": 0},
        {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 2}
        | {"num_key_value_heads": 1, "patch_size": 4},
        projector_hidden_size=32,
    ),
    "llama4": _multimodal(
        {"num_local_experts": 4, "num_hidden_layers": 4, "intermediate_size_mlp": 80, "attention_chunk_size": 8},
        _VISION | {"vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32},
    ),
    "llava": _multimodal({"model_type": "llama"}, _VISION | {"model_type": "clip_vision_model"}),
    "llava_next": _multimodal({"model_type": "mistral"}, _VISION | {"model_type": "clip_vision_model"}),
    "llava_next_video": _multimodal({"model_type": "llama"}, _VISION | {"model_type": "clip_vision_model"}),
    "llava_onevision": _multimodal({"model_type": "qwen2"}, _VISION | {"model_type": "siglip_vision_model"}),
    "minimax_m3_vl": _multimodal(
        {"num_local_experts": 4, "num_experts_per_tok": 2, "dense_intermediate_size": 80, "shared_intermediate_size": 48}
        | {"mlp_layer_types": ["dense", "sparse"], "layer_types": ["full_attention", "minimax_m3_sparse"]}
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 5e6, "partial_rotary_factor": 0.5}, "rotary_dim": 8}
        | {"index_n_heads": 2, "index_head_dim": 16, "index_block_size": 32},
        _VISION,
        projector_hidden_size=32,
    ),
    "mistral3": _multimodal({"model_type": "mistral"}, _VISION | {"model_type": "pixtral"}),
    "mistral_large4": _multimodal(
        _LATENT_MIXTURE
        | {"q_lora_rank": None, "qk_rope_head_dim": 8, "v_head_dim": 16, "no_rope_layers": [1, 0], "pad_token_id": 0}
        | {"num_key_value_heads": 4}
        | {"index_n_heads": 2, "index_head_dim": 16, "index_topk": 512, "rms_norm_eps": 0.01},
        _VISION | {"model_type": "pixtral"},
    ),
    "ovis2": _multimodal({"model_type": "qwen2"}, hidden_size=64, vocab_size=VOCABULARY),
    "step3p7": _multimodal(
        {
            "head_dim": 16,
            "n_routed_experts": 5,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "share_expert_dim": 40,
        }
        | {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 16, "num_sliding_attention_heads": 6}
        | {"mlp_layer_types": ["dense", "sparse"], "swiglu_limits": [0, 0.01], "swiglu_limits_shared": [0.02, 0]},
        _VISION | {"image_size": 56},
    ),
    "qwen2_5_vl": _qwen(),
    "qwen2_vl": _qwen(),
    "qwen3_5": _multimodal(_DELTA, _QWEN_VISION),
    "qwen3_5_moe": _multimodal(
        _DELTA
        | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 48},
        _QWEN_VISION,
    ),
    "qwen4_exp": _multimodal(
        _DELTA
        | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 48}
        | {"hc_lowrank": 16, "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 512}
        | {"indexer_compress_ratio": 16},
        _QWEN_VISION,
    ),
    "qwen3_vl": _qwen(mrope_interleaved=True),
    "qwen3_vl_moe": _qwen(
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 40}, mrope_interleaved=True
    ),
    "smolvlm": _multimodal({"model_type": "llama"}, _VISION | {"model_type": "smolvlm_vision"}),
    "video_llama_3": _multimodal({"model_type": "qwen2"}),
    "vipllava": _multimodal(
        {"model_type": "llama"}, _VISION | {"model_type": "clip_vision_model"}, vision_feature_layers=[-1]
    ),
    "deepseek_vl_hybrid": _multimodal(
        {"model_type": "llama"},
        _VISION | {"model_type": "siglip_vision_model"},
        high_res_vision_config=_VISION | {"model_type": "sam_vision_model", "global_attn_indexes": [0], "mlp_dim": 48},
    ),
    "granite4_vision": _multimodal(
        {"residual_multiplier": 0.4, "logits_scaling": 2.0},
        _VISION | {"model_type": "siglip_vision_model", "hidden_size": 64},
        downsample_rate="1/2",
        deepstack_layer_map=[[0, 1]],
        spatial_target_layers=[0, 1],
        vision_feature_layer=-1,
    ),
    "nemotron_h_omni": {
        "text_config": {key: size for key, size in _SIZES.items() if key != "num_hidden_layers"}
        | {"model_type": "nemotron_h", "layers_block_type": ["linear_attention", "mlp", "full_attention"]}
        | {"mamba_num_heads": 4, "mamba_head_dim": 16, "n_groups": 2, "ssm_state_size": 16, "chunk_size": 8}
        | {"time_step_min": 1e-9},
        "vision_config": {"model_type": "radio", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
        | {"num_attention_heads": 2, "patch_size": 14, "image_size": 28, "video_temporal_patch_size": 2},
        "projector_hidden_size": 32,
        "vision_hidden_size": 32,
    },
    "glm_ocr": _multimodal(_GLM, _GLM_VISION | {"intermediate_size": 48}),
    "glm5_next": _multimodal(
        _LATENT_MIXTURE
        | {"qk_rope_head_dim": 0, "v_head_dim": 16}
        | {"linear_num_heads": 2, "linear_head_dim": 16, "layer_types": ["linear_attention", "full_attention"]}
        | {"index_n_heads": 2, "index_head_dim": 16, "index_topk": 512, "pad_token_id": 0, "num_key_value_heads": 4},
        _QWEN_VISION,
    ),
    "got_ocr2": _multimodal({"model_type": "qwen2"}, _VISION | {"global_attn_indexes": [0], "mlp_dim": 48}),
    "granite_docling": _multimodal(
        {"residual_multiplier": 0.4, "logits_scaling": 2.0, "pad_token_id": 0},
        _VISION | {"out_hidden_size": 64, "deepstack_visual_indexes": [0], "scale_factor": 2, "image_size": 56},
    ),
    "granite_speech": {
        "text_config": _SIZES | {"model_type": "granite", "residual_multiplier": 0.4, "logits_scaling": 2.0},
        "encoder_config": {"hidden_dim": 32, "num_layers": 1, "num_heads": 2, "dim_head": 16, "input_dim": 16}
        | {"output_dim": 16, "context_size": 16},
        "projector_config": {"model_type": "blip_2_qformer", "hidden_size": 32, "num_hidden_layers": 1}
        | {"num_attention_heads": 2, "intermediate_size": 48, "encoder_hidden_size": 32},
        "has_lora_adapter": False,
    },
    "hy_v4_vl": _multimodal(
        _LATENT_MIXTURE
        | {"qk_rope_head_dim": 8, "v_head_dim": 16}
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}, "rms_norm_eps": 0.01}
        | {"index_n_heads": 2, "index_head_dim": 16, "index_topk": 512, "indexer_types": ["full", "shared"]}
        | {"pad_token_id": 0},
        _VISION | {"out_hidden_size": 64, "max_image_size": 64},
    ),
    "hyperclovax_vision_v2": _multimodal(
        {"model_type": "hyperclovax", "attention_multiplier": 0.2}, _QWEN_VISION | {"model_type": "qwen2_5_vl_vision"}
    ),
    "hunyuan_vl": _multimodal(
        {
            "rope_parameters": {"type": "xdrope", "alpha": 1000.0, "factor": 1.0, "rope_theta": 1e4}
            | {"beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0, "xdrope_section": [2, 2, 2, 2]}
        },
        _VISION | {"out_hidden_size": 64, "text_hidden_size": 64},
    ),
    "idefics2": _multimodal({"model_type": "mistral"}, perceiver_config={"resampler_n_latents": 4, "resampler_depth": 1}),
    "janus": _multimodal(
        {"model_type": "llama"},
        _VISION | {"mlp_ratio": 2.0, "projection_dim": 64, "depth": 1},
        vq_config={"base_channels": 32, "channel_multiplier": [1], "num_res_blocks": 1, "embed_dim": 8}
        | {"num_embeddings": 16, "projection_dim": 64, "image_token_embed_dim": 64},
    ),
    "lighton_ocr": _multimodal({"model_type": "qwen3"}, _VISION | {"model_type": "pixtral"}),
    "minicpmv4_6": _multimodal(_DELTA | {"model_type": "qwen3_5_text"}, _VISION, insert_layer_id=0),
    "minicpmv4_7": _multimodal(_DELTA | {"model_type": "qwen3_5_text"}, _VISION, insert_layer_id=0),
    "mllama": _multimodal(
        {"cross_attention_layers": [1], "num_hidden_layers": 3, "pad_token_id": 0},
        _VISION
        | {"num_global_layers": 1, "attention_heads": 2, "intermediate_layers_indices": [0], "max_num_tiles": 1}
        | {"supported_aspect_ratios": [[1, 1]], "vision_output_dim": 64},
    ),
    "muse_glimmer": _multimodal(
        {"num_hidden_layers": 5, "sliding_window": 16}, _VISION | {"num_hidden_layers": 1}, projector_hidden_size=32
    ),
    "muse_spark": _multimodal(
        {"sliding_window": 16, "num_local_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
        | {"num_hidden_layers": 5, "moe_hidden_size": 40, "mlp_layer_types": ["dense", *["sparse"] * 4]},
        _VISION,
        projector_hidden_size=32,
        audio_config={"hidden_sizes": [16, 16, 16, 16], "depths": [1, 1, 1, 1], "out_hidden_size": 64},
    ),
    "phi4_multimodal": _SIZES
    | {"vision_config": _VISION | {"crop_size": 28, "image_size": 28, "feature_layer": -1}, "pad_token_id": 0}
    | {"audio_config": {"hidden_size": 32, "intermediate_size": 48, "num_blocks": 1, "num_attention_heads": 2}}
    | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.75}},
    "qianfan_ocr": _multimodal({"model_type": "qwen3"}, _VISION | {"image_size": [28, 28], "patch_size": [14, 14]}),
    "qwen2_5_omni_thinker": _qwen() | {"audio_config": _OMNI_AUDIO},
    "qwen2_audio": {"text_config": _SIZES | {"model_type": "qwen2"}, "audio_config": _AUDIO},
    "qwen3_omni_moe_thinker": _qwen({"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 40})
    | {"audio_config": _OMNI_AUDIO | {"downsample_hidden_size": 8, "n_window_infer": 8}},
    "video_llava": _multimodal({"model_type": "llama"}, _VISION | {"model_type": "clip_vision_model"}),
    "voxtral": {
        "text_config": _SIZES | {"model_type": "llama"},
        "audio_config": {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2},
    },
}


def _with(settings: dict[str, Any], language: dict[str, Any] | None) -> dict[str, Any]:
    return settings | {"text_config": settings["text_config"] | language} if language else settings


def multimodal_model(kind: str, seed: int = 0, language: dict[str, Any] | None = None) -> PreTrainedModel:
    torch.manual_seed(seed)
    config = AutoConfig.for_model(kind, **_with(KINDS[kind], language))
    model: PreTrainedModel = AutoModelForMultimodalLM.from_config(config, dtype=torch.float32).eval()
    return model


# What transformers 5.24 calls layers when it writes them, does not read again, and their makers call otherwise.
BLOCKS = {
    "kimi_k25": ("language_model.model.blocks.", "language_model.model.layers."),
    "qianfan_ocr": ("language_model.model.encoder.layers.", "language_model.model.layers."),
}


def save_multimodal(kind: str, path: Path, seed: int = 0, language: dict[str, Any] | None = None) -> Path:
    """``language``: changed keys of its language model's configuration."""
    multimodal_model(kind, seed, language).save_pretrained(path)
    if kind in BLOCKS:
        file, (theirs, own) = path / "model.safetensors", BLOCKS[kind]
        save_file({name.replace(theirs, own): tensor for name, tensor in load_file(file).items()}, file, {"format": "pt"})
    return path
