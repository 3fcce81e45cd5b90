"""Gemma 1 to 3: scaled embeddings, norms that multiply by 1 + w, soft caps, windows."""

from __future__ import annotations

from typing import Any

from outrider.workers.models.formats.gguf.architectures.architecture import (
    ATTENTION,
    GATED,
    KNOWN,
    LLAMA_PARTS,
    Architecture,
    less_one,
)
from outrider.workers.models.formats.gguf.architectures.sizes import biased, head_size, llama_style, rope
from outrider.workers.models.formats.gguf.architectures.windows import (
    FULL,
    KNOWN_OF_WINDOWS,
    SLIDING,
    WINDOW,
    layer_types,
    same_base,
)
from outrider.workers.models.formats.gguf.metadata import Metadata

# The key of an image's number of tokens, in files of multimodal models.
IMAGES = "mm.tokens_per_image"
CAPS = {"attn_logit_softcapping", "final_logit_softcapping"}
AROUND = (
    ATTENTION
    | GATED
    | {
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "post_attention_norm",
        "pre_feedforward_layernorm": "ffn_norm",
        "post_feedforward_layernorm": "post_ffw_norm",
    }
)
# The largest Gemma 2 and 3 (27B) divide scores by sqrt(width / heads), the others by sqrt(head size). GGUF has no key for
# it; llama.cpp, too, goes by the number of layers.
LAYERS_OF_LARGEST = {"gemma2": 46, "gemma3": 62}


def _gemma(metadata: Metadata) -> dict[str, Any]:
    return llama_style(metadata) | {
        "model_type": "gemma",
        "hidden_act": "gelu_pytorch_tanh",
        "attention_bias": biased(metadata),
    }


def _later(metadata: Metadata) -> dict[str, Any]:
    config = llama_style(metadata) | {"hidden_activation": "gelu_pytorch_tanh", "attention_bias": biased(metadata)}
    largest = config["num_hidden_layers"] == LAYERS_OF_LARGEST[metadata.architecture]
    scalar = config["hidden_size"] // config["num_attention_heads"] if largest else head_size(metadata)
    return config | {"query_pre_attn_scalar": scalar}


def _cap(metadata: Metadata, key: str, usual: float) -> float | None:
    return metadata.get(key, float, usual) or None


def _gemma2(metadata: Metadata) -> dict[str, Any]:
    same_base(metadata)
    return _later(metadata) | {
        "model_type": "gemma2",
        "sliding_window": metadata.get(WINDOW, int, 4096),
        "layer_types": layer_types(metadata, 2),
        "attn_logit_softcapping": _cap(metadata, "attn_logit_softcapping", 50.0),
        "final_logit_softcapping": _cap(metadata, "final_logit_softcapping", 30.0),
    }


def _gemma3(metadata: Metadata) -> dict[str, Any]:
    """Layers with a window have their own base of rope, without scaling."""
    config = _later(metadata)
    window = metadata.get(WINDOW, int, 0)
    types = layer_types(metadata, 6) if window else [FULL] * config["num_hidden_layers"]
    local = {"rope_type": "default", "rope_theta": metadata.get("rope.freq_base_swa", float, 10000.0)}
    return config | {
        "model_type": "gemma3_text",
        "sliding_window": window or None,
        "layer_types": types,
        "rope_parameters": {FULL: rope(metadata), SLIDING: local},
        "final_logit_softcapping": _cap(metadata, "final_logit_softcapping", 0.0),
    }


def _norms(*names: str) -> dict[str, Any]:
    """llama.cpp's converter stores 1 + w."""
    return dict.fromkeys((*names, "model.norm"), less_one)


OF_LAYERS = tuple(name for name in AROUND if name.endswith("layernorm"))
ARCHITECTURES = {
    "gemma": Architecture(_gemma, parts=LLAMA_PARTS, changes=_norms("input_layernorm", "post_attention_layernorm")),
    "gemma2": Architecture(_gemma2, KNOWN | CAPS | KNOWN_OF_WINDOWS, parts=AROUND, changes=_norms(*OF_LAYERS)),
    "gemma3": Architecture(
        _gemma3,
        KNOWN | {"final_logit_softcapping", IMAGES} | KNOWN_OF_WINDOWS,
        parts=AROUND,
        changes=_norms(*OF_LAYERS, "self_attn.q_norm", "self_attn.k_norm"),
    ),
}
