"""The engine of a head on a target's hidden states (EAGLE): each token is fed with the target's state of the token before
it.

A token without such a state takes the state that the head itself computed for the token before it, so these tokens need a
pass each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from outrider.kernels.native import NativeModel
from outrider.workers.engines.engine import Chosen, DecodeFeed, DecodeResult, Feed, StopRule
from outrider.workers.engines.native import NativeEngine
from outrider.workers.messages import Sampling

States = NDArray[np.uint16]


class HeadEngine(NativeEngine):
    """``give`` hands over the target's states for a row's next tokens; ``confirmed`` counts its tokens that had one."""

    branches = False

    def __init__(self, model: NativeModel, context: int) -> None:
        super().__init__(model, context)
        # ``HeadDrafter`` skips tokens by itself: only it knows which of them have no states.
        self.skipper = None
        # Passes beyond one for each call, which tokens without states took.
        self.more_passes = 0
        self._states: dict[int, States] = {}
        self._confirmed: dict[int, int] = {}

    def give(self, row: int, states: States) -> None:
        """Replace the row's states: one for each of the tokens that are fed next, from the first on."""
        self._states[row] = states

    def waiting(self, row: int) -> States:
        """The states that were given and not used yet."""
        return self._states[row]

    def confirmed(self, row: int) -> int:
        """How many of the row's first tokens were fed with states or skipped; later ones must be fed again with theirs."""
        return self._confirmed[row]

    def skip(self, row: int, tokens: Sequence[int]) -> None:
        """Tokens that have no states."""
        super().skip(row, tokens)
        self._confirmed[row] = self.length(row)

    def open(self, row: int, sampling: Sampling, prompt_length: int) -> None:
        super().open(row, sampling, prompt_length)
        self._forget(row, 0)

    def fork(self, row: int, source: int, length: int, sampling: Sampling, prompt_length: int) -> None:
        confirmed = min(length, self._confirmed[source])
        super().fork(row, source, length, sampling, prompt_length)
        self._forget(row, confirmed)

    def truncate(self, row: int, length: int) -> None:
        super().truncate(row, length)
        self._confirmed[row] = min(self._confirmed[row], length)

    def close(self, row: int) -> None:
        super().close(row)
        del self._states[row], self._confirmed[row]

    def feed(self, feeds: Sequence[Feed]) -> list[Chosen]:
        rest = self._feed_all_but_last_pass([(feed.row, feed.tokens) for feed in feeds])
        # Only a token with a choice stores the head's own state, which a next token without the target's needs.
        return super().feed([replace(feed, tokens=rest[feed.row], choose=max(1, feed.choose)) for feed in feeds])

    def decode(self, decode_feeds: Sequence[DecodeFeed], stop_rule: StopRule) -> DecodeResult:
        rest = self._feed_all_but_last_pass([(feed.row, feed.tokens) for feed in decode_feeds])
        return super().decode([replace(feed, tokens=rest[feed.row]) for feed in decode_feeds], stop_rule)

    def _feed_all_but_last_pass(self, fed: Sequence[tuple[int, Sequence[int]]]) -> dict[int, Sequence[int]]:
        """Feed all but the tokens of the last pass, and return these: each token without a state takes a pass of its
        own."""
        left = {row: list(tokens) for row, tokens in fed}
        while True:
            feeds = []
            for row, tokens in left.items():
                count = min(len(self._states[row]), len(tokens)) or 1
                if count < len(tokens):
                    feeds.append(Feed(row, tokens[:count], 1))
                    del tokens[:count]
            if not feeds:
                return dict(left)
            super().feed(feeds)
            self.more_passes += 1

    def _given(self, feed: Feed | DecodeFeed) -> States | None:
        states = self._states[feed.row]
        given, self._states[feed.row] = states[: len(feed.tokens)], states[len(feed.tokens) :]
        if not len(given):
            return None
        self._confirmed[feed.row] = self.length(feed.row) + len(given)
        return given

    def _forget(self, row: int, confirmed: int) -> None:
        self._states[row] = np.empty((0, self.model.program.hidden_in), np.uint16)
        self._confirmed[row] = confirmed
