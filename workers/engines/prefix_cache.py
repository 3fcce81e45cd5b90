"""The prefix cache: a row begins as a fork of another row whose prompt has the same first tokens.

The other row may be unfinished, or ended: the prompts of some ended rows are kept. What is kept never changes a token, so
any prompt may be dropped at any time.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from outrider.workers.engines.engine import Engine
from outrider.workers.messages import Sampling

# The least number of tokens in common for which a fork, or waiting for one, pays.
LEAST_SHARED = 16
# The most kept prompts of ended rows. All with the same beginning are compared when a row comes.
MOST_KEPT = 16
# The first touch of new memory is slow, above all in a virtual machine (docs/lab/2026-11-22-new-memory.md). So few tokens
# are kept at first, and KEPT_FOR_EACH more for each token that could have been shared if its prompt had not been dropped.
# The tokens of MOST_REMEMBERED dropped prompts are remembered to notice that.
KEPT_AT_FIRST, KEPT_FOR_EACH, MOST_REMEMBERED = 256, 8, 64
# The first row number of kept and of dropped prompts; they go down from here, below those of any caller.
FIRST_NAME = -1000

Tokens = NDArray[np.int32]


class PrefixCache:
    """Opens and closes rows of an engine. ``most_tokens`` bounds what is kept of ended rows; 0 shares nothing at all."""

    def __init__(self, engine: Engine, most_tokens: int) -> None:
        self._engine = engine
        self._most_tokens = most_tokens if engine.forks else 0
        # Prompts by row number: of live rows, of kept ones (least recently used first), and of dropped ones, which the
        # engine does not have. `_by_beginning` has all three by their first LEAST_SHARED tokens.
        self._live: dict[int, Tokens] = {}
        self._kept: OrderedDict[int, Tokens] = OrderedDict()
        self._dropped: OrderedDict[int, Tokens] = OrderedDict()
        self._by_beginning: dict[bytes, dict[int, Tokens]] = {}
        self._kept_tokens = self._missed_tokens = 0
        self._next_name = FIRST_NAME

    @property
    def held(self) -> int:
        """How many tokens of ended rows are kept; tokens in common count once."""
        return self._kept_tokens

    @property
    def allowed(self) -> int:
        """The most tokens of ended rows to keep: min(most_tokens, KEPT_AT_FIRST + KEPT_FOR_EACH * missed tokens)."""
        return min(self._most_tokens, KEPT_AT_FIRST + KEPT_FOR_EACH * self._missed_tokens)

    def open(
        self, row: int, prompt: Sequence[int], sampling: Sampling, wait: bool = True, written: Sequence[int] = ()
    ) -> int | None:
        """Open a row with as many tokens of its prompt (and of what is ``written``) as another row's cache has; returns how
        many.

        None, and nothing is opened, where another row is still reading more of that prompt: it pays to wait for it.
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
            self._missed_tokens += known - shared
        if self._most_tokens and len(tokens) >= LEAST_SHARED:
            self._live[row] = tokens
            self._rows_beginning_like(tokens)[row] = tokens
        return shared

    def common(self, row: int) -> int:
        """How many first tokens this row's prompt shares with that of any other row: live, kept or dropped."""
        tokens = self._live.get(row)
        return 0 if tokens is None else self._best_source(tokens, row)[3]

    def withdraw(self, row: int) -> None:
        """Do not fork this row, since it does not read all of its prompt. The prompt is remembered like a dropped one."""
        tokens = self._live.pop(row, None)
        if tokens is not None:
            self._remove(row, tokens)
            self._remember_dropped(tokens)

    def close(self, row: int) -> None:
        """Close an ended row. Its prompt is kept if it has enough tokens that no other kept one has."""
        tokens = self._live.pop(row, None)
        if tokens is not None:
            self._remove(row, tokens)
            tokens = tokens[: self._engine.length(row)]
            kept = tokens[: self.allowed]
            new = len(kept) - self._shared_with_kept(kept)
            if new >= LEAST_SHARED:
                self._keep(row, kept, new)
            if len(tokens) - len(kept) >= LEAST_SHARED:
                self._remember_dropped(tokens)
        self._engine.close(row)

    def _best_source(self, tokens: Tokens, but: int | None = None) -> tuple[int | None, int, int, int]:
        """(source, shared, coming, known): the row with the longest cached prefix of these tokens, that prefix's length,
        the longest that a row will have once it has read its prompt, and the longest of any prompt, dropped ones included.

        All rows ``but`` this one are compared.
        """
        source, shared, coming, known = None, 0, 0, 0
        # At least one token has to be fed, since the first choice is made after it.
        most = len(tokens) - 1
        for row, others in self._by_beginning.get(_beginning(tokens), {}).items():
            if row == but:
                continue
            common = min(most, _common(tokens, others))
            known = max(known, common)
            if row in self._dropped:
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
        self._rows_beginning_like(tokens)[name] = tokens
        self._kept_tokens += new
        while self._kept_tokens > self.allowed or len(self._kept) > MOST_KEPT:
            oldest, others = self._kept.popitem(last=False)
            self._remove(oldest, others)
            self._kept_tokens -= len(others) - self._shared_with_kept(others)
            self._engine.close(oldest)
            self._remember_dropped(others)

    def _remember_dropped(self, tokens: Tokens) -> None:
        """Remember the tokens of a prompt that is not kept, or only in part."""
        for name, others in list(self._by_beginning.get(_beginning(tokens), {}).items()):
            if name in self._dropped:
                common = _common(tokens, others)
                if common == len(tokens):
                    self._dropped.move_to_end(name)
                    return
                if common == len(others):
                    del self._dropped[name]
                    self._remove(name, others)
        name = self._new_name()
        self._dropped[name] = self._rows_beginning_like(tokens)[name] = tokens
        if len(self._dropped) > MOST_REMEMBERED:
            self._remove(*self._dropped.popitem(last=False))

    def _new_name(self) -> int:
        self._next_name -= 1
        return self._next_name + 1

    def _shared_with_kept(self, tokens: Tokens) -> int:
        """The longest prefix that a kept row has of these tokens."""
        rows = self._by_beginning.get(_beginning(tokens), {})
        return max((_common(tokens, others) for row, others in rows.items() if row in self._kept), default=0)

    def _rows_beginning_like(self, tokens: Tokens) -> dict[int, Tokens]:
        return self._by_beginning.setdefault(_beginning(tokens), {})

    def _remove(self, row: int, tokens: Tokens) -> None:
        rows = self._rows_beginning_like(tokens)
        rows.pop(row, None)
        if not rows:
            del self._by_beginning[_beginning(tokens)]


def _beginning(tokens: Tokens) -> bytes:
    """The key of ``_by_beginning``."""
    return tokens[:LEAST_SHARED].tobytes()


def _common(left: Tokens, right: Tokens) -> int:
    shorter = min(len(left), len(right))
    same = left[:shorter] == right[:shorter]
    first = int(same.argmin()) if shorter else 0
    return shorter if shorter and same[first] else first
