"""OLMo 1: norms without weights. OLMo 2 and 3: norms after attention and feed-forward, and of queries and keys over all
heads."""

from __future__ import annotations

from typing import Any

from outrider.workers.models.formats.gguf.architectures.architecture import (
    ATTENTION,
    GATED,
    KNOWN,
    Architecture,
)
from outrider.workers.models.formats.gguf.architectures.rows import interleaved
from outrider.workers.models.formats.gguf.architectures.sizes import base, biased, llama_style, rope, sizes
from outrider.workers.models.formats.gguf.architectures.windows import FULL, KNOWN_OF_WINDOWS, SLIDING, WINDOW, layer_types
from outrider.workers.models.formats.gguf.metadata import Metadata

BEHIND = {"post_attention_layernorm": "post_attention_norm", "post_feedforward_layernorm": "post_ffw_norm"}
# The epsilon of the first OLMo's norms.
EPSILON = 1e-5


def _olmo(metadata: Metadata) -> dict[str, Any]:
    if abs(metadata.get("attention.layer_norm_epsilon", float) - EPSILON) > EPSILON / 1e6:
        metadata.refuse_value("attention.layer_norm_epsilon")
    return sizes(metadata) | {"model_type": "olmo", "hidden_act": "silu", "rope_parameters": rope(metadata)}


def _olmo2(metadata: Metadata) -> dict[str, Any]:
    config = llama_style(metadata) | {"model_type": "olmo2", "hidden_act": "silu", "attention_bias": biased(metadata)}
    if not (window := metadata.get(WINDOW, int, 0)):
        return config
    # Layers with a window have the same base, and no scaling.
    local = {"rope_type": "default", "rope_theta": metadata.get("rope.freq_base_swa", float, base(metadata))}
    return config | {
        "model_type": "olmo3",
        "sliding_window": window,
        "layer_types": layer_types(metadata, 4),
        "rope_parameters": {FULL: config["rope_parameters"], SLIDING: local},
    }


ARCHITECTURES = {
    "olmo": Architecture(_olmo, parts=ATTENTION | GATED, order=interleaved),
    "olmo2": Architecture(_olmo2, KNOWN | KNOWN_OF_WINDOWS, parts=ATTENTION | GATED | BEHIND),
}
