"""What is known of a job while it runs: its rows' records and tokens, its counters and statistics, and where it runs."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from outrider.runner.driving import schedule
from outrider.runner.driving.partial_results import PartialResults
from outrider.runner.driving.replica import Replica
from outrider.runner.job.journal import Journal
from outrider.runner.planning.replica_plan import ReplicaPlan
from outrider.runner.report import statistics
from outrider.runner.report.counters import FROM_TARGETS, JobCounters
from outrider.runner.report.statistics import SECONDS_BETWEEN_SAVES, SECONDS_BETWEEN_SAVES_WITH_ROWS, JobStatistics
from outrider.runner.report.trace import TraceFile
from outrider.workers.messages import Harvest, Row, TargetCounters, WorkerReport


class JobRecord:
    """Rows become durable here, each once, before anybody is told that they have ended."""

    def __init__(
        self, journal: Journal, model: str, replicas: int, trace: TraceFile, host_of: Callable[[ReplicaPlan], str]
    ) -> None:
        counts = journal.counts()
        self.counters = JobCounters(rows=counts.rows, done=counts.done, failed=counts.failed)
        self.pinned: dict[tuple[int, str], dict[str, Any]] = {}
        self.layouts: dict[int, dict[str, Any]] = {}
        self.costs: dict[int, dict[str, Any]] = {}
        self.rows_by_host: Counter[str] = Counter()
        self.trace = trace
        self._journal = journal
        self._host_of = host_of
        self._earlier: dict[str, float] = journal.meta("totals") or {}
        self._statistics = JobStatistics(journal.meta(statistics.KEY), replicas)
        self._partial_results = PartialResults(
            model, self.counters, self._statistics.latencies, (journal.meta("input") or {}).get("name", "line")
        )
        self._statistics.pace.go_on(counts.done + counts.failed, self._statistics.tokens)
        self.counters.pace = self._statistics.pace
        # Loading models is no part of the job's speed.
        self._first_up: float | None = None
        self._places_kept = -math.inf
        # Whether all rows that are counted stand in the journal.
        self._all_recorded = True
        self._counters_of_targets: dict[int, TargetCounters] = {}
        self._counted_before = TargetCounters()

    # Rows

    def rows_to_send(self, numbers: Sequence[int], replica: int) -> list[Row]:
        """What a replica is sent for these rows, as far as they are not written yet."""
        rows = self._journal.load(numbers)
        kept = self._journal.kept_tokens(self._partial_results.new(numbers))
        self.trace.event("rows sent", replica, rows=len(rows))
        return self._partial_results.add(rows, kept, replica)

    def keys(self, rows: Sequence[int]) -> list[int]:
        """What a replica calls the samples of rows that it need not finish."""
        return self._partial_results.keys(rows)

    def give_up(self, row: int, reason: str) -> None:
        """No replica survives this row."""
        self._journal.record([], [(row, self._partial_results.give_up(row, reason))])
        self.counters.failed += 1

    def take(self, harvests: Sequence[tuple[Replica, Harvest]]) -> list[schedule.RowsEnded]:
        """Harvests that arrived together are one transaction; the schedule hears of their rows when it is through."""
        done: list[tuple[int, str]] = []
        failed: list[tuple[int, str]] = []
        ended: list[schedule.RowsEnded] = []
        self._all_recorded = not harvests
        self._note_seconds()
        for replica, harvest in harvests:
            now_done, now_failed = self._partial_results.take(harvest, replica.number)
            done += now_done
            failed += now_failed
            self._observe(replica, harvest)
            if rows := [number for number, _ in (*now_done, *now_failed)]:
                ended.append(schedule.RowsEnded(replica.number, tuple(rows)))
                self.rows_by_host[self._host_of(replica.plan)] += len(rows)
        if harvests:
            # Work that was lost and done again is counted in.
            for name in FROM_TARGETS:
                kept = (self._counted_before, *self._counters_of_targets.values())
                setattr(self.counters, name, sum(getattr(counters, name) for counters in kept))
        if ended:
            # Totals and account together: where the driver is killed, speeds and shares are made of both.
            due = self._statistics.due(self._now(), SECONDS_BETWEEN_SAVES_WITH_ROWS)
            account = self._statistics.record() if due else None
            self._journal.record(done, failed, self.counters.summed(self._earlier), account)
            self.counters.done += len(done)
            self.counters.failed += len(failed)
        self._all_recorded = True
        return ended

    def _observe(self, replica: Replica, harvest: Harvest) -> None:
        self._statistics.observe(replica.number, harvest.counters, self._now())
        self.trace.actor(replica.number, "target", harvest.trace)
        if harvest.ended:
            self.trace.event("rows received", replica.number, rows=len(harvest.ended))
        self._counters_of_targets[replica.number] = harvest.counters
        self.costs[replica.number] = harvest.costs
        for note in harvest.notes:
            self.counters.note(note)
        if harvest.layout is not None:
            self.layouts[replica.number] = asdict(harvest.layout)
            if len(replica.plan.replica_spec.layouts) > 1:
                self.counters.note(f"replica {replica.number}: {harvest.layout.sentence}")

    # Replicas

    def target_is_up(self, replica: Replica, report: WorkerReport) -> None:
        self.actor_is_up(replica, "target", report)
        self._statistics.started(replica.number, self._now())
        if self._first_up is None:
            self._first_up = time.monotonic()

    def actor_is_up(self, replica: Replica, role: str, report: WorkerReport) -> None:
        """Keep what an actor says of its numbers and its pinning, and tell the user what is not as it was asked to be."""
        self.pinned[replica.number, role] = {
            "replica": replica.number,
            "role": role,
            "node": replica.plan.target.node,
            "numeric_path": report.path,
            **report.pinned,
        }
        for note in (*report.notes, *report.pinned["warnings"]):
            self.counters.note(note)
        for difference in report.differences:
            self.counters.note(f"{role} of replica {replica.number}: {difference}")

    def replica_stopped(self, replica: int) -> None:
        """Its target will tell no more of its rows; the next one counts from zero."""
        self._partial_results.written.released(replica)
        lost = self._counters_of_targets.pop(replica, TargetCounters())
        for name in FROM_TARGETS:
            setattr(self._counted_before, name, getattr(self._counted_before, name) + getattr(lost, name))

    # What is kept in the journal beside rows, for a report or a run that comes after this one

    def keep_due(self) -> None:
        """Whatever has not been kept for a while."""
        self._note_seconds()
        if self._first_up is not None:
            self._note_pace()
            if self._statistics.due(self._now()):
                self._keep_account()
            if self._now() - self._places_kept >= SECONDS_BETWEEN_SAVES:
                self._keep_places()
        if self._partial_results.written.due(time.monotonic()):
            self._keep_written()

    def _note_seconds(self) -> None:
        if self._first_up is not None:
            self.counters.seconds = time.monotonic() - self._first_up

    def _note_pace(self) -> None:
        told = self.counters
        prompts = told.prompt_tokens + self._earlier.get("prompt_tokens", 0)
        # Where answers are long, no row ends for minutes.
        self._statistics.pace.add(self._now(), told.done + told.failed, self._statistics.tokens, prompts)

    def keep_all(self) -> None:
        if self._all_recorded:  # else these rows are done again, and counted then
            self._keep_account()
            self._keep_places()
            self._keep_written()

    def _keep_account(self) -> None:
        """The totals with it: rows under way have used time, too."""
        self._journal.record([], [], self.counters.summed(self._earlier), self._statistics.record())

    def _keep_places(self) -> None:
        self._places_kept = self._now()
        if self.pinned:
            self._journal.set_meta("pinning", list(self.pinned.values()))
        if self.layouts:
            self._journal.set_meta("layouts", self.layouts)

    def _keep_written(self) -> None:
        """The tokens of rows under way, so that a resumed job goes on where they are."""
        store = self._partial_results.written
        started = time.monotonic()
        if written := store.to_keep():
            self._journal.keep_tokens(written)
            ended = time.monotonic()
            store.was_written(ended, ended - started)
            # With them the time that they took, or a driver that is killed often would be said to be faster than it was.
            if self._statistics.due(self._now(), SECONDS_BETWEEN_SAVES_WITH_ROWS):
                self._keep_account()

    def _now(self) -> float:
        """Seconds of the job: its earlier runs and this one."""
        return self.counters.seconds + self._earlier.get("seconds", 0.0)
