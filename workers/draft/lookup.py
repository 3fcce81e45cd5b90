"""The row's own text as a draft: what followed the last occurrence of its last few tokens."""

from __future__ import annotations

from collections.abc import Sequence

LONGEST = 4


class NgramIndex:
    """Where each n-gram of a growing row last ended, kept up to date token by token.

    Two positions are kept, because the row's own tail is always the latest: what is asked for is the one before it.
    """

    def __init__(self, longest: int = LONGEST) -> None:
        self._longest = longest
        self._indexed = 0
        self._last: dict[tuple[int, ...], int] = {}
        self._before: dict[tuple[int, ...], int] = {}

    def extend(self, tokens: Sequence[int]) -> None:
        """Take in what has been added to the row since the last call; the rest must be unchanged."""
        for end in range(self._indexed + 1, len(tokens) + 1):
            for size in range(1, min(self._longest, end) + 1):
                gram = tuple(tokens[end - size : end])
                if gram in self._last:
                    self._before[gram] = self._last[gram]
                self._last[gram] = end
        self._indexed = len(tokens)

    def propose(self, tokens: Sequence[int], limit: int) -> tuple[int, ...]:
        """What followed the last earlier occurrence of the longest tail that occurred before."""
        if limit <= 0:
            return ()
        self.extend(tokens)
        for size in range(min(self._longest, len(tokens) - 1), 0, -1):
            end = self._before.get(tuple(tokens[len(tokens) - size :]))
            if end is not None:
                return tuple(tokens[end : end + limit])
        return ()
