"""Converts a GGUF file's metadata to the config.json of the model that it was made from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from outrider.workers.models.formats.gguf.architectures import architecture_of
from outrider.workers.models.formats.gguf.end_tokens import TOKENIZER, end_tokens
from outrider.workers.models.formats.gguf.file import GgufFile
from outrider.workers.models.formats.gguf.metadata import Metadata

# The keys of generation_config.json that llama.cpp's converter keeps, by its names.
SAMPLING = {"temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p"}
PENALTY = "general.sampling.penalty_repeat"


def config_of(file: GgufFile) -> dict[str, Any]:
    metadata = Metadata(file)
    architecture = architecture_of(metadata)
    metadata.check_known(architecture.known)
    return _shared(metadata) | architecture.config(metadata)


def _shared(metadata: Metadata) -> dict[str, Any]:
    """The keys that all architectures have; an architecture's own take precedence."""
    tokens = metadata.values.get(f"{TOKENIZER}tokens")
    embedding = metadata.file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        metadata.refuse('lacks the tensor "token_embd.weight"')
    if not isinstance(tokens, list):
        metadata.refuse(f'has no "{TOKENIZER}tokens"')
    return {
        "vocab_size": embedding.shape[0],
        "tie_word_embeddings": not metadata.has_tensor("output.weight"),
        "eos_token_id": end_tokens(metadata.values) or None,
        **_generation(metadata.values),
        # fp16, which the kernels do not have, is kept as fp32.
        "dtype": "bfloat16" if any(entry.type == "BF16" for entry in metadata.file.tensors.values()) else "float32",
    }


def _generation(values: Mapping[str, Any]) -> dict[str, Any]:
    """The generation settings, under generation_config.json's keys."""
    sampling = {setting: values.get(f"general.sampling.{name}") for name, setting in SAMPLING.items()}
    stated = {setting: value for setting, value in sampling.items() if value is not None}
    found = {"do_sample": True, **stated} if stated else {}
    if PENALTY in values:
        found["repetition_penalty"] = values[PENALTY]
    return found | {"suppress_tokens": values.get(f"{TOKENIZER}suppress_tokens") or None}
