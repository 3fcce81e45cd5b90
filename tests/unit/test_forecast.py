"""Measured times of rounds against their forecasts."""

from __future__ import annotations

from outrider.workers.messages import Layout
from outrider.workers.speculation import LayoutKind
from outrider.workers.target.forecast import Forecast, ForecastCheck, Round

SHARED = Layout("shared", LayoutKind.SEQUENTIAL)
PLAIN = Layout("plain", LayoutKind.SEQUENTIAL, plain=True)


def test_rounds_are_summed_by_layout_and_by_whether_there_were_candidates() -> None:
    check = ForecastCheck()
    expected = Forecast(0.1, 3.0)
    check.observe(SHARED, Round((2,), (2,), 1, True, verifying=0.05, forecast=expected), 0.2)
    check.observe(SHARED, Round((2,), (0,), 1, True, verifying=0.05, forecast=expected), 0.1)
    check.observe(SHARED, Round((0,), (0,), 1, True, forecast=Forecast(0.04, 1.0)), 0.05)
    check.observe(SHARED, Round((2,), (2,), 1, False, read=9, forecast=expected), 100.0)
    check.observe(SHARED, Round((2,), (2,), 1, True), 100.0)
    check.observe(PLAIN, Round((0,), (0,), 1, True, forecast=Forecast(0.04, 1.0)), 0.05)
    record = check.record()
    assert record.keys() == {"shared", "shared, no candidates", "plain"}, "plain rounds never have any"
    assert record["shared"] == {
        "rounds": 2,
        "seconds": 0.3,
        "forecast_seconds": 0.2,
        "tokens": 4,
        "forecast_tokens": 6.0,
        "verify_seconds": 0.1,
        "tried": 3,
        "accepted": 2,
    }
