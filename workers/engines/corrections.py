"""Corrections of a draft's logits, learned from its wrong choices, for the hf engine.

A correction is a vector v for each of some tokens: logit += v · (hidden state). The native engine has the same in
kernels/src/corrections.h, and learns from close right choices and from repeated text as well.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

# The constants of kernels/src/corrections.h and corrections.cpp, explained there.
STEP, FIRST_STATES, STATES_OF_LATE = 0.5, 64, 512
LEAST_RECORD, RECORD_MEMORY = -3.0, 0.99
MOST_TOKENS = 512
# This many choices of each row are kept until the target's tokens say which were right.
KEPT_CHOICES = 64

State = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class KeptChoice:
    """The choices by the model's own and by the corrected scores, and the hidden state that both were made from."""

    own: int
    corrected: int
    state: State


class Corrections:
    def __init__(self, most: int = MOST_TOKENS) -> None:
        self._most = most
        self._record = 0.0
        self._states = 0
        self._mean: State | None = None
        # In the order of their last change, so that the first one is dropped for a new token.
        self._vectors: dict[int, State] = {}

    @property
    def trusted(self) -> bool:
        """Whether the corrected choices have lately been better than the model's own."""
        return self._record >= LEAST_RECORD

    def corrected(self, scores: State, state: State) -> State:
        if not self._vectors:
            return scores
        tokens = np.fromiter(self._vectors, np.intp, len(self._vectors))
        found = scores.copy()
        found[tokens] += np.stack(list(self._vectors.values())) @ self._centred(state)
        return found

    def learn(self, choice: KeptChoice, right: int) -> int:
        """Learn from the target's token. 1 where a correction made the choice right, -1 where it made it wrong, else 0."""
        if min(choice.own, choice.corrected) < 0:  # the mask allowed no token, so there was no choice
            return 0
        good = int(choice.corrected == right) - int(choice.own == right)
        if choice.own != choice.corrected:
            self._record = self._record * RECORD_MEMORY + good
        self._states += 1
        before = np.zeros_like(choice.state) if self._mean is None else self._mean
        self._mean = before + (choice.state - before) / np.float32(min(self._states, STATES_OF_LATE))
        if choice.corrected == right:
            return good
        state = self._centred(choice.state)
        square = float(state @ state)
        if square > 0.0:
            self._move(right, STEP / square * state)
            self._move(choice.corrected, -STEP / square * state)
        return good

    def _centred(self, state: State) -> State:
        return state if self._mean is None or self._states <= FIRST_STATES else state - self._mean

    def _move(self, token: int, by: State) -> None:
        vector = self._vectors.pop(token, None)
        if vector is None and len(self._vectors) >= self._most:
            del self._vectors[next(iter(self._vectors))]
        self._vectors[token] = by if vector is None else vector + by
