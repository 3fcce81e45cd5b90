"""Latencies in logarithmic buckets of ratio 1.05: bounded memory, and percentiles to within 2.5 percent."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping

RATIO = 1.05
# Shorter ones count as this, since 0 has no logarithm.
SHORTEST = 1e-6


class Latencies:
    def __init__(self, record: Mapping[str, int] | None = None) -> None:
        self._buckets: Counter[int] = Counter({int(bucket): count for bucket, count in (record or {}).items()})

    @property
    def count(self) -> int:
        return self._buckets.total()

    def add(self, seconds: float) -> None:
        self._buckets[math.floor(math.log(max(seconds, SHORTEST)) / math.log(RATIO))] += 1

    def percentile(self, share: float) -> float:
        """The middle of the bucket that holds this percentile; 0 without entries."""
        wanted, seen = share * self.count, 0
        for bucket in sorted(self._buckets):
            seen += self._buckets[bucket]
            if seen >= wanted:
                return float(RATIO ** (bucket + 0.5))
        return 0.0

    def histogram(self, most: int) -> list[tuple[float, float, int]]:
        """(from, to, count) of at most ``most`` bars of equal logarithmic width, over the range that occurred."""
        if not self._buckets:
            return []
        lowest, highest = min(self._buckets), max(self._buckets)
        width = -(-(highest - lowest + 1) // most)
        bars: Counter[int] = Counter()
        for bucket, count in self._buckets.items():
            bars[(bucket - lowest) // width] += count
        return [
            (RATIO ** (lowest + bar * width), RATIO ** (lowest + (bar + 1) * width), bars[bar])
            for bar in range(max(bars) + 1)
        ]

    def record(self) -> dict[str, int]:
        return {str(bucket): count for bucket, count in sorted(self._buckets.items())}
