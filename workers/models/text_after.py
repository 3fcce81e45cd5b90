"""Decodes tokens as the continuation of others."""

from __future__ import annotations

from collections.abc import Callable, Sequence

# This many tokens before are decoded with the text; the last few decide how its beginning is decoded.
ANCHOR = 8


def text_after(before: Sequence[int], tokens: Sequence[int], decode: Callable[[list[int]], str]) -> str:
    """The text of ``tokens`` as a continuation of ``before``.

    Decoders like Llama 2's drop the space at the beginning of a text; after a prompt that space is needed. Where ``before``
    ends within a character, its text changes with the tokens after it: then ``tokens`` are decoded alone.
    """
    if not before:
        return decode(list(tokens))
    anchor = list(before[-ANCHOR:])
    known, whole = decode(anchor), decode([*anchor, *tokens])
    return whole[len(known) :] if whole.startswith(known) else decode(list(tokens))
