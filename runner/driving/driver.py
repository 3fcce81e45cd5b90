"""The driver's loop: turns what Ray reports into events for schedule and lifecycle, and carries out their commands.

Only this module waits, calls Ray and reads the clock. ``schedule.py`` decides which replica does which row,
``lifecycle.py`` when replicas are started and stopped; ``job_record.py`` keeps the results.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import ray
from ray.exceptions import RayTaskError

from outrider.runner.driving import lifecycle_events, schedule_events
from outrider.runner.driving.answers import AnswerExchange
from outrider.runner.driving.job_record import JobRecord
from outrider.runner.driving.lifecycle import Lifecycle
from outrider.runner.driving.lifecycle_events import Failure, Loss
from outrider.runner.driving.replica import Call, Replica
from outrider.runner.driving.schedule import Schedule
from outrider.runner.hosts.limits import full_shared_memory
from outrider.runner.hosts.memory_kills import MemoryKills
from outrider.runner.hosts.this_machine import Hosts
from outrider.runner.hosts.worker_errors import SHORT_OF_MEMORY, explain, with_remedy
from outrider.runner.job.journal import Journal
from outrider.runner.planning.replica_plan import ReplicaPlan
from outrider.runner.report.counters import JobCounters
from outrider.runner.report.trace import TraceFile
from outrider.workers.errors import JobChangedError, JobError, RayLostError
from outrider.workers.messages import Harvest, Row, RowResult, WorkerReport

TICK_SECONDS = 0.2
# Harvests without ended rows: at most this many a second of all replicas together, so that they do not occupy the driver.
HARVESTS_A_SECOND = 200


class RowSource(Protocol):
    """Where rows come from: the journal of one job, or those of a server's batches."""

    def pending(self, after: int, count: int) -> list[tuple[int, int]]: ...

    def count_attempt(self, rows: Sequence[int]) -> None: ...


class DriverRecord(Protocol):
    """Where results, counters and pinning are kept: those of one job (``JobRecord``) or of a server's batches."""

    counters: JobCounters

    def rows_to_send(self, numbers: Sequence[int], replica: int) -> list[Row]: ...

    def keys(self, rows: Sequence[int]) -> list[int]: ...

    def give_up(self, row: int, reason: str) -> None: ...

    def take(self, harvests: Sequence[tuple[Replica, Harvest]]) -> list[schedule_events.RowsEnded]: ...

    def target_is_up(self, replica: Replica, report: WorkerReport) -> None: ...

    def actor_is_up(self, replica: Replica, role: str, report: WorkerReport) -> None: ...

    def replica_stopped(self, replica: int) -> None: ...

    def save_if_due(self) -> None: ...

    def save_all(self) -> None: ...


class DriverLoop:
    """The loop of a job's driver (``Driver``) and of a model's process of the batch server (``SharedDriver``)."""

    def __init__(
        self,
        rows: RowSource,
        record: DriverRecord,
        plans: Sequence[ReplicaPlan],
        rows_schedule: Schedule,
        start_deadline: float,
        agree_on_path: Callable[[dict[str, str]], None],
        hosts: Hosts,
        show: Callable[[JobCounters], None],
        trace: TraceFile,
        patience: float,
    ) -> None:
        self._trace = trace
        self._rows = rows
        self._hosts = hosts
        self._memory_kills = MemoryKills()
        self._agree_on_path = agree_on_path
        self._show = show
        self.record = record
        self.counters = record.counters
        shared = len(plans) > 1 and all(each.replica_spec.suffix and each.replica_spec.answer_tokens for each in plans)
        self._answers = AnswerExchange() if shared else None
        self._replicas = {number: self._new_replica(number, plan) for number, plan in enumerate(plans)}
        self._target = plans[0].target.model
        self._lifecycle = Lifecycle(plans, start_deadline, patience)
        self._schedule = rows_schedule
        # The number of the last row that was fetched.
        self._cursor = -1
        self._finish: schedule_events.Finish | None = None
        self._drain = threading.Event()
        self._draining = False

    def drain(self) -> None:
        """Start no further rows. Safe to call from a signal handler."""
        self._drain.set()

    @property
    def draining(self) -> bool:
        return self._drain.is_set()

    def run(self) -> None:
        """Run until every row has ended, or, after ``drain``, every row in progress."""
        try:
            self._carry_out_lifecycle(self._lifecycle.start(time.monotonic()))
            self._carry_out_schedule(self._schedule.start())
            while self._finish is None:
                self._ask_for_harvests()
                self._handle_answers(self._wait_for_answers())
                self._offer_cores()
                self._tell_lifecycle(lifecycle_events.Tick())
                self._begin_drain_if_asked()
                self._at_every_tick()
                self.record.save_if_due()
                self._show(self.counters)
            self._collect_traces()
        except Exception as error:
            # A Ray whose servers are gone may raise any exception.
            if (how := self._hosts.lost()) is None:
                raise
            self.counters.ray_deaths += 1
            raise RayLostError(how) from error
        finally:
            for replica in self._replicas.values():
                replica.stop()
            self.record.save_all()
        if self._finish.reason is not None:
            why = with_remedy(self._finish.reason, self._target)
            raise JobError(f"{why}; the rows already done are kept, and the job can be resumed")

    def _at_every_tick(self) -> None:
        """For subclasses: further work of every turn of the loop."""

    # What Ray reports, as events

    def _ask_for_harvests(self) -> None:
        for replica in self._replicas.values():
            replica.harvest(max(1.0, len(self._replicas) / HARVESTS_A_SECOND))

    def _wait_for_answers(self) -> list[tuple[Replica, Any, Any]]:
        """Wait up to a tick for the first answer; all answers that have arrived: replica, future, value or exception."""
        asked = {future: replica for replica in self._replicas.values() for future in replica.pending}
        if not asked:
            self._drain.wait(TICK_SECONDS)
            return []
        first, others = ray.wait(list(asked), num_returns=1, timeout=TICK_SECONDS)
        more = ray.wait(others, num_returns=len(others), timeout=0)[0] if first and others else []
        return [(asked[future], future, _answer(future)) for future in (*first, *more)]

    def _handle_answers(self, answers: Sequence[tuple[Replica, Any, Any]]) -> None:
        self._tell_schedule(schedule_events.Tick(time.monotonic()))
        # Harvests first: rows that ended before an actor died are results. All of them are one transaction of the journal.
        harvests = [(replica, answer) for replica, _, answer in answers if isinstance(answer, Harvest)]
        for replica, future, answer in answers:
            if isinstance(answer, Harvest):
                del replica.pending[future]
                replica.harvested()
        self._share_answers(harvests)
        if ended := self.record.take(harvests):
            self._tell_schedule(schedule_events.RowsEndedTogether(tuple(ended)))
        # If Ray itself is gone, the deaths below are its own, and no row or replica is blamed for them.
        if (how := self._hosts.lost()) is not None:
            raise RayLostError(how)
        for replica, future, answer in answers:
            if future in replica.pending:  # else an earlier event of this turn has restarted the replica
                call = replica.pending.pop(future)
                event = (
                    self._failed(replica, call, answer)
                    if isinstance(answer, Exception)
                    else self._answered(replica, call, answer)
                )
                if event is not None:
                    self._tell_lifecycle(event)

    def _share_answers(self, harvests: Sequence[tuple[Replica, Harvest]]) -> None:
        if self._answers is not None:
            for replica, harvest in harvests:
                for ended in harvest.ended:
                    if isinstance(ended, RowResult):
                        self._answers.add(replica.number, ended.tokens)

    def _answered(self, replica: Replica, call: Call, answer: Any) -> lifecycle_events.Event | None:
        match call:
            case Call.LOAD_TARGET:
                return self._target_loaded(replica, answer)
            case Call.LOAD_DRAFT:
                self.record.actor_is_up(replica, "draft", answer)
                replica.draft_is_ready(answer)
                return lifecycle_events.DraftReady(replica.number)
            case Call.TRACE_DRAFT:
                self._trace.actor(replica.number, "draft", answer)
                replica.draft_trace()
            case Call.SIGN_OF_LIFE:
                return lifecycle_events.HostLives(replica.number)
        return None

    def _target_loaded(self, replica: Replica, report: WorkerReport) -> lifecycle_events.Event:
        try:
            self._agree_on_path(report.path)
        except JobChangedError as difference:
            return lifecycle_events.TargetDiffers(replica.number, difference)
        self.record.target_is_up(replica, report)
        if self._trace.enabled:
            replica.align("target", self._trace)
        replica.target_is_ready(report)
        return lifecycle_events.TargetReady(replica.number)

    def _failed(self, replica: Replica, call: Call, error: Exception) -> lifecycle_events.Event | None:
        number = replica.number
        match call:
            case Call.TRACE_DRAFT:
                return None  # WATCH_DRAFT reports the draft's death
            case Call.SIGN_OF_LIFE:
                return lifecycle_events.HostGone(number)
        cause, raised = (error.cause, True) if isinstance(error, RayTaskError) else (error, False)
        # The kernel's memory kills and /dev/shm can be read only for this host.
        died_here = not raised and replica.plan.target.node is None
        killed_for_memory = died_here and self._memory_kills.rose()
        reason = explain(error, killed_for_memory, full_shared_memory() if died_here else None)
        failure = Failure(cause, reason, raised, self._hosts.gone(replica.plan), reason in SHORT_OF_MEMORY)
        match call:
            case Call.LOAD_DRAFT | Call.WATCH_DRAFT:
                replica.draft_is_gone()
                return lifecycle_events.DraftDied(number, failure)
            case Call.LOAD_TARGET:
                return lifecycle_events.StartFailed(number, failure)
        return lifecycle_events.TargetDied(number, failure, replica.unsent)

    def _offer_cores(self) -> None:
        if not self._draining:
            for plan in self._hosts.new_replica_plans(self._lifecycle.unplaced):
                self._tell_lifecycle(lifecycle_events.CoresOffered(plan))

    def _begin_drain_if_asked(self) -> None:
        if self._drain.is_set() and not self._draining:
            self._draining = True
            self._tell_lifecycle(lifecycle_events.Drain())
            self._tell_schedule(schedule_events.Drain())

    # What lifecycle and schedule want done

    def _tell_lifecycle(self, event: lifecycle_events.Event) -> None:
        self._carry_out_lifecycle(self._lifecycle.handle(event, time.monotonic()))
        self.counters.replicas_up = self._lifecycle.up
        self.counters.without_cores = self._lifecycle.without_cores

    def _tell_schedule(self, event: schedule_events.Event) -> None:
        self._carry_out_schedule(self._schedule.handle(event))

    def _carry_out_lifecycle(self, instructions: Iterable[lifecycle_events.Instruction]) -> None:
        for instruction in instructions:
            match instruction:
                case lifecycle_events.Place(number, plan):
                    self._place(number, plan)
                case lifecycle_events.Start(number):
                    self._trace.event("start", number)
                    self._replicas[number].start()
                case lifecycle_events.StartDraft(number):
                    self._replicas[number].start_draft()
                case lifecycle_events.AttachDraft(number):
                    self._attach_draft(self._replicas[number])
                case lifecycle_events.Stop(number):
                    self._replicas[number].stop()
                    self.record.replica_stopped(number)
                case lifecycle_events.Release(number):
                    self._release(self._replicas[number])
                case lifecycle_events.AskHost(number):
                    self._tell_lifecycle(self._ask_host(self._replicas[number]))
                case lifecycle_events.Note(sentence):
                    self.counters.note(sentence)
                case lifecycle_events.NoteLeftOut(number, difference):
                    host = self._hosts.host(self._replicas[number].plan)
                    self.counters.note(f"replica {number} on {host} is not used: {difference}")
                case lifecycle_events.RecordLoss(loss, number, reason):
                    self._record_loss(loss, number, reason)
                case lifecycle_events.TellSchedule(event):
                    self._tell_schedule(event)
                case lifecycle_events.EndJob(error):
                    raise error

    def _carry_out_schedule(self, commands: Iterable[schedule_events.Command]) -> None:
        for command in commands:
            match command:
                case schedule_events.Fetch(count):
                    rows = self._rows.pending(self._cursor, count)
                    self._cursor = rows[-1][0] if rows else self._cursor
                    self._tell_schedule(schedule_events.RowsFetched(tuple(rows), len(rows) < count))
                case schedule_events.Send(number, numbers):
                    self._replicas[number].submit(self.record.rows_to_send(numbers, number))
                case schedule_events.Cancel(number, numbers):
                    self._replicas[number].cancel(self.record.keys(numbers))
                case schedule_events.RecordAttempts(numbers):
                    self._rows.count_attempt(numbers)
                case schedule_events.FailRow(row, reason):
                    self.record.give_up(row, reason)
                case schedule_events.Restart(number):
                    self._tell_lifecycle(lifecycle_events.RestartWanted(number))
                case schedule_events.Finish():
                    self._finish = command

    def _place(self, number: int, plan: ReplicaPlan) -> None:
        if number in self._replicas:
            self._replicas[number].plan = plan
        else:
            self._replicas[number] = self._new_replica(number, plan)

    def _new_replica(self, number: int, plan: ReplicaPlan) -> Replica:
        replica = Replica(number, plan)
        replica.answers = self._answers
        return replica

    def _release(self, replica: Replica) -> None:
        self._hosts.release(replica.plan)

    def _attach_draft(self, replica: Replica) -> None:
        replica.attach_draft()
        if self._trace.enabled:
            replica.align("draft", self._trace)
            replica.draft_trace()

    def _ask_host(self, replica: Replica) -> lifecycle_events.Event:
        if self._hosts.gone(replica.plan):
            return lifecycle_events.HostGone(replica.number)
        sign_of_life = self._hosts.sign_of_life(replica.plan)
        if sign_of_life is None:
            return lifecycle_events.HostLives(replica.number)
        replica.ask_host(sign_of_life)
        return lifecycle_events.HostWillTell(replica.number)

    def _record_loss(self, loss: Loss, number: int, reason: str) -> None:
        self.counters.target_deaths += loss is Loss.TARGET
        self.counters.draft_deaths += loss is Loss.DRAFT
        role = "draft" if loss is Loss.DRAFT else "target"
        self._trace.event(loss.value, number, role, reason=reason)

    def _collect_traces(self) -> None:
        """Write what the actors' traces still hold at the end."""
        if self._trace.enabled:
            for replica in self._replicas.values():
                for role, last in replica.last_traces():
                    self._trace.actor(replica.number, role, last)


class Driver(DriverLoop):
    """The driver of one job."""

    record: JobRecord

    def __init__(
        self,
        journal: Journal,
        plans: Sequence[ReplicaPlan],
        model: str,
        start_deadline: float,
        agree_on_path: Callable[[dict[str, str]], None],
        hosts: Hosts,
        show: Callable[[JobCounters], None],
        trace: TraceFile | None = None,
        patience: float = 3600.0,
    ) -> None:
        trace = trace or TraceFile(None)
        record = JobRecord(journal, model, len(plans), trace, hosts.host)
        rows_schedule = Schedule(range(len(plans)))
        super().__init__(journal, record, plans, rows_schedule, start_deadline, agree_on_path, hosts, show, trace, patience)


def _answer(future: Any) -> Any:
    """The value of a call, or the exception that it raised."""
    try:
        return ray.get(future)
    except Exception as error:
        return error
