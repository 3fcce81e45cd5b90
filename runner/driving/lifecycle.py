"""What becomes of each replica: events in, instructions out. Pure: no Ray, no clock but the time that comes with an event.

         CoresOffered             TargetReady
    Lost ────────────> Starting ─────────────> Up
     ^                  ^    │ too late, died   │ TargetDied
     │ HostGone         │    v                  │
     └───────────────── │ ─ Doubtful <──────────┘
          RestartWanted │    │ HostLives, or no word for long
                        │    v
                        └── Down

    LeftOut: its model is no longer the job's.

A host that goes down takes its processes first. So a target that stops answering is in doubt until its host has told
whether it died alone. Only then does the schedule hold the death against the rows that it had.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from outrider.runner.counted import counted
from outrider.runner.driving import schedule
from outrider.runner.planning.replica_plan import ReplicaPlan
from outrider.workers.errors import JobChangedError, JobError, LeaseError, UsageError

# A replica holds this many times its batch, so that another row can follow a finished one without asking the driver.
QUEUE_DEPTH = 2
# A host that is alive but does not say so for longer is taken for alive: Ray gives up a silent one well before.
SIGN_SECONDS = 60.0
# A draft that dies this often is left dead: the job goes on without.
MOST_DRAFT_DEATHS = 5
# A draft whose cores another run holds is tried again so often.
DRAFT_AGAIN_SECONDS = 30.0


# States


@dataclass(frozen=True, slots=True)
class Starting:
    """Its target is loading."""

    since: float


@dataclass(frozen=True, slots=True)
class Up:
    """Its target takes rows; its draft may be there or not."""


@dataclass(frozen=True, slots=True)
class Doubtful:
    """Its target has died. Whether the host has, too, is not known yet."""

    since: float
    reason: str
    unsent: frozenset[int] = frozenset()
    # It was ended because memory was short, with rows in it.
    had_too_many: bool = False


@dataclass(frozen=True, slots=True)
class Down:
    """It died alone. Whether it is started again, the schedule says."""


@dataclass(frozen=True, slots=True)
class Lost:
    """It has no cores, and waits for others."""


@dataclass(frozen=True, slots=True)
class LeftOut:
    """Its model is no longer the job's, so it is not tried again."""


State = Starting | Up | Doubtful | Down | Lost | LeftOut


# Events


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a call brought no answer: what was raised there, in words as well."""

    error: Exception
    reason: str
    # The process lived to raise it, so its host lives.
    raised: bool = False
    host_gone: bool = False
    # Its process was ended because memory was short.
    short_of_memory: bool = False


@dataclass(frozen=True, slots=True)
class TargetReady:
    replica: int


@dataclass(frozen=True, slots=True)
class TargetDiffers:
    """It is up, and computes otherwise than the rows before."""

    replica: int
    difference: JobChangedError


@dataclass(frozen=True, slots=True)
class StartFailed:
    """The target did not come up."""

    replica: int
    failure: Failure


@dataclass(frozen=True, slots=True)
class TargetDied:
    """Rows that were meant for it and are still ``unsent`` had no part in that."""

    replica: int
    failure: Failure
    unsent: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class DraftReady:
    replica: int


@dataclass(frozen=True, slots=True)
class DraftDied:
    """It did not come up, or has ended."""

    replica: int
    failure: Failure


@dataclass(frozen=True, slots=True)
class HostLives:
    """The host of a target in doubt is there."""

    replica: int


@dataclass(frozen=True, slots=True)
class HostWillTell:
    """The host of a target in doubt has been asked for a sign of life."""

    replica: int


@dataclass(frozen=True, slots=True)
class HostGone:
    replica: int


@dataclass(frozen=True, slots=True)
class RestartWanted:
    """The schedule wants a replica that is down to be started again."""

    replica: int


@dataclass(frozen=True, slots=True)
class CoresOffered:
    """Cores that have come free, with the plan of a replica on them."""

    plan: ReplicaPlan


@dataclass(frozen=True, slots=True)
class Drain:
    """Nothing is started any more."""


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has gone by."""


Event = (
    TargetReady | TargetDiffers | StartFailed | TargetDied | DraftReady | DraftDied
    | HostLives | HostWillTell | HostGone | RestartWanted | CoresOffered | Drain | Tick
)  # fmt: skip


# Instructions


@dataclass(frozen=True, slots=True)
class Place:
    """The replica, which may be a new one, is to run as planned."""

    replica: int
    plan: ReplicaPlan


@dataclass(frozen=True, slots=True)
class Start:
    """Bring up its target and its draft."""

    replica: int


@dataclass(frozen=True, slots=True)
class StartDraft:
    replica: int


@dataclass(frozen=True, slots=True)
class IntroduceDraft:
    """The draft is up: watch it, and make it known to its target."""

    replica: int


@dataclass(frozen=True, slots=True)
class Stop:
    """Let go of its processes, and of whatever they were asked."""

    replica: int


@dataclass(frozen=True, slots=True)
class Release:
    """Its cores may be planned on again."""

    replica: int


@dataclass(frozen=True, slots=True)
class AskHost:
    """Answered by ``HostLives``, ``HostWillTell`` or ``HostGone``; after ``HostWillTell`` by one of the other two."""

    replica: int


@dataclass(frozen=True, slots=True)
class Note:
    """Tell the user."""

    sentence: str


@dataclass(frozen=True, slots=True)
class NoteLeftOut:
    """Tell the user that the replica is not used, and on which host."""

    replica: int
    difference: JobChangedError


class Loss(Enum):
    """What has died, in the words of a trace."""

    TARGET = "target died"
    DRAFT = "draft died"
    HOST = "host left"


@dataclass(frozen=True, slots=True)
class Record:
    """Count and trace a loss."""

    loss: Loss
    replica: int
    reason: str


@dataclass(frozen=True, slots=True)
class Tell:
    """The schedule is to know of this."""

    event: schedule.Event


@dataclass(frozen=True, slots=True)
class EndJob:
    error: Exception


Instruction = (
    Place | Start | StartDraft | IntroduceDraft | Stop | Release | AskHost | Note | NoteLeftOut | Record | Tell | EndJob
)  # fmt: skip


@dataclass(slots=True)
class _Replica:
    plan: ReplicaPlan
    state: State
    draft_deaths: int = 0
    # When its draft found its cores held by another run, and whether that has been said since it was up the last time.
    draft_held_since: float | None = None
    draft_waits: bool = False


class Lifecycle:
    """Of all replicas of a job. A job that has no replica with cores for ``patience`` seconds ends."""

    def __init__(self, plans: Sequence[ReplicaPlan], start_deadline: float, patience: float) -> None:
        self._replicas = {number: _Replica(plan, Lost()) for number, plan in enumerate(plans)}
        self._lost = set(self._replicas)
        self.up = 0
        self._start_deadline = start_deadline
        self._patience = patience
        # When a replica was starting, up or in doubt the last time.
        self._last_alive: float | None = None
        # Whether any target, and any draft, has ever come up: then its files were right, and may be again.
        self._ever_up = False
        self._draft_ever_up = False
        self._draining = False

    @property
    def unplaced(self) -> int:
        """How many replicas wait for cores."""
        return len(self._lost)

    @property
    def without_cores(self) -> bool:
        """Whether all of them do."""
        return len(self._lost) == len(self._replicas)

    def state(self, replica: int) -> State:
        return self._replicas[replica].state

    def start(self, now: float) -> list[Instruction]:
        """All replicas on the cores that they were planned on."""
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
                self._replicas[replica].draft_waits = False
                return [IntroduceDraft(replica)]
            case DraftDied(replica, failure):
                return self._lose_draft(replica, failure, now)
            case HostLives(replica):
                return self._died(replica)
            case HostWillTell(replica):
                return [Tell(schedule.ReplicaDoubtful(replica))]
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
                return [*self._overdue(now), *self._drafts_due(now), *self._give_up(now)]

    def _start(self, replica: int, now: float) -> list[Instruction]:
        self._enter(replica, Starting(now))
        self._replicas[replica].draft_held_since = None
        return [Start(replica)]

    def _target_is_up(self, replica: int) -> list[Instruction]:
        self._enter(replica, Up())
        self._ever_up = True
        batch = self._replicas[replica].plan.replica_spec.batch
        return [Tell(schedule.ReplicaUp(replica, batch * QUEUE_DEPTH, batch))]

    def _place(self, plan: ReplicaPlan, now: float) -> list[Instruction]:
        """On cores that have come free: first a replica that lost its own, else a new one."""
        if self._lost:
            replica = min(self._lost)
            self._replicas[replica].plan = plan
            return [Place(replica, plan), *self._start(replica, now)]
        replica = max(self._replicas) + 1
        self._replicas[replica] = _Replica(plan, Lost())
        return [Place(replica, plan), Tell(schedule.ReplicaAdded(replica)), *self._start(replica, now)]

    # What fails

    def _start_failed(self, replica: int, failure: Failure, now: float) -> list[Instruction]:
        match failure.error:
            case LeaseError() as held:
                # Another run was quicker to the same cores. Nothing has died.
                return [Note(f"replica {replica} waits for cores: {held}"), *self._withdraw(replica)]
            case JobChangedError() as difference:
                return self._leave_out(replica, difference, LeftOut())
        return self._lose_target(replica, failure, frozenset(), now)

    def _lose_target(self, replica: int, failure: Failure, unsent: frozenset[int], now: float) -> list[Instruction]:
        if isinstance(failure.error, UsageError) and not self._ever_up:
            return [EndJob(failure.error)]  # no replica will fare better
        if failure.host_gone:
            return self._lose_host(replica, failure.reason)
        had_too_many = failure.short_of_memory and isinstance(self.state(replica), Up)
        self._enter(replica, Doubtful(now, failure.reason, unsent, had_too_many))
        return self._died(replica) if failure.raised else [Stop(replica), AskHost(replica)]

    def _died(self, replica: int) -> list[Instruction]:
        doubt = self._replicas[replica].state
        assert isinstance(doubt, Doubtful)
        self._enter(replica, Down())
        fewer = self._take_fewer_rows(replica, doubt.reason) if doubt.had_too_many else []
        return [
            Stop(replica),
            Record(Loss.TARGET, replica, doubt.reason),
            *fewer,
            Tell(schedule.ReplicaDown(replica, doubt.reason, doubt.unsent, rows_are_blamed=not fewer)),
        ]

    def _take_fewer_rows(self, replica: int, reason: str) -> list[Instruction]:
        """Half as many at once from now on: their keys and values take half the memory. Of one row there is no half."""
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
        state.draft_deaths += 1
        recorded = Record(Loss.DRAFT, replica, failure.reason)
        if state.draft_deaths < MOST_DRAFT_DEATHS:
            return [recorded, StartDraft(replica)]
        without = f"replica {replica} goes on without a draft, which died again and again: {failure.reason}"
        return [recorded, Note(without)]

    def _await_draft_cores(self, replica: int, held: LeaseError, now: float) -> list[Instruction]:
        """Nothing has died: the target decodes plainly until they are free."""
        state = self._replicas[replica]
        said, state.draft_waits, state.draft_held_since = state.draft_waits, True, now
        return [] if said else [Note(f"the draft of replica {replica} waits for cores: {held}")]

    def _lose_host(self, replica: int, reason: str) -> list[Instruction]:
        return [Record(Loss.HOST, replica, reason), *self._withdraw(replica)]

    def _withdraw(self, replica: int) -> list[Instruction]:
        """Its cores or its host are gone, through no fault of its rows or its own."""
        self._enter(replica, Lost())
        return [Release(replica), Stop(replica), Tell(schedule.ReplicaLost(replica))]

    def _leave_out(self, replica: int, difference: JobChangedError, state: Lost | LeftOut) -> list[Instruction]:
        """Go on without a replica whose rows would not be the job's; the job ends where there is no other."""
        if not any(number != replica and _is_alive(each.state) for number, each in self._replicas.items()):
            return [EndJob(difference)]
        self._enter(replica, state)
        return [NoteLeftOut(replica, difference), Stop(replica), Tell(schedule.ReplicaLost(replica))]

    # What takes too long

    def _overdue(self, now: float) -> Iterator[Instruction]:
        """Replicas that do not come up, which ends the job only where none ever has; hosts that say no word."""
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
        """Drafts that found their cores held, and may find them free by now."""
        for number, replica in self._replicas.items():
            since = replica.draft_held_since
            wanted = not self._draining and isinstance(replica.state, Starting | Up)
            if wanted and since is not None and now - since > DRAFT_AGAIN_SECONDS:
                replica.draft_held_since = None
                yield StartDraft(number)

    def _give_up(self, now: float) -> Iterator[Instruction]:
        if self._draining:
            return
        if any(_is_alive(each.state) for each in self._replicas.values()):
            self._last_alive = now
        elif self._last_alive is not None and now - self._last_alive > self._patience:
            yield EndJob(
                JobError(
                    f"no replica has had a place for {self._patience:g} s; the rows already done are kept, and the job "
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
