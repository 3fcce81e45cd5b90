"""Which replica does which row: events in, commands out. Pure: no Ray, no files, and no clock but the time of ``Tick``.

Rows are named by number. Replicas hold a bounded number of rows each; the rest of the job stays in the journal and is
fetched as needed, so memory does not grow with the job. An event takes time in proportion to the rows and replicas that it
names, not to all of them, except for rare ones (a death, a fetch for many idle replicas).
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice, takewhile

from outrider.runner.driving.schedule_events import (
    Cancel,
    Command,
    Drain,
    Event,
    FailRow,
    Fetch,
    Finish,
    RecordAttempts,
    ReplicaAdded,
    ReplicaDoubtful,
    ReplicaDown,
    ReplicaLost,
    ReplicaUp,
    Restart,
    RowsEnded,
    RowsEndedTogether,
    RowsFetched,
    RowsOffered,
    RowsWithdrawn,
    Send,
    Tick,
)

FETCH = 256
# A row that was on a replica in this many deaths, alone on it in the last one, is taken to be the cause and fails.
MOST_ATTEMPTS = 3
# A replica that dies this often without ending a single row in between is not restarted. Deaths that a row is blamed for
# do not count, but if this many rows in succession are blamed, the replica is the cause.
MOST_IDLE_DEATHS = 3
MOST_BLAMED_IN_SUCCESSION = 3
# A straggler is a row in progress for longer than max(STRAGGLER_FACTOR * the usual time, STRAGGLER_SECONDS). When no row
# waits any more, stragglers are given to idle replicas as well.
STRAGGLER_FACTOR = 1.5
STRAGGLER_SECONDS = 5.0
# The usual time of a row is a running average over about this many rows.
USUAL_OVER = 1000
# While other rows wait, one replica for this many suspects is emptied to try suspects alone.
SUSPECTS_A_TESTER = 16


@dataclass(slots=True)
class _Replica:
    """``rows``: those that it holds, each with its attempts. ``expected``: it is up or being started.

    While it is in doubt its rows may end or fail elsewhere, so ``rows_at_death`` keeps how many it had when it died.
    """

    capacity: int = 0
    slots: int = 0
    up: bool = False
    expected: bool = True
    tester: bool = False
    rows_at_death: int = 0
    idle_deaths: int = 0
    blamed: int = 0
    rows: dict[int, int] = field(default_factory=dict)

    @property
    def has_a_suspect(self) -> bool:
        return any(attempts > 1 for attempts in self.rows.values())


class Schedule:
    """Rows of all replicas of a job, or of a server's batches.

    ``ahead``: rows are fetched when fewer than this wait here. ``stays_open``: the schedule ends only by a drain, since
    more rows may be offered.
    """

    def __init__(self, replicas: Iterable[int], ahead: int = FETCH // 2, stays_open: bool = False) -> None:
        self._ahead = ahead
        self._stays_open = stays_open
        self._replicas = {replica: _Replica() for replica in replicas}
        self._waiting: deque[tuple[int, int]] = deque()
        # Rows with more than one attempt. Each is tried alone on a replica, so that no other row is blamed with it.
        self._suspects: deque[tuple[int, int]] = deque()
        self._testers = 0
        # Every row in progress, with the replicas that have it.
        self._holders: dict[int, tuple[int, ...]] = {}
        # The rows that exactly one replica has, with the time at which it was sent them, the oldest first.
        self._sent_at: OrderedDict[int, float] = OrderedDict()
        # Replicas that have room for more rows (an ordered set).
        self._with_room: dict[int, None] = {}
        # Replicas that are up, and the rows beyond their batches (capacity - slots) that they hold together.
        self._up = self._queue = 0
        self._now = 0.0
        self._usual_seconds, self._timed = 0.0, 0
        self._fetching = False
        self._exhausted = False
        self._draining = False
        self._finished = False
        self._last_reason = ""

    @property
    def rows_known(self) -> int:
        """The number of rows that are waiting or in progress here; the others are in the journal only."""
        return len(self._holders) + len(self._waiting) + len(self._suspects)

    def start(self) -> list[Command]:
        return self._next_commands(())

    def handle(self, event: Event) -> list[Command]:
        commands: list[Command] = []
        fed: Iterable[int]
        match event:
            case RowsEnded():
                commands, fed = self._rows_ended([event])
            case RowsEndedTogether(ended):
                commands, fed = self._rows_ended(ended)
            case Tick(now):
                self._now = now
                fed = tuple(islice(self._with_room, self._straggler_count())) if self._with_room else ()
            case RowsFetched(rows_and_attempts, exhausted):
                self._fetching, self._exhausted = False, exhausted
                for row, attempts in rows_and_attempts:
                    (self._suspects if attempts > 1 else self._waiting).append((row, attempts))
                fed = tuple(self._with_room)
            case RowsOffered():
                self._exhausted = False
                fed = ()
            case RowsWithdrawn(first, last):
                commands, fed = self._withdraw(first, last)
            case ReplicaUp(replica, capacity, slots):
                state = self._replicas.setdefault(replica, _Replica())
                state.up, state.capacity, state.slots = True, capacity, min(slots, capacity)
                state.expected, state.rows_at_death = True, 0
                self._up += 1
                self._queue += capacity - state.slots
                fed = (replica,)
            case ReplicaDoubtful(replica):
                state = self._replicas[replica]
                self._take_out_of_service(state)
                state.rows_at_death = len(state.rows)
                self._with_room.pop(replica, None)
                fed = ()
            case ReplicaDown(replica, reason, unsent, rows_are_blamed):
                if rows_are_blamed:
                    commands = self._replica_died(replica, reason, unsent)
                else:
                    self._put_back(replica, self._empty(replica))
                    commands = [] if self._draining else [Restart(replica)]
                fed = tuple(self._with_room)
            case ReplicaAdded(replica):
                self._replicas[replica] = _Replica()
                fed = ()
            case ReplicaLost(replica):
                self._put_back(replica, self._empty(replica))
                self._replicas[replica].expected = False
                fed = tuple(self._with_room)
            case Drain():
                self._draining = True
                fed = ()
        commands.extend(self._next_commands(fed))
        return commands

    def _rows_ended(self, ends: Iterable[RowsEnded]) -> tuple[list[Command], Iterable[int]]:
        """Commands to cancel the rows' copies on other replicas, and the replicas that have room now."""
        with_room: dict[int, None] = {}
        others: dict[int, list[int]] = {}
        for ended in ends:
            state = self._replicas[ended.replica]
            state.idle_deaths = state.blamed = 0
            with_room[ended.replica] = None
            for row in ended.rows:
                sent = self._sent_at.pop(row, None)
                if sent is not None:
                    self._timed += 1
                    self._usual_seconds += (self._now - sent - self._usual_seconds) / min(self._timed, USUAL_OVER)
                for holder in self._holders.pop(row, ()):
                    del self._replicas[holder].rows[row]
                    if holder != ended.replica:
                        others.setdefault(holder, []).append(row)
        return [Cancel(holder, tuple(rows)) for holder, rows in others.items()], with_room | dict.fromkeys(others)

    def _withdraw(self, first: int, last: int) -> tuple[list[Command], Iterable[int]]:
        """Forget waiting rows and cancel those in progress; returns the replicas that have room now as well."""
        self._waiting = deque(each for each in self._waiting if not first <= each[0] <= last)
        self._suspects = deque(each for each in self._suspects if not first <= each[0] <= last)
        cancelled: dict[int, list[int]] = {}
        for row in [row for row in self._holders if first <= row <= last]:
            self._sent_at.pop(row, None)
            for holder in self._holders.pop(row):
                del self._replicas[holder].rows[row]
                cancelled.setdefault(holder, []).append(row)
        return [Cancel(holder, tuple(rows)) for holder, rows in cancelled.items()], tuple(cancelled)

    def _replica_died(self, replica: int, reason: str, unsent: frozenset[int]) -> list[Command]:
        state = self._replicas[replica]
        innocent = [row for row in state.rows if row in unsent]
        self._put_back(replica, {row: state.rows.pop(row) for row in innocent})
        rows = self._empty(replica)
        self._last_reason = reason
        commands: list[Command] = []
        if rows:
            commands.append(RecordAttempts(tuple(rows)))
        # Only a row that was alone on the replica is blamed. It may have had others beside it when the replica went into
        # doubt, which have since ended elsewhere: rows_at_death counts them.
        alone = max(len(rows), state.rows_at_death) == 1
        blamed = [row for row, attempts in rows.items() if alone and attempts + 1 >= MOST_ATTEMPTS]
        for row, attempts in rows.items():
            elsewhere = tuple(holder for holder in self._holders.pop(row) if holder != replica)
            self._sent_at.pop(row, None)
            if row in blamed:
                for holder in elsewhere:
                    del self._replicas[holder].rows[row]
                    commands.append(Cancel(holder, (row,)))
            elif elsewhere:
                self._holders[row], self._sent_at[row] = elsewhere, self._now
                for holder in elsewhere:
                    self._replicas[holder].rows[row] = attempts + 1
            else:
                (self._suspects if attempts + 1 > 1 else self._waiting).appendleft((row, attempts + 1))
        commands.extend(FailRow(row, f"its replica died {MOST_ATTEMPTS} times while doing it: {reason}") for row in blamed)
        state.idle_deaths = 0 if blamed else state.idle_deaths + 1
        state.blamed += len(blamed)
        if state.idle_deaths >= MOST_IDLE_DEATHS or state.blamed >= MOST_BLAMED_IN_SUCCESSION:
            del self._replicas[replica]
        elif not self._draining:
            commands.append(Restart(replica))
        return commands

    def _put_back(self, replica: int, rows: dict[int, int]) -> None:
        """Let these rows of the replica wait again, without another attempt counted."""
        for row, attempts in reversed(rows.items()):
            elsewhere = tuple(holder for holder in self._holders.pop(row) if holder != replica)
            self._sent_at.pop(row, None)
            if elsewhere:
                self._holders[row], self._sent_at[row] = elsewhere, self._now
            else:
                (self._suspects if attempts > 1 else self._waiting).appendleft((row, attempts))

    def _empty(self, replica: int) -> dict[int, int]:
        """Take a replica out of service; returns the rows that it held."""
        state = self._replicas[replica]
        rows, state.rows = state.rows, {}
        self._take_out_of_service(state)
        self._with_room.pop(replica, None)
        return rows

    def _take_out_of_service(self, state: _Replica) -> None:
        """The replica gets no rows from now on."""
        if state.up:
            self._up -= 1
            self._queue -= state.capacity - state.slots
        state.up = False
        self._release_tester(state)

    def _next_commands(self, fed: Iterable[int]) -> list[Command]:
        """Commands to give rows to the ``fed`` replicas, to fetch more rows, or to finish."""
        if self._finished:
            return []
        commands: list[Command] = []
        if not self._draining and self._replicas:
            for replica in self._emptiest_first(fed):
                commands.extend(self._feed(replica, self._replicas[replica]))
            ahead = max(self._ahead, self._queue)
            if not self._fetching and not self._exhausted and len(self._waiting) < ahead:
                self._fetching = True
                commands.append(Fetch(2 * ahead))
        nothing_waits = self._exhausted and not self._waiting and not self._suspects and not self._stays_open
        if not self._holders and not self._fetching and (self._draining or nothing_waits):
            commands.extend(self._finish(None))
        elif not self._replicas:
            commands.extend(self._finish(f"no replica stays alive: {self._last_reason}"))
        return commands

    def _finish(self, reason: str | None) -> list[Command]:
        self._finished = True
        return [Finish(reason)]

    def _emptiest_first(self, replicas: Iterable[int]) -> list[int]:
        """Replicas that are up, those with the fewest rows first, so that all run out of rows together at the end."""
        up = [replica for replica in replicas if replica in self._replicas and self._replicas[replica].up]
        return up if len(up) == 1 else sorted(up, key=lambda replica: len(self._replicas[replica].rows))

    def _feed(self, replica: int, state: _Replica) -> Iterator[Command]:
        self._with_room.pop(replica, None)
        if self._is_kept_for_suspects(state):
            if not state.rows:
                yield self._send(replica, state, [self._suspects.popleft()])
            return
        if state.has_a_suspect:
            return
        # Near the end no replica gets more rows than its batch: rows waiting on one would end sooner on another.
        near_end = self._exhausted and len(self._waiting) <= self._queue
        room = max(0, (state.slots if near_end else state.capacity) - len(state.rows))
        given = [self._waiting.popleft() for _ in range(min(room, len(self._waiting)))]
        if not given and self._stragglers_are_copied:
            given = self._stragglers(replica, state, room)
        if given:
            yield self._send(replica, state, given)
        if len(given) < room:
            # At the end of the ordered set, so that the next straggler is offered to another replica first.
            self._with_room[replica] = None

    def _send(self, replica: int, state: _Replica, rows: Iterable[tuple[int, int]]) -> Send:
        rows = tuple(rows)
        for row, attempts in rows:
            state.rows[row] = attempts
            before = self._holders.get(row, ())
            self._holders[row] = (*before, replica)
            if before:
                del self._sent_at[row]
            else:
                self._sent_at[row] = self._now
        return Send(replica, tuple(row for row, _ in rows))

    # Stragglers

    @property
    def _stragglers_are_copied(self) -> bool:
        return self._exhausted and not self._waiting and not self._draining and self._timed > 0

    def _is_straggler(self, sent: float) -> bool:
        return self._now - sent > max(STRAGGLER_FACTOR * self._usual_seconds, STRAGGLER_SECONDS)

    def _straggler_count(self) -> int:
        if not self._stragglers_are_copied:
            return 0
        return sum(1 for _ in takewhile(self._is_straggler, self._sent_at.values()))

    def _stragglers(self, replica: int, state: _Replica, room: int) -> list[tuple[int, int]]:
        """Up to ``room`` stragglers of other replicas. Texts do not depend on the replica, so the first answer counts."""
        given: list[tuple[int, int]] = []
        for row, sent in self._sent_at.items():
            if len(given) == room or not self._is_straggler(sent):
                break
            (holder,) = self._holders[row]
            attempts = self._replicas[holder].rows[row]
            if holder == replica:
                continue
            if attempts <= 1:
                given.append((row, attempts))
            elif not given and not state.rows:
                return [(row, attempts)]
        return given

    # Suspects

    def _is_kept_for_suspects(self, state: _Replica) -> bool:
        """Whether the replica takes a suspect next: it is empty, or is being emptied for them."""
        # A replica that has itself died without a row to blame is a poor test, if there is another one.
        others = self._replicas.values()
        unreliable = state.idle_deaths and any(other.expected and not other.idle_deaths for other in others)
        if not self._suspects or unreliable:
            self._release_tester(state)
            return False
        if state.rows and not state.tester:
            testers = min(1 + len(self._suspects) // SUSPECTS_A_TESTER, self._up // 2)
            if self._testers >= testers:
                return False
            state.tester = True
            self._testers += 1
        return True

    def _release_tester(self, state: _Replica) -> None:
        self._testers -= state.tester
        state.tester = False
