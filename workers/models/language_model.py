"""The language model of a multimodal checkpoint: its configuration and its tensors.

Prompts are texts here, which the language model computes alone. Multimodal rotary positions (mrope) in three directions are
equal for text, so they are ordinary ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from outrider.workers.errors import ModelError
from outrider.workers.models.headers import quoted

# Multimodal "model_type"s, with that of the language model where ``text_config`` does not name it.
MULTIMODAL = {
    "apertus1p5": "apertus1p5_text",
    "aria": "aria_text",
    "aya_vision": "cohere2",
    "cohere2_vision": "cohere2",
    "cohere_compass": "cohere_compass_text",
    "deepseek_vl": "llama",
    "deepseek_vl_hybrid": "llama",
    "ernie4_5_vl_moe": "ernie4_5_vl_moe_text",
    "exaone4_5": "exaone4",
    "gemma3": "gemma3_text",
    "gemma3n": "gemma3n_text",
    "gemma4": "gemma4_text",
    "gemma4_unified": "gemma4_unified_text",
    "glm46v": "glm4v_text",
    "glm4v": "glm4v_text",
    "glm4v_moe": "glm4v_moe_text",
    "glm_ocr": "glm_ocr_text",
    "glm5_next": "glm5_next_text",
    "got_ocr2": "qwen2",
    "granite4_vision": "granite4_vision_text",
    "granite_docling": "granite_docling_text",
    "granite_speech": "granite",
    "hunyuan_vl": "hunyuan_vl_text",
    "hy_v4_vl": "hy_v4_vl_text",
    "hyperclovax_vision_v2": "hyperclovax",
    "idefics2": "mistral",
    "idefics3": "llama",
    "internvl": "qwen2",
    "janus": "llama",
    "kimi_k25": "deepseek_v3",
    "lfm2_vl": "lfm2",
    "lfm3_vl": "lfm3",
    "lighton_ocr": "qwen3",
    "llama4": "llama4_text",
    "llava": "llama",
    "llava_next": "llama",
    "llava_next_video": "llama",
    "llava_onevision": "qwen2",
    "minicpmv4_6": "qwen3_5_text",
    "minicpmv4_7": "qwen3_5_text",
    "minimax_m3_vl": "minimax_m3_vl_text",
    "mistral3": "mistral",
    "mistral_large4": "mistral_large4_text",
    "mllama": "mllama_text_model",
    "muse_glimmer": "muse_glimmer_text",
    "muse_spark": "muse_spark_text",
    "nemotron_h_omni": "nemotron_h",
    "ovis2": "qwen2",
    "perception_lm": "llama",
    "phi4_multimodal": "phi4_multimodal",
    "qianfan_ocr": "qwen3",
    "qwen2_5_omni": "qwen2_5_omni_text",
    "qwen2_5_omni_thinker": "qwen2_5_omni_text",
    "qwen2_5_vl": "qwen2_5_vl_text",
    "qwen2_audio": "qwen2",
    "qwen2_vl": "qwen2_vl_text",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
    "qwen3_omni_moe": "qwen3_omni_moe_text",
    "qwen3_omni_moe_thinker": "qwen3_omni_moe_text",
    "qwen3_vl": "qwen3_vl_text",
    "qwen3_vl_moe": "qwen3_vl_moe_text",
    "qwen4_exp": "qwen4_exp_text",
    "smolvlm": "llama",
    "step3p7": "step3p5",
    "video_llama_3": "qwen2",
    "video_llava": "llama",
    "vipllava": "llama",
    "voxtral": "llama",
}
# Language models' "model_type"s that are computed like another family's.
SAME = {
    "exaone4_5_text": "exaone4",
    "glm4v_moe_text": "glm4_moe",
    "glm4v_text": "glm4",
    "glm_ocr_text": "glm4",
    "granite4_vision_text": "granite",
    "granite_docling_text": "granite",
    "hunyuan_vl_text": "hunyuan_v1_dense",
    "kimi_k2": "deepseek_v3",
    "phi4_multimodal": "phi3",
    "qwen2_5_omni_text": "qwen2",
    "qwen2_vl_text": "qwen2",
    "qwen2_5_vl_text": "qwen2",
    "qwen3_omni_moe_text": "qwen3_moe",
    "qwen3_vl_text": "qwen3",
    "qwen3_vl_moe_text": "qwen3_moe",
}
# Families whose experts' matrices may be stored transposed (formats/experts.py).
MAYBE_TRANSPOSED_EXPERTS = ("qwen3_vl_moe",)
# Families whose experts' matrices are always stored transposed.
TRANSPOSED_EXPERTS = ("aria", "aria_text", "llama4", "llama4_text")
# transformers' defaults for keys that are missing from a ``text_config``: it does not save keys with the default value.
NAMES = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    "max_position_embeddings",
)
USUAL: dict[str, dict[str, Any]] = {
    kind: dict(zip(NAMES, sizes, strict=True))
    for kind, sizes in {
        "cohere2": (256000, 8192, 22528, 40, 64, None, 8192),
        "aria_text": (32000, 4096, 4096, 32, 32, None, 2048),
        "apertus1p5_text": (266752, 4096, 14336, 32, 32, None, 65536),
        "cohere_compass_text": (256000, 8192, 22528, 40, 64, None, 8192),
        "deepseek_v3": (129280, 7168, 18432, 61, 128, 128, 4096),
        "ernie4_5_vl_moe_text": (103424, 2560, 12288, 28, 20, 4, 131072),
        "exaone4": (102400, 4096, 16384, 32, 32, 32, 2048),
        "gemma3_text": (262208, 2304, 9216, 26, 8, 4, 131072),
        "gemma3n_text": (262400, 2048, 16384, 35, 8, 2, 32768),
        "gemma4_text": (262144, 2304, 9216, 30, 8, 4, 131072),
        "gemma4_unified_text": (262144, 2304, 9216, 30, 8, 4, 262144),
        "glm4v_moe_text": (151424, 4096, 10944, 46, 96, 8, 65536),
        "glm4v_text": (151552, 4096, 13696, 40, 32, 2, 32768),
        "glm_ocr_text": (59392, 1024, 4096, 16, 16, 8, 131072),
        "granite_docling_text": (133800, 1024, 2048, 28, 16, 4, 32768),
        "hunyuan_vl_text": (290943, 4096, 11008, 32, 32, None, 2048),
        "glm5_next_text": (154880, 4096, 12288, 45, 64, 64, 1048576),
        "hy_v4_vl_text": (120832, 6144, 18432, 78, 64, None, 262144),
        "lfm2": (65536, 2560, 12288, 32, 32, 8, 128000),
        "lfm3": (128000, 2048, 7680, 24, 16, 4, 128000),
        "llama": (32000, 4096, 11008, 32, 32, None, 2048),
        "llama4_text": (202048, 5120, 8192, 48, 40, 8, 131072),
        "minimax_m3_vl_text": (200064, 6144, 3072, 60, 64, 4, 524288),
        "granite4_vision_text": (32000, 4096, 11008, 32, 32, None, 2048),
        "granite": (32000, 4096, 11008, 32, 32, None, 2048),
        "hyperclovax": (32000, 4096, 11008, 32, 32, None, 2048),
        "mllama_text_model": (128256, 4096, 14336, 40, 32, 8, 131072),
        "muse_glimmer_text": (202048, 6656, 19968, 52, 32, 2, 131072),
        "muse_spark_text": (202048, 8192, 16384, 62, 128, 16, 1048576),
        "qwen2_5_omni_text": (152064, 3584, 18944, 28, 28, 4, 32768),
        "qwen3_omni_moe_text": (3584, 2048, 18944, 28, 28, 4, 32768),
        "ministral3": (131072, 4096, 14336, 34, 32, 8, 262144),
        "mistral": (32000, 4096, 14336, 32, 32, 8, 131072),
        "mistral_large4_text": (204800, 6144, 24576, 72, 64, 64, 1048576),
        "mistral4": (131072, 4096, 12288, 36, 32, 32, 1048576),
        "phi4_multimodal": (200064, 3072, 8192, 32, 32, 8, 131072),
        "qwen2": (151936, 4096, 22016, 32, 32, 32, 32768),
        "qwen2_5_vl_text": (152064, 8192, 29568, 80, 64, 8, 32768),
        "qwen2_vl_text": (152064, 8192, 29568, 80, 64, 8, 32768),
        "qwen3": (151936, 4096, 22016, 32, 32, 32, 32768),
        "qwen3_5_moe_text": (248320, 2048, None, 40, 16, 2, 32768),
        "qwen3_5_text": (248320, 4096, 12288, 32, 16, 4, 32768),
        "qwen4_exp_text": (248320, 2048, None, 40, 16, 2, 32768),
        "qwen3_vl_moe_text": (151936, 2048, 5632, 24, 16, 16, 128000),
        "step3p5": (128815, 4096, 11264, 45, 64, 8, 128000),
        "qwen3_vl_text": (151936, 4096, 22016, 32, 32, 32, 128000),
    }.items()
}
del USUAL["gemma3n_text"][
    "intermediate_size"
]  # each layer has one of its own, and its family's builder knows what is usual
del USUAL["step3p5"]["num_key_value_heads"]  # it has several names, which its family's builder knows
USUAL["phi4_multimodal"] |= {"original_max_position_embeddings": 4096}
USUAL["qwen2_5_omni_text"] |= {"rope_theta": 1e6}
USUAL["qwen3_omni_moe_text"] |= {"rope_theta": 1e6, "moe_intermediate_size": 768}
USUAL["qwen2_vl_text"] |= {"rms_norm_eps": 1e-5, "rope_theta": 1e6}
USUAL["qwen2_5_vl_text"] |= {"rms_norm_eps": 1e-5, "rope_theta": 1e6}
USUAL["qwen3_vl_text"] |= {"rope_theta": 5e5}
USUAL["qwen3_vl_moe_text"] |= {"rope_theta": 5e5, "num_experts_per_tok": 4, "moe_intermediate_size": 1408, "head_dim": 128}
USUAL["glm4v_text"] |= {"rms_norm_eps": 1e-5}
USUAL["glm4v_moe_text"] |= {"attention_bias": True}
USUAL["glm_ocr_text"] |= {"rms_norm_eps": 1e-5}
USUAL["granite_docling_text"] |= {"embedding_multiplier": 12.0, "logits_scaling": 4.0, "residual_multiplier": 0.263}
USUAL["granite_docling_text"] |= {"attention_multiplier": 0.015625, "rms_norm_eps": 1e-5}
# Keys of rope about its directions, which are equal for text, and rope types with several, by what they are for text.
OF_DIRECTIONS = ("mrope_section", "mrope_interleaved", "xdrope_section")
OF_TEXT = {"mrope": "default", "xdrope": "dynamic"}
# Keys in the language model's configuration that concern pictures.
OF_PICTURES = frozenset(
    [
        "vision_config",
        "audio_config",
        "image_token_id",
        "video_token_id",
        "vision_start_token_id",
        "vision_end_token_id",
        "vision_token_id",
        "image_start_token_id",
        "image_end_token_id",
        "video_start_token_id",
        "video_end_token_id",
        "pixel_shuffle_factor",
        "perceiver_config",
    ]
)
# Keys of the whole model that hold for its language model; its type only if that has none of its own.
TYPES = ("dtype", "torch_dtype")
OF_THE_WHOLE = ("quantization_config", "eos_token_id", "transformers_weights", *TYPES)
# Prefixes of the language model's tensors in multimodal checkpoints, and in text-only ones.
PREFIXES = (
    ("model.language_model.lm_head.", "lm_head."),
    ("language_model.model.", "model."),
    ("model.language_model.", "model."),
    ("model.text_model.", "model."),
    ("language_model.lm_head.", "lm_head."),
    ("language_model.backbone.", "backbone."),
    ("thinker.model.", "model."),
    ("thinker.lm_head.", "lm_head."),
)
# Models whose LM head is not tied by default.
UNTIED = (
    *("apertus1p5", "aria", "glm5_next", "hy_v4_vl", "llama4", "minimax_m3_vl", "mistral_large4", "mllama"),
    *("muse_glimmer", "muse_spark", "qwen4_exp", "step3p7"),
)
# Models whose language model has the type below whatever its configuration says, as in transformers.
NAMED_BY_THE_WHOLE = ("step3p7",)
# Models whose language model is the part that thinks, beside parts that talk.
OMNI = ("qwen2_5_omni", "qwen3_omni_moe")
THINKER = "thinker."
# How many tokens the table of Llama 3.2 Vision has beside those of its head: the picture's, and room for others.
BESIDE_HEAD = 8
NOT_LANGUAGE = (
    *("vision_tokenizer.", "audio_tokenizer."),
    *("visual.", "vision_tower.", "vision_model.", "vision_embedder.", "embed_vision.", "audio_tower.", "embed_audio."),
    *("multi_modal_projector.", "patch_merge_mlp.", "mm_projector.", "connector.", "image_newline"),
    *("aligner.", "projector.", "visual_embeddings_table.", "vision_projector.", "vision_adapter.", "vision_projection."),
    *("vision_encoder.", "image_tower.", "video_tower.", "encoder.", "merger.", "vqmodel.", "generation_"),
    *("mlp1.", "sound_encoder.", "sound_projection.", "layerwise_projectors.", "spatial_projectors."),
    *("patch_merger.", "pre_mm_projector_norm.", "vision_language_adapter.", "vit_large_projector."),
    *("vit.", "resampler_model.", "high_res_vision_", "embed_tokens_extend.", "talker.", "token2wav.", "code2wav."),
)


def is_multimodal(values: Mapping[str, Any]) -> bool:
    """Whether a config.json is that of a supported multimodal model."""
    return isinstance(kind := values.get("model_type"), str) and kind in MULTIMODAL


def language_config(values: Mapping[str, Any], source: str) -> dict[str, Any]:
    """The configuration of the language model alone; of a text-only model, the configuration itself."""
    if not is_multimodal(values):
        return dict(values)
    if values.get("quantization"):  # MLX's, whose tools for these have layouts of their own
        raise ModelError(
            f'{source}: "quantization" (MLX) of {quoted(values["model_type"])}, a multimodal model, is not read: '
            "take this model in another format"
        )
    if values["model_type"] in OMNI:
        values = _thinker(values, source)
    stated = values.get("text_config")
    if stated is None and values["model_type"] == "nemotron_h_omni":  # as it is published
        stated = values.get("llm_config")
    if stated is None:  # the first releases of some families have these keys at the top level
        stated = {key: value for key, value in values.items() if key != "model_type"}
    if not isinstance(stated, dict):
        raise ModelError(f'{source}: "text_config" must be an object, got {quoted(stated)}')
    own = None if values["model_type"] in NAMED_BY_THE_WHOLE else stated.get("model_type")
    kind = str(own or MULTIMODAL[values["model_type"]])
    text = USUAL.get(kind, {}) | {key: value for key, value in stated.items() if key not in OF_PICTURES}
    text["model_type"] = SAME.get(kind, kind)
    if kind == "qwen3_vl_moe_text":
        text["norm_topk_prob"] = True  # transformers ignores the configuration's value
    if kind in ("glm4v_text", "glm_ocr_text"):
        text["attention_bias"] = kind == "glm4v_text"  # so it does this one
        # These differ from GLM-4's own defaults.
        text.setdefault("head_dim", text["hidden_size"] // text["num_attention_heads"])
        text.setdefault("partial_rotary_factor", 1.0)
    if kind == "mllama_text_model":
        text |= {"output_vocab_size": text["vocab_size"], "vocab_size": text["vocab_size"] + BESIDE_HEAD}
    # By default tied_head.py decides by whether the checkpoint has an LM head of its own.
    text["tie_word_embeddings"] = values.get("tie_word_embeddings", values["model_type"] not in UNTIED)
    for key in ("rope_scaling", "rope_parameters"):
        if isinstance(text.get(key), dict):
            text[key] = _of_text(text[key])
    whole = {key: values[key] for key in OF_THE_WHOLE if values.get(key) is not None}
    if any(text.get(key) for key in TYPES):
        whole = {key: value for key, value in whole.items() if key not in TYPES}
    return text | whole


def _thinker(values: Mapping[str, Any], source: str) -> dict[str, Any]:
    """The configuration of the part that thinks, with what the whole model says of all of its parts."""
    stated = values.get("thinker_config")
    if not isinstance(stated, dict):
        raise ModelError(f'{source}: "thinker_config" must be an object, got {quoted(stated)}')
    whole = {key: values[key] for key in OF_THE_WHOLE if values.get(key) is not None}
    return whole | stated | {"model_type": f"{values['model_type']}_thinker"}


def _of_text(rope: Mapping[str, Any]) -> dict[str, Any]:
    kept = {key: value for key, value in rope.items() if key not in OF_DIRECTIONS}
    return {key: OF_TEXT.get(value, value) if isinstance(value, str) else value for key, value in kept.items()}


def texts_below(values: Mapping[str, Any]) -> int | None:
    """The first token id of Gemma 3n whose embedding comes from its vision and audio parts, which are not loaded; else
    None."""
    if values.get("model_type") != "gemma3n":
        return None
    vision = values.get("vision_config")
    stated = vision.get("vocab_offset") if isinstance(vision, dict) else None
    return stated if type(stated) is int else 262144


def language_name(name: str) -> str | None:
    """The tensor's name in a text-only checkpoint; None where it is not the language model's."""
    if name.removeprefix(THINKER).removeprefix("model.").startswith(NOT_LANGUAGE):
        return None
    for whole, alone in PREFIXES:
        if name.startswith(whole):
            return alone + name.removeprefix(whole)
    return name


def spellings(name: str) -> tuple[str, ...]:
    """The names that a tensor or layer of a text-only model may have in multimodal checkpoints."""
    dotted = f"{name}."  # a layer's own name may be a whole prefix
    return tuple((whole + dotted.removeprefix(alone))[:-1] for whole, alone in PREFIXES if dotted.startswith(alone))
