"""Which replica does which row: events in, commands out. Pure: no Ray, no clock, no files.

Rows are named by number. Replicas hold a bounded number of rows each; the rest of the job stays in the journal and is
fetched as it is needed, so memory does not grow with the job.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

FETCH = 256
# A row that was on a replica when it died, this many times, is taken to be the cause.
MOST_ATTEMPTS = 3
# A replica that dies this often without ending a single row in between is not started again. Deaths that a row is
# blamed for do not count, but so many rows blamed in succession mean that the rows are not the cause.
MOST_BARREN_DEATHS = 3
MOST_BLAMED_IN_A_ROW = 3


@dataclass(frozen=True, slots=True)
class ReplicaUp:
    """The replica can take rows, at most ``capacity`` at a time."""

    replica: int
    capacity: int


@dataclass(frozen=True, slots=True)
class ReplicaDown:
    replica: int
    reason: str


@dataclass(frozen=True, slots=True)
class ReplicaAdded:
    """A further replica, which may come up later."""

    replica: int


@dataclass(frozen=True, slots=True)
class ReplicaLost:
    """Its host has left, or it gave up its place: nobody's fault. It may come up again elsewhere."""

    replica: int


@dataclass(frozen=True, slots=True)
class RowsFetched:
    """The next rows of the journal, with the attempts each has behind it."""

    rows: tuple[tuple[int, int], ...]
    exhausted: bool


@dataclass(frozen=True, slots=True)
class RowEnded:
    replica: int
    row: int


@dataclass(frozen=True, slots=True)
class Drain:
    """Start nothing new; what is under way may end."""


Event = ReplicaUp | ReplicaDown | ReplicaAdded | ReplicaLost | RowsFetched | RowEnded | Drain


@dataclass(frozen=True, slots=True)
class Fetch:
    count: int


@dataclass(frozen=True, slots=True)
class Send:
    replica: int
    rows: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RecordAttempts:
    """These rows were on a replica that died."""

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
    """Nothing is left to do; ``reason`` says why where rows are left over that nobody can do."""

    reason: str | None = None


Command = Fetch | Send | RecordAttempts | FailRow | Restart | Finish


@dataclass(slots=True)
class _Replica:
    capacity: int = 0
    up: bool = False
    barren_deaths: int = 0
    blamed: int = 0
    rows: dict[int, int] = field(default_factory=dict)


class Schedule:
    def __init__(self, replicas: Iterable[int]) -> None:
        self._replicas = {replica: _Replica() for replica in replicas}
        self._waiting: deque[tuple[int, int]] = deque()
        # Rows that have seen replicas die: each is tried alone, so that an innocent one is not blamed with the guilty.
        self._suspects: deque[tuple[int, int]] = deque()
        self._fetching = False
        self._exhausted = False
        self._draining = False
        self._finished = False
        self._last_reason = ""

    @property
    def in_flight(self) -> int:
        return sum(len(replica.rows) for replica in self._replicas.values())

    def start(self) -> list[Command]:
        return self._next()

    def handle(self, event: Event) -> list[Command]:
        match event:
            case ReplicaUp(replica, capacity):
                self._replicas[replica].up = True
                self._replicas[replica].capacity = capacity
                commands: list[Command] = []
            case ReplicaDown(replica, reason):
                commands = self._lose(replica, reason)
            case ReplicaAdded(replica):
                self._replicas[replica] = _Replica()
                commands = []
            case ReplicaLost(replica):
                self._take_back(replica)
                commands = []
            case RowsFetched(rows, exhausted):
                self._fetching, self._exhausted = False, exhausted
                for row, attempts in rows:
                    (self._suspects if attempts > 1 else self._waiting).append((row, attempts))
                commands = []
            case RowEnded(replica, row):
                state = self._replicas[replica]
                state.rows.pop(row, None)
                state.barren_deaths = state.blamed = 0
                commands = []
            case Drain():
                self._draining = True
                commands = []
        return commands + self._next()

    def _lose(self, replica: int, reason: str) -> list[Command]:
        state = self._replicas[replica]
        rows, state.rows = state.rows, {}
        state.up = False
        self._last_reason = reason
        commands: list[Command] = []
        if rows:
            commands.append(RecordAttempts(tuple(rows)))
        blamed = [row for row, attempts in rows.items() if attempts + 1 >= MOST_ATTEMPTS]
        commands.extend(FailRow(row, f"its replica died {MOST_ATTEMPTS} times while doing it: {reason}") for row in blamed)
        for row, attempts in rows.items():
            if row not in blamed:
                (self._suspects if attempts + 1 > 1 else self._waiting).appendleft((row, attempts + 1))
        state.barren_deaths = 0 if blamed else state.barren_deaths + 1
        state.blamed += len(blamed)
        if state.barren_deaths >= MOST_BARREN_DEATHS or state.blamed >= MOST_BLAMED_IN_A_ROW:
            del self._replicas[replica]
        elif not self._draining:
            commands.append(Restart(replica))
        return commands

    def _take_back(self, replica: int) -> None:
        """Its rows wait again, with no more attempts behind them than before."""
        state = self._replicas[replica]
        rows, state.rows = state.rows, {}
        state.up = False
        for row, attempts in reversed(rows.items()):
            (self._suspects if attempts > 1 else self._waiting).appendleft((row, attempts))

    def _next(self) -> list[Command]:
        """Whatever can be started now."""
        if self._finished:
            return []
        commands: list[Command] = []
        if not self._draining and self._replicas:
            commands.extend(self._feed())
            if not self._fetching and not self._exhausted and len(self._waiting) < FETCH // 2:
                self._fetching = True
                commands.append(Fetch(FETCH))
        nothing_waits = self._exhausted and not self._waiting and not self._suspects
        if self.in_flight == 0 and not self._fetching and (self._draining or nothing_waits):
            commands.extend(self._finish(None))
        elif not self._replicas:
            commands.extend(self._finish(f"no replica stays alive: {self._last_reason}"))
        return commands

    def _finish(self, reason: str | None) -> list[Command]:
        self._finished = True
        return [Finish(reason)]

    def _feed(self) -> Iterable[Command]:
        # The emptiest first, so that all run dry together at the end.
        by_load = sorted((state for state in self._replicas.items() if state[1].up), key=lambda item: len(item[1].rows))
        trusted = [replica for replica, state in self._replicas.items() if not state.barren_deaths]
        for replica, state in by_load:
            # A replica that has itself just died for no known reason is no judge of a suspect, where there is a better one.
            if self._suspects and not state.rows and (not trusted or replica in trusted):
                row, attempts = self._suspects.popleft()
                state.rows[row] = attempts
                yield Send(replica, (row,))
            elif not any(attempts > 1 for attempts in state.rows.values()):
                free = min(state.capacity - len(state.rows), len(self._waiting))
                taken = [self._waiting.popleft() for _ in range(free)]
                if taken:
                    state.rows.update(taken)
                    yield Send(replica, tuple(row for row, _ in taken))
