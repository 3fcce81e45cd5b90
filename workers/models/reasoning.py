"""A model's thoughts apart from its answer, where its chat template tells them apart: by tags, or by channels.

gpt-oss writes messages, each with its channel: ``<|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>final
<|message|>…``. These marks are special tokens, which such an answer's text has.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

OPENING_TAG, CLOSING_TAG = "<think>", "</think>"
CHANNEL, MESSAGE, MESSAGE_END, START = CHANNEL_MARKS = "<|channel|>", "<|message|>", "<|end|>", "<|start|>"
# What a template that knows channels writes of an earlier answer.
THOUGHTS = f"{CHANNEL}analysis{MESSAGE}"
HEADER = re.compile(f"\\s*(?:{re.escape(START)}[^<]*)?{re.escape(CHANNEL)}([^<]*){re.escape(MESSAGE)}")
# For the user, unless they are said to somebody: "commentary to=functions.find".
SPOKEN = frozenset({"final", "commentary"})
# So many tokens may follow the tag at the end of a prompt: line feeds.
MOST_BEHIND = 2


class ReasoningTags(NamedTuple):
    """What stands around the thoughts: as text, and how the opening tag is told at a prompt's end.

    ``shown`` are the marks that are special tokens. With channels, the two are what stands around a channel's name.
    """

    opening: str
    closing: str
    opening_tokens: tuple[int, ...]
    shown: tuple[int, ...] = ()


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
    if opening == CHANNEL:
        return _split_by_channels(begun) if begun.startswith(CHANNEL) else Split(None, text)
    if begun.startswith(opening):
        text = begun.removeprefix(opening)
    elif not inside:
        return Split(None, text)
    reasoning, _, content = text.partition(closing)
    return Split(reasoning.strip("\n"), content.lstrip("\n"))


def _split_by_channels(text: str) -> Split:
    """Nothing is told of a message whose channel is still being written."""
    thoughts, spoken = list[str](), list[str]()
    at = 0
    while header := HEADER.match(text, at):
        body, _, _ = text[header.end() :].partition(MESSAGE_END)
        (spoken if header[1].strip() in SPOKEN else thoughts).append(body)
        at = header.end() + len(body) + len(MESSAGE_END)
    return Split("\n".join(thoughts) if thoughts else None, "\n".join(spoken))
