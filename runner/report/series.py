"""Quantities over time, in a bounded number of equal intervals, whose length is doubled when there are too many."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

FIRST_INTERVAL = 0.25
MOST_POINTS = 200


class Series:
    """Sums of several quantities, by interval, from second 0 on."""

    def __init__(self, columns: Sequence[str], most: int = MOST_POINTS, interval: float = FIRST_INTERVAL) -> None:
        self.columns = tuple(columns)
        self.interval = interval
        self.points: list[list[float]] = []
        # The first points as `record` has them: a job's statistics are recorded all the time, and most points never change.
        self._recorded: list[list[float]] = []
        self._most = most

    def add(self, began: float, ended: float, amounts: Sequence[float]) -> None:
        """Spread amounts evenly over the time between two moments."""
        began, ended = max(0.0, began), max(0.0, began, ended)
        while ended >= self.interval * self._most:
            self._double()
        first, last = int(began / self.interval), int(ended / self.interval)
        del self._recorded[first:]
        while len(self.points) <= last:
            self.points.append([0.0] * len(self.columns))
        for index in range(first, last + 1):
            within = min(ended, (index + 1) * self.interval) - max(began, index * self.interval)
            share = within / (ended - began) if ended > began else 1.0
            point = self.points[index]
            for column, amount in enumerate(amounts):
                point[column] += share * amount

    def _double(self) -> None:
        self.interval *= 2
        self._recorded.clear()
        if len(self.points) % 2:
            self.points.append([0.0] * len(self.columns))
        self.points = [
            [one + other for one, other in zip(left, right, strict=True)]
            for left, right in zip(self.points[::2], self.points[1::2], strict=True)
        ]

    def record(self) -> dict[str, Any]:
        self._recorded += [[round(value, 3) for value in point] for point in self.points[len(self._recorded) :]]
        return {"interval": self.interval, "columns": list(self.columns), "points": self._recorded[:]}

    @classmethod
    def restored(cls, columns: Sequence[str], record: dict[str, Any], most: int = MOST_POINTS) -> Series:
        """The series of a ``record``; a column that an older version lacked is 0."""
        series = cls(columns, most, record["interval"])
        places = [record["columns"].index(name) if name in record["columns"] else None for name in columns]
        series.points = [[0.0 if place is None else point[place] for place in places] for point in record["points"]]
        return series
