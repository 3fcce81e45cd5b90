"""The size of the KV cache a token, in numbers, by config.json: for planning models that the native engine does not run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from outrider.workers.models.size_check import LAYERS, WIDTHS

QUERY_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
KEY_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num")
# Latent attention in transformers' cache: the keys of each head have two parts.
LATENT = ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")


def cached_numbers(config: Mapping[str, Any]) -> int | None:
    """Keys and values of one token in all layers, in numbers; None where the configuration does not tell."""
    layers, heads = _first(config, LAYERS), _first(config, QUERY_HEADS)
    kinds = config.get("layer_types")
    if isinstance(kinds, list):
        # Other kinds of layers have no keys and values.
        layers = sum("attention" in str(kind) and "linear" not in str(kind) for kind in kinds)
    if layers is None or heads is None:
        return None
    latent = [_first(config, (key,)) for key in LATENT]
    if all(latent):
        return layers * heads * sum(filter(None, latent))
    width = _first(config, WIDTHS)
    size = _first(config, ("head_dim",)) or (None if width is None else width // heads)
    if size is None:
        return None
    multi_query = config.get("multi_query") is True and config.get("new_decoder_architecture") is not True
    return 2 * layers * (1 if multi_query else _first(config, KEY_HEADS) or heads) * size


def _first(config: Mapping[str, Any], keys: tuple[str, ...]) -> int | None:
    """The first of these keys that has a positive whole number (some families have null or a list there)."""
    return next((config[key] for key in keys if type(config.get(key)) is int and config[key] > 0), None)
