"""Phi 1 to 2, Phi 3 and 4 with their fused projections, and Phi-3.5-MoE."""

from __future__ import annotations

from typing import Any

from outrider.workers.models.formats.gguf.architectures.architecture import (
    ATTENTION,
    KNOWN,
    LLAMA_PARTS,
    NORMS_BEFORE,
    ROPE_FACTORS,
    WHOLE,
    Architecture,
)
from outrider.workers.models.formats.gguf.architectures.experts import KNOWN_OF_EXPERTS, experts
from outrider.workers.models.formats.gguf.architectures.sizes import (
    base,
    biased,
    factors,
    rms_epsilon,
    rope,
    sizes,
    turned_part,
)
from outrider.workers.models.formats.gguf.architectures.windows import WINDOW
from outrider.workers.models.formats.gguf.metadata import Metadata
from outrider.workers.models.headers import quoted

SHORT, LONG = "rope_factors_short.weight", "rope_factors_long.weight"
# Phi-3.5-MoE: (original context, extended context), and the factor of sines and cosines.
LENGTHS_OF_MOE, FACTOR_OF_MOE = (4096, 131072), 1.243163121016122
FUSED = {
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
PLAIN = ATTENTION | {
    "self_attn.dense": "attn_output",
    "mlp.fc1": "ffn_up",
    "mlp.fc2": "ffn_down",
    "input_layernorm": "attn_norm",
}


def _phi2(metadata: Metadata) -> dict[str, Any]:
    return sizes(metadata) | {
        "model_type": "phi",
        "hidden_act": "gelu_new",
        "layer_norm_eps": metadata.get("attention.layer_norm_epsilon", float),
        "rope_parameters": rope(metadata, partial=True),
    }


def _phi3(metadata: Metadata) -> dict[str, Any]:
    """A window of 0 stands for none. (llama.cpp itself ignores the window that a file states.)"""
    return (
        sizes(metadata)
        | rms_epsilon(metadata)
        | {
            "model_type": "phi3",
            "hidden_act": "silu",
            "sliding_window": metadata.get(WINDOW, int, 0) or None,
            "rope_parameters": turned_part(metadata) | long_rope(metadata)
            if metadata.has_tensor(LONG)
            else rope(metadata, partial=True),
            "original_max_position_embeddings": _original(metadata),
        }
    )


def _phimoe(metadata: Metadata) -> dict[str, Any]:
    count, used = experts(metadata)
    return (
        sizes(metadata)
        | rms_epsilon(metadata)
        | {
            "model_type": "phimoe",
            "hidden_act": "silu",
            "num_local_experts": count,
            "num_experts_per_tok": used,
            "attention_bias": biased(metadata),
            "lm_head_bias": metadata.has_tensor("output.bias"),
            "sliding_window": metadata.get(WINDOW, int, 0) or None,
            "rope_parameters": _with_factors_of_moe(metadata) if metadata.has_tensor(LONG) else rope(metadata),
        }
    )


def _with_factors_of_moe(metadata: Metadata) -> dict[str, Any]:
    """GGUF has no key for Phi-3.5-MoE's factor of sines and cosines, which does not follow from the two lengths."""
    original, context = _original(metadata), metadata.get("context_length", int)
    if (original, context) != LENGTHS_OF_MOE:
        metadata.refuse(f"has long rope from {original} to {context} tokens; of phimoe only that of Phi-3.5-MoE is known")
    scaling = turned_part(metadata, partial=False) | long_rope(metadata)
    del scaling["attention_factor"]
    factors_of_both = {"short_mscale": FACTOR_OF_MOE, "long_mscale": FACTOR_OF_MOE}
    return scaling | factors_of_both | {"original_max_position_embeddings": original}


def _original(metadata: Metadata) -> int:
    return int(metadata.get("rope.scaling.original_context_length", int, metadata.get("context_length", int)))


def long_rope(metadata: Metadata) -> dict[str, Any]:
    if not metadata.has_tensor(SHORT):
        metadata.refuse(f"has a {quoted(LONG)} and no {quoted(SHORT)}")
    kind = metadata.get("rope.scaling.type", str, "longrope")
    if kind != "longrope" or metadata.has_tensor(ROPE_FACTORS):
        metadata.refuse(f"has both a {quoted(LONG)} and another rope scaling")
    return {
        "rope_type": "longrope",
        "rope_theta": base(metadata),
        "short_factor": factors(metadata.file, SHORT),
        "long_factor": factors(metadata.file, LONG),
        "attention_factor": metadata.get("rope.scaling.attn_factor", float, 1.0),
    }


ARCHITECTURES = {
    "phi2": Architecture(_phi2, parts=PLAIN, whole=WHOLE | {"model.final_layernorm": "output_norm"}),
    "phi3": Architecture(_phi3, KNOWN | {WINDOW}, parts=FUSED | NORMS_BEFORE, in_config=frozenset({SHORT, LONG})),
    "phimoe": Architecture(
        _phimoe,
        KNOWN_OF_EXPERTS | {WINDOW},
        parts=LLAMA_PARTS | {"mlp.router": "ffn_gate_inp"},
        in_config=frozenset({SHORT, LONG}),
    ),
}
