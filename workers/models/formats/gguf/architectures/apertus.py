"""Apertus: Llama with norms of heads and ungated feed-forward layers (xIELU, whose parameters are metadata)."""

from __future__ import annotations

from typing import Any

from outrider.workers.models.formats.gguf.architectures.architecture import ATTENTION, Architecture
from outrider.workers.models.formats.gguf.architectures.sizes import biased, llama_style
from outrider.workers.models.formats.gguf.metadata import Metadata

PARTS = ATTENTION | {
    "attention_layernorm": "attn_norm",
    "feedforward_layernorm": "ffn_norm",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
# Their keys do not begin with the architecture's name.
NUMBERS = {f"mlp.act_fn.{name}": f"xielu.{name}" for name in ("alpha_n", "alpha_p", "beta", "eps")}


def _apertus(metadata: Metadata) -> dict[str, Any]:
    return llama_style(metadata) | {
        "model_type": "apertus",
        "hidden_act": "xielu",
        "attention_bias": biased(metadata),
    }


ARCHITECTURES = {"apertus": Architecture(_apertus, parts=PARTS, numbers=NUMBERS)}
