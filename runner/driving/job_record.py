"""The state of a running job: records and partial tokens of rows, counters, statistics, and the pinning of its actors."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from outrider.runner import continued
from outrider.runner.driving import schedule_events
from outrider.runner.driving.partial_results import PartialResults
from outrider.runner.driving.replica import Replica
from outrider.runner.job.journal import Journal
from outrider.runner.planning.replica_plan import ReplicaPlan
from outrider.runner.report import statistics
from outrider.runner.report.counters import FROM_TARGETS, JobCounters
from outrider.runner.report.statistics import SECONDS_BETWEEN_SAVES, SECONDS_BETWEEN_SAVES_WITH_ROWS, JobStatistics
from outrider.runner.report.trace import TraceFile
from outrider.workers.messages import Harvest, Row, TargetCounters, WorkerReport

# ``save_if_due`` is called at least this often: a longer gap with a SIGCONT in it was a stop of the process.
TURN_SECONDS = 0.5


class JobRecord:
    """Journals each ended row once, and durably before the schedule is told that it has ended."""

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
        self._statistics.pace.resume(counts.done + counts.failed, self._statistics.tokens)
        self.counters.pace = self._statistics.pace
        # The job's seconds count from here: the time of loading models is not part of its speed.
        self._first_up: float | None = None
        self._looked_at = 0.0
        self._continued = 0
        self._pinning_saved_at = -math.inf
        # False while ended rows are counted but not journalled yet.
        self._all_recorded = True
        self._counters_of_targets: dict[int, TargetCounters] = {}
        self._counted_before = TargetCounters()

    # Rows

    def rows_to_send(self, numbers: Sequence[int], replica: int) -> list[Row]:
        """The samples of these rows that have not ended, each with the tokens that it has so far."""
        rows = self._journal.load(numbers)
        kept = self._journal.kept_tokens(self._partial_results.new(numbers))
        self.trace.event("rows sent", replica, rows=len(rows))
        return self._partial_results.add(rows, kept, replica)

    def keys(self, rows: Sequence[int]) -> list[int]:
        """The keys of these rows' samples, by which a replica is told to cancel them."""
        return self._partial_results.keys(rows)

    def give_up(self, row: int, reason: str) -> None:
        """Fail a row on which replicas have died repeatedly."""
        self._journal.record([], [(row, self._partial_results.give_up(row, reason))])
        self.counters.failed += 1

    def take(self, harvests: Sequence[tuple[Replica, Harvest]]) -> list[schedule_events.RowsEnded]:
        """Journal the harvests that arrived together in one transaction; returns the rows that ended, by replica."""
        done: list[tuple[int, str]] = []
        failed: list[tuple[int, str]] = []
        ended: list[schedule_events.RowsEnded] = []
        self._all_recorded = not harvests
        self._update_seconds()
        for replica, harvest in harvests:
            now_done, now_failed = self._partial_results.take(harvest, replica.number)
            done += now_done
            failed += now_failed
            self._observe(replica, harvest)
            if rows := [number for number, _ in (*now_done, *now_failed)]:
                ended.append(schedule_events.RowsEnded(replica.number, tuple(rows)))
                self.rows_by_host[self._host_of(replica.plan)] += len(rows)
        if harvests:
            # Includes work of targets that have died and whose rows were done again.
            for name in FROM_TARGETS:
                kept = (self._counted_before, *self._counters_of_targets.values())
                setattr(self.counters, name, sum(getattr(counters, name) for counters in kept))
        if ended:
            # Totals and statistics in one transaction, since the report divides one by the other.
            due = self._statistics.due(self._now(), SECONDS_BETWEEN_SAVES_WITH_ROWS)
            record = self._statistics.record() if due else None
            self._journal.record(done, failed, self.counters.summed(self._earlier), record)
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
            self._first_up = self._looked_at = time.monotonic()
            self._continued = continued.times()

    def actor_is_up(self, replica: Replica, role: str, report: WorkerReport) -> None:
        """Keep an actor's numeric path and pinning, and note where they differ from what was planned."""
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
        """Add the counters of the target that has stopped to those of earlier ones; its successor counts from zero."""
        self._partial_results.partial_tokens.replica_gone(replica)
        lost = self._counters_of_targets.pop(replica, TargetCounters())
        for name in FROM_TARGETS:
            setattr(self._counted_before, name, getattr(self._counted_before, name) + getattr(lost, name))

    # What the journal keeps besides rows, for the report and for a resumed job

    def save_if_due(self) -> None:
        """Save statistics, pinning and partial tokens, each as often as it is due."""
        self._update_seconds()
        if self._first_up is not None:
            self._update_pace()
            if self._statistics.due(self._now()):
                self._save_statistics()
            if self._now() - self._pinning_saved_at >= SECONDS_BETWEEN_SAVES:
                self._save_pinning()
        if self._partial_results.partial_tokens.due(time.monotonic()):
            self._save_partial_tokens()

    def _update_seconds(self) -> None:
        if self._first_up is None:
            return
        now = time.monotonic()
        if (times := continued.times()) != self._continued:
            # A stop (Ctrl-Z) is a pause like one between two runs of the job.
            self._continued = times
            self._first_up += max(0.0, now - self._looked_at - TURN_SECONDS)
        self._looked_at = now
        self.counters.seconds = now - self._first_up

    def _update_pace(self) -> None:
        counters = self.counters
        prompts = counters.prompt_tokens + self._earlier.get("prompt_tokens", 0)
        # Also between harvests that end a row: with long answers none ends for minutes.
        self._statistics.pace.add(self._now(), counters.done + counters.failed, self._statistics.tokens, prompts)

    def save_all(self) -> None:
        if self._all_recorded:  # else the rows that could not be journalled are done again, and counted then
            self._save_statistics()
            self._save_pinning()
            self._save_partial_tokens()

    def _save_statistics(self) -> None:
        """Save statistics and totals together: rows in progress have used time too."""
        self._journal.record([], [], self.counters.summed(self._earlier), self._statistics.record())

    def _save_pinning(self) -> None:
        self._pinning_saved_at = self._now()
        if self.pinned:
            self._journal.set_meta("pinning", list(self.pinned.values()))
        if self.layouts:
            self._journal.set_meta("layouts", self.layouts)

    def _save_partial_tokens(self) -> None:
        """Save the tokens of rows in progress, from which a resumed job continues."""
        store = self._partial_results.partial_tokens
        started = time.monotonic()
        if written := store.to_keep():
            self._journal.keep_tokens(written)
            ended = time.monotonic()
            store.was_written(ended, ended - started)
            # With the time that they took: else the tokens of a driver that is killed often would count without their time.
            if self._statistics.due(self._now(), SECONDS_BETWEEN_SAVES_WITH_ROWS):
                self._save_statistics()

    def _now(self) -> float:
        """Seconds that the job has run, in earlier runs and in this one."""
        return self.counters.seconds + self._earlier.get("seconds", 0.0)
