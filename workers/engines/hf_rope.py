"""Rotary positions that depend on how long a row is, in passes over many rows.

A model with long rope has two sets of frequencies: one for rows up to the length it was trained on first (the switch), one
for longer rows. transformers picks one for a whole pass, by the largest position in it; rows that lie in one pass need one
each, so here the model's own module is asked once for either set.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

LONG = "longrope"


@dataclass(frozen=True, slots=True)
class Switch:
    """Rows of more than ``length`` tokens take the long frequencies.

    ``anew``: when a row grows beyond it, all of its keys are computed again with them, as for Phi 3; else the keys that it
    has stay as they are. Both are what transformers' own generation does, by family.
    """

    length: int
    anew: bool

    def long(self, tokens: int, prompt: int) -> bool:
        """Whether a row of so many tokens, this many of them given, is on the far side."""
        return max(tokens, prompt) > self.length


class RopeByToken:
    """Holds, while a pass runs, which of its tokens (1, tokens) take the long frequencies."""

    def __init__(self, modules: Sequence[torch.nn.Module] = ()) -> None:
        self.long: torch.Tensor | None = None
        self._modules = modules

    def release(self) -> None:
        for module in self._modules:
            del module.forward  # of the object; its class has its own


def find_switch(model: PreTrainedModel) -> Switch | None:
    """Where the model's rope changes; None where it does not."""
    lengths = {_length(module) for module in _long_modules(model)}
    if not lengths:
        return None
    # Where there are several, which does not happen, the first decides and the probe finds out whether that is right.
    length = min(lengths)
    text = model.config.get_text_config(decoder=True)
    overwritten = "original_max_position_embeddings" in inspect.getsource(type(model).prepare_inputs_for_generation)
    return Switch(length, overwritten and hasattr(text, "original_max_position_embeddings"))


def rope_by_token(model: PreTrainedModel) -> RopeByToken:
    """Have the model's long rope ask what is returned, and not the largest position of the pass."""
    modules = _long_modules(model)
    choice = RopeByToken(modules)
    for module in modules:
        module.forward = functools.partial(_forward, choice, module.forward, _length(module))
    return choice


def _forward(
    choice: RopeByToken,
    original: Callable[..., tuple[torch.Tensor, torch.Tensor]],
    switch: int,
    x: torch.Tensor,
    position_ids: torch.Tensor,
    *others: Any,
    **named: Any,
) -> tuple[torch.Tensor, ...]:
    long = choice.long
    if long is None:
        return original(x, position_ids, *others, **named)

    def frequencies(last: int) -> tuple[torch.Tensor, ...]:
        """By a further position, which decides: no other is larger than the switch unless the row is."""
        within = position_ids if last else position_ids.clamp(max=switch - 1)
        further = torch.full_like(position_ids[..., :1], last)
        found = original(x, torch.cat([within, further], dim=-1), *others, **named)
        return tuple(each[..., :-1, :] for each in found)

    if not long.any():
        return frequencies(0)
    if long.all():
        return frequencies(switch)
    chosen = long.view(1, -1, 1)
    return tuple(torch.where(chosen, far, near) for near, far in zip(frequencies(0), frequencies(switch), strict=True))


def _long_modules(model: PreTrainedModel) -> list[torch.nn.Module]:
    def is_long(kind: object) -> bool:
        return LONG in kind.values() if isinstance(kind, dict) else kind == LONG

    return [module for module in model.modules() if is_long(getattr(module, "rope_type", None))]


def _length(module: torch.nn.Module) -> int:
    parameters = module.config.rope_parameters
    if "original_max_position_embeddings" not in parameters:  # by kind of layer
        [parameters] = [each for each in parameters.values() if isinstance(each, dict) and each.get("rope_type") == LONG]
    return int(parameters["original_max_position_embeddings"])
