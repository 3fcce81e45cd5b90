"""How much of a text a draft reads before it guesses: the end of it, as much as pays.

What stands far back says little about the next few words, takes time to be read, and again in each of the draft's passes.
With a window, the last so many tokens, a row's candidates should save

    rounds * (accepted(window) / rate - seen * passes * context) - to_read * read

seconds: in each of its rounds accepted(window) candidates are accepted, each saves what a token takes (1 / rate), and
passes of the draft read keys and values of what it has seen. What a window costs in candidates is learned from rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import sqrt
from typing import NamedTuple

# All of the text.
WHOLE = 0
SMALLEST = 32
WINDOWS = tuple(SMALLEST << doubled for doubled in range(8))
# Until a window has been tried in about so many rounds, it is believed that this share of the candidates accepted behind
# whole texts, over the square root of the window, misses behind it: a twentieth with 256 tokens.
PRIOR_ROUNDS, PRIOR_MISSES = 128.0, 0.8
# Before anything is known: what a round brings behind a whole text, with the weight of so many rounds, and how often a row
# is asked about, with how many passes of the draft each time.
PRIOR_ACCEPTED, PRIOR_ACCEPTED_ROUNDS = 1.0, 16.0
PRIOR_ROW_ROUNDS, PRIOR_PASSES = 16.0, 3.0
# Windows are compared by so many candidates of a round at most: a text that repeats itself brings one row
# many, whatever its window is.
MOST_COMPARED = 4
# One row in so many tries another window: in turn the whole text, half as much and twice as much.
TRY_EVERY = 8
# What is counted is halved when it reaches this, so that it follows a job whose text changes.
MOST_ROUNDS = 4096.0


class Prices(NamedTuple):
    """``rate`` is in tokens a second; seconds of reading a token, and of one more in the context of a pass."""

    rate: float = 0.0
    read: float = 0.0
    context: float = 0.0


NOTHING_KNOWN = Prices()


@dataclass(slots=True)
class _Record:
    rounds: float = 0.0
    accepted: float = 0.0


@dataclass(slots=True)
class WindowChoice:
    """Chooses a window for each text that a draft has to read, by what has come of those before."""

    # The best window for a text that is longer; WHOLE while nobody knows what reading takes.
    best: int = WHOLE
    _prices: Prices = NOTHING_KNOWN
    _records: dict[int, _Record] = field(default_factory=lambda: {window: _Record() for window in (WHOLE, *WINDOWS)})
    # Of rows that have ended.
    _rows: float = 1.0
    _rounds_of_rows: float = PRIOR_ROW_ROUNDS
    # Of all rounds.
    _rounds: float = 1.0
    _passes: float = PRIOR_PASSES
    _accepted: float = PRIOR_ACCEPTED * PRIOR_ACCEPTED_ROUNDS
    _compared: float = PRIOR_ACCEPTED * PRIOR_ACCEPTED_ROUNDS
    _chosen: int = 0

    def price(self, prices: Prices) -> None:
        """What things cost from now on."""
        self._prices = prices
        known = prices.rate > 0.0 and prices.read > 0.0
        self.best = max(WINDOWS, key=lambda window: self._saved(window, window, window)) if known else WHOLE

    def choose(self, seen: int, unread: int, to_read: int) -> int:
        """For a row that sees so many tokens of its text and lacks ``unread`` more; WHOLE where all of them are to be read.

        That takes as long as reading ``to_read``.
        """
        smaller = [window for window in WINDOWS if window < unread]
        if not smaller or self.best == WHOLE:
            return WHOLE
        self._chosen += 1
        window = max(smaller, key=lambda each: self._saved(each, each, each))
        if self._saved(WHOLE, seen + unread, to_read) >= self._saved(window, window, window):
            window = WHOLE
        tried, nothing_tried = divmod(self._chosen, TRY_EVERY)
        return window if nothing_tried else _another(window, tried, smaller)

    def observe(self, window: int, accepted: int, passes: float) -> None:
        """A round of a row for which this window was chosen, and whose guesses took so many passes of the draft."""
        record, compared = self._records[window], min(accepted, MOST_COMPARED)
        record.rounds += 1.0
        record.accepted += compared
        self._rounds += 1.0
        self._passes += passes
        self._accepted += accepted
        self._compared += compared
        if self._rounds >= MOST_ROUNDS:
            self._rounds, self._passes = self._rounds / 2.0, self._passes / 2.0
            self._accepted, self._compared = self._accepted / 2.0, self._compared / 2.0
            for each in self._records.values():
                each.rounds, each.accepted = each.rounds / 2.0, each.accepted / 2.0

    def ended(self, rounds: int) -> None:
        """A row, about which so many rounds were observed."""
        self._rows += 1.0
        self._rounds_of_rows += rounds

    def accepted(self, window: int) -> float:
        """How many candidates should be accepted in a round."""
        record = self._records[window]
        kept = (PRIOR_ROUNDS * _kept(window) * self._behind_whole() + record.accepted) / (PRIOR_ROUNDS + record.rounds)
        return kept * self._accepted / self._compared

    def _behind_whole(self) -> float:
        """What is compared, in a round; each window's rounds are as many of whole texts as is believed to be kept there."""
        rounds = PRIOR_ACCEPTED_ROUNDS + sum(record.rounds * _kept(window) for window, record in self._records.items())
        return (PRIOR_ACCEPTED * PRIOR_ACCEPTED_ROUNDS + sum(record.accepted for record in self._records.values())) / rounds

    def _saved(self, window: int, seen: int, to_read: int) -> float:
        rate, read, context = self._prices
        rounds, passes = self._rounds_of_rows / self._rows, self._passes / self._rounds
        return rounds * (self.accepted(window) / rate - seen * passes * context) - to_read * read


def _kept(window: int) -> float:
    return 1.0 - PRIOR_MISSES / sqrt(window) if window else 1.0


def _another(window: int, tried: int, smaller: Sequence[int]) -> int:
    others = [WHOLE, max(SMALLEST, window // 2), 2 * window] if window else [smaller[-1]]
    other = others[tried % len(others)]
    return other if other in smaller else WHOLE
