"""Several jobs on the same loaded model: their rows in turn, each recorded in the journal of its own job.

Rows of all jobs have one numbering, ``job << ROW_BITS | row``, so schedule and replicas know nothing of jobs. Job 0 is that
of single requests, which come first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any

from outrider.runner.driving import schedule_events
from outrider.runner.driving.job_record import JobRecord
from outrider.runner.driving.replica import Replica
from outrider.runner.job.damage import gone
from outrider.runner.job.directory import JOURNAL, describe, is_job, job_lock
from outrider.runner.job.identity import differences, kept_identity
from outrider.runner.job.journal import Journal
from outrider.runner.job.requests import MOST_SAMPLES
from outrider.runner.planning.replica_plan import ReplicaPlan
from outrider.runner.prepare_job import texts_differ
from outrider.runner.report import statistics
from outrider.runner.report.counters import JobCounters
from outrider.runner.report.summary import summarize
from outrider.runner.report.trace import TraceFile
from outrider.runner.serve.shares import SentRows, Share
from outrider.runner.serve.single_rows import SingleRows
from outrider.workers.errors import JobChangedError, OldAnswersError, OutriderError
from outrider.workers.messages import Harvest, PartialTokens, Row, RowFailure, RowResult, TargetCounters, WorkerReport

ROW_BITS = 40
KEY_BITS = ROW_BITS + (MOST_SAMPLES - 1).bit_length()
assert MOST_SAMPLES == 1 << (KEY_BITS - ROW_BITS)
SINGLE = 0
# The kernels keep keys of rows in 63 bits, so after this number jobs are counted from 1 again. A target may still end a row
# of a job that was closed, but not for so long.
LAST_JOB = (1 << 63 - KEY_BITS) - 1


def first_row(job: int) -> int:
    return job << ROW_BITS


def job_of(row: int) -> int:
    return row >> ROW_BITS


@dataclass(slots=True)
class Job:
    """An open batch: this process holds the lock of its job directory."""

    number: int
    batch: str
    directory: Path
    journal: Journal
    record: JobRecord
    hold: ExitStack
    cursor: int = -1
    exhausted: bool = False
    broken: bool = False
    # By replica: the job's share of the target's counters.
    shares: dict[int, Share] = field(default_factory=dict)
    sent: SentRows = field(default_factory=SentRows)

    @property
    def whole(self) -> bool:
        counters = self.record.counters
        return counters.done + counters.failed >= counters.rows

    def close(self) -> None:
        """Save statistics and job.json, close the journal and release the lock."""
        with self.hold:
            try:
                self.record.save_all()
                told: dict[str, Any] = {
                    "pinning": list(self.record.pinned.values()),
                    "layouts": self.record.layouts,
                    "costs": self.record.costs,
                    "rows_by_host": dict(self.record.rows_by_host),
                    "summary": summarize(self.journal),
                    "over_time": statistics.over_time(self.journal.meta(statistics.KEY)),
                    "numeric_path": self.journal.meta("numeric_path"),
                }
                describe(self.directory, self.journal, told)
            finally:
                self.journal.close()


class SharedJobs:
    """``RowSource`` and ``DriverRecord`` of a driver (``driving/driver.py``) for all open jobs.

    ``broken`` is called with a job whose journal cannot be used; the other jobs go on.
    """

    def __init__(
        self,
        model: str,
        replicas: int,
        host_of: Callable[[ReplicaPlan], str],
        single: SingleRows,
        broken: Callable[[Job, OutriderError], None],
    ) -> None:
        self.counters = JobCounters()
        self.jobs: dict[int, Job] = {}
        self.path: dict[str, str] | None = None
        self.single = single
        self._model = model
        self._replicas = replicas
        self._host_of = host_of
        self._broken = broken
        self._last = SINGLE
        self._turn = 0
        self._trace = TraceFile(None)
        # Actors that are up, which are reported to jobs that are opened later.
        self._up: dict[int, tuple[Replica, WorkerReport]] = {}
        self._actors: dict[tuple[int, str], tuple[Replica, WorkerReport]] = {}
        self._counted: dict[int, TargetCounters] = {}
        self._sent_singles = SentRows()

    # Jobs

    def open(self, batch: str, directory: Path, asked: Callable[[str], dict[str, Any]], dropped: Callable[[], bool]) -> Job:
        """Open an admitted job. Its identity and numeric path must be those that it began with.

        ``dropped``: whether an older outrider left out the space before an answer's first word.
        """
        assert self.path is not None
        # Checked before the lock is taken, which would make a missing directory (of a file system that is not mounted).
        if not is_job(directory):
            raise gone(directory / JOURNAL)
        with ExitStack() as hold:
            hold.enter_context(job_lock(directory))
            journal = Journal(directory / JOURNAL)
            hold.callback(journal.close)
            for note in journal.check():
                self.counters.note(note)
            kept = kept_identity(journal)
            # "skip_bad" mattered at admission only.
            now = {**asked(str(kept.get("input"))), "skip_bad": kept.get("skip_bad")}
            _check_as_begun(batch, kept, now)
            if (path := journal.meta("numeric_path")) is None:
                journal.set_meta("numeric_path", self.path)
            else:
                _check_as_begun(batch, path, self.path)
            if journal.counts().pending and texts_differ(journal, dropped):
                raise OldAnswersError(
                    "the batch was begun by an older outrider, whose answers lacked the space before their first word: "
                    "what is done stands in its files, make another batch of the other rows"
                )
            record = JobRecord(journal, self._model, self._replicas, self._trace, self._host_of)
            for (_, role), (replica, report) in self._actors.items():
                record.actor_is_up(replica, role, report)
            for replica, report in self._up.values():
                record.target_is_up(replica, report)
            job = Job(self._unused_number(), batch, directory, journal, record, hold.pop_all())
        self.jobs[job.number] = job
        return job

    def _unused_number(self) -> int:
        """The number after that of the last job, leaving out those of open ones."""
        self._last = next(each for step in count() if (each := (self._last + step) % LAST_JOB + 1) not in self.jobs)
        return self._last

    def leave(self, job: Job) -> None:
        """Close a job and release its directory."""
        del self.jobs[job.number]
        job.close()

    def _isolated(self, job: Job, act: Callable[..., Any], *arguments: Any) -> Any:
        """Call ``act`` for a job. If it raises, the job is broken and the others go on."""
        try:
            return None if job.broken else act(*arguments)
        except OutriderError as error:
            job.broken = job.exhausted = True
            self._broken(job, error)
            return None

    # Where rows come from

    def pending(self, after: int, count: int) -> list[tuple[int, int]]:
        """The next rows: single requests first, then equally many of each job in turn."""
        found = self.single.pending(count)
        while len(found) < count and (open_jobs := [job for job in self.jobs.values() if not job.exhausted]):
            # The turn is kept between calls, which may ask for fewer rows than there are jobs.
            first = self._turn % len(open_jobs)
            quota = max(1, (count - len(found)) // len(open_jobs))
            lanes = []
            for job in (*open_jobs[first:], *open_jobs[:first])[: count - len(found)]:
                self._turn += 1
                lanes.append(self._isolated(job, self._next_of, job, quota) or [])
            found += [row for rank in range(quota) for lane in lanes for row in lane[rank : rank + 1]]
        return found

    def _next_of(self, job: Job, count: int) -> list[tuple[int, int]]:
        rows = job.journal.pending(job.cursor, count)
        job.exhausted = len(rows) < count
        if rows:
            job.cursor = rows[-1][0]
        return [(first_row(job.number) + row, attempts) for row, attempts in rows]

    def count_attempt(self, rows: Sequence[int]) -> None:
        for job, own in self._by_job(rows):
            self._isolated(job, job.journal.count_attempt, own)

    # Rows in progress and their results

    def rows_to_send(self, numbers: Sequence[int], replica: int) -> list[Row]:
        """The rows' samples, in the order of ``numbers``, so that the jobs' turns are kept."""
        sent = self.single.rows_to_send([row for row in numbers if job_of(row) == SINGLE], replica)
        self._sent_singles.add(replica, sent)
        by_row: dict[int, list[Row]] = {}
        for job, own in self._by_job(numbers):
            rows: list[Row] = self._isolated(job, job.record.rows_to_send, own, replica) or []
            job.sent.add(replica, rows)
            for row in rows:
                shifted = replace(row, key=(job.number << KEY_BITS) + row.key)
                by_row.setdefault(shifted.key // MOST_SAMPLES, []).append(shifted)
        return sent + [row for number in numbers for row in by_row.get(number, ())]

    def keys(self, rows: Sequence[int]) -> list[int]:
        found = self.single.keys([row for row in rows if job_of(row) == SINGLE])
        self._sent_singles.forget(found)
        for job, own in self._by_job(rows):
            found += [(job.number << KEY_BITS) + key for key in job.record.keys(own)]
        return found

    def give_up(self, row: int, reason: str) -> None:
        if job_of(row) == SINGLE:
            self.single.give_up(row, reason)
        for job, [own] in self._by_job([row]):
            self._isolated(job, job.record.give_up, own, reason)

    def take(self, harvests: Sequence[tuple[Replica, Harvest]]) -> list[schedule_events.RowsEnded]:
        """Give each job its part of the harvests; returns the rows that ended, by replica."""
        ended = [each for harvest in harvests for each in self.single.take(*harvest)]
        theirs: dict[int, list[tuple[Replica, Harvest]]] = {}
        for replica, harvest in harvests:
            for number, part in self._parts(replica, harvest).items():
                theirs.setdefault(number, []).append((replica, part))
            for note in harvest.notes:
                self.counters.note(note)
        for number, parts in theirs.items():
            job = self.jobs[number]
            for each in self._isolated(job, job.record.take, parts) or ():
                rows = tuple(first_row(number) + row for row in each.rows)
                ended.append(schedule_events.RowsEnded(each.replica, rows))
        return ended

    def _parts(self, replica: Replica, harvest: Harvest) -> dict[int, Harvest]:
        """Divide a harvest among jobs: rows exactly, the target's counters in proportion to the tokens that each gained."""
        ended: dict[int, list[RowResult | RowFailure]] = {}
        written: dict[int, list[PartialTokens]] = {}
        for each in harvest.ended:
            number = each.key >> KEY_BITS
            ended.setdefault(number, []).append(replace(each, key=each.key - (number << KEY_BITS)))
        for some in harvest.written:
            number = some.key >> KEY_BITS
            written.setdefault(number, []).append(replace(some, key=some.key - (number << KEY_BITS)))
        gained = {
            number: self._sent(number).gained(replica.number, ended.get(number, ()), written.get(number, ()))
            for number in {*ended, *written}
        }
        before = self._counted.get(replica.number, TargetCounters())
        together = sum(weight for weight, _ in gained.values())
        parts = {}
        # Counters move on without a share only while there is no job, so that idle time is not a later job's.
        if together or not self.jobs:
            self._counted[replica.number] = harvest.counters
        for number, (weight, own) in gained.items():
            if (job := self.jobs.get(number)) is None:
                continue
            share = job.shares.setdefault(replica.number, Share())
            share.add(before, harvest.counters, weight / together, own)
            own_ended, own_written = tuple(ended.get(number, ())), tuple(written.get(number, ()))
            parts[number] = replace(harvest, ended=own_ended, written=own_written, counters=share.counters(), notes=())
        return parts

    def _sent(self, number: int) -> SentRows:
        """The sent rows of a job; empty for a job that has been closed."""
        if number == SINGLE:
            return self._sent_singles
        return self.jobs[number].sent if number in self.jobs else SentRows()

    # Replicas

    def target_is_up(self, replica: Replica, report: WorkerReport) -> None:
        self.actor_is_up(replica, "target", report)
        self._up[replica.number] = (replica, report)
        for job in self.jobs.values():
            job.record.target_is_up(replica, report)

    def actor_is_up(self, replica: Replica, role: str, report: WorkerReport) -> None:
        self._actors[replica.number, role] = (replica, report)
        for note in (*report.notes, *report.pinned["warnings"], *report.differences):
            self.counters.note(note)
        if role != "target":
            for job in self.jobs.values():
                job.record.actor_is_up(replica, role, report)

    def replica_stopped(self, replica: int) -> None:
        self._up.pop(replica, None)
        self._counted.pop(replica, None)
        self._sent_singles.stopped(replica)
        self.single.replica_stopped(replica)
        for job in self.jobs.values():
            job.shares.pop(replica, None)
            job.sent.stopped(replica)
            job.record.replica_stopped(replica)

    # What journals keep besides rows

    def save_if_due(self) -> None:
        for job in list(self.jobs.values()):
            self._isolated(job, job.record.save_if_due)

    def save_all(self) -> None:
        for job in list(self.jobs.values()):
            self._isolated(job, self.leave, job)

    def _by_job(self, rows: Iterable[int]) -> list[tuple[Job, list[int]]]:
        """The open jobs of these rows, each with the rows' numbers in that job."""
        found: dict[int, list[int]] = {}
        for row in rows:
            found.setdefault(job_of(row), []).append(row - first_row(job_of(row)))
        return [(self.jobs[number], own) for number, own in found.items() if number in self.jobs]


def _check_as_begun(batch: str, kept: dict[str, Any], now: dict[str, Any]) -> None:
    if found := differences(kept, now):
        raise JobChangedError(
            f"{batch} waits: its rows were begun with something else than now ({found}); "
            "start outrider serve as it was then, or cancel the batch"
        )
