"""Command A's mixtures: Cohere 2 with experts in some layers. The dense layers before them have rope, in llama.cpp too."""

from __future__ import annotations

from typing import Any

from outrider.workers.models.formats.gguf.architectures.architecture import ATTENTION, GATED, Architecture
from outrider.workers.models.formats.gguf.architectures.experts import (
    KNOWN_OF_EXPERTS,
    ROUTER,
    SHARED,
    SHARED_WIDTH,
    SIGMOID,
    check_scores,
    experts,
)
from outrider.workers.models.formats.gguf.architectures.left_out import FURTHER_LAYERS
from outrider.workers.models.formats.gguf.architectures.sizes import rope, sizes
from outrider.workers.models.formats.gguf.architectures.windows import (
    KNOWN_OF_WINDOWS,
    PATTERN,
    WINDOW,
    layer_types,
    same_base,
)
from outrider.workers.models.formats.gguf.metadata import Metadata

KNOWN_OF_COHERE = (
    KNOWN_OF_EXPERTS
    | KNOWN_OF_WINDOWS
    | {"logit_scale", "expert_gating_func", "expert_weights_norm", "expert_shared_count"}
    | {"leading_dense_block_count", SHARED_WIDTH, FURTHER_LAYERS}
)


def _cohere2_moe(metadata: Metadata) -> dict[str, Any]:
    same_base(metadata)
    check_scores(metadata, SIGMOID)
    count, used = experts(metadata)
    metadata.get(PATTERN, list)
    width, shared = metadata.get("expert_feed_forward_length", int), metadata.get("expert_shared_count", int, 0)
    if metadata.get(SHARED_WIDTH, int, shared * width) != shared * width:
        metadata.refuse(f"has shared experts that are not {shared} of {width} columns")
    return sizes(metadata, width) | {
        "model_type": "cohere2_moe",
        "intermediate_size": width,
        "prefix_dense_intermediate_size": metadata.get("feed_forward_length", int, width),
        "first_k_dense_replace": metadata.get("leading_dense_block_count", int),
        "num_experts": count,
        "num_experts_per_tok": used,
        "num_shared_experts": shared,
        "expert_selection_fn": "sigmoid",
        "norm_topk_prob": metadata.get("expert_weights_norm", bool, False),
        "sliding_window": metadata.get(WINDOW, int),
        "layer_types": layer_types(metadata, 4),
        "rope_parameters": rope(metadata),
        # 0 stands for no factor, as in llama.cpp.
        "logit_scale": metadata.get("logit_scale", float, 0.0) or 1.0,
        "hidden_act": "silu",
        **_epsilon(metadata),
    }


def _epsilon(metadata: Metadata) -> dict[str, Any]:
    """The epsilon of the norms: they are RMS norms if the file states an epsilon of these, else layer norms."""
    if metadata.has("attention.layer_norm_rms_epsilon"):
        return {"rms_norm_eps": metadata.get("attention.layer_norm_rms_epsilon", float)}
    return {"layer_norm_eps": metadata.get("attention.layer_norm_epsilon", float)}


PARTS = ATTENTION | GATED | ROUTER | SHARED | {"input_layernorm": "attn_norm"}
ARCHITECTURES = {"cohere2moe": Architecture(_cohere2_moe, KNOWN_OF_COHERE, parts=PARTS)}
