"""A GGUF file's metadata as the config.json that the model was converted from would have it."""

from __future__ import annotations

from typing import Any

from outrider.workers.models.formats.gguf.architectures import architecture_of
from outrider.workers.models.formats.gguf.end_tokens import TOKENIZER, end_tokens
from outrider.workers.models.formats.gguf.file import GgufFile
from outrider.workers.models.formats.gguf.metadata import Metadata

SPLIT = "split.count"


def config_of(file: GgufFile) -> dict[str, Any]:
    metadata = Metadata(file)
    if file.metadata.get(SPLIT, 1) not in (0, 1):
        metadata.refuse(f"is one of {file.metadata[SPLIT]} parts: join them first (llama-gguf-split --merge)")
    architecture = architecture_of(metadata)
    metadata.check_known(architecture.known)
    return _shared(metadata) | architecture.config(metadata)


def _shared(metadata: Metadata) -> dict[str, Any]:
    """What is read in the same way of all; an architecture may know better."""
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
        # As in generation_config.json: it is told that these are not followed.
        "suppress_tokens": metadata.values.get(f"{TOKENIZER}suppress_tokens") or None,
        # fp16, which the kernels do not have, is kept as fp32.
        "dtype": "bfloat16" if any(entry.type == "BF16" for entry in metadata.file.tensors.values()) else "float32",
    }
