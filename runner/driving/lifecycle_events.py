"""What the lifecycle of replicas is told (events), and what it wants done (instructions)."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from outrider.runner.driving import schedule_events
from outrider.runner.planning.replica_plan import ReplicaPlan
from outrider.workers.errors import JobChangedError

# Events


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a call failed: the exception, and a sentence about it."""

    error: Exception
    reason: str
    # The actor's own code raised the exception, so its host is alive.
    raised: bool = False
    host_gone: bool = False
    # The process was killed because memory was short.
    short_of_memory: bool = False


@dataclass(frozen=True, slots=True)
class TargetReady:
    replica: int


@dataclass(frozen=True, slots=True)
class TargetDiffers:
    """It is up, but its numeric path is not the job's (another instruction set, say), so its texts might differ."""

    replica: int
    difference: JobChangedError


@dataclass(frozen=True, slots=True)
class StartFailed:
    """The target did not come up."""

    replica: int
    failure: Failure


@dataclass(frozen=True, slots=True)
class TargetDied:
    """The target died. Rows that were assigned to it but still ``unsent`` cannot be the cause."""

    replica: int
    failure: Failure
    unsent: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class DraftReady:
    replica: int


@dataclass(frozen=True, slots=True)
class DraftDied:
    """The draft could not be loaded, or its process has died."""

    replica: int
    failure: Failure


@dataclass(frozen=True, slots=True)
class HostLives:
    """The host of a target in doubt has answered."""

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
    """Cores are free; ``plan`` is that of a replica on them."""

    plan: ReplicaPlan


@dataclass(frozen=True, slots=True)
class Drain:
    """Start nothing from now on."""


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
    """Use this plan for the replica, which may be a new one."""

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
class AttachDraft:
    """The draft is up: watch it, and attach it to its target."""

    replica: int


@dataclass(frozen=True, slots=True)
class Stop:
    """Kill the replica's processes and forget the calls to them."""

    replica: int


@dataclass(frozen=True, slots=True)
class Release:
    """Its cores are free for other plans."""

    replica: int


@dataclass(frozen=True, slots=True)
class AskHost:
    """Ask the host for a sign of life: ``HostLives`` or ``HostGone`` follows, at once or after ``HostWillTell``."""

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
class RecordLoss:
    """Count and trace a loss."""

    loss: Loss
    replica: int
    reason: str


@dataclass(frozen=True, slots=True)
class TellSchedule:
    """Pass this event on to the schedule."""

    event: schedule_events.Event


@dataclass(frozen=True, slots=True)
class EndJob:
    error: Exception


Instruction = (
    Place | Start | StartDraft | AttachDraft | Stop | Release | AskHost | Note | NoteLeftOut | RecordLoss | TellSchedule
    | EndJob
)  # fmt: skip
