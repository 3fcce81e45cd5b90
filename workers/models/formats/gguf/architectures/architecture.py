"""What a GGUF architecture says of its files: their configuration, and how the family's tensors lie in them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.workers.models.formats.gguf.metadata import Metadata

Floats = NDArray[np.float32]
Values = Mapping[str, Any]
# What says nothing about logits, or what other keys say as well; behind the architecture's name.
KNOWN_NAMES = """
block_count context_length embedding_length feed_forward_length vocab_size attention.head_count attention.head_count_kv
attention.key_length attention.value_length attention.layer_norm_rms_epsilon attention.layer_norm_epsilon
rope.dimension_count rope.freq_base rope.scaling.type rope.scaling.factor
rope.scaling.original_context_length rope.scaling.finetuned rope.scaling.attn_factor rope.scaling.yarn_beta_fast
rope.scaling.yarn_beta_slow rope.scaling.yarn_attn_factor
"""
KNOWN = frozenset(KNOWN_NAMES.split())
# What each frequency of rope is divided by.
ROPE_FACTORS = "rope_freqs.weight"
# GGUF's name of each part of a layer, by the names of Llama's family.
ATTENTION = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
}
GATED = {"mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down"}
NORMS_BEFORE = {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}
LLAMA_PARTS = ATTENTION | GATED | NORMS_BEFORE
WHOLE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def less_one(values: Floats) -> Floats:
    """Of norms that multiply by 1 + w, which llama.cpp's converter stores as that sum."""
    return values - np.float32(1)


def of_stream(name: str, stream: int) -> str:
    """One of the matrices that lie together in a tensor of the file."""
    return f"{name} of stream {stream}"


def as_they_are(config: Values, part: str, count: int) -> NDArray[np.int64] | None:
    return None


@dataclass(frozen=True, slots=True)
class Architecture:
    """``config``: what config.json would say, beside what is read of all files in the same way.

    ``known`` are the keys of metadata that it reads, or that change no logit; all others are refused.
    ``layers``: how the family's names of a layer's tensors begin. ``parts``: GGUF's names, behind the layer's number, of
    the family's modules (whose weight and bias have the same ending), or of single tensors. ``whole``: the same of what no
    layer has.
    ``order``: (configuration, part or whole, rows) -> where in the file each row lies; None: in its own place.
    ``columns``: (configuration, part or whole, columns) -> of each column in the file the input that it multiplies.
    ``changes``: what is done to the values of a module's tensors, or of single ones (never of codes), as float32.
    ``in_config``: tensors that the configuration is made from. ``numbers``: the keys of metadata that hold, for all
    layers, tensors of one number.
    """

    config: Callable[[Metadata], dict[str, Any]]
    known: frozenset[str] = KNOWN
    layers: str = "model.layers."
    parts: Mapping[str, str] = field(default_factory=lambda: LLAMA_PARTS)
    whole: Mapping[str, str] = field(default_factory=lambda: WHOLE)
    order: Callable[[Values, str, int], NDArray[np.int64] | None] = as_they_are
    columns: Callable[[Values, str, int], NDArray[np.int64] | None] = as_they_are
    changes: Mapping[str, Callable[[Floats], Floats]] = field(default_factory=dict)
    in_config: frozenset[str] = frozenset({ROPE_FACTORS})
    numbers: Mapping[str, str] = field(default_factory=dict)
