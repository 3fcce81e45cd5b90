"""Progress and speed of batches, from what the runner reports; in memory only."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from outrider.runner.serve.running import Progress

# A batch's speed is measured over this time.
SPEED_SECONDS = 60.0


@dataclass(slots=True)
class Pace:
    """A batch's progress, and its recent speed."""

    progress: Progress
    seen: deque[tuple[float, Progress]] = field(default_factory=deque)

    def add(self, progress: Progress, now: float) -> None:
        if progress.tokens < self.progress.tokens:
            # Another process has the batch now, and counts tokens from 0.
            self.seen.clear()
        self.progress = progress
        self.seen.append((now, progress))
        while len(self.seen) > 2 and now - self.seen[0][0] > SPEED_SECONDS:
            self.seen.popleft()

    def speed(self) -> tuple[float, float]:
        """Rows and tokens a second."""
        if len(self.seen) < 2 or (seconds := self.seen[-1][0] - self.seen[0][0]) <= 0:
            return 0.0, 0.0
        first, last = self.seen[0][1], self.seen[-1][1]
        rows = last.done + last.failed - first.done - first.failed
        return rows / seconds, (last.tokens - first.tokens) / seconds


class Paces:
    """The paces of unended batches. ``totals``: what was done since the server's start, for the metrics."""

    def __init__(self) -> None:
        self._paces: dict[str, Pace] = {}
        self.totals = {"done": 0, "failed": 0, "tokens": 0, "proposed": 0, "accepted": 0}

    def get(self, batch: str) -> Pace | None:
        return self._paces.get(batch)

    def progresses(self) -> Iterator[Progress]:
        return (pace.progress for pace in self._paces.values())

    def add(self, progress: Progress, counts_before: Mapping[str, int]) -> None:
        """``counts_before``: the batch's request counts, for its first progress since the server's start."""
        begun = Progress(progress.batch, counts_before["completed"], counts_before["failed"], 0, 0, 0, 0.0)
        pace = self._paces.setdefault(progress.batch, Pace(begun))
        self._add_to_totals(pace.progress, progress)
        pace.add(progress, time.monotonic())

    def forget(self, batch: str) -> None:
        self._paces.pop(batch, None)

    def _add_to_totals(self, before: Progress, now: Progress) -> None:
        """Rows are counted over all processes that had the batch, the rest over the present one."""
        for name in self.totals:
            known = getattr(before, name) if name in ("done", "failed") or now.tokens >= before.tokens else 0
            self.totals[name] += max(0, getattr(now, name) - known)
