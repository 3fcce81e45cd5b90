"""A target's metrics for Prometheus."""

from __future__ import annotations

from typing import Any

import pytest

from outrider.workers.messages import LONGEST_COUNTED, RowFailure, RowResult, TargetCounters
from outrider.workers.target import metrics as module
from outrider.workers.target.metrics import Metrics


class Recorded:
    """In the place of Ray's metrics: sums by name and tags."""

    def __init__(self, values: dict[Any, float], name: str, *given: Any) -> None:
        self.values, self.name = values, name

    def set_default_tags(self, tags: dict[str, str]) -> Recorded:
        assert tags == {"replica": "3"}
        return self

    def inc(self, amount: float = 1, tags: dict[str, str] | None = None) -> None:
        assert amount > 0, "Ray raises an error"
        key = (self.name, *sorted((tags or {}).values()))
        self.values[key] = self.values.get(key, 0) + amount

    def set(self, value: float) -> None:
        self.values[self.name] = value

    observe = inc


@pytest.fixture
def values(monkeypatch: pytest.MonkeyPatch) -> dict[Any, float]:
    found: dict[Any, float] = {}
    for kind in ("Counter", "Gauge", "Histogram"):
        monkeypatch.setattr(module, kind, lambda name, *given: Recorded(found, name, *given))
    return found


def counters(times: int) -> TargetCounters:
    lengths = [0] * (LONGEST_COUNTED + 1)
    lengths[4], lengths[0] = 3 * times, times
    return TargetCounters(
        seconds=10.0 * times, rounds=2 * times, row_rounds=4 * times, tokens=16 * times, asked=16 * times,
        asking_rows=4 * times, proposed=16 * times, accepted=12 * times, verify_seconds=6.0 * times,
        draft_seconds=3.0 * times, accepted_lengths=lengths,
    )  # fmt: skip


def test_totals_are_told_as_increases_and_not_more_often_than_wanted(values: dict[Any, float]) -> None:
    now = [100.0]
    metrics = Metrics(3, lambda: now[0])
    assert metrics.publish(counters(1))
    now[0] += 0.5
    assert not metrics.publish(counters(2))
    now[0] += 0.6
    assert metrics.publish(counters(3))
    assert values["outrider_tokens",] == 48
    assert values["outrider_accepted_length", "4"] == 9
    assert values["outrider_accepted_length", "0"] == 3
    assert ("outrider_accepted_length", "1") not in values
    phases = {name[1]: value for name, value in values.items() if name[0] == "outrider_phase_seconds"}
    assert phases == pytest.approx({"verify": 18.0, "draft": 9.0, "other": 3.0})
    assert (values["outrider_k"], values["outrider_acceptance"]) == (4.0, 0.75)


def test_rows_are_counted_by_how_they_ended(values: dict[Any, float]) -> None:
    done = RowResult(1, (1, 2), "x", "stop", 1, 3, 2, 0.5)
    Metrics(3).ended([done, done, RowFailure(2, "cannot be")])
    assert values["outrider_rows", "stop"] == 2
    assert values["outrider_rows", "failed"] == 1
    assert values["outrider_row_seconds",] == 1.0
