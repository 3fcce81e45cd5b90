"""How many numbers of keys and values a token has in a cache, by config.json: for plans of models that are not native."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from outrider.workers.models.size_check import LAYERS, WIDTHS

QUERY_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
KEY_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num")
# Of latent attention, as transformers hands it over: each head has keys of two parts.
LATENT = ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")


def cached_numbers(config: Mapping[str, Any]) -> int | None:
    """Of a language model's configuration; None where it does not say."""
    layers, heads = _first(config, LAYERS), _first(config, QUERY_HEADS)
    kinds = config.get("layer_types")
    if isinstance(kinds, list):
        # Layers of another kind keep no keys.
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
    alone = config.get("multi_query") is True and config.get("new_decoder_architecture") is not True
    return 2 * layers * (1 if alone else _first(config, KEY_HEADS) or heads) * size


def _first(config: Mapping[str, Any], keys: tuple[str, ...]) -> int | None:
    """Some families say nothing under a name, or have a list there."""
    return next((config[key] for key in keys if type(config.get(key)) is int and config[key] > 0), None)
