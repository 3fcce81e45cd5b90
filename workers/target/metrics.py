"""A target's counters as metrics for Prometheus, through Ray, at most once a second."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from ray.util.metrics import Counter, Gauge, Histogram

from outrider.workers.counters import counters
from outrider.workers.messages import OTHER_PHASE, PHASES, RowFailure, RowResult, TargetCounters

SECONDS_BETWEEN = 1.0
ROW_SECONDS = [0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 500, 1000]
COUNTERS = {name: one.meaning for name, one in counters(TargetCounters).items() if one.metric}


class Metrics:
    def __init__(self, replica: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._due = 0.0
        self._known = TargetCounters()
        tags = {"replica": str(replica)}

        def counter(name: str, description: str, *keys: str) -> Counter:
            return Counter(f"outrider_{name}", description, ("replica", *keys)).set_default_tags(tags)

        self._counters = {name: counter(name, description) for name, description in COUNTERS.items()}
        self._seconds = counter("phase_seconds", "Where the target's time went", "phase")
        # A counter by length instead of a histogram: one observation for each row and round would take too long.
        self._lengths = counter("accepted_length", "Rounds of rows by how many of their candidates were accepted", "length")
        self._rows = counter("rows", "Answers that ended", "outcome")
        gauges = ("replica",)
        self._k = Gauge("outrider_k", "Mean number of candidates asked for lately", gauges).set_default_tags(tags)
        self._acceptance = Gauge("outrider_acceptance", "Share of candidates that were accepted in the last second", gauges)
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

    def publish(self, counters: TargetCounters) -> bool:
        """Report what is new; False where it is too early."""
        now = self._clock()
        if now < self._due:
            return False
        self._due = now + SECONDS_BETWEEN
        known, self._known = self._known, counters
        for name, metric in self._counters.items():
            _increase(metric, getattr(counters, name) - getattr(known, name))
        accounted = 0.0
        for phase in PHASES:
            spent = getattr(counters, f"{phase}_seconds") - getattr(known, f"{phase}_seconds")
            accounted += spent
            _increase(self._seconds, spent, {"phase": phase})
        _increase(self._seconds, counters.seconds - known.seconds - accounted, {"phase": OTHER_PHASE})
        for length, (count, before) in enumerate(zip(counters.accepted_lengths, known.accepted_lengths, strict=True)):
            _increase(self._lengths, count - before, {"length": str(length)})
        if counters.asking_rows > known.asking_rows:
            self._k.set((counters.asked - known.asked) / (counters.asking_rows - known.asking_rows))
        if counters.proposed > known.proposed:
            self._acceptance.set((counters.accepted - known.accepted) / (counters.proposed - known.proposed))
        return True


def _increase(metric: Counter, amount: float, tags: dict[str, str] | None = None) -> None:
    """Ray refuses to increase by nothing."""
    if amount > 0:
        metric.inc(amount, tags)
