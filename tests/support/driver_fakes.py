"""Fakes around the driver: replicas, and futures whose values are computed when the driver asks for them."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import count
from typing import Any

import pytest
from ray.exceptions import OutOfMemoryError, RayActorError

from outrider.runner.driving import driver as module
from outrider.runner.driving.driver import Driver
from outrider.runner.driving.replica import Call
from outrider.runner.hosts.this_machine import LocalHost
from outrider.runner.job.journal import Journal, StoredRow
from outrider.runner.job.requests import MOST_SAMPLES
from outrider.runner.planning.placement import PlannedActor
from outrider.runner.planning.replica_plan import ActorPlan, ReplicaPlan
from outrider.runner.report.trace import TraceFile
from outrider.workers.machine.pinning import Launch
from outrider.workers.messages import (
    ActorPlacement,
    Harvest,
    ModelSpec,
    ReplicaSpec,
    Row,
    RowFailure,
    RowResult,
    Slice,
    TargetCounters,
    Trace,
    WorkerReport,
)

REPORT = WorkerReport(
    pid=1, host="here", load_seconds=1.0, engine="fake", notes=("a note",), path={"engine": "fake"},
    pinned={"warnings": ()}, differences=("core 3 is not core 2",))  # fmt: skip
PLANNED = PlannedActor("target", 0, "here", (0,), (), 1, "cpu", "", {}, (), {})
PLAN = ReplicaPlan(
    ActorPlan(
        ModelSpec("/models/tiny", "hf", "fp32"), PLANNED, ActorPlacement(Launch(PLANNED.pin, "affinity", (), "python3"))
    ),
    None,
    ReplicaSpec(batch=4, draft_tokens=3),
)


class Future:
    """The value is computed when it is asked for, so that a harvest has all rows submitted until then."""

    def __init__(self, answer: Callable[[], Any], ready: bool = True) -> None:
        self.answer, self.ready = answer, ready


class FakeReplicas:
    """What the replicas do: a target dies of the rows ``poison`` and refuses the rows ``refused``."""

    def __init__(self) -> None:
        self.poison: set[int] = set()
        # The number of rows that a replica has memory for.
        self.fits = 1 << 30
        self.refused: set[int] = set()
        self.never_up: set[int] = set()
        self.dies_at_start: dict[int, Exception] = {}
        self.starts: list[int] = []
        self.submitted: list[int] = []
        self.cancelled: list[int] = []
        # (replica, row): rows that the replica never ends.
        self.hangs_on: set[tuple[int, int]] = set()
        self.after_harvest: Callable[[], None] = lambda: None
        self.draft_deaths = 0


class FakeReplica:
    def __init__(self, number: int, plan: ReplicaPlan, fakes: FakeReplicas) -> None:
        self.number, self.plan, self.fakes = number, plan, fakes
        self.report: WorkerReport | None = None
        self.pending: dict[Any, Call] = {}
        self.rows: deque[Row] = deque()
        self.rounds = 0
        self.harvesting = False
        self.stopped = 0
        self.unsent: frozenset[int] = frozenset()

    def start(self) -> None:
        self.fakes.starts.append(self.number)
        self.report = None
        self.rounds = 0
        if self.number in self.fakes.dies_at_start:
            self._promise(Call.LOAD_TARGET, self.fakes.dies_at_start[self.number])
        elif self.number not in self.fakes.never_up:
            self._promise(Call.LOAD_TARGET, REPORT)
        else:
            self.pending[Future(lambda: None, ready=False)] = Call.LOAD_TARGET
        self.start_draft()

    def start_draft(self) -> None:
        if self.fakes.draft_deaths:
            self.fakes.draft_deaths -= 1
            self._promise(Call.WATCH_DRAFT, RayActorError())

    def _promise(self, call: Call, value: Any) -> None:
        self.pending[Future(lambda: value)] = call

    def target_is_ready(self, report: WorkerReport) -> None:
        self.report = report

    def draft_is_gone(self) -> None:
        pass

    def ask_host(self, sign_of_life: Any) -> None:
        self.pending[sign_of_life] = Call.SIGN_OF_LIFE

    def harvested(self) -> None:
        self.harvesting = False

    def harvest(self, seconds: float) -> None:
        if self.report is not None and not self.harvesting:
            self.harvesting = True
            self.pending[Future(self._harvest)] = Call.HARVEST

    def cancel(self, keys: Sequence[int]) -> None:
        self.fakes.cancelled.extend(keys)
        self.rows = deque(row for row in self.rows if row.key not in keys)

    def _harvest(self) -> Any:
        self.fakes.after_harvest()
        if len(self.rows) > self.fakes.fits:
            return OutOfMemoryError("1.2GB")
        free = [row for row in self.rows if (self.number, row.key // MOST_SAMPLES) not in self.fakes.hangs_on]
        some = free[:2]
        self.rows = deque(row for row in self.rows if row not in some)
        if any(row.key // MOST_SAMPLES in self.fakes.poison for row in some):
            return RayActorError()
        self.rounds += len(some)
        ended = tuple(
            RowFailure(row.key, "cannot be")
            if row.key // MOST_SAMPLES in self.fakes.refused
            else RowResult(row.key, (1, 2), f"text {row.sampling.sample}", "stop", 1, 3, 2, 0.1)
            for row in some
        )
        counters = TargetCounters(rounds=self.rounds, row_rounds=self.rounds, tokens=2 * self.rounds)
        counters.prompt_tokens, counters.prompt_tokens_reused = 5 * self.rounds, 3 * self.rounds
        counters.proposed, counters.accepted = 3 * self.rounds, 2 * self.rounds
        return Harvest(ended, counters, self._slices())

    def _slices(self) -> Trace:
        now = time.perf_counter_ns()
        return Trace((Slice("verify", now, now + 1, 1, 1),)) if self.plan.replica_spec.trace else Trace()

    def align(self, role: str, trace: TraceFile) -> None:
        trace.align(self.number, role, time.perf_counter)

    def last_traces(self) -> Iterator[tuple[str, Trace]]:
        yield "target", self._slices()

    def submit(self, rows: Sequence[Row]) -> None:
        self.rows.extend(rows)
        self.fakes.submitted.extend(row.key // MOST_SAMPLES for row in rows)

    def stop(self) -> None:
        self.report = None
        self.harvesting = False
        self.pending.clear()
        self.rows.clear()
        self.stopped += 1


def install_fakes(monkeypatch: pytest.MonkeyPatch) -> FakeReplicas:
    """Replaces the replicas and Ray in the driver's module by fakes."""
    made = FakeReplicas()
    monkeypatch.setattr(module, "Replica", lambda number, plan: FakeReplica(number, plan, made))

    turns = count()

    def wait(futures: list[Future], num_returns: int, timeout: float) -> tuple[list[Future], list[Future]]:
        assert 1 <= num_returns <= len(futures)
        ready = [future for future in futures if future.ready]
        # In turn one answer alone, or as many as are asked for.
        turn = next(turns)
        ready = ready[turn % len(ready) :][: num_returns if turn % 3 else 1] if ready else []
        return ready, [future for future in futures if future not in ready]

    def get(future: Future) -> Any:
        value = future.answer()
        if isinstance(value, Exception):
            raise value
        return value

    monkeypatch.setattr(module.ray, "wait", wait)
    monkeypatch.setattr(module.ray, "get", get)
    return made


REQUEST = {
    "max_tokens": 5, "n": 1, "stop": [], "temperature": 0.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "seed": 1,
    "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "logit_bias": [],
}  # fmt: skip


def fill(journal: Journal, count: int, samples: int = 1) -> None:
    request = {**REQUEST, "n": samples}
    journal.fill((StoredRow(n, f"id-{n}", n + 1, "completion", request, (1, 2)) for n in range(count)), [], {})


def driver(
    journal: Journal, replicas: int = 1, batch: int = 4, traced: bool = False, plan: ReplicaPlan = PLAN, **options: Any
) -> Driver:
    plan = replace(plan, replica_spec=ReplicaSpec(batch=batch, draft_tokens=3, trace=traced))
    given = {
        "agree_on_path": lambda path: None,
        "hosts": LocalHost(lambda unplaced: [], lambda: None, lambda: None),
        "show": lambda counters: None,
        "start_deadline": 60.0,
        **options,
    }
    return Driver(journal, [plan] * replicas, "tiny", **given)


def ids(journal: Journal, state: int) -> list[str]:
    return [json.loads(record)["custom_id"] for record in journal.records(state)]
