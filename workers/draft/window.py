"""How much of a text a draft reads: a window of its last tokens, as many as pay.

Distant tokens hardly help to guess the next few, and take time to be read, and again in the attention of each draft pass.
The candidates of a row with a window should save

    rounds * (accepted(window) / rate - seen * passes * context) - to_read * read

seconds: in each of its ``rounds`` accepted(window) candidates are accepted, each of which saves 1 / rate; the ``passes`` of
the draft in a round take ``context`` seconds for each of the ``seen`` tokens in its cache; and ``to_read`` tokens take
``read`` seconds each. How many candidates a window costs is learned from rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import sqrt
from typing import NamedTuple

# The window that stands for all of the text.
WHOLE = 0
SMALLEST = 32
WINDOWS = tuple(SMALLEST << doubled for doubled in range(8))
# The prior of a window: accepted(window) = accepted(whole text) * (1 - PRIOR_MISSES / sqrt(window)), a twentieth fewer with
# 256 tokens, with the weight of this many rounds.
PRIOR_ROUNDS, PRIOR_MISSES = 128.0, 0.8
# Further priors: accepted candidates in a round with a whole text, and their weight in rounds; the rounds of a row, and the
# draft's passes in a round.
PRIOR_ACCEPTED, PRIOR_ACCEPTED_ROUNDS = 1.0, 16.0
PRIOR_ROW_ROUNDS, PRIOR_PASSES = 16.0, 3.0
# Windows are compared by at most this many accepted candidates of a round: in repetitive text many are accepted with any
# window.
MOST_COMPARED = 4
# One row in this many tries another window: in turn the whole text, half as much and twice as much.
TRY_EVERY = 8
# All counts are halved when they reach this, so that they follow a job whose text changes.
MOST_ROUNDS = 4096.0


class Prices(NamedTuple):
    """``rate`` in tokens a second; ``read``: seconds of prefilling a token; ``context``: seconds that a cached token adds
    to a pass."""

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
    """Chooses a window for each text that a draft has to read, by the acceptance with each window so far."""

    # The best window for a long text; WHOLE while the cost of reading is not known.
    best: int = WHOLE
    _prices: Prices = NOTHING_KNOWN
    _records: dict[int, _Record] = field(default_factory=lambda: {window: _Record() for window in (WHOLE, *WINDOWS)})
    # Ended rows, and their rounds.
    _rows: float = 1.0
    _rounds_of_rows: float = PRIOR_ROW_ROUNDS
    # Sums over all rounds.
    _rounds: float = 1.0
    _passes: float = PRIOR_PASSES
    _accepted: float = PRIOR_ACCEPTED * PRIOR_ACCEPTED_ROUNDS
    _compared: float = PRIOR_ACCEPTED * PRIOR_ACCEPTED_ROUNDS
    _chosen: int = 0

    def price(self, prices: Prices) -> None:
        """Set the current costs."""
        self._prices = prices
        known = prices.rate > 0.0 and prices.read > 0.0
        self.best = max(WINDOWS, key=lambda window: self._saved(window, window, window)) if known else WHOLE

    def choose(self, seen: int, unread: int, to_read: int) -> int:
        """The window for a row that has ``seen`` tokens of its text and lacks ``unread`` more; WHOLE: read all of them.

        Reading all of them takes as long as reading ``to_read`` tokens.
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
        """Count a row's round with this window: its accepted candidates, and the draft's passes."""
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
        """Count a row that has ended after this many observed rounds."""
        self._rows += 1.0
        self._rounds_of_rows += rounds

    def accepted(self, window: int) -> float:
        """The expected number of accepted candidates in a round."""
        record = self._records[window]
        kept = (PRIOR_ROUNDS * _kept(window) * self._with_whole_text() + record.accepted) / (PRIOR_ROUNDS + record.rounds)
        return kept * self._accepted / self._compared

    def _with_whole_text(self) -> float:
        """Accepted candidates (those compared) in a round with a whole text; a window's round counts as ``_kept`` of
        one."""
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
