"""EXAONE 3 to 4."""

from __future__ import annotations

from typing import Any

from outrider.workers.models.formats.gguf.architectures.architecture import ATTENTION, GATED, KNOWN, Architecture
from outrider.workers.models.formats.gguf.architectures.olmo import BEHIND
from outrider.workers.models.formats.gguf.architectures.sizes import llama_style
from outrider.workers.models.formats.gguf.architectures.windows import KNOWN_OF_WINDOWS, WINDOW, layer_types, same_base
from outrider.workers.models.formats.gguf.metadata import Metadata

PARTS = {
    "attn.attention.q_proj": "attn_q",
    "attn.attention.k_proj": "attn_k",
    "attn.attention.v_proj": "attn_v",
    "attn.attention.out_proj": "attn_output",
    "mlp.c_fc_0": "ffn_gate",
    "mlp.c_fc_1": "ffn_up",
    "mlp.c_proj": "ffn_down",
    "ln_1": "attn_norm",
    "ln_2": "ffn_norm",
}
WHOLE = {"transformer.wte": "token_embd", "transformer.ln_f": "output_norm", "lm_head": "output"}


def _exaone(metadata: Metadata) -> dict[str, Any]:
    config = llama_style(metadata)
    layers, epsilon = config.pop("num_hidden_layers"), config.pop("rms_norm_eps")
    own = {"num_layers": layers, "layer_norm_epsilon": epsilon, "activation_function": "silu"}
    return config | own | {"model_type": "exaone"}


def _exaone4(metadata: Metadata) -> dict[str, Any]:
    """If some layers have a window, only those have rope."""
    same_base(metadata)
    config = llama_style(metadata) | {"model_type": "exaone4", "hidden_act": "silu", "sliding_window": None}
    if not (window := metadata.get(WINDOW, int, 0)):
        return config
    return config | {"sliding_window": window, "layer_types": layer_types(metadata, 4)}


ARCHITECTURES = {
    "exaone": Architecture(_exaone, layers="transformer.h.", parts=PARTS, whole=WHOLE),
    "exaone4": Architecture(_exaone4, KNOWN | KNOWN_OF_WINDOWS, parts=ATTENTION | GATED | BEHIND),
}
