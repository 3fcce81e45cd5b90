"""Llama, Mistral and Mixtral, and Qwen's dense models."""

from __future__ import annotations

from typing import Any

from outrider.workers.models.formats.gguf.architectures.architecture import Architecture
from outrider.workers.models.formats.gguf.architectures.rows import interleaved
from outrider.workers.models.formats.gguf.architectures.sizes import biased, llama_style
from outrider.workers.models.formats.gguf.metadata import Metadata


def _llama(metadata: Metadata) -> dict[str, Any]:
    has_bias = biased(metadata)
    config = llama_style(metadata) | {"hidden_act": "silu", "attention_bias": has_bias}
    window = metadata.get("attention.sliding_window", int, 0)
    if window and has_bias:
        metadata.refuse("has a sliding window and biases, which no family has that the native engine knows")
    if window:
        del config["attention_bias"]
        return config | {"model_type": "mistral", "sliding_window": window}
    return config | {"model_type": "llama"}


def _qwen2(metadata: Metadata) -> dict[str, Any]:
    return llama_style(metadata) | {"model_type": "qwen2", "hidden_act": "silu"}


def _qwen3(metadata: Metadata) -> dict[str, Any]:
    return llama_style(metadata) | {"model_type": "qwen3", "hidden_act": "silu", "attention_bias": biased(metadata)}


ARCHITECTURES = {
    "llama": Architecture(_llama, order=interleaved),
    "qwen2": Architecture(_qwen2),
    "qwen3": Architecture(_qwen3),
}
