"""Long rope (``longrope``) in passes over rows of different lengths.

Such a model has two sets of frequencies: short ones for rows up to its original context length (the switch), long ones for
longer rows. transformers chooses one set for a whole pass, by its largest position; here each row needs its own, so the
model's rope module is called once for either set.
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

    ``anew``: when a row grows beyond ``length``, all its keys are computed again (as for Phi 3); else its earlier keys keep
    the short frequencies. transformers' generation does one or the other, by family.
    """

    length: int
    anew: bool

    def long(self, tokens: int, prompt: int) -> bool:
        """Whether a row of this many tokens, with a prompt of ``prompt`` tokens, takes the long frequencies."""
        return max(tokens, prompt) > self.length


class RopeByToken:
    """``long`` says, while a pass runs, which of its tokens take the long frequencies."""

    def __init__(self, modules: Sequence[torch.nn.Module] = ()) -> None:
        self.long: torch.Tensor | None = None
        self._modules = modules

    def release(self) -> None:
        for module in self._modules:
            del module.forward  # the instance's attribute, which hides that of the class


def find_switch(model: PreTrainedModel) -> Switch | None:
    """Where the model's rope changes; None where it does not."""
    lengths = {_length(module) for module in _long_modules(model)}
    if not lengths:
        return None
    # No known model has several lengths. If one had, the probe would find out whether the smallest is right.
    length = min(lengths)
    text = model.config.get_text_config(decoder=True)
    overwritten = "original_max_position_embeddings" in inspect.getsource(type(model).prepare_inputs_for_generation)
    return Switch(length, overwritten and hasattr(text, "original_max_position_embeddings"))


def rope_by_token(model: PreTrainedModel) -> RopeByToken:
    """Patch the model's rope modules so that the returned object chooses the frequencies, not the largest position."""
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
        """The module chooses by the largest position, so ``last`` is appended as one more; the others are clamped for 0."""
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
