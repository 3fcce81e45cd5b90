"""A fake Ray and a virtual clock in this process, on which the real driver and its replicas run without waiting.

Whatever takes time is an entry of an agenda. ``wait`` executes entries until enough futures are ready, and the clock jumps
to the time of each, so an hour of a job takes milliseconds and depends on the seed only.
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from itertools import count
from types import SimpleNamespace
from typing import Any
from unittest import mock

from ray.exceptions import ObjectLostError, RayActorError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from outrider.runner.driving import driver, job_record, replica
from outrider.workers.machine.pin_check import PinningReport
from outrider.workers.machine.pinning import Pin
from outrider.workers.messages import (
    Harvest,
    PartialTokens,
    ReplicaSpec,
    Row,
    RowFailure,
    RowResult,
    TargetCounters,
    WorkerReport,
)

LATENCY = 0.01


class Crash(BaseException):
    """The driver's process was killed: none of its code runs any more, not even ``finally`` blocks that use Ray."""


class Future:
    """The result of a call, once it is ``ready``."""

    def __init__(self) -> None:
        self.ready = False
        self.value: Any = None

    def resolve(self, value: Any) -> None:
        if not self.ready:
            self.ready, self.value = True, value

    def lose(self) -> None:
        """The result is lost (``ObjectLostError``)."""
        self.ready, self.value = True, ObjectLostError("00" * 28, None, "")


class VirtualRay:
    """The parts of Ray that the driver and its replicas use. ``step`` is called before each call of them, and may raise."""

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)
        self.now = 0.0
        self.log: list[str] = []
        self.actors: list[Actor] = []
        self.step: Callable[[], None] = lambda: None
        self._agenda: list[tuple[float, int, Callable[[], None]]] = []
        self._entries = 0
        self.names = count()

    def say(self, what: str) -> None:
        self.log.append(f"{self.now:9.3f}  {what}")

    def later(self, seconds: float, what: Callable[[], None]) -> None:
        self._entries += 1
        heapq.heappush(self._agenda, (self.now + seconds, self._entries, what))

    def sleep(self, seconds: float, until: Callable[[], bool] = lambda: False) -> None:
        """Advances the clock by this many seconds, or until ``until()`` is true, and executes the entries that are due."""
        end = self.now + seconds
        while not until() and self._agenda and self._agenda[0][0] <= end:
            self.now, _, what = heapq.heappop(self._agenda)
            what()
        if not until():
            self.now = end

    def kill_all(self) -> None:
        """Ends all actors, as the end of a driver does."""
        for actor in self.actors:
            actor.alive = False
        self.actors.clear()

    # The functions that replace those of the module ``ray``

    def wait(self, futures: Sequence[Future], num_returns: int, timeout: float) -> tuple[list[Future], list[Future]]:
        self.step()
        assert 1 <= num_returns <= len(futures) == len(set(futures))
        self.sleep(timeout, lambda: [future.ready for future in futures].count(True) >= num_returns)
        ready = [future for future in futures if future.ready][:num_returns]
        return ready, [future for future in futures if future not in ready]

    def get(self, future: Future) -> Any:
        self.step()
        assert future.ready, "the driver would stand still here"
        if isinstance(future.value, Exception):
            raise future.value
        return future.value

    def kill(self, actor: Actor) -> None:
        self.step()
        actor.die("is stopped", reported=False)


class VirtualEvent:
    """A ``threading.Event`` on the virtual clock."""

    def __init__(self, ray: VirtualRay) -> None:
        self._ray = ray
        self._set = False

    def set(self) -> None:
        self._set = True

    def is_set(self) -> bool:
        return self._set

    def wait(self, timeout: float) -> bool:
        self._ray.step()
        self._ray.sleep(timeout, self.is_set)
        return self._set


class Actor:
    """A process that executes calls. If it dies, its unanswered calls fail."""

    role = ""

    def __init__(self, ray: VirtualRay, host: str, fate: Fate) -> None:
        self.ray, self.host, self.fate = ray, host, fate
        self.alive = True
        self.frozen_until = 0.0
        self.name = f"{self.role} {next(ray.names)} on {host[-3:]}"
        self._unanswered: list[Future] = []
        ray.actors.append(self)

    def __getattr__(self, method: str) -> Any:
        """``actor.method.remote(...)``, as with handles of Ray."""
        if method.startswith("_"):
            raise AttributeError(method)
        return SimpleNamespace(remote=lambda *arguments: self._call(method, arguments))

    def _call(self, method: str, arguments: tuple[Any, ...]) -> Future:
        self.ray.step()
        future = Future()
        self._unanswered.append(future)
        self.sent(method, arguments)
        if self.alive:
            self.soon(LATENCY * self.ray.dice.random(), lambda: getattr(self, f"do_{method}")(future, *arguments))
        else:
            self.ray.later(LATENCY, lambda: future.resolve(RayActorError()))
        return future

    def sent(self, method: str, arguments: tuple[Any, ...]) -> None:
        """Called when a call is sent, before it is executed."""

    def soon(self, seconds: float, what: Callable[[], None]) -> None:
        """Calls ``what`` after this many seconds, after the freeze if the process is frozen then, never if it is dead."""

        def run() -> None:
            if self.alive and self.ray.now < self.frozen_until:
                self.ray.later(self.frozen_until - self.ray.now, run)
            elif self.alive:
                what()

        self.ray.later(seconds, run)

    def freeze(self, seconds: float) -> None:
        self.ray.say(f"{self.name} stands still for {seconds:.1f} s")
        self.frozen_until = max(self.frozen_until, self.ray.now + seconds)

    def die(self, how: str, reported: bool = True) -> None:
        if not self.alive:
            return
        self.ray.say(f"{self.name} {how}")
        self.alive = False
        delay = self.fate.notice()
        for future in self._unanswered if reported else ():
            self.ray.later(delay, partial(future.resolve, RayActorError()))

    def _load(self, future: Future, report: WorkerReport) -> None:
        """Loads the model: the fate decides how long it takes, and whether it fails."""
        seconds, error = self.fate.start(self)
        if seconds is not None:
            answer = report if error is None else RayTaskError("load", "Traceback", error).as_instanceof_cause()
            self.soon(seconds, lambda: future.resolve(answer))


class Fate:
    """The random events in an actor's life; in this base class nothing goes wrong."""

    def start(self, actor: Actor) -> tuple[float | None, Exception | None]:
        """(seconds until the model is loaded, None: never; the error then, or None)."""
        return 1.0, None

    def notice(self) -> float:
        """Seconds until a death is known."""
        return LATENCY

    def seconds_a_token(self) -> float:
        return 0.05

    def begins(self, target: TargetActor, row: Row) -> RowFailure | None:
        """The failure if the row is refused."""
        return None

    def given(self, target: TargetActor, rows: Sequence[Row]) -> None:
        """Called when rows are sent to a target, which may be dead already."""

    def fatal(self, target: TargetActor, row: Row) -> float | None:
        """Seconds after which the row kills its target; None if it does not."""
        return None

    def dies_of(self, target: TargetActor, row: Row) -> None:
        target.die(f"dies of {row.key}")

    def answers(self, target: TargetActor) -> tuple[float, str]:
        """(seconds by which a harvest's reply is late, "lost" if it is lost, "twice" if it brings rows again, else "")."""
        return 0.0, ""


class DraftActor(Actor):
    role = "draft"

    def do_load(self, future: Future, *_: Any) -> None:
        self._load(future, report_of(self))

    def do_watch(self, future: Future) -> None:
        """Never answers."""


class TargetActor(Actor):
    """Writes the rows that it is given, as many at once as its batch allows."""

    role = "target"

    def __init__(self, ray: VirtualRay, host: str, fate: Fate) -> None:
        super().__init__(ray, host, fate)
        # The keys of all rows that were ever sent to this process.
        self.given: set[int] = set()
        self._queue: deque[Row] = deque()
        self._running: dict[int, Row] = {}
        # For each row (start, seconds a token), and the number of its tokens that were reported.
        self._pace: dict[int, tuple[float, float]] = {}
        self._told: dict[int, int] = {}
        self._ended: list[RowResult | RowFailure] = []
        self._brought: tuple[RowResult | RowFailure, ...] = ()
        self._told_last: tuple[PartialTokens, ...] = ()
        self._progress = TargetCounters()
        self._asking: Future | None = None

    def sent(self, method: str, arguments: tuple[Any, ...]) -> None:
        rows: Sequence[Row] = {"submit": arguments[:1], "harvest": arguments[1:]}.get(method, ((),))[0]
        self.given.update(row.key for row in rows)
        self.fate.given(self, rows)

    def do_load(self, future: Future, model: object, placement: object, replica_spec: ReplicaSpec) -> None:
        self._serve = replica_spec
        self._load(future, report_of(self))

    def do_attach(self, future: Future, draft: DraftActor) -> None:
        future.resolve(None)

    def do_submit(self, future: Future, rows: Sequence[Row]) -> None:
        self._take(rows)
        future.resolve(None)

    def do_cancel(self, future: Future, keys: Sequence[int]) -> None:
        self._queue = deque(row for row in self._queue if row.key not in keys)
        for key in keys:
            self._running.pop(key, None)
        self._begin()
        future.resolve(None)

    def do_harvest(self, future: Future, seconds: float, rows: Sequence[Row]) -> None:
        assert self._asking is None, "two harvests at a time"
        self._asking = future
        self._take(rows)
        self.soon(seconds, lambda: self._answer(future))
        self._answer_if_due()

    def _take(self, rows: Sequence[Row]) -> None:
        self._queue.extend(rows)
        self._begin()

    def _begin(self) -> None:
        while self.alive and self._queue and len(self._running) < self._serve.batch:
            row = self._queue.popleft()
            refused = self.fate.begins(self, row)
            if refused is not None:
                self._ended.append(refused)
                continue
            self._running[row.key] = row
            pace = self.fate.seconds_a_token()
            self._pace[row.key], self._told[row.key] = (self.ray.now, pace), len(row.resumed)
            seconds = max(0, len(tokens_of(row)) - len(row.resumed)) * pace
            end = self._end if (fatal := self.fate.fatal(self, row)) is None else self._die_of
            self.soon(seconds if fatal is None else fatal, partial(end, row))

    def _die_of(self, row: Row) -> None:
        if self._running.get(row.key) is row:
            self.fate.dies_of(self, row)

    def _end(self, row: Row) -> None:
        if self._running.get(row.key) is not row:
            return
        del self._running[row.key]
        result = result_of(row)
        self._ended.append(result)
        self._progress.rounds += result.rounds
        self._progress.row_rounds += result.rounds
        self._progress.tokens += len(result.tokens)
        self._progress.prompt_tokens += len(row.prompt)
        self._begin()
        self._answer_if_due()

    def _answer_if_due(self) -> None:
        if self._asking is not None and self._ended and len(self._queue) <= self._serve.batch // 2:
            self._answer(self._asking)

    def _answer(self, future: Future) -> None:
        if future is not self._asking:
            return
        self._asking = None
        late, what = self.fate.answers(self)
        ended, self._ended = tuple(self._ended), []
        written = tuple(self._written())
        if what == "twice":
            ended, written = (*self._brought, *ended, *ended), (*self._told_last, *written, *written)
        self._brought, self._told_last = ended, written
        counters = TargetCounters(**{name: getattr(self._progress, name) for name in COUNTED})
        harvest = Harvest(ended, counters, written=written)
        self.soon(late, lambda: future.lose() if what == "lost" else future.resolve(harvest))

    def _written(self) -> Iterator[PartialTokens]:
        for row in self._running.values():
            (since, pace), told = self._pace[row.key], self._told[row.key]
            now = min(len(row.resumed) + int((self.ray.now - since) / pace), len(tokens_of(row)))
            if now > told:
                self._told[row.key] = now
                yield PartialTokens(row.key, told, written_by(row)[told:now])


COUNTED = ("rounds", "row_rounds", "tokens", "prompt_tokens")


def tokens_of(row: Row) -> tuple[int, ...]:
    """The tokens that any target writes for a row, which depend on the row only."""
    return _tokens(f"{row.key} {row.prompt} {row.sampling.seed}", row.max_tokens)


@lru_cache(10_000)
def _tokens(seed: str, most: int) -> tuple[int, ...]:
    dice = random.Random(seed)
    return tuple(dice.choices(range(1000), k=dice.randint(1, most)))


def written_by(row: Row) -> tuple[int, ...]:
    """A resumed row goes on after the tokens that its target is given, whatever they are."""
    return (*row.resumed, *tokens_of(row)[len(row.resumed) :])


def result_of(row: Row) -> RowResult:
    tokens = written_by(row)
    return RowResult(row.key, tokens, " ".join(map(str, tokens)), "stop", len(tokens), 3, 2, 0.1)


def report_of(actor: Actor) -> WorkerReport:
    """A report like that of ``check_pinning``."""
    asked = Pin((0,), (), 1)
    pinned = PinningReport(1, actor.host, "affinity", asked, (0,), "default", (), 1, None, (), None, {}, {}, (), ())
    return WorkerReport(1, actor.host, 1.0, "fake", (), {"engine": "fake"}, pinned.record(), ())


@contextmanager
def in_place_of_ray(ray: VirtualRay, fate_of: Callable[[], Fate] = Fate) -> Iterator[None]:
    """Replaces Ray, the clock and the actors in the modules of the driver and its replicas."""

    def actor_class(kind: type[Actor]) -> Any:
        def options(scheduling_strategy: NodeAffinitySchedulingStrategy | None = None, **_: Any) -> Any:
            ray.step()
            host = "here" if scheduling_strategy is None else scheduling_strategy.node_id
            return SimpleNamespace(remote=lambda: kind(ray, host, fate_of()))

        return SimpleNamespace(options=options)

    clock = SimpleNamespace(monotonic=lambda: ray.now)
    event = SimpleNamespace(Event=lambda: VirtualEvent(ray))
    with (
        mock.patch.multiple(driver, ray=ray, time=clock, threading=event),
        mock.patch.multiple(job_record, time=clock),
        mock.patch.multiple(replica, ray=ray, TargetActor=actor_class(TargetActor), DraftActor=actor_class(DraftActor)),
    ):
        yield
