"""Prompt lookup: the candidates are what followed the last earlier occurrence of the row's last few tokens."""

from __future__ import annotations

from collections.abc import Sequence

LONGEST = 4


class NgramIndex:
    """The positions at which each n-gram of a growing row, and of a text ``before`` it, ended last and the time before.

    The last one is always the row's own tail, so lookup uses the one before.
    """

    def __init__(self, before: Sequence[int] = (), longest: int = LONGEST) -> None:
        self._longest = longest
        self._text = list(before)
        # How many of the row's own tokens are in ``_text``.
        self._indexed = 0
        self._last: dict[tuple[int, ...], int] = {}
        self._before: dict[tuple[int, ...], int] = {}
        self._index(0)

    def extend(self, tokens: Sequence[int]) -> None:
        """Add the row's tokens since the last call; the earlier ones must be unchanged."""
        start = len(self._text)
        self._text += tokens[self._indexed :]
        self._indexed = len(tokens)
        self._index(start)

    def _index(self, start: int) -> None:
        text = self._text
        for end in range(start + 1, len(text) + 1):
            for size in range(1, min(self._longest, end) + 1):
                gram = tuple(text[end - size : end])
                if gram in self._last:
                    self._before[gram] = self._last[gram]
                self._last[gram] = end

    def propose(self, tokens: Sequence[int], limit: int) -> tuple[int, ...]:
        """The tokens after the last earlier occurrence of the longest tail that has one."""
        if limit <= 0:
            return ()
        self.extend(tokens)
        text = self._text
        for size in range(min(self._longest, len(text) - 1), 0, -1):
            end = self._before.get(tuple(text[len(text) - size :]))
            if end is not None:
                return tuple(text[end : end + limit])
        return ()
