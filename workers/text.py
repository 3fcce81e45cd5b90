"""From a row's tokens to its text, and where a stop string ends it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol


class Decoder(Protocol):
    def __call__(self, tokens: Sequence[int]) -> str: ...


class TextWriter:
    """Collects one row's tokens. Only rows with stop strings are decoded before they end."""

    def __init__(self, decode: Decoder, stop: Sequence[str], end_tokens: Collection[int]) -> None:
        self._decode = decode
        self._stop = stop
        self._end_tokens = end_tokens
        self._tokens: list[int] = []
        # A token is a character or more, but for those that are a part of one; four of them make any character.
        self._window = 4 * max((len(word) for word in stop), default=0) + 8

    def stopped_by(self, token: int) -> bool:
        """Add a token; True if the text now holds a stop string."""
        self._tokens.append(token)
        if not self._stop:
            return False
        tail = self._decode(self._tokens[-self._window :])
        return any(word in tail for word in self._stop)

    def text(self) -> str:
        """The text so far, without end tokens, up to the first stop string."""
        text = self._decode([token for token in self._tokens if token not in self._end_tokens])
        found = [index for word in self._stop if (index := text.find(word)) >= 0]
        return text[: min(found)] if found else text
