"""What the layers of a quantisation library are made of, and whether each of them takes every token by itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from transformers import PreTrainedModel

# How much larger than a token its company becomes.
LOUDER = 97.0


def parts_of(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensor, or those that a library's own kind of tensor holds: it knows few of torch's operations itself."""
    if not is_traceable_wrapper_subclass(tensor):
        yield tensor
        return
    names, _ = tensor.__tensor_flatten__()
    for name in names:
        yield from parts_of(getattr(tensor, name))


@torch.inference_mode()
def layer_that_mixes(model: PreTrainedModel, tokens: torch.Tensor) -> str | None:
    """The first layer by which a token's numbers depend on the other tokens of its pass: these share a scale, or outliers.

    Each layer gets its input once more, with the first token as it was and the others much larger. The shape is the same
    and so are the kernels: what takes every token by itself gives the first one the same bits.
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
        # A kernel that sums in an order of the moment gives other bits each time, whatever the others are.
        if not _same_first(layer.forward(louder), result) and _same_first(layer.forward(tokens), result):
            found.append(name)

    return check


def _same_first(one: torch.Tensor, other: torch.Tensor) -> bool:
    same: bool = torch.equal(one[..., :1, :], other[..., :1, :])
    return same
