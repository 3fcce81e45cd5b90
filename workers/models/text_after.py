"""The text of tokens that stand behind others."""

from __future__ import annotations

from collections.abc import Callable, Sequence

# Tokens before, of which the last at least decide how those behind them are written.
ANCHOR = 8


def text_after(before: Sequence[int], tokens: Sequence[int], decode: Callable[[list[int]], str]) -> str:
    """The text of ``tokens`` as it goes on behind ``before``.

    Decoders like Llama 2's drop the space before a text's first word; behind a prompt that word is not the first.
    Where ``before`` ends amid a character its text changes with what follows: then ``tokens`` are decoded alone.
    """
    if not before:
        return decode(list(tokens))
    anchor = list(before[-ANCHOR:])
    known, whole = decode(anchor), decode([*anchor, *tokens])
    return whole[len(known) :] if whole.startswith(known) else decode(list(tokens))
