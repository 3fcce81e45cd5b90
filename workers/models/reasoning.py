"""A model's thoughts apart from its answer, where its chat template tells them apart by tags."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

OPENING_TAG, CLOSING_TAG = "<think>", "</think>"
# So many tokens may follow the tag at the end of a prompt: line feeds.
MOST_BEHIND = 2


class ReasoningTags(NamedTuple):
    """What stands around the thoughts: as text, and how the opening tag is told at a prompt's end."""

    opening: str
    closing: str
    opening_tokens: tuple[int, ...]


class Split(NamedTuple):
    reasoning: str | None
    content: str


def prompt_ends_inside(tags: ReasoningTags, prompt: Sequence[int]) -> bool:
    """Whether the template has opened the thoughts itself, so that the answer begins amid them."""
    length = len(tags.opening_tokens)
    return any(
        tuple(prompt[len(prompt) - length - behind : len(prompt) - behind]) == tags.opening_tokens
        for behind in range(min(MOST_BEHIND, len(prompt) - length) + 1)
    )


def split(text: str, opening: str, closing: str, inside: bool) -> Split:
    """As chat templates themselves do with earlier answers: the line feeds around the tags belong to neither part.

    Thoughts that were cut off leave no content.
    """
    begun = text.lstrip()
    if begun.startswith(opening):
        text = begun.removeprefix(opening)
    elif not inside:
        return Split(None, text)
    reasoning, _, content = text.partition(closing)
    return Split(reasoning.strip("\n"), content.lstrip("\n"))
