"""What a pass of an engine costs, measured: seconds against the number of tokens fed."""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Collection, Mapping, Sequence

from outrider.workers.engines.engine import Engine, Feed
from outrider.workers.messages import Sampling

# The first few decide between plain rounds and small numbers of candidates; the others are taken if time allows.
FIRST_POINTS = (1, 4, 8, 16)
POINTS = (*FIRST_POINTS, 2, 6, 12, 32, 64, 128)
REPEATS = 3
BUDGET_SECONDS = 0.4
PREFIX = 32
# A row number that no job uses.
PROBE_ROW = -1
# The share of a new observation in a point's running mean.
FRESH = 0.1
# How fast the points that a pass says nothing of follow those that it does.
FOLLOWING = 0.02
# So many values decide what is usual.
RECENT = 9


class CostCurve:
    """Seconds of a pass over a number of tokens, linear between measured points and beyond the last."""

    def __init__(self, points: Mapping[int, float]) -> None:
        self._counts = sorted(points)
        self._seconds = [points[count] for count in self._counts]
        self._at_start = list(self._seconds)

    @property
    def points(self) -> dict[int, float]:
        return dict(zip(self._counts, self._seconds, strict=True))

    def measured_anew(self, points: Mapping[int, float]) -> CostCurve:
        """With these points; those on either side of all of them are believed to have changed like the nearest one."""
        if not points:
            return self
        first, last = min(points), max(points)
        below = {count: self(count) * points[first] / self(first) for count in self._counts if count < first}
        above = {count: self(count) * points[last] / self(last) for count in self._counts if count > last}
        return type(self)(rising({**below, **points, **above}))

    def __call__(self, tokens: int) -> float:
        return self._between(self._seconds, tokens)

    def _between(self, seconds: Sequence[float], tokens: int) -> float:
        counts = self._counts
        if len(counts) == 1:
            return seconds[0]
        right = self._right_of(tokens)
        share = (tokens - counts[right - 1]) / (counts[right] - counts[right - 1])
        return max(seconds[0] / 2, seconds[right - 1] + share * (seconds[right] - seconds[right - 1]))

    def observe(self, tokens: int, seconds: float) -> None:
        """Refresh the points on both sides with what a real pass took, the nearer one more.

        A machine slows down and recovers as a whole, so the points further off follow, slowly: those that no pass visits
        any more would else stay as they were in the worst second.
        """
        counts = self._counts
        if tokens > counts[-1]:
            return
        # An interruption counts as no more than a pass that took twice as long.
        excess = min(1.0, seconds / self(tokens) - 1.0)
        slower = (1.0 + excess) * self(tokens) / self._between(self._at_start, tokens)
        right = self._right_of(tokens)
        share = (tokens - counts[right - 1]) / (counts[right] - counts[right - 1]) if len(counts) > 1 else 0.0
        self._seconds[right - 1] *= 1.0 + FRESH * (1.0 - share) * excess
        if len(counts) > 1:
            self._seconds[right] *= 1.0 + FRESH * share * excess
        for index, start in enumerate(self._at_start):
            if index not in (right - 1, right):
                self._seconds[index] += FOLLOWING * (start * slower - self._seconds[index])

    def _right_of(self, tokens: int) -> int:
        return min(max(bisect_left(self._counts, tokens), 1), max(1, len(self._counts) - 1))


class Recent:
    """What is usual among the last few values, by number of rows; a number not seen yet takes its nearest's.

    The lower quartile and not a mean: the first call of anything takes many times as long as the next, and a disturbed
    second must not make a draft look dear for long, since what looks dear is hardly asked and hardly measured again.
    """

    def __init__(self, most: int = RECENT) -> None:
        self._most = most
        self._values: dict[int, deque[float]] = {}

    @property
    def usual(self) -> dict[int, float]:
        return {rows: _usual(values) for rows, values in list(self._values.items())}

    def observe(self, rows: int, value: float) -> None:
        self._values.setdefault(rows, deque(maxlen=self._most)).append(value)

    def __call__(self, rows: int) -> float | None:
        nearest = self._nearest(rows)
        return None if nearest is None else _usual(self._values[nearest])

    def of_a_row(self, rows: int) -> float:
        """What one row of so many adds, by the fewest rows that were seen; 0 where it cannot be told."""
        most, fewest = self._nearest(rows), min(self._values, default=None)
        if most is None or fewest is None or most == fewest:
            return 0.0
        value = _usual(self._values[most])
        return min(max(0.0, (value - _usual(self._values[fewest])) / (most - fewest)), value / most)

    def _nearest(self, rows: int) -> int | None:
        return min(self._values, key=lambda count: abs(count - rows), default=None)


def _usual(values: Collection[float]) -> float:
    return sorted(values)[(len(values) - 1) // 4]


class _Texts:
    """Tokens that have nothing in common: of a mixture of experts, the cost of a pass depends on how many of them its
    tokens need, and the same ones again would be in the processor's caches. Real texts need rather fewer."""

    def __init__(self, vocabulary: int) -> None:
        self._vocabulary = vocabulary
        self._taken = 0

    def take(self, count: int) -> list[int]:
        numbers = range(self._taken, self._taken + count)
        self._taken += count
        # Consecutive numbers, spread over the vocabulary.
        return [(number * 2654435761 >> 7) % self._vocabulary for number in numbers]


def measure(engine: Engine, seconds: float = BUDGET_SECONDS, only: Sequence[int] = ()) -> CostCurve:
    """Feed a probe row passes of several sizes: each once, and again as long as the time lasts; the fastest counts.

    With ``only``, passes of these sizes, once each.
    """
    if only:
        return CostCurve(rising(_passes(engine, 0.0, only, 1)))
    return CostCurve(rising(_passes(engine, seconds, POINTS, PREFIX)))


def rising(points: Mapping[int, float]) -> dict[int, float]:
    """With what must have been disturbed put right: no pass takes longer than one over more tokens."""
    least, found = math.inf, {}
    for count in sorted(points, reverse=True):
        least = found[count] = min(least, points[count])
    return found


def _passes(engine: Engine, seconds: float, sizes: Sequence[int], prefix: int) -> dict[int, float]:
    deadline = time.perf_counter() + seconds
    points: dict[int, float] = {}
    engine.open(PROBE_ROW, Sampling(), prefix)
    try:
        prefix = min(prefix, engine.context // 2)
        texts = _Texts(engine.vocabulary)
        engine.feed([Feed(PROBE_ROW, texts.take(prefix), 0)])
        for repeat in range(REPEATS):
            for count in sizes:
                beyond = prefix + count > engine.context
                needed = not repeat and (count in FIRST_POINTS or sizes is not POINTS)
                if beyond or (not needed and time.perf_counter() > deadline):
                    continue
                engine.truncate(PROBE_ROW, prefix)
                tokens = texts.take(count)
                started = time.perf_counter()
                engine.feed([Feed(PROBE_ROW, tokens, count)])
                points[count] = min(points.get(count, math.inf), time.perf_counter() - started)
    finally:
        engine.close(PROBE_ROW)
    return points
