"""The mask token of a parallel draft, from its configuration; unsupported kinds of parallel drafts are refused.

A PARD draft is an ordinary causal model whose configuration names a mask token. PARD-2 and DFlash name one too, but feed
their drafts hidden states of the target, without which they would propose noise.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from outrider.workers.errors import ModelError
from outrider.workers.models.config_file import config_path, read_config
from outrider.workers.models.headers import quoted

NAMES = ("pard_token", "ptd_token_id")
DFLASH, DFLASH_NAME = "dflash_config", "mask_token_id"
# The ends of the class names of causal models.
CAUSAL = ("ForCausalLM", "LMHeadModel")


def mask_token_of(model: Path) -> int | None:
    """The mask token of a parallel draft; None for an ordinary model."""
    config, source = read_config(model), str(config_path(model))
    named, vocabulary = dict(_named(config)), config.get("vocab_size")
    found: set[int] = set()
    for key, token in named.items():
        if type(token) is not int or type(vocabulary) is not int or not 0 <= token < vocabulary:
            raise ModelError(f'{source}: "{key}" must be the id of one of {vocabulary} tokens, got {quoted(token)}')
        found.add(token)
    if not found:
        return None
    if len(found) > 1:
        raise ModelError(f"{source} names several mask tokens ({', '.join(named)}): a parallel draft has one")
    wanting = list(_not_honoured(config))
    if wanting:
        raise ModelError(
            f"{source} is of a parallel draft that reads hidden states of its target ({', '.join(wanting)}), which is "
            "not supported: choose one that was adapted as PARD does it, or one that proposes token by token"
        )
    return found.pop()


def _named(config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name in NAMES:
        if config.get(name) is not None:
            yield name, config[name]
    dflash = config.get(DFLASH)
    if isinstance(dflash, Mapping) and dflash.get(DFLASH_NAME) is not None:
        yield f"{DFLASH}.{DFLASH_NAME}", dflash[DFLASH_NAME]


def _not_honoured(config: Mapping[str, Any]) -> Iterator[str]:
    if config.get("spd_type") not in (None, "pard"):
        yield f'"spd_type": {quoted(config["spd_type"])}'
    yield from (f'"{key}"' for key, value in config.items() if key.startswith("pard2") and value)
    if isinstance(dflash := config.get(DFLASH), Mapping):
        yield from (f'"{DFLASH}.{key}"' for key in dflash if key != DFLASH_NAME)
    architectures = config.get("architectures") or []
    for name in architectures if isinstance(architectures, list) else [architectures]:
        if not str(name).endswith(CAUSAL):
            yield f'"architectures": {quoted(name)}'
