"""GLM-4 and ERNIE 4.5: rope rotates neighbouring columns, in files as in checkpoints."""

from __future__ import annotations

from typing import Any

from outrider.workers.models.formats.gguf.architectures.architecture import (
    ATTENTION,
    LLAMA_PARTS,
    NORMS_BEFORE,
    Architecture,
)
from outrider.workers.models.formats.gguf.architectures.sizes import biased, llama_style
from outrider.workers.models.formats.gguf.metadata import Metadata

GLM = ATTENTION | NORMS_BEFORE | {"mlp.gate_up_proj": "ffn_up", "mlp.down_proj": "ffn_down"}
AROUND = {"post_self_attn_layernorm": "post_attention_norm", "post_mlp_layernorm": "post_ffw_norm"}


def _style(metadata: Metadata) -> dict[str, Any]:
    return llama_style(metadata, partial=True) | {"hidden_act": "silu", "attention_bias": biased(metadata)}


def _glm(metadata: Metadata) -> dict[str, Any]:
    return _style(metadata) | {"model_type": "glm"}


def _glm4(metadata: Metadata) -> dict[str, Any]:
    return _style(metadata) | {"model_type": "glm4"}


def _ernie(metadata: Metadata) -> dict[str, Any]:
    return llama_style(metadata) | {"model_type": "ernie4_5", "hidden_act": "silu", "use_bias": biased(metadata)}


ARCHITECTURES = {
    "chatglm": Architecture(_glm, parts=GLM),
    "glm4": Architecture(_glm4, parts=GLM | AROUND),
    "ernie4_5": Architecture(_ernie, parts=LLAMA_PARTS),
}
