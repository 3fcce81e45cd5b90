"""What a pass of an engine costs, measured: seconds against the number of tokens fed."""

from __future__ import annotations

import time
from bisect import bisect_left

from outrider.workers.engine import Engine, Feed
from outrider.workers.messages import Sampling

POINTS = (1, 2, 4, 8, 16, 32, 64, 128)
REPEATS = 3
PREFIX = 32
# A row number that no job uses.
PROBE_ROW = -1
# The share of a new observation in a point's running mean.
FRESH = 0.1


class CostCurve:
    """Seconds of a pass over a number of tokens, linear between measured points and beyond the last."""

    def __init__(self, points: dict[int, float]) -> None:
        self._counts = sorted(points)
        self._seconds = [points[count] for count in self._counts]

    def __call__(self, tokens: int) -> float:
        counts, seconds = self._counts, self._seconds
        if len(counts) == 1:
            return seconds[0]
        right = min(max(bisect_left(counts, tokens), 1), len(counts) - 1)
        share = (tokens - counts[right - 1]) / (counts[right] - counts[right - 1])
        return max(seconds[0] / 2, seconds[right - 1] + share * (seconds[right] - seconds[right - 1]))

    def observe(self, tokens: int, seconds: float) -> None:
        """Refresh the nearest point with what a real pass took."""
        nearest = min(range(len(self._counts)), key=lambda index: abs(self._counts[index] - tokens))
        if self._counts[nearest] == tokens:
            self._seconds[nearest] += FRESH * (seconds - self._seconds[nearest])


def measure(engine: Engine) -> CostCurve:
    """Feed a probe row passes of several sizes; the fastest of a few tries counts."""
    points: dict[int, float] = {}
    engine.open(PROBE_ROW, Sampling(), PREFIX)
    try:
        prefix = min(PREFIX, engine.context // 2)
        engine.feed([Feed(PROBE_ROW, [1] * prefix, 0)])
        for count in POINTS:
            if prefix + count > engine.context:
                break
            times = []
            for _ in range(REPEATS):
                engine.truncate(PROBE_ROW, prefix)
                started = time.perf_counter()
                engine.feed([Feed(PROBE_ROW, [1] * count, count)])
                times.append(time.perf_counter() - started)
            points[count] = min(times)
    finally:
        engine.close(PROBE_ROW)
    return CostCurve(points)
