"""Command R and R7B: layer norms without biases, attention and the gated feed-forward layer in parallel, scaled logits."""

from __future__ import annotations

from typing import Any

from outrider.workers.models.formats.gguf.architectures.architecture import ATTENTION, GATED, KNOWN, Architecture
from outrider.workers.models.formats.gguf.architectures.sizes import biased, rope, sizes
from outrider.workers.models.formats.gguf.architectures.windows import KNOWN_OF_WINDOWS, WINDOW, layer_types, same_base
from outrider.workers.models.formats.gguf.metadata import Metadata

PARTS = ATTENTION | GATED | {"input_layernorm": "attn_norm"}


def _style(metadata: Metadata) -> dict[str, Any]:
    return sizes(metadata) | {
        "hidden_act": "silu",
        "attention_bias": biased(metadata),
        "layer_norm_eps": metadata.get("attention.layer_norm_epsilon", float),
        # 0 stands for no factor, as in llama.cpp.
        "logit_scale": metadata.get("logit_scale", float, 0.0) or 1.0,
        "rope_parameters": rope(metadata),
    }


def _command_r(metadata: Metadata) -> dict[str, Any]:
    normed = metadata.has_tensor("blk.0.attn_q_norm.weight")
    return _style(metadata) | {"model_type": "cohere", "use_qk_norm": normed}


def _cohere2(metadata: Metadata) -> dict[str, Any]:
    same_base(metadata)
    return _style(metadata) | {
        "model_type": "cohere2",
        "sliding_window": metadata.get(WINDOW, int),
        "layer_types": layer_types(metadata, 4),
    }


ARCHITECTURES = {
    "command-r": Architecture(_command_r, KNOWN | {"logit_scale"}, parts=PARTS),
    "cohere2": Architecture(_cohere2, KNOWN | {"logit_scale"} | KNOWN_OF_WINDOWS, parts=PARTS),
}
