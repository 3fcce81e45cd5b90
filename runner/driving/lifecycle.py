"""The states of each replica: events in, instructions out. Pure: no Ray, and no clock but the time of each event.

         CoresOffered             TargetReady
    Lost ────────────> Starting ─────────────> Up
     ^                  ^    │ too late, died   │ TargetDied
     │ HostGone         │    v                  │
     └───────────────── │ ─ Doubtful <──────────┘
          RestartWanted │    │ HostLives, or no word for long
                        │    v
                        └── Down

    LeftOut: its model's files are no longer those that the job began with.

When a host goes down, its processes die first. So a target that stops answering is in doubt until it is known whether its
host still answers. Only a death on a living host counts against the rows that the target had.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from outrider.runner.counted import counted
from outrider.runner.driving import schedule_events
from outrider.runner.driving.lifecycle_events import (
    AskHost,
    AttachDraft,
    CoresOffered,
    DraftDied,
    DraftReady,
    Drain,
    EndJob,
    Event,
    Failure,
    HostGone,
    HostLives,
    HostWillTell,
    Instruction,
    Loss,
    Note,
    NoteLeftOut,
    Place,
    RecordLoss,
    Release,
    RestartWanted,
    Start,
    StartDraft,
    StartFailed,
    Stop,
    TargetDied,
    TargetDiffers,
    TargetReady,
    TellSchedule,
    Tick,
)
from outrider.runner.planning.replica_plan import ReplicaPlan
from outrider.workers.errors import JobChangedError, JobError, LeaseError, UsageError

# A replica holds this many times its batch, so that another row can follow a finished one without asking the driver.
QUEUE_DEPTH = 2
# A host that has not answered after this time counts as alive: Ray would have declared a silent one dead well before.
SIGN_SECONDS = 60.0
# A draft that has died this often, each time soon, is started again only after a pause, without which the replica works
# meanwhile. A server runs for weeks, so a death long after a start counts as the first.
MOST_DRAFT_DEATHS = 5
DRAFT_STEADY_SECONDS = 600.0
DRAFT_PAUSE_SECONDS = 3600.0
# A draft whose cores another run holds is started again after this time.
DRAFT_AGAIN_SECONDS = 30.0


# States


@dataclass(frozen=True, slots=True)
class Starting:
    """Its target is loading."""

    since: float


@dataclass(frozen=True, slots=True)
class Up:
    """Its target takes rows, with or without a draft."""


@dataclass(frozen=True, slots=True)
class Doubtful:
    """Its target has died, and it is not known yet whether the host has too."""

    since: float
    reason: str
    unsent: frozenset[int] = frozenset()
    # It was killed because memory was short, while it had rows.
    had_too_many_rows: bool = False


@dataclass(frozen=True, slots=True)
class Down:
    """Its target died on a living host. The schedule decides whether it is restarted."""


@dataclass(frozen=True, slots=True)
class Lost:
    """It has no cores, and waits until a host offers some."""


@dataclass(frozen=True, slots=True)
class LeftOut:
    """Its model's files are no longer those of the job, so it is not started again."""


State = Starting | Up | Doubtful | Down | Lost | LeftOut


@dataclass(slots=True)
class _Replica:
    plan: ReplicaPlan
    state: State
    draft_deaths: int = 0
    draft_up_since: float | None = None
    # When the draft is to be started again, and whether it was noted since it was last up that another run holds its cores.
    draft_due: float | None = None
    draft_wait_noted: bool = False


class Lifecycle:
    """The states of all replicas. If no replica has had cores for ``patience`` seconds, the job ends."""

    def __init__(self, plans: Sequence[ReplicaPlan], start_deadline: float, patience: float) -> None:
        self._replicas = {number: _Replica(plan, Lost()) for number, plan in enumerate(plans)}
        self._lost = set(self._replicas)
        self.up = 0
        self._start_deadline = start_deadline
        self._patience = patience
        # When any replica was last starting, up or in doubt.
        self._last_alive: float | None = None
        # Whether any target, and any draft, has ever come up. If so, its files can be loaded, and a failure may pass.
        self._ever_up = False
        self._draft_ever_up = False
        self._draining = False

    @property
    def unplaced(self) -> int:
        """The number of replicas that wait for cores."""
        return len(self._lost)

    @property
    def without_cores(self) -> bool:
        """Whether all replicas wait for cores."""
        return len(self._lost) == len(self._replicas)

    def state(self, replica: int) -> State:
        return self._replicas[replica].state

    def start(self, now: float) -> list[Instruction]:
        """Start all replicas on their planned cores."""
        self._last_alive = now
        return [instruction for number in self._replicas for instruction in self._start(number, now)]

    def handle(self, event: Event, now: float) -> list[Instruction]:
        match event:
            case TargetReady(replica):
                return self._target_is_up(replica)
            case TargetDiffers(replica, difference):
                return self._leave_out(replica, difference, Lost())
            case StartFailed(replica, failure):
                return self._start_failed(replica, failure, now)
            case TargetDied(replica, failure, unsent):
                return self._lose_target(replica, failure, unsent, now)
            case DraftReady(replica):
                self._draft_ever_up = True
                self._replicas[replica].draft_wait_noted = False
                self._replicas[replica].draft_up_since = now
                return [AttachDraft(replica)]
            case DraftDied(replica, failure):
                return self._lose_draft(replica, failure, now)
            case HostLives(replica):
                return self._died(replica)
            case HostWillTell(replica):
                return [TellSchedule(schedule_events.ReplicaDoubtful(replica))]
            case HostGone(replica):
                state = self._replicas[replica].state
                return self._lose_host(replica, state.reason if isinstance(state, Doubtful) else "its host is gone")
            case RestartWanted(replica):
                return self._start(replica, now)
            case CoresOffered(plan):
                return self._place(plan, now)
            case Drain():
                self._draining = True
                return []
            case Tick():
                return [*self._overdue(now), *self._drafts_due(now), *self._end_without_cores(now)]

    def _start(self, replica: int, now: float) -> list[Instruction]:
        self._enter(replica, Starting(now))
        # A draft is started with the target; the one before it may have been up for long.
        self._replicas[replica].draft_due = self._replicas[replica].draft_up_since = None
        return [Start(replica)]

    def _target_is_up(self, replica: int) -> list[Instruction]:
        self._enter(replica, Up())
        self._ever_up = True
        batch = self._replicas[replica].plan.replica_spec.batch
        return [TellSchedule(schedule_events.ReplicaUp(replica, batch * QUEUE_DEPTH, batch))]

    def _place(self, plan: ReplicaPlan, now: float) -> list[Instruction]:
        """Use free cores for a replica that lost its own, else for a new one."""
        if self._lost:
            replica = min(self._lost)
            self._replicas[replica].plan = plan
            return [Place(replica, plan), *self._start(replica, now)]
        replica = max(self._replicas) + 1
        self._replicas[replica] = _Replica(plan, Lost())
        return [Place(replica, plan), TellSchedule(schedule_events.ReplicaAdded(replica)), *self._start(replica, now)]

    # What fails

    def _start_failed(self, replica: int, failure: Failure, now: float) -> list[Instruction]:
        match failure.error:
            case LeaseError() as held:
                # Another run has leased the same cores first. Nothing has died.
                return [Note(f"replica {replica} waits for cores: {held}"), *self._withdraw(replica)]
            case JobChangedError() as difference:
                return self._leave_out(replica, difference, LeftOut())
        return self._lose_target(replica, failure, frozenset(), now)

    def _lose_target(self, replica: int, failure: Failure, unsent: frozenset[int], now: float) -> list[Instruction]:
        if isinstance(failure.error, UsageError) and not self._ever_up:
            return [EndJob(failure.error)]  # it would fail on every replica
        if failure.host_gone:
            return self._lose_host(replica, failure.reason)
        had_too_many_rows = failure.short_of_memory and isinstance(self.state(replica), Up)
        self._enter(replica, Doubtful(now, failure.reason, unsent, had_too_many_rows))
        return self._died(replica) if failure.raised else [Stop(replica), AskHost(replica)]

    def _died(self, replica: int) -> list[Instruction]:
        doubt = self._replicas[replica].state
        assert isinstance(doubt, Doubtful)
        self._enter(replica, Down())
        fewer = self._halve_batch(replica, doubt.reason) if doubt.had_too_many_rows else []
        return [
            Stop(replica),
            RecordLoss(Loss.TARGET, replica, doubt.reason),
            *fewer,
            TellSchedule(schedule_events.ReplicaDown(replica, doubt.reason, doubt.unsent, rows_are_blamed=not fewer)),
        ]

    def _halve_batch(self, replica: int, reason: str) -> list[Instruction]:
        """Halve the replica's batch, and with it the memory of keys and values; nothing if the batch is 1."""
        state = self._replicas[replica]
        spec = state.plan.replica_spec
        if spec.batch == 1:
            return []
        fewer = spec.batch // 2
        state.plan = replace(state.plan, replica_spec=replace(spec, batch=fewer))
        rows = counted(fewer, "row")
        said = f"replica {replica} works on {rows} at once from now on instead of {spec.batch}: {reason}"
        return [Place(replica, state.plan), Note(said)]

    def _lose_draft(self, replica: int, failure: Failure, now: float) -> list[Instruction]:
        if isinstance(failure.error, UsageError) and not self._draft_ever_up:
            return [EndJob(failure.error)]
        if failure.host_gone:
            return self._lose_host(replica, failure.reason)
        state = self._replicas[replica]
        if isinstance(failure.error, LeaseError):
            return self._await_draft_cores(replica, failure.error, now)
        if state.draft_up_since is not None and now - state.draft_up_since > DRAFT_STEADY_SECONDS:
            state.draft_deaths = 0
        state.draft_up_since = None
        state.draft_deaths += 1
        recorded = RecordLoss(Loss.DRAFT, replica, failure.reason)
        if state.draft_deaths < MOST_DRAFT_DEATHS:
            return [recorded, StartDraft(replica)]
        state.draft_due = now + DRAFT_PAUSE_SECONDS
        without = f"replica {replica} goes on without a draft, which died {state.draft_deaths} times: {failure.reason}"
        return [recorded, Note(without)]

    def _await_draft_cores(self, replica: int, held: LeaseError, now: float) -> list[Instruction]:
        """Another run holds the draft's cores: the target decodes plainly, and the draft is started again later."""
        state = self._replicas[replica]
        noted, state.draft_wait_noted, state.draft_due = state.draft_wait_noted, True, now + DRAFT_AGAIN_SECONDS
        return [] if noted else [Note(f"the draft of replica {replica} waits for cores: {held}")]

    def _lose_host(self, replica: int, reason: str) -> list[Instruction]:
        return [RecordLoss(Loss.HOST, replica, reason), *self._withdraw(replica)]

    def _withdraw(self, replica: int) -> list[Instruction]:
        """Its cores or its host are gone, which neither its rows nor the replica is blamed for."""
        self._enter(replica, Lost())
        return [Release(replica), Stop(replica), TellSchedule(schedule_events.ReplicaLost(replica))]

    def _leave_out(self, replica: int, difference: JobChangedError, state: Lost | LeftOut) -> list[Instruction]:
        """Go on without a replica whose texts might differ from the job's; end the job if no other is alive."""
        if not any(number != replica and _is_alive(each.state) for number, each in self._replicas.items()):
            return [EndJob(difference)]
        self._enter(replica, state)
        return [NoteLeftOut(replica, difference), Stop(replica), TellSchedule(schedule_events.ReplicaLost(replica))]

    # What takes too long

    def _overdue(self, now: float) -> Iterator[Instruction]:
        """Replicas past the start deadline (the job ends if no target has ever come up), and hosts that do not answer."""
        for number, replica in self._replicas.items():
            match replica.state:
                case Starting(since) if now - since > self._start_deadline:
                    launch = replica.plan.target.placement.launch
                    late = launch.not_up(f"the target of replica {number}", self._start_deadline)
                    if not self._ever_up:
                        yield EndJob(late)
                        return
                    yield from self._lose_target(number, Failure(late, str(late)), frozenset(), now)
                case Doubtful(since) if now - since > SIGN_SECONDS:
                    yield from self._died(number)

    def _drafts_due(self, now: float) -> Iterator[Instruction]:
        """Start drafts again that found their cores held by another run, or that have died too often."""
        for number, replica in self._replicas.items():
            wanted = not self._draining and isinstance(replica.state, Starting | Up)
            if wanted and replica.draft_due is not None and now > replica.draft_due:
                replica.draft_due = None
                yield StartDraft(number)

    def _end_without_cores(self, now: float) -> Iterator[Instruction]:
        if self._draining:
            return
        if any(_is_alive(each.state) for each in self._replicas.values()):
            self._last_alive = now
        elif self._last_alive is not None and now - self._last_alive > self._patience:
            yield EndJob(
                JobError(
                    f"no replica has had cores for {self._patience:g} s; the rows already done are kept, and the job "
                    "can be resumed"
                )
            )

    def _enter(self, replica: int, state: State) -> None:
        self.up += isinstance(state, Up) - isinstance(self._replicas[replica].state, Up)
        self._replicas[replica].state = state
        if isinstance(state, Lost):
            self._lost.add(replica)
        else:
            self._lost.discard(replica)


def _is_alive(state: State) -> bool:
    return isinstance(state, Starting | Up | Doubtful)
