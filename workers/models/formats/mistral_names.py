"""Mistral Large 4's tensors by transformers' names, from those of its makers, by which transformers writes it, too."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TypeVar

# The "model_type"s whose checkpoints have these names.
KINDS = ("mistral_large4", "mistral_large4_text")
BEGINNINGS = {
    "tok_embeddings.": "model.embed_tokens.",
    "lerope.": "model.rotary_emb.",
    "layers.": "model.layers.",
    "norm.": "model.norm.",
    "output.": "lm_head.",
}
LAYER = re.compile(r"(model\.layers\.\d+\.)(\w+\.)(.*)")
PARTS = {
    "attention.": "self_attn.",
    "attention_norm.": "input_layernorm.",
    "ffn_norm.": "post_attention_layernorm.",
    "feed_forward.": "mlp.",
    "gate.": "mlp.gate.",
    "experts.": "mlp.experts.",
    "shared_experts.": "mlp.shared_experts.",
}
OF_ATTENTION = {
    "wq.": "q_proj.",
    "wkv_a_with_mqa.": "kv_a_proj_with_mqa.",
    "wkv_b.": "kv_b_proj.",
    "wo.": "o_proj.",
    "kv_a_norm.": "kv_a_layernorm.",
    "ssmax_scaling.s": "softmax_scaling.scale",
    "ssmax_scaling.b": "softmax_scaling.bias",
}
MATRICES = {"w1.": "gate_proj.", "w2.": "down_proj.", "w3.": "up_proj."}
OF_AN_EXPERT = re.compile(r"(\d+\.)(.*)")

Found = TypeVar("Found")


def as_transformers_names(tensors: Mapping[str, Found]) -> dict[str, Found]:
    return {renamed(name): tensor for name, tensor in tensors.items()}


def renamed(name: str) -> str:
    """The name in transformers, which may be the name itself."""
    name = _begun_otherwise(name, BEGINNINGS)
    if not (found := LAYER.fullmatch(name)):
        return name
    layer, part, rest = found.groups()
    if part == "attention.":
        rest = _begun_otherwise(rest, OF_ATTENTION)
    elif part in ("feed_forward.", "shared_experts."):
        rest = _begun_otherwise(rest, MATRICES)
    elif part == "experts." and (one := OF_AN_EXPERT.fullmatch(rest)):
        rest = one[1] + _begun_otherwise(one[2], MATRICES)
    return f"{layer}{PARTS.get(part, part)}{rest}"


def _begun_otherwise(name: str, beginnings: Mapping[str, str]) -> str:
    for theirs, ours in beginnings.items():
        if name.startswith(theirs):
            return ours + name.removeprefix(theirs)
    return name
