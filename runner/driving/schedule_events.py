"""What the schedule is told (events), and what it wants done (commands)."""

from __future__ import annotations

from dataclasses import dataclass

# Events


@dataclass(frozen=True, slots=True)
class ReplicaUp:
    """The replica can take rows: it holds up to ``capacity``, and works on ``slots`` of them (its batch) at a time.

    The replica may be new to the schedule.
    """

    replica: int
    capacity: int
    slots: int


@dataclass(frozen=True, slots=True)
class ReplicaDoubtful:
    """It has stopped answering: it keeps its rows and gets no others until ``ReplicaDown`` or ``ReplicaLost`` follows."""

    replica: int


@dataclass(frozen=True, slots=True)
class ReplicaDown:
    """It has died on a living host. Rows that were assigned to it but still ``unsent`` cannot be the cause.

    ``rows_are_blamed`` is False if it died for want of memory with a full batch; it is restarted with a smaller one.
    """

    replica: int
    reason: str
    unsent: frozenset[int] = frozenset()
    rows_are_blamed: bool = True


@dataclass(frozen=True, slots=True)
class ReplicaAdded:
    """A new replica, which is being started."""

    replica: int


@dataclass(frozen=True, slots=True)
class ReplicaLost:
    """It has no cores any more (its host has left, say). No row is blamed, and it may come up again elsewhere."""

    replica: int


@dataclass(frozen=True, slots=True)
class RowsFetched:
    """The next rows of the journal, each with its attempts (deaths of replicas that had it)."""

    rows: tuple[tuple[int, int], ...]
    exhausted: bool


@dataclass(frozen=True, slots=True)
class RowsOffered:
    """More rows can be fetched, after the last one that was (a server's next batch)."""


@dataclass(frozen=True, slots=True)
class RowsWithdrawn:
    """The rows from ``first`` to ``last`` are cancelled."""

    first: int
    last: int


@dataclass(frozen=True, slots=True)
class RowsEnded:
    replica: int
    rows: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RowsEndedTogether:
    """Rows that ended on several replicas. Handled as one event, so that none of them is given out as a straggler."""

    ended: tuple[RowsEnded, ...]


@dataclass(frozen=True, slots=True)
class Tick:
    """The time, in seconds of any monotonic clock."""

    now: float


@dataclass(frozen=True, slots=True)
class Drain:
    """Start no further rows; those in progress may end."""


Event = (
    ReplicaUp | ReplicaDoubtful | ReplicaDown | ReplicaAdded | ReplicaLost
    | RowsFetched | RowsOffered | RowsWithdrawn | RowsEnded | RowsEndedTogether | Tick | Drain
)  # fmt: skip


# Commands


@dataclass(frozen=True, slots=True)
class Fetch:
    count: int


@dataclass(frozen=True, slots=True)
class Send:
    replica: int
    rows: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Cancel:
    """The replica need not finish these rows: they have ended on another one, or were withdrawn."""

    replica: int
    rows: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RecordAttempts:
    """Journal one more attempt of these rows: they were on a replica that died."""

    rows: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class FailRow:
    row: int
    reason: str


@dataclass(frozen=True, slots=True)
class Restart:
    replica: int


@dataclass(frozen=True, slots=True)
class Finish:
    """The schedule has ended; ``reason`` is set if rows are left because no replica stays alive."""

    reason: str | None = None


Command = Fetch | Send | Cancel | RecordAttempts | FailRow | Restart | Finish
