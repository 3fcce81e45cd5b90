"""What a target tells Prometheus through Ray: its running totals, at most once a second."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from ray.util.metrics import Counter, Gauge, Histogram

from outrider.workers.messages import Progress, RowFailure, RowResult

SECONDS_BETWEEN = 1.0
ROW_SECONDS = [0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 500, 1000]
COUNTERS = {
    "tokens": "Tokens committed",
    "rounds": "Passes of the target",
    "row_rounds": "Rows of passes of the target that gained tokens",
    "proposed": "Candidates that the draft proposed",
    "accepted": "Candidates that held",
    "runners_up": "Second guesses of the draft that were verified",
    "runners_up_held": "Second guesses that brought a token",
    "asked": "Candidates asked for",
    "asking_rows": "Turns of rows in which candidates could be asked for",
}
PHASES = ("verify", "draft", "hop", "idle")


class Metrics:
    def __init__(self, replica: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._due = 0.0
        self._known = Progress()
        tags = {"replica": str(replica)}

        def counter(name: str, description: str, *keys: str) -> Counter:
            return Counter(f"outrider_{name}", description, ("replica", *keys)).set_default_tags(tags)

        self._counters = {name: counter(name, description) for name, description in COUNTERS.items()}
        self._seconds = counter("phase_seconds", "Where the target's time went", "phase")
        # Observing each row of each round singly would cost more than the round may pay.
        self._lengths = counter("accepted_length", "Turns of rows by how many of their candidates held", "length")
        self._rows = counter("rows", "Answers that ended", "outcome")
        gauges = ("replica",)
        self._k = Gauge("outrider_k", "Mean number of candidates asked for lately", gauges).set_default_tags(tags)
        self._acceptance = Gauge("outrider_acceptance", "Share of candidates that held lately", gauges)
        self._acceptance.set_default_tags(tags)
        self._row_seconds = Histogram("outrider_row_seconds", "From a row's entry to its end", ROW_SECONDS, gauges)
        self._row_seconds.set_default_tags(tags)

    def ended(self, rows: Iterable[RowResult | RowFailure]) -> None:
        for row in rows:
            if isinstance(row, RowResult):
                self._row_seconds.observe(row.seconds)
                self._rows.inc(1, {"outcome": row.finish_reason})
            else:
                self._rows.inc(1, {"outcome": "failed"})

    def publish(self, progress: Progress) -> bool:
        """Report what is new; False where it is too early."""
        now = self._clock()
        if now < self._due:
            return False
        self._due = now + SECONDS_BETWEEN
        known, self._known = self._known, progress
        for name, metric in self._counters.items():
            _increase(metric, getattr(progress, name) - getattr(known, name))
        accounted = 0.0
        for phase in PHASES:
            spent = getattr(progress, f"{phase}_seconds") - getattr(known, f"{phase}_seconds")
            accounted += spent
            _increase(self._seconds, spent, {"phase": phase})
        _increase(self._seconds, progress.seconds - known.seconds - accounted, {"phase": "other"})
        for length, (count, before) in enumerate(zip(progress.accepted_lengths, known.accepted_lengths, strict=True)):
            _increase(self._lengths, count - before, {"length": str(length)})
        if progress.asking_rows > known.asking_rows:
            self._k.set((progress.asked - known.asked) / (progress.asking_rows - known.asking_rows))
        if progress.proposed > known.proposed:
            self._acceptance.set((progress.accepted - known.accepted) / (progress.proposed - known.proposed))
        return True


def _increase(metric: Counter, amount: float, tags: dict[str, str] | None = None) -> None:
    """Ray refuses to increase by nothing."""
    if amount > 0:
        metric.inc(amount, tags)
