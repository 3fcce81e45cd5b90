"""Separates a model's thoughts from its answer, by the tags or channels of its chat template.

gpt-oss writes messages, each with its channel: ``<|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>final
<|message|>…``. These marks are special tokens, which are kept in the text of such an answer.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

OPENING_TAG, CLOSING_TAG = "<think>", "</think>"
CHANNEL, MESSAGE, MESSAGE_END, START = CHANNEL_MARKS = "<|channel|>", "<|message|>", "<|end|>", "<|start|>"
# How a template with channels writes the thoughts of an earlier answer; its presence identifies such a template.
THOUGHTS = f"{CHANNEL}analysis{MESSAGE}"
HEADER = re.compile(f"\\s*(?:{re.escape(START)}[^<]*)?{re.escape(CHANNEL)}([^<]*){re.escape(MESSAGE)}")
# Channels for the user. (A channel with a recipient, "commentary to=functions.find", is not for the user.)
SPOKEN = frozenset({"final", "commentary"})
# This many tokens may follow the tag at the end of a prompt: line feeds.
MOST_AFTER_TAG = 2


class ReasoningTags(NamedTuple):
    """The text before and after thoughts, and the tokens of the opening tag, to find it at the end of a prompt.

    ``shown`` are the marks that are special tokens. With channels, the two texts are those around a channel's name.
    """

    opening: str
    closing: str
    opening_tokens: tuple[int, ...]
    shown: tuple[int, ...] = ()


class Split(NamedTuple):
    reasoning: str | None
    content: str


def prompt_ends_inside(tags: ReasoningTags, prompt: Sequence[int]) -> bool:
    """Whether the prompt ends with the opening tag, so that the answer begins within the thoughts."""
    length = len(tags.opening_tokens)
    return any(
        tuple(prompt[len(prompt) - length - behind : len(prompt) - behind]) == tags.opening_tokens
        for behind in range(min(MOST_AFTER_TAG, len(prompt) - length) + 1)
    )


def split(text: str, opening: str, closing: str, inside: bool) -> Split:
    """Split as chat templates do with earlier answers: line feeds around the tags belong to neither part.

    If the thoughts are unfinished, the content is empty.
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
    """Messages by their channels. A message whose header is incomplete is left out."""
    thoughts, spoken = list[str](), list[str]()
    at = 0
    while header := HEADER.match(text, at):
        body, _, _ = text[header.end() :].partition(MESSAGE_END)
        (spoken if header[1].strip() in SPOKEN else thoughts).append(body)
        at = header.end() + len(body) + len(MESSAGE_END)
    return Split("\n".join(thoughts) if thoughts else None, "\n".join(spoken))
