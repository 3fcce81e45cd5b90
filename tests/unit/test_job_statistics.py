"""A job's statistics over all replicas, deaths and resumptions."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import pytest

from outrider.runner.report.latencies import Latencies
from outrider.runner.report.statistics import JobStatistics, over_time, summary_of
from outrider.runner.report.summary import Summary
from outrider.runner.report.summary_lines import histogram, sparkline, speculation_lines
from outrider.workers.messages import LONGEST_COUNTED, TargetCounters


def counters(rounds: int) -> TargetCounters:
    """A target after this many rounds of a second each: two rows, k of 4, three tokens a row and round."""
    lengths = [0] * (LONGEST_COUNTED + 1)
    lengths[2] = 2 * rounds
    return TargetCounters(
        seconds=1.25 * rounds, rounds=rounds, row_rounds=2 * rounds, tokens=6 * rounds, asked=8 * rounds,
        asking_rows=2 * rounds, proposed=8 * rounds, accepted=4 * rounds,
        runners_up=2 * rounds, runners_up_accepted=rounds // 2, verify_seconds=0.6 * rounds,
        draft_seconds=0.3 * rounds, hop_seconds=0.1 * rounds, idle_seconds=0.125 * rounds, accepted_lengths=lengths,
    )  # fmt: skip


def kept(statistics: JobStatistics) -> dict[str, object]:
    """As the journal gives it back."""
    return json.loads(json.dumps(statistics.record()))


def test_rates_and_shares() -> None:
    statistics = JobStatistics(None, 1)
    statistics.started(0, 0.0)
    for rounds in range(1, 11):
        statistics.observe(0, counters(rounds), float(rounds))
    summary = summary_of(kept(statistics))
    assert (summary["acceptance"], summary["tokens_per_round"], summary["mean_k"]) == (0.5, 3.0, 4.0)
    assert summary["time"] == {"verify": 0.48, "draft": 0.24, "hop": 0.08, "idle": 0.1, "other": 0.1}
    assert sum(summary["time"].values()) == pytest.approx(1.0)
    assert summary["accepted_lengths"] == [0, 0, 20, *[0] * 14]
    [replica] = summary["replicas"]
    assert (replica["replica"], replica["tokens"], replica["tokens_per_second"]) == (0, 60, 60 / 12.5)
    [line] = over_time(kept(statistics))
    assert {k for _, k, tokens in line["points"] if tokens} == {4.0}
    assert sum(tokens for _, _, tokens in line["points"]) == pytest.approx(60)


def test_every_key_of_a_summary_stands_on_the_page_of_jobs() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "jobs.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| (.+) \|$", page.partition("| key | is |")[2].partition("\n\n")[0], re.M)
    assert [name for name, _ in rows] == list(Summary.__annotations__)
    statistics, said = JobStatistics(None, 1), dict(rows)
    statistics.started(0, 0.0)
    statistics.observe(0, counters(1), 1.0)
    summary = summary_of(kept(statistics))
    missing = [
        name for name in (*summary["time"], *summary["replicas"][0]) if f"`{name}`" not in said["time"] + said["replicas"]
    ]
    assert missing == []


def test_a_target_that_died_is_counted_and_its_successor_starts_from_nothing() -> None:
    statistics = JobStatistics(None, 1)
    statistics.started(0, 0.0)
    statistics.observe(0, counters(10), 10.0)
    statistics.started(0, 12.0)
    statistics.observe(0, counters(3), 15.0)
    summary = summary_of(kept(statistics))
    assert summary["replicas"][0]["tokens"] == 78
    assert summary["accepted_lengths"][2] == 26


def test_a_job_of_an_older_outrider_keeps_what_it_counted_under_older_names() -> None:
    statistics = JobStatistics(None, 1)
    statistics.started(0, 0.0)
    statistics.observe(0, counters(10), 10.0)
    older = json.dumps(statistics.record()).replace("runners_up_accepted", "runners_up_held")
    older = older.replace("corrected_right", "corrected_held").replace("corrected_wrong", "corrected_missed")
    assert summary_of(json.loads(older)) == summary_of(kept(statistics))
    resumed = JobStatistics(json.loads(older), 1)
    resumed.started(0, 12.0)
    resumed.observe(0, counters(2), 14.0)
    assert summary_of(kept(resumed))["runners_up_accepted"] == 6
    assert "runners_up_held" not in json.dumps(resumed.record())


def test_a_resumed_job_goes_on_where_it_was() -> None:
    whole, first = JobStatistics(None, 2), JobStatistics(None, 2)
    for statistics in (whole, first):
        for replica in (0, 1):
            statistics.started(replica, 0.0)
            statistics.observe(replica, counters(4), 4.0)
        statistics.latencies.add(3.0)
    second = JobStatistics(kept(first), 2)
    for statistics in (whole, second):
        for replica in (0, 1):
            statistics.started(replica, 4.0)
            statistics.observe(replica, counters(5), 9.0)
        statistics.latencies.add(5.0)
    assert kept(second) == kept(whole)
    assert summary_of(kept(second))["replicas"][1]["tokens"] == 54
    assert second.latencies.count == 2


def test_a_job_that_has_done_nothing_has_a_summary() -> None:
    summary = summary_of(None)
    assert summary["tokens_per_round"] == 0.0
    assert set(summary["time"].values()) == {0.0}
    assert (summary["replicas"], over_time(None)) == ([], [])
    assert list(speculation_lines(summary, [])) == []


@pytest.mark.slow
def test_the_record_stays_small_however_many_replicas_and_hours_there_are() -> None:
    statistics = JobStatistics(None, 100)
    for replica in range(100):
        statistics.started(replica, 0.0)
        for hour in range(1, 200):
            statistics.observe(replica, counters(hour), 3600.0 * hour)
    assert len(json.dumps(statistics.record())) < 500_000


def test_percentiles_lie_within_their_bucket() -> None:
    values = sorted(random.Random(1).lognormvariate(0.0, 1.5) for _ in range(5000))
    latencies = Latencies()
    for value in values:
        latencies.add(value)
    again = Latencies(json.loads(json.dumps(latencies.record())))
    for share in (0.01, 0.5, 0.9, 0.99):
        assert again.percentile(share) == pytest.approx(values[int(share * 5000)], rel=0.03)
    bars = again.histogram(30)
    assert len(bars) <= 30
    assert sum(count for _, _, count in bars) == 5000
    assert bars[0][0] <= values[0] and values[-1] <= bars[-1][1]


def test_latencies_take_whatever_a_clock_gives() -> None:
    latencies = Latencies()
    assert (latencies.percentile(0.5), latencies.histogram(10)) == (0.0, [])
    for value in (0.0, -1.0, 1e9):
        latencies.add(value)
    assert latencies.count == 3
    assert len(latencies.histogram(10)) <= 10


def test_lines_for_the_terminal() -> None:
    statistics = JobStatistics(None, 2)
    for replica in (0, 1):
        statistics.started(replica, 0.0)
        statistics.observe(replica, counters(10), 10.0)
    lines = dict(speculation_lines(summary_of(kept(statistics)), over_time(kept(statistics))))
    assert lines["tokens a round"] == "3.00 (k 4.0 on average)"
    assert lines["accepted"] == "▁▁█ 0: 0%, 1: 0%, 2: 100%"
    assert lines["runners-up"] == "25% (10 of 40 second choices) accepted"
    assert lines["time"] == "verify 48.0%, draft 24.0%, hop 8.0%, idle 10.0%, other 10.0%"
    assert lines["replica 1"] == "4.8 tokens/s, 60 tokens, k 4.0"
    assert lines["k over time of replica 0"].endswith("4.0 to 4.0")


def test_sparks() -> None:
    assert sparkline([0, 1, 8], 10) == "▁▂█"
    assert sparkline([0, 0], 10) == "▁▁"
    assert len(sparkline(range(1000), 40)) == 40
    assert histogram([1, 0, 3]).endswith("0: 25%, 1: 0%, 2: 75%")
