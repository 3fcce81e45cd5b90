"""The driver's loop: what Ray reports becomes events, the schedule turns them into commands, and they are carried out."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from typing import Any

import ray
from ray.exceptions import RayTaskError

from outrider.runner.driving import schedule
from outrider.runner.driving.partial_results import UnderWay
from outrider.runner.driving.replica import Replica
from outrider.runner.hosts.this_machine import Fleet
from outrider.runner.hosts.worker_errors import explain
from outrider.runner.job.journal import Journal
from outrider.runner.planning.replica_plan import ReplicaPlan
from outrider.runner.report import statistics as account
from outrider.runner.report.statistics import Account
from outrider.runner.report.totals import Totals
from outrider.runner.report.trace import TraceFile
from outrider.workers.errors import JobChangedError, JobError, LeaseError, RayLostError, UsageError
from outrider.workers.messages import Harvest, Progress, WorkerReport

TICK_SECONDS = 0.2
# A replica holds this many times its batch, so that a finished row's place is taken without asking the driver.
QUEUE_DEPTH = 2
# So many answers without a row in them are asked for at most, however many replicas there are.
HARVESTS_A_SECOND = 200
# A host that is alive but does not say so for longer is taken for alive: Ray gives up a silent one well before.
SIGN_SECONDS = 60.0
# What the totals take from the replicas' own counts, work that was lost and done again included.
OF_PROGRESS = ("rounds", "near_ties", "prompt_tokens", "prompt_tokens_reused", "resumed_tokens")


class Driver:
    def __init__(
        self,
        journal: Journal,
        plans: Sequence[ReplicaPlan],
        model: str,
        start_deadline: float,
        agree_on_path: Callable[[dict[str, str]], None],
        fleet: Fleet,
        show: Callable[[Totals], None],
        trace: TraceFile | None = None,
        patience: float = 3600.0,
    ) -> None:
        counts = journal.counts()
        self.totals = Totals(rows=counts.rows, done=counts.done, failed=counts.failed)
        self._earlier: dict[str, float] = journal.meta("totals") or {}
        self._account = Account(journal.meta(account.KEY), len(plans))
        self._trace = trace or TraceFile(None)
        self._journal = journal
        self._agree_on_path = agree_on_path
        self._fleet = fleet
        self._seatless: set[int] = set()
        # Targets that have died where it is not yet known whether their host has, too; and since when.
        self._doubtful: dict[int, tuple[Exception, float]] = {}
        # Rows that had not left for the target when it died.
        self._unsent: dict[int, frozenset[int]] = {}
        # How long a job goes on waiting when no replica has a place.
        self._patience = patience
        self._seated_at = time.monotonic()
        self.rows_by_host: Counter[str] = Counter()
        self._show = show
        self._start_deadline = start_deadline
        self.pinned: dict[tuple[int, str], dict[str, Any]] = {}
        self.layouts: dict[int, dict[str, Any]] = {}
        self.costs: dict[int, dict[str, Any]] = {}
        self._replicas = {number: Replica(number, plan) for number, plan in enumerate(plans)}
        self._started: dict[int, float] = {}
        # Loading models is no part of the job's speed.
        self._first_up: float | None = None
        self._schedule = schedule.Schedule(self._replicas)
        self._under_way = UnderWay(
            model, self.totals, self._account.latencies, (journal.meta("input") or {}).get("name", "line")
        )
        self._cursor = -1
        self._finish: schedule.Finish | None = None
        # Whether all rows that the totals count stand in the journal.
        self._settled = True
        self._rounds: dict[int, Progress] = {}
        self._past = Progress()
        self._drain = threading.Event()
        self._draining = False

    def drain(self) -> None:
        """Start no further rows. Safe to call from a signal handler."""
        self._drain.set()

    @property
    def draining(self) -> bool:
        return self._drain.is_set()

    def run(self) -> None:
        """Until every row has ended, or the drain is done."""
        try:
            for replica in self._replicas.values():
                self._start(replica)
            self._perform(self._schedule.start())
            while self._finish is None:
                for replica in self._replicas.values():
                    replica.harvest(max(1.0, len(self._replicas) / HARVESTS_A_SECOND))
                for event in self._wait():
                    self._perform(self._schedule.handle(event))
                if self._drain.is_set() and not self._draining:
                    self._draining = True
                    self._perform(self._schedule.handle(schedule.Drain()))
                if self._first_up is not None:
                    self.totals.seconds = time.monotonic() - self._first_up
                if self._account.due(self._now()):
                    self._keep()
                if self._under_way.written.due(time.monotonic()):
                    self._keep_written()
                self._show(self.totals)
            self._collect_traces()
        except Exception as error:
            # Whatever a Ray raises whose servers are gone.
            if (how := self._fleet.lost()) is None:
                raise
            self.totals.ray_deaths += 1
            raise RayLostError(how) from error
        finally:
            for replica in self._replicas.values():
                replica.stop()
            if self._settled:  # else these rows are done again, and counted then
                self._journal.record([], [], self.totals.summed(self._earlier))
                self._keep()
                self._keep_written()
        if self._finish.reason is not None:
            raise JobError(f"{self._finish.reason}; the rows already done are kept, and the job can be resumed")

    def _start(self, replica: Replica) -> None:
        self._started[replica.number] = time.monotonic()
        self._trace.event("start", replica.number)
        replica.start()

    def _keep(self) -> None:
        """What a report shows, for one that is made while the job runs or after it was killed."""
        self._journal.set_meta(account.KEY, self._account.record())
        if self.pinned:
            self._journal.set_meta("pinning", list(self.pinned.values()))
        if self.layouts:
            self._journal.set_meta("layouts", self.layouts)

    def _keep_written(self) -> None:
        """The tokens of rows under way, so that a resumed job goes on where they are."""
        started = time.monotonic()
        if written := self._under_way.written.to_keep():
            self._journal.keep_tokens(written)
        ended = time.monotonic()
        self._under_way.written.was_written(ended, ended - started)

    def _now(self) -> float:
        """Seconds of the job: its earlier runs and this one."""
        return self.totals.seconds + self._earlier.get("seconds", 0.0)

    def _collect_traces(self) -> None:
        """What the timelines hold at the end."""
        if self._trace.enabled:
            for replica in self._replicas.values():
                for role, last in replica.last_traces():
                    self._trace.actor(replica.number, role, last)

    # What Ray reports, as events

    def _wait(self) -> Iterable[schedule.Event]:
        meaning = {
            future: (replica, what) for replica in self._replicas.values() for future, what in replica.pending.items()
        }
        answers = [(*meaning[future], future, _answer(future)) for future in self._arrived(list(meaning))]
        yield schedule.Tick(time.monotonic())
        # What ended before something died is good, so harvests come first; together they are one transaction.
        harvests = [(replica, future, answer) for replica, _, future, answer in answers if isinstance(answer, Harvest)]
        for replica, future, _ in harvests:
            del replica.pending[future]
            replica.harvested()
        yield from self._harvested([(replica, harvest) for replica, _, harvest in harvests])
        # What dies with Ray is not to blame.
        if (how := self._fleet.lost()) is not None:
            raise RayLostError(how)
        for replica, what, future, answer in answers:
            if future in replica.pending:  # else an earlier event of this very tick has replaced the replica
                del replica.pending[future]
                if isinstance(answer, Exception):
                    yield from self._failed(replica, what, answer)
                else:
                    yield from self._translate(replica, what, answer)
        yield from self._take_seats()
        yield from self._overdue()

    def _arrived(self, futures: list[Any]) -> list[Any]:
        """Every answer that is there, after waiting a little for the first."""
        if not futures:
            self._drain.wait(TICK_SECONDS)
            return []
        first, others = ray.wait(futures, num_returns=1, timeout=TICK_SECONDS)
        more = ray.wait(others, num_returns=len(others), timeout=0)[0] if first and others else []
        return [*first, *more]

    def _translate(self, replica: Replica, what: str, answer: Any) -> Iterable[schedule.Event]:
        if what == "target ready":
            if not self._is_alike(replica, answer):
                yield schedule.ReplicaLost(replica.number)
                return
            self._note(replica, "target", answer)
            self._account.started(replica.number, self._now())
            if self._trace.enabled:
                replica.align("target", self._trace)
            replica.target_is_ready(answer)
            self.totals.replicas_up += 1
            self._first_up = self._first_up or time.monotonic()
            batch = replica.plan.serve.batch
            yield schedule.ReplicaUp(replica.number, batch * QUEUE_DEPTH, batch)
        elif what == "draft ready":
            self._note(replica, "draft", answer)
            replica.draft_is_ready(answer)
            if self._trace.enabled:
                replica.align("draft", self._trace)
                replica.draft_trace()
        elif what == "trace of the draft":
            self._trace.actor(replica.number, "draft", answer)
            replica.draft_trace()
        elif what == "sign of life":
            yield self._died(replica, self._doubtful.pop(replica.number)[0])

    def _is_alike(self, replica: Replica, report: WorkerReport) -> bool:
        """Whether a replica computes as the job does. One that does not is left out, where there are others."""
        try:
            self._agree_on_path(report.path)
        except JobChangedError as difference:
            self._leave_out(replica, difference)
            self._seatless.add(replica.number)
            return False
        return True

    def _leave_out(self, replica: Replica, difference: JobChangedError) -> None:
        """Go on without a replica whose rows would not be the job's; raises where there is no other."""
        others = any(each.report or each.pending for each in self._replicas.values() if each is not replica)
        if not others:
            raise difference
        self.totals.note(f"replica {replica.number} on {self._fleet.host(replica.plan)} is not used: {difference}")
        replica.stop()

    def _note(self, replica: Replica, role: str, report: WorkerReport) -> None:
        """Keep what an actor says of its place, and tell the user what is not as it was asked to be."""
        self.pinned[replica.number, role] = {
            "replica": replica.number,
            "role": role,
            "node": replica.plan.target.node,
            **report.pinned,
        }
        for note in (*report.notes, *report.pinned["warnings"]):
            self.totals.note(note)
        for difference in report.differences:
            self.totals.note(f"{role} of replica {replica.number}: {difference}")

    def _failed(self, replica: Replica, what: str, error: Exception) -> Iterable[schedule.Event]:
        cause = error.cause if isinstance(error, RayTaskError) else error
        if isinstance(cause, UsageError):
            raise cause  # no replica will fare better
        if what == "target ready" and isinstance(cause, LeaseError):
            # Another run was quicker to the same cores. Nothing has died: this replica waits for others.
            self.totals.note(f"replica {replica.number} waits for cores: {cause}")
            self._unseat(replica)
            yield schedule.ReplicaLost(replica.number)
            return
        if what == "target ready" and isinstance(cause, JobChangedError):
            # Its weights are no longer those of the rows before.
            self._leave_out(replica, cause)
            return
        if self._fleet.gone(replica.plan):
            self._trace.event("host left", replica.number, "target", reason=explain(error))
            self._unseat(replica)
            yield schedule.ReplicaLost(replica.number)
            return
        if what == "trace of the draft":
            return  # its end is reported by "draft gone"
        if what.startswith("draft"):
            self._trace.event("draft died", replica.number, "draft", reason=explain(error))
            self._lose_draft(replica, error)
            return
        if what == "sign of life":
            self._unseat(replica)
            yield schedule.ReplicaLost(replica.number)
            return
        if replica.report is not None:
            self.totals.replicas_up -= 1
        self._unsent[replica.number] = replica.unsent
        self._forget(replica)
        sign = None if isinstance(error, RayTaskError) else self._fleet.sign_of_life(replica.plan)
        if sign is None:
            yield self._died(replica, error)
            return
        # A host that goes down takes its processes first: whether this one died alone, the host has to tell.
        self._doubtful[replica.number] = (error, time.monotonic())
        replica.pending[sign] = "sign of life"
        yield schedule.ReplicaDoubtful(replica.number)

    def _died(self, replica: Replica, error: Exception) -> schedule.Event:
        self.totals.target_deaths += 1
        self._trace.event("target died", replica.number, "target", reason=explain(error))
        return schedule.ReplicaDown(replica.number, explain(error), self._unsent.pop(replica.number))

    def _lose_draft(self, replica: Replica, error: Exception) -> None:
        self.totals.draft_deaths += 1
        if replica.draft_is_gone():
            replica.start_draft()
        else:
            self.totals.note(
                f"replica {replica.number} goes on without a draft, which died again and again: {explain(error)}"
            )

    def _take_seats(self) -> Iterable[schedule.Event]:
        """Seats that have come free: first for replicas that lost theirs, then for new ones."""
        if self._draining:
            return
        for plan in self._fleet.seats(len(self._seatless)):
            if self._seatless:
                number = min(self._seatless)
                self._seatless.remove(number)
                self._replicas[number].plan = plan
            else:
                number = max(self._replicas) + 1
                self._replicas[number] = Replica(number, plan)
                yield schedule.ReplicaAdded(number)
            self._start(self._replicas[number])
        now = time.monotonic()
        if any(each.pending for each in self._replicas.values()):
            self._seated_at = now
        elif now - self._seated_at > self._patience:
            raise JobError(
                f"no replica has had a place for {self._patience:g} s; the rows already done are kept, and the job can be "
                "resumed"
            )

    def _unseat(self, replica: Replica) -> None:
        """It has no place any more, through no fault of its rows or its own."""
        if replica.report is not None:
            self.totals.replicas_up -= 1
        self._doubtful.pop(replica.number, None)
        self._unsent.pop(replica.number, None)
        self._fleet.release(replica.plan)
        self._forget(replica)
        self._seatless.add(replica.number)

    def _forget(self, replica: Replica) -> None:
        replica.stop()
        self._under_way.written.released(replica.number)
        lost = self._rounds.pop(replica.number, Progress())
        for name in OF_PROGRESS:
            setattr(self._past, name, getattr(self._past, name) + getattr(lost, name))

    def _overdue(self) -> Iterable[schedule.Event]:
        """Replicas that take too long to come up, which ends the job only where none has yet; hosts that say no word."""
        now = time.monotonic()
        for replica in self._replicas.values():
            waiting = "target ready" in replica.pending.values()
            if waiting and now - self._started[replica.number] > self._start_deadline:
                who = f"the target of replica {replica.number}"
                late = replica.plan.target.seat.launch.not_up(who, self._start_deadline)
                if self._first_up is None:
                    raise late
                yield from self._failed(replica, "target ready", late)
        for number, (error, since) in list(self._doubtful.items()):
            if now - since > SIGN_SECONDS:
                del self._doubtful[number]
                self._replicas[number].pending.clear()
                yield self._died(self._replicas[number], error)

    def _harvested(self, harvests: Sequence[tuple[Replica, Harvest]]) -> Iterable[schedule.Event]:
        """Durable first, then known to the schedule."""
        done: list[tuple[int, str]] = []
        failed: list[tuple[int, str]] = []
        ended: list[schedule.RowsEnded] = []
        self._settled = not harvests
        for replica, harvest in harvests:
            now_done, now_failed = self._under_way.take(harvest, replica.number)
            done += now_done
            failed += now_failed
            self._account.observe(replica.number, harvest.progress, self._now())
            self._trace.actor(replica.number, "target", harvest.trace)
            if harvest.ended:
                self._trace.event("rows received", replica.number, rows=len(harvest.ended))
            self._rounds[replica.number] = harvest.progress
            self.costs[replica.number] = harvest.costs
            for note in harvest.notes:
                self.totals.note(note)
            if harvest.layout is not None:
                self.layouts[replica.number] = asdict(harvest.layout)
                if len(replica.plan.serve.arrangements) > 1:
                    self.totals.note(f"replica {replica.number}: {harvest.layout.sentence}")
            if rows := [number for number, _ in (*now_done, *now_failed)]:
                ended.append(schedule.RowsEnded(replica.number, tuple(rows)))
                self.rows_by_host[self._fleet.host(replica.plan)] += len(rows)
        if harvests:
            for name in OF_PROGRESS:
                kept = (self._past, *self._rounds.values())
                setattr(self.totals, name, sum(getattr(progress, name) for progress in kept))
        if ended:
            self._journal.record(done, failed, self.totals.summed(self._earlier))
            self.totals.done += len(done)
            self.totals.failed += len(failed)
        self._settled = True
        yield from ended

    # What the schedule wants, carried out

    def _perform(self, commands: Iterable[schedule.Command]) -> None:
        for command in commands:
            match command:
                case schedule.Fetch(count):
                    rows = self._journal.pending(self._cursor, count)
                    self._cursor = rows[-1][0] if rows else self._cursor
                    self._perform(self._schedule.handle(schedule.RowsFetched(tuple(rows), len(rows) < count)))
                case schedule.Send(replica, rows):
                    self._send(self._replicas[replica], rows)
                case schedule.Cancel(replica, rows):
                    self._replicas[replica].cancel(self._under_way.keys(rows))
                case schedule.RecordAttempts(rows):
                    self._journal.count_attempt(rows)
                case schedule.FailRow(row, reason):
                    self._journal.record([], [(row, self._under_way.give_up(row, reason))])
                    self.totals.failed += 1
                case schedule.Restart(replica):
                    self._start(self._replicas[replica])
                case schedule.Finish():
                    self._finish = command

    def _send(self, replica: Replica, numbers: Sequence[int]) -> None:
        rows = self._journal.load(numbers)
        kept = self._journal.kept_tokens(self._under_way.new(numbers))
        self._trace.event("rows sent", replica.number, rows=len(rows))
        replica.submit(self._under_way.add(rows, kept, replica.number))


def _answer(future: Any) -> Any:
    """What a call came to: its value, or the exception that it raised."""
    try:
        return ray.get(future)
    except Exception as error:
        return error
