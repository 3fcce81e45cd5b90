"""The states that a target has handed out for a row's tokens, until its draft is asked about the row: a head reads them."""

from __future__ import annotations

from collections import deque

import numpy as np
from numpy.typing import NDArray

States = NDArray[np.uint16]
# Of more tokens a row's head is not told: at three states of 4,096 numbers these are 25 MB.
MOST_HELD = 1024


class HeldStates:
    """States of tokens that follow each other, as bf16; where there is a gap, of those behind it alone."""

    def __init__(self) -> None:
        self._parts: deque[States] = deque()
        self._held = 0
        self._end = 0

    def add(self, start: int, states: States) -> None:
        """Of the row's tokens from ``start`` on."""
        if start != self._end:
            self._parts.clear()
            self._held = 0
        # A copy: the pass's own array has those of all rows.
        self._parts.append(states[-MOST_HELD:].copy())
        self._held += len(self._parts[-1])
        self._end = start + len(states)
        while self._held - len(self._parts[0]) >= MOST_HELD:
            self._held -= len(self._parts.popleft())

    def take(self) -> tuple[bytes, int]:
        """All that are held, and behind which of the row's tokens they end. They are held no longer."""
        states = b"".join(part.tobytes() for part in self._parts)
        self._parts.clear()
        self._held = 0
        return states, self._end
