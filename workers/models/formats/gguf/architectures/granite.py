"""Granite: Llama's layers, with multipliers."""

from __future__ import annotations

from typing import Any

from outrider.workers.models.formats.gguf.architectures.architecture import KNOWN, Architecture
from outrider.workers.models.formats.gguf.architectures.rows import interleaved
from outrider.workers.models.formats.gguf.architectures.sizes import biased, head_size, llama_style, mlp_biased
from outrider.workers.models.formats.gguf.metadata import Metadata

# As the file names them, and as config.json does.
MULTIPLIERS = {
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
}
KNOWN_OF_GRANITE = KNOWN | MULTIPLIERS.keys() | {"attention.scale"}


def multipliers(metadata: Metadata) -> dict[str, Any]:
    """Here 0 is none, as in llama.cpp."""
    found = {name: metadata.get(key, float, 0.0) or 1.0 for key, name in MULTIPLIERS.items()}
    return found | {"attention_multiplier": metadata.get("attention.scale", float, 0.0) or head_size(metadata) ** -0.5}


def granite_style(metadata: Metadata) -> dict[str, Any]:
    # Of these architectures it says whether there is rope at all.
    if not metadata.get("rope.scaling.finetuned", bool, True):
        metadata.refuse_value("rope.scaling.finetuned")
    return llama_style(metadata) | multipliers(metadata) | {"hidden_act": "silu", "attention_bias": biased(metadata)}


def _granite(metadata: Metadata) -> dict[str, Any]:
    return granite_style(metadata) | {"model_type": "granite", "mlp_bias": mlp_biased(metadata)}


# Files of Granite 4 without recurrent layers tell of these all the same.
RECURRENT_NAMES = "ssm.conv_kernel ssm.state_size ssm.group_count ssm.inner_size ssm.time_step_rank"
RECURRENT = frozenset(RECURRENT_NAMES.split())
KNOWN_OF_DENSE = KNOWN_OF_GRANITE | RECURRENT | {"expert_shared_feed_forward_length"}
ARCHITECTURES = {"granite": Architecture(_granite, KNOWN_OF_DENSE, order=interleaved)}
