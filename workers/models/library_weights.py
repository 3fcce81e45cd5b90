"""Inspects the layers of quantisation libraries: their tensors, and whether they compute every token by itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from transformers import PreTrainedModel

# The factor by which the other tokens exceed the first one in the trial.
LOUDER = 97.0


def parts_of(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensor itself, or the plain tensors inside a library's tensor class, which supports few operations of torch."""
    if not is_traceable_wrapper_subclass(tensor):
        yield tensor
        return
    names, _ = tensor.__tensor_flatten__()
    for name in names:
        yield from parts_of(getattr(tensor, name))


@torch.inference_mode()
def layer_that_mixes(model: PreTrainedModel, tokens: torch.Tensor) -> str | None:
    """The first layer in which a token's result depends on the other tokens of the pass, since they share a scale or
    outliers.

    Each layer is run once more with the first token unchanged and the others much larger. With the same shape and so the
    same kernels, a layer that computes every token by itself gives the first one the same bits.
    """
    found: list[str] = []
    hooks = [
        layer.register_forward_hook(_check_of(name, found))
        for name, layer in model.named_modules()
        if hasattr(layer, "in_features")
    ]
    try:
        model(input_ids=tokens, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return found[0] if found else None


def _check_of(name: str, found: list[str]) -> Callable[[Any, tuple[Any, ...], Any], None]:
    def check(layer: torch.nn.Module, given: tuple[Any, ...], result: Any) -> None:
        if found or len(given) != 1 or not isinstance(result, torch.Tensor):
            return
        tokens = given[0]
        louder = tokens.clone()
        louder[..., 1:, :] = LOUDER * max(1.0, float(tokens.abs().max()))
        # A kernel without a fixed order of summation gives other bits each time, so it is run twice with the same input.
        if not _same_first(layer.forward(louder), result) and _same_first(layer.forward(tokens), result):
            found.append(name)

    return check


def _same_first(one: torch.Tensor, other: torch.Tensor) -> bool:
    same: bool = torch.equal(one[..., :1, :], other[..., :1, :])
    return same
