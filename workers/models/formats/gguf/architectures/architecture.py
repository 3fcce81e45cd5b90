"""The description of a GGUF architecture: its configuration, and the names and layout of its tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.workers.models.formats.gguf.metadata import Metadata

Floats = NDArray[np.float32]
Values = Mapping[str, Any]
# Keys of every architecture that are read, or change no logit; after the architecture's name.
KNOWN_NAMES = """
block_count context_length embedding_length feed_forward_length vocab_size attention.head_count attention.head_count_kv
attention.key_length attention.value_length attention.layer_norm_rms_epsilon attention.layer_norm_epsilon
rope.dimension_count rope.freq_base rope.scaling.type rope.scaling.factor
rope.scaling.original_context_length rope.scaling.finetuned rope.scaling.attn_factor rope.scaling.yarn_beta_fast
rope.scaling.yarn_beta_slow rope.scaling.yarn_attn_factor
"""
KNOWN = frozenset(KNOWN_NAMES.split())
# The tensor of the divisors of rope's frequencies.
ROPE_FACTORS = "rope_freqs.weight"
# GGUF's names of a layer's modules, by Llama's names.
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
    """w from 1 + w, which llama.cpp's converter stores for norms that multiply by 1 + w."""
    return values - np.float32(1)


def of_stream(name: str, stream: int) -> str:
    """The name of one stream's matrix in a tensor that holds those of several streams."""
    return f"{name} of stream {stream}"


def as_they_are(config: Values, part: str, count: int) -> NDArray[np.int64] | None:
    return None


@dataclass(frozen=True, slots=True)
class Architecture:
    """``config`` makes the keys of config.json that are particular to the architecture.

    ``known`` are the metadata keys that it reads, or that change no logit; all others are refused.
    ``layers``: the prefix of the family's names of a layer's tensors. ``parts``: GGUF's names, after the layer's number, of
    the family's modules (weight and bias) or single tensors. ``whole``: the same for tensors outside of layers.
    ``order``: (configuration, part or whole, rows) -> the row in the file of each row of the family (None: the same).
    ``columns``: (configuration, part or whole, columns) -> the input channel of each column in the file (None: the same).
    ``changes``: functions on the float32 values of a module's or a single tensor (never on codes).
    ``in_config``: tensors from which the configuration is made. ``numbers``: metadata keys that hold scalar tensors.
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
