"""The attention masks of transformers' models (causal, window, chunk), for rows concatenated to one flat sequence.

transformers describes a mask as a function of (batch, head, query's position, key's position), composed of a few known
parts. A ragged pass needs it in the positions of each row, so the parts are recognised here and applied by row. An unknown
part is refused. Only this file uses these internals of transformers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import AttentionMaskInterface

from outrider.workers.errors import ModelError

ATTENTION_NAME = "outrider_ragged"


class NotHonoured(ModelError):
    """A model's attention has a feature that the engine does not compute; the sentence names it."""


@dataclass(slots=True)
class RaggedMask:
    """Each token sees itself and those before it in its row: at most ``window`` of them, none of an earlier chunk."""

    window: int | None = None
    chunk: int | None = None
    # By (past, count). A mask lives for one pass, and its layers of one kind share it.
    _made: dict[tuple[int, int], tuple[int, torch.Tensor | None]] = field(default_factory=dict)

    def of(self, past: int, count: int, device: torch.device) -> tuple[int, torch.Tensor | None]:
        """For ``count`` queries after ``past`` tokens: the first key that any of them attends to, and the mask [queries,
        keys] from that key on (None: all of them)."""
        made = self._made.get((past, count))
        if made is None:
            made = self._made[past, count] = self._make(past, count, device)
        return made

    def _make(self, past: int, count: int, device: torch.device) -> tuple[int, torch.Tensor | None]:
        first = 0
        if self.window is not None:
            first = max(first, past + 1 - self.window)
        if self.chunk is not None:
            first = max(first, past // self.chunk * self.chunk)
        if count == 1:
            return first, None
        positions = torch.arange(past, past + count, device=device)[:, None]
        keys = torch.arange(first, past + count, device=device)[None]
        seen = keys <= positions
        if self.window is not None:
            seen &= keys > positions - self.window
        if self.chunk is not None:
            seen &= keys // self.chunk == positions // self.chunk
        return first, seen


def describe(mask_function: Callable[..., Any]) -> RaggedMask:
    """The mask that a mask function of transformers computes; NotHonoured where a part of it is unknown."""
    mask = RaggedMask()
    causal = False
    for name, held in _parts(mask_function):
        if name == "causal_mask_function":
            causal = True
        elif name == "sliding_window_overlay":
            mask.window = _least(mask.window, held["sliding_window"])
        elif name == "chunked_overlay":
            if mask.chunk not in (None, held["chunk_size"]):
                raise NotHonoured("attention in chunks of two sizes at once")
            mask.chunk = int(held["chunk_size"])
        else:
            raise NotHonoured(f'a mask of its own ("{name}")')
    if not causal:
        raise NotHonoured("attention to tokens that come later")
    return mask


def _least(known: int | None, other: int) -> int:
    return int(other) if known is None else min(known, int(other))


def _parts(function: Callable[..., Any]) -> list[tuple[str, dict[str, Any]]]:
    """The names of the factories whose masks are combined by "and", with what each was given."""
    name = function.__qualname__.partition(".")[0]
    held = _closure(function)
    if name == "and_masks":
        return [part for inner in held["mask_functions"] for part in _parts(inner)]
    return [(name, held)]


def _closure(function: Callable[..., Any]) -> dict[str, Any]:
    names = function.__code__.co_freevars
    return dict(zip(names, (cell.cell_contents for cell in function.__closure__ or ()), strict=True))


def make_mask(*, mask_function: Callable[..., Any], **_: Any) -> RaggedMask:
    """transformers calls this instead of building a tensor. Rows have no padding, so the other arguments are not needed."""
    return describe(mask_function)


AttentionMaskInterface.register(ATTENTION_NAME, make_mask)
