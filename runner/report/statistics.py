"""A job's statistics over all its runs: sums by replica, series over time, latencies, pace.

The journal keeps them (every five seconds), so that a resumed job continues them.
"""

from __future__ import annotations

import math
from typing import Any

from outrider.runner.report.latencies import Latencies
from outrider.runner.report.pace import pace_of
from outrider.runner.report.series import MOST_POINTS, Series
from outrider.workers.counters import names
from outrider.workers.messages import LONGEST_COUNTED, OTHER_PHASE, PHASES, TargetCounters

KEY = "account"
SECONDS_BETWEEN_SAVES = 5.0
# With a transaction that is written anyway, for rows that have ended.
SECONDS_BETWEEN_SAVES_WITH_ROWS = 1.0
# The counters that are kept over time.
COLUMNS = names(TargetCounters, lambda counter: counter.over_time)
# The most points of all replicas' series together, so that the record stays small.
MOST_POINTS_TOGETHER = 6400
SUMS = names(TargetCounters)
IN_SUMMARY = names(TargetCounters, lambda counter: counter.in_summary)
# Counters' names in journals of older versions, and their present names.
RENAMED = {
    "runners_up_held": "runners_up_accepted",
    "corrected_held": "corrected_right",
    "corrected_missed": "corrected_wrong",
}


class JobStatistics:
    """``now`` is always in seconds of the job: the time that it has run, without pauses between its runs."""

    def __init__(self, kept: dict[str, Any] | None, replicas: int) -> None:
        kept = kept or {}
        self._most = max(20, min(MOST_POINTS, MOST_POINTS_TOGETHER // max(1, replicas)))
        self.pace = pace_of(kept)
        self.latencies = Latencies(kept.get("latencies"))
        self._sums: dict[int, dict[str, float]] = {}
        self._lengths = [0] * (LONGEST_COUNTED + 1)
        self._series: dict[int, Series] = {}
        self._before: dict[int, tuple[float, TargetCounters]] = {}
        self._saved = -math.inf
        for length, count in enumerate(kept.get("accepted_lengths", [])):
            self._lengths[length] = count
        for name, replica in kept.get("replicas", {}).items():
            self._sums[int(name)] = dict.fromkeys(SUMS, 0.0) | _sums(replica)
            self._series[int(name)] = Series.restored(COLUMNS, replica["series"], self._most)

    def started(self, replica: int, now: float) -> None:
        """A target has come up; its counters begin at 0."""
        self._before[replica] = (now, TargetCounters())

    def observe(self, replica: int, counters: TargetCounters, now: float) -> None:
        """Add what a target's counters have gained since the last call."""
        before, known = self._before.get(replica, (now, TargetCounters()))
        self._before[replica] = (now, counters)
        sums = self._sums.setdefault(replica, dict.fromkeys(SUMS, 0.0))
        for name in SUMS:
            sums[name] += getattr(counters, name) - getattr(known, name)
        for length, count in enumerate(counters.accepted_lengths):
            self._lengths[length] += count - known.accepted_lengths[length]
        series = self._series.setdefault(replica, Series(COLUMNS, self._most))
        series.add(before, now, [getattr(counters, name) - getattr(known, name) for name in COLUMNS])

    @property
    def tokens(self) -> int:
        """The tokens that targets have generated, including those of rows in progress."""
        return int(sum(sums["tokens"] for sums in self._sums.values()))

    def due(self, now: float, seconds: float = SECONDS_BETWEEN_SAVES) -> bool:
        """Whether the last save was at least ``seconds`` ago; if so, a save is assumed to follow."""
        if now - self._saved < seconds:
            return False
        self._saved = now
        return True

    def record(self) -> dict[str, Any]:
        """The statistics as the journal keeps them."""
        return {
            "accepted_lengths": self._lengths,
            "latencies": self.latencies.record(),
            "pace": self.pace.record(),
            "replicas": {
                str(number): {
                    "sums": {name: round(value, 6) for name, value in self._sums[number].items()},
                    "series": self._series[number].record(),
                }
                for number in sorted(self._sums)
            },
        }


def summary_of(record: dict[str, Any] | None) -> dict[str, Any]:
    """The part of a job's summary that follows from its statistics: rates, shares and the replicas' speeds."""
    replicas = (record or {}).get("replicas", {})
    sums = {name: sum(_sums(replica).get(name, 0.0) for replica in replicas.values()) for name in SUMS}
    return {
        "acceptance": _ratio(sums["accepted"], sums["proposed"]),
        "tokens_per_round": _ratio(sums["tokens"], sums["row_rounds"]),
        "mean_k": _ratio(sums["asked"], sums["asking_rows"]),
        **{name: int(sums[name]) for name in IN_SUMMARY},
        "accepted_lengths": (record or {}).get("accepted_lengths", [0] * (LONGEST_COUNTED + 1)),
        "time": shares(sums),
        "replicas": [_replica(int(number), replica["sums"]) for number, replica in replicas.items()],
    }


def shares(sums: dict[str, float]) -> dict[str, float]:
    """The targets' time by phase, as shares; ``other``: their bookkeeping."""
    seconds = sums["seconds"]
    found = {phase: _ratio(sums[f"{phase}_seconds"], seconds) for phase in PHASES}
    return {**found, OTHER_PHASE: round(max(0.0, 1.0 - sum(found.values())), 4) if seconds else 0.0}


def _replica(number: int, sums: dict[str, float]) -> dict[str, Any]:
    return {
        "replica": number,
        "tokens": int(sums["tokens"]),
        "seconds": round(sums["seconds"], 3),
        "tokens_per_second": _ratio(sums["tokens"], sums["seconds"]),
        "acceptance": _ratio(sums["accepted"], sums["proposed"]),
        "tokens_per_round": _ratio(sums["tokens"], sums["row_rounds"]),
        "mean_k": _ratio(sums["asked"], sums["asking_rows"]),
        "time": shares(sums),
    }


def over_time(record: dict[str, Any] | None) -> list[dict[str, Any]]:
    """By replica, points of (seconds, mean k asked for, tokens): a point stands for the interval that ends there."""
    found = []
    for number, replica in (record or {}).get("replicas", {}).items():
        series = Series.restored(COLUMNS, replica["series"])
        places = {name: COLUMNS.index(name) for name in COLUMNS}
        points = [
            [
                round((index + 1) * series.interval, 3),
                _ratio(point[places["asked"]], point[places["asking_rows"]]),
                round(point[places["tokens"]], 1),
            ]
            for index, point in enumerate(series.points)
        ]
        found.append({"replica": int(number), "interval": series.interval, "points": points})
    return found


def _sums(replica: dict[str, Any]) -> dict[str, float]:
    return {RENAMED.get(name, name): value for name, value in replica["sums"].items()}


def _ratio(part: float, whole: float) -> float:
    return round(part / whole, 4) if whole else 0.0
