"""The record of a job with long rows, whose driver is killed or stopped while they are in progress."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from io import StringIO
from pathlib import Path
from types import SimpleNamespace

import pytest
from driver_fakes import PLAN, REPORT, REQUEST
from rich.console import Console

from outrider.runner import continued
from outrider.runner.driving import job_record
from outrider.runner.driving.job_record import JobRecord
from outrider.runner.driving.replica import Replica
from outrider.runner.job.journal import Journal, StoredRow
from outrider.runner.report import statistics
from outrider.runner.report.display import summary_table
from outrider.runner.report.series import Series
from outrider.runner.report.statistics import COLUMNS
from outrider.runner.report.status import status_of
from outrider.runner.report.summary import summarize
from outrider.runner.report.trace import TraceFile
from outrider.workers.messages import LONGEST_COUNTED, Harvest, PartialTokens, RowResult, TargetCounters

ROWS = 2
TICK = 0.5


class SteadyJob:
    """One target, two rows, ten rounds a second: a row gains two tokens a round by ``held`` of three candidates."""

    def __init__(self, journal: Journal, monkeypatch: pytest.MonkeyPatch) -> None:
        self.journal = journal
        self._now = 1000.0
        # What else happens, by the seconds of a driver's life.
        self.meanwhile: Callable[[JobRecord, float], None] = lambda record, seconds: None
        monkeypatch.setattr(job_record, "time", SimpleNamespace(monotonic=lambda: self._now))

    def pass_by(self, seconds: float) -> None:
        self._now += seconds

    def live(self, seconds: float, held: int = 1) -> JobRecord:
        """A driver for so long, or until all rows have ended; it keeps what is due, and is gone without a word."""
        record = JobRecord(self.journal, "m", 1, TraceFile(None), lambda plan: "here")
        replica = Replica(0, PLAN)
        record.target_is_up(replica, REPORT)
        rows = record.rows_to_send(range(ROWS), 0)
        written = {row.key: len(row.resumed) for row in rows}
        proposed = dict.fromkeys(written, 0)
        lengths = [0] * (LONGEST_COUNTED + 1)
        counters = TargetCounters(
            prompt_tokens=sum(len(row.prompt) for row in rows),
            resumed_tokens=sum(written.values()),
            accepted_lengths=lengths,
        )
        until = self._now + seconds
        while self._now < until and any(written[row.key] < row.max_tokens for row in rows):
            self._now += TICK
            counters.seconds += TICK
            counters.verify_seconds += 0.9 * TICK
            counters.rounds += 5
            told, ended = [], []
            for row in (row for row in rows if written[row.key] < row.max_tokens):
                told.append(PartialTokens(row.key, written[row.key], (7,) * 10))
                written[row.key] += 10
                proposed[row.key] += 15
                counters.row_rounds += 5
                counters.asking_rows += 5
                counters.asked += 15
                counters.tokens += 10
                counters.proposed += 15
                counters.accepted += 5 * held
                lengths[held] += 5
                if written[row.key] == row.max_tokens:
                    theirs = proposed[row.key]
                    tokens = (7,) * row.max_tokens
                    ended.append(RowResult(row.key, tokens, "text", "length", 1, theirs, theirs // 3 * held, 1.0))
            copy = replace(counters, accepted_lengths=list(lengths))
            record.take([(replica, Harvest(tuple(ended), copy, written=tuple(told)))])
            self.meanwhile(record, self._now - until + seconds)
            record.save_if_due()
        return record


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    with closing(Journal(tmp_path / "job.db")) as made:
        yield made


def fill(journal: Journal, max_tokens: int) -> None:
    request = {**REQUEST, "max_tokens": max_tokens}
    journal.fill((StoredRow(n, f"id-{n}", n + 1, "completion", request, (1, 2, 3)) for n in range(ROWS)), [], {})


def test_a_killed_driver_has_spent_the_time_of_the_tokens_that_it_leaves(
    journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(journal, 1200)
    job = SteadyJob(journal, monkeypatch)
    job.live(50.0)
    assert journal.counts().pending == ROWS, "no row has ended"
    job.live(1000.0).save_all()
    summary = summarize(journal)
    assert summary["tokens"] == ROWS * 1200
    # Tokens of the last two seconds are lost, and their time with them.
    assert summary["seconds"] == 60.0
    [replica] = summary["replicas"]
    assert (replica["seconds"], replica["tokens_per_second"]) == (summary["seconds"], 40.0)
    assert summary["rounds"] == 10 * summary["seconds"]
    assert summary["prompt_tokens"] == 2 * ROWS * 3, "both drivers' targets have read them"
    account = journal.meta(statistics.KEY)
    moments = [moment for moment, *_ in account["pace"]]
    assert moments == sorted(moments)
    series = Series.restored(COLUMNS, account["replicas"]["0"]["series"])
    most = max(tokens for tokens, *_ in series.points)
    assert most == pytest.approx(40.0 * series.interval), "no second counts twice"


@pytest.mark.parametrize("continued_by", ["SIGCONT", ""])
def test_a_stop_by_ctrl_z_is_no_time_of_the_job(
    journal: Journal, monkeypatch: pytest.MonkeyPatch, continued_by: str
) -> None:
    """A driver that has merely come by late, on a busy machine, has used that time."""
    fill(journal, 1200)
    job = SteadyJob(journal, monkeypatch)
    paused = []

    def pause(record: JobRecord, seconds: float) -> None:
        if seconds == 10.0:
            job.pass_by(45.0)
            paused.append(seconds)
            if continued_by:
                os.kill(os.getpid(), signal.Signals[continued_by])

    job.meanwhile = pause
    with continued.counted():
        job.live(1000.0).save_all()
    assert paused == [10.0]
    summary = summarize(journal)
    # Of the pause what the driver usually takes for a turn counts.
    expected = 60.0 + (job_record.TURN_SECONDS if continued_by else 45.0)
    assert (summary["tokens"], summary["seconds"]) == (ROWS * 1200, expected)


def test_a_driver_that_is_killed_when_all_rows_have_ended_leaves_what_they_took(
    journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(journal, 80)
    SteadyJob(journal, monkeypatch).live(1000.0)
    assert journal.counts().done == ROWS
    summary = summarize(journal)
    assert (summary["tokens"], summary["seconds"], summary["tokens_per_round"]) == (160, 4.0, 2.0)
    assert summary["acceptance"] == pytest.approx(1 / 3, abs=1e-4)
    assert (summary["time"]["verify"], summary["replicas"][0]["tokens_per_second"]) == (0.9, 40.0)
    assert sum(journal.meta(statistics.KEY)["latencies"].values()) == ROWS


def test_where_actors_run_is_kept_however_often_the_account_is(journal: Journal, monkeypatch: pytest.MonkeyPatch) -> None:
    """A report that is drawn meanwhile shows it."""
    fill(journal, 1200)
    job = SteadyJob(journal, monkeypatch)
    job.meanwhile = lambda record, seconds: (
        record.actor_is_up(Replica(0, PLAN), "draft", REPORT) if seconds == 3.0 else None
    )
    job.live(12.0)
    kept = journal.meta("pinning")
    assert [each["role"] for each in kept] == ["target", "draft"]
    assert kept[1]["numeric_path"] == REPORT.path


def test_long_rows_are_not_said_to_stand_still(journal: Journal, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(journal, 1200)
    record = SteadyJob(journal, monkeypatch).live(50.0)
    rates = record.counters.pace.rates()
    assert rates is not None and (rates.ended, rates.tokens) == (0, 40.0)


def test_what_was_proposed_for_a_row_before_it_was_resumed_counts(
    journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The draft is poor before a stop and good behind it: every figure tells of both."""
    fill(journal, 1200)
    job = SteadyJob(journal, monkeypatch)
    job.live(50.0, held=0).save_all()
    told = dict(status_of(journal).totals)
    assert (told["proposed"], told["accepted"]) == (3000, 0), "of rows under way, too"
    job.live(1000.0, held=3).save_all()
    summary = summarize(journal)
    assert (summary["proposed"], summary["accepted"]) == (3600, 600)
    assert summary["acceptance"] == pytest.approx(600 / 3600, abs=1e-4)
    assert sum(summary["accepted_lengths"]) == 3600 / 3
    table = Console(width=100, file=StringIO(), record=True)
    table.print(summary_table(summary, [], "job"))
    assert "17% (600 of 3,600 candidates)" in table.export_text()


def test_the_account_is_not_written_with_every_row() -> None:
    spent = statistics.JobStatistics(None, 1)
    assert [spent.due(moment / 4, statistics.SECONDS_BETWEEN_SAVES_WITH_ROWS) for moment in range(6)] == [
        *(True, False, False, False, True, False)
    ]
    assert not spent.due(5.9), "nobody wrote it for a while"
    assert spent.due(6.0)
