"""StarCoder and SantaCoder (GPT-BigCode): one KV head, learned positions."""

from __future__ import annotations

from typing import Any

from outrider.workers.models.formats.gguf.architectures.architecture import Architecture
from outrider.workers.models.formats.gguf.metadata import Metadata

PARTS = {
    "attn.c_attn": "attn_qkv",
    "attn.c_proj": "attn_output",
    "mlp.c_fc": "ffn_up",
    "mlp.c_proj": "ffn_down",
    "ln_1": "attn_norm",
    "ln_2": "ffn_norm",
}
WHOLE = {
    "transformer.wte": "token_embd",
    "transformer.wpe": "position_embd",
    "transformer.ln_f": "output_norm",
    "lm_head": "output",
}


def _starcoder(metadata: Metadata) -> dict[str, Any]:
    heads = metadata.get("attention.head_count", int)
    kv_heads = metadata.get("attention.head_count_kv", int, heads)
    if kv_heads != 1:
        metadata.refuse(f"has {kv_heads} heads of keys, where this family has one")
    return {
        "model_type": "gpt_bigcode",
        "n_layer": metadata.get("block_count", int),
        "n_embd": metadata.get("embedding_length", int),
        "n_inner": metadata.get("feed_forward_length", int),
        "n_head": heads,
        "n_positions": metadata.get("context_length", int),
        "layer_norm_epsilon": metadata.get("attention.layer_norm_epsilon", float),
        "activation_function": "gelu_pytorch_tanh",
    }


ARCHITECTURES = {"starcoder": Architecture(_starcoder, layers="transformer.h.", parts=PARTS, whole=WHOLE)}
