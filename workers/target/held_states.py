"""The target's hidden states of a row's tokens, kept until its draft, a head, is asked about the row."""

from __future__ import annotations

from collections import deque

import numpy as np
from numpy.typing import NDArray

States = NDArray[np.uint16]
# The states of this many last tokens are kept: three states of 4,096 numbers each are 25 MB.
MOST_HELD = 1024


class HeldStates:
    """States of consecutive tokens, in bf16. After a gap only those after it are kept."""

    def __init__(self) -> None:
        self._parts: deque[States] = deque()
        self._held = 0
        self._end = 0

    def add(self, start: int, states: States) -> None:
        """Add the states of the row's tokens from position ``start`` on."""
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
        """Remove and return all states, and the position after the last of their tokens."""
        states = b"".join(part.tobytes() for part in self._parts)
        self._parts.clear()
        self._held = 0
        return states, self._end
