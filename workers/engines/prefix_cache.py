"""What several prompts begin with is computed once: a row begins as a fork of another that has the same first tokens.

The other row may be under way or may have ended: some prompts of ended rows are kept for those to come. This is for the
engine's memory alone and decides no token, so it may keep or forget whatever it likes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from outrider.workers.engines.engine import Engine
from outrider.workers.messages import Sampling

# Fewer tokens in common are not worth a fork, nor the wait for one.
LEAST_SHARED = 16
# Prompts kept of rows that have ended; each is looked at when a row of the same beginning comes.
MOST_KEPT = 16
# Memory that is new to a process is slow to come by, above all in a virtual machine (docs/lab/2026-11-22-new-memory.md).
# So little is kept until that turns out to be too little, and then so many times what was missed: of prompts that were
# given up the tokens are remembered.
KEPT_AT_FIRST, KEPT_FOR_EACH, MOST_REMEMBERED = 256, 8, 64
# Names of kept prompts, and of those given up: below those that anybody else uses.
FIRST_NAME = -1000

Tokens = NDArray[np.int32]


class PrefixCache:
    """Opens and closes rows of an engine. ``most_tokens`` bounds what is kept of ended rows; 0 shares nothing at all."""

    def __init__(self, engine: Engine, most_tokens: int) -> None:
        self._engine = engine
        self._most_tokens = most_tokens if engine.forks else 0
        # Live rows' prompts, and those kept (the one used last at the end), by their names in the engine. Those given
        # up have names here only. All three by their beginnings: `_alike`.
        self._live: dict[int, Tokens] = {}
        self._kept: OrderedDict[int, Tokens] = OrderedDict()
        self._given_up: OrderedDict[int, Tokens] = OrderedDict()
        self._alike: dict[bytes, dict[int, Tokens]] = {}
        self._held = self._missed = 0
        self._next_name = FIRST_NAME

    @property
    def held(self) -> int:
        """How many tokens are kept of ended rows; what they have in common counts once."""
        return self._held

    @property
    def allowed(self) -> int:
        """How many may be, by what would have been shared so far if more had been kept."""
        return min(self._most_tokens, KEPT_AT_FIRST + KEPT_FOR_EACH * self._missed)

    def open(
        self, row: int, prompt: Sequence[int], sampling: Sampling, wait: bool = True, written: Sequence[int] = ()
    ) -> int | None:
        """Begin a row with as much of its prompt (and of what is ``written`` of it) as another row has; how many tokens.

        None, and nothing is opened, where a row under way will soon have more of it: then it pays to wait for that one.
        """
        tokens = np.asarray(prompt, np.int32)
        source, shared, coming, known = self._best_source(np.asarray([*prompt, *written], np.int32) if written else tokens)
        if wait and coming - shared >= LEAST_SHARED:
            return None
        if source is not None and shared >= LEAST_SHARED:
            self._engine.fork(row, source, shared, sampling, len(prompt))
            if source in self._kept:
                self._kept.move_to_end(source)
        else:
            shared = 0
            self._engine.open(row, sampling, len(prompt))
        if known - shared >= LEAST_SHARED:
            self._missed += known - shared
        if self._most_tokens and len(tokens) >= LEAST_SHARED:
            self._live[row] = tokens
            self._beginning_like(tokens)[row] = tokens
        return shared

    def common(self, row: int) -> int:
        """How many first tokens of this row's prompt some other row's has had, too, as far as that is remembered."""
        tokens = self._live.get(row)
        return 0 if tokens is None else self._best_source(tokens, row)[3]

    def withdraw(self, row: int) -> None:
        """The row will not have all of its prompt, so none may begin as its fork. That one asked for it is remembered."""
        tokens = self._live.pop(row, None)
        if tokens is not None:
            self._forget(row, tokens)
            self._give_up(tokens)

    def close(self, row: int) -> None:
        """The row has ended. Its prompt is kept for a while if it has tokens that no other kept one has."""
        tokens = self._live.pop(row, None)
        if tokens is not None:
            self._forget(row, tokens)
            tokens = tokens[: self._engine.length(row)]
            kept = tokens[: self.allowed]
            new = len(kept) - self._covered(kept)
            if new >= LEAST_SHARED:
                self._keep(row, kept, new)
            if len(tokens) - len(kept) >= LEAST_SHARED:
                self._give_up(tokens)
        self._engine.close(row)

    def _best_source(self, tokens: Tokens, but: int | None = None) -> tuple[int | None, int, int, int]:
        """The row with most of these tokens in its cache and how many it has, how many some row will have, or once had.

        Of all rows ``but`` this one.
        """
        source, shared, coming, known = None, 0, 0, 0
        # At least one token has to be fed, for the choice behind it.
        most = len(tokens) - 1
        for row, others in self._alike.get(_beginning(tokens), {}).items():
            if row == but:
                continue
            common = min(most, _common(tokens, others))
            known = max(known, common)
            if row in self._given_up:
                continue
            cached = common if row in self._kept else min(common, self._engine.length(row))
            coming = max(coming, common)
            if cached > shared:
                source, shared = row, cached
        return source, shared, coming, known

    def _keep(self, row: int, tokens: Tokens, new: int) -> None:
        name = self._new_name()
        self._engine.fork(name, row, len(tokens), Sampling(), len(tokens))
        self._kept[name] = tokens
        self._beginning_like(tokens)[name] = tokens
        self._held += new
        while self._held > self.allowed or len(self._kept) > MOST_KEPT:
            oldest, others = self._kept.popitem(last=False)
            self._forget(oldest, others)
            self._held -= len(others) - self._covered(others)
            self._engine.close(oldest)
            self._give_up(others)

    def _give_up(self, tokens: Tokens) -> None:
        """Remember a prompt that is not kept, or not whole."""
        for name, others in list(self._alike.get(_beginning(tokens), {}).items()):
            if name in self._given_up:
                common = _common(tokens, others)
                if common == len(tokens):
                    self._given_up.move_to_end(name)
                    return
                if common == len(others):
                    del self._given_up[name]
                    self._forget(name, others)
        name = self._new_name()
        self._given_up[name] = self._beginning_like(tokens)[name] = tokens
        if len(self._given_up) > MOST_REMEMBERED:
            self._forget(*self._given_up.popitem(last=False))

    def _new_name(self) -> int:
        self._next_name -= 1
        return self._next_name + 1

    def _covered(self, tokens: Tokens) -> int:
        """How many of the tokens a kept row has."""
        alike = self._alike.get(_beginning(tokens), {})
        return max((_common(tokens, others) for row, others in alike.items() if row in self._kept), default=0)

    def _beginning_like(self, tokens: Tokens) -> dict[int, Tokens]:
        return self._alike.setdefault(_beginning(tokens), {})

    def _forget(self, row: int, tokens: Tokens) -> None:
        alike = self._beginning_like(tokens)
        alike.pop(row, None)
        if not alike:
            del self._alike[_beginning(tokens)]


def _beginning(tokens: Tokens) -> bytes:
    """What rows must have in common to be looked at."""
    return tokens[:LEAST_SHARED].tobytes()


def _common(left: Tokens, right: Tokens) -> int:
    shorter = min(len(left), len(right))
    same = left[:shorter] == right[:shorter]
    first = int(same.argmin()) if shorter else 0
    return shorter if shorter and same[first] else first
