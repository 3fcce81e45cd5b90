"""Keys of config.json that transformers does not read although they change what a model computes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from outrider.workers.errors import ModelError

# What transformers computes, whatever an MPT says.
OF_MPT: dict[str, tuple[Any, ...]] = {
    "no_bias": (True,),
    "norm_type": ("low_precision_layernorm", "layernorm"),
    "expansion_ratio": (4,),
    "logit_scale": (None,),
}
OF_MPT_ATTENTION: dict[str, tuple[Any, ...]] = {
    "alibi": (True,),
    "alibi_bias_max": (8,),
    "attn_type": ("multihead_attention",),
    "prefix_lm": (False,),
    "qk_ln": (False,),
}


def refuse_unread(config: Mapping[str, Any], source: str) -> None:
    """Refuse a model that the hf engine would compute otherwise than its configuration says."""
    if config.get("model_type") != "mpt":
        return
    _refuse_others(config, OF_MPT, source)
    if isinstance(attention := config.get("attn_config"), Mapping):
        _refuse_others(attention, OF_MPT_ATTENTION, f'{source}: "attn_config"')


def _refuse_others(config: Mapping[str, Any], computed: Mapping[str, tuple[Any, ...]], source: str) -> None:
    for key, values in computed.items():
        if (found := config.get(key)) is not None and found not in values:
            raise ModelError(
                f'{source}: transformers does not read "{key}": {found!r}, so the hf engine would compute another model; '
                "the native engine may know it"
            )
