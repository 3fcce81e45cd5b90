"""The driver's loop, over replicas and a Ray that do at once what they are told."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import RayActorError, RayTaskError

from outrider.runner import account
from outrider.runner import driver as module
from outrider.runner.account import summary_of
from outrider.runner.driver import Driver
from outrider.runner.fleet import OneHost
from outrider.runner.journal import DONE, FAILED, Counts, Journal, StoredRow
from outrider.runner.placement import PlannedActor
from outrider.runner.plan import ActorPlan, ReplicaPlan
from outrider.runner.requests import MOST_SAMPLES
from outrider.runner.schedule import MOST_ATTEMPTS, MOST_BARREN_DEATHS
from outrider.runner.trace import TraceFile
from outrider.workers.errors import JobChangedError, JobError, LeaseError, ModelError, WorkerError
from outrider.workers.messages import (
    Harvest,
    ModelSpec,
    Progress,
    Row,
    RowFailure,
    RowResult,
    Seat,
    ServeSpec,
    Slice,
    Trace,
    WorkerReport,
)
from outrider.workers.pinning import Launch

REPORT = WorkerReport(
    pid=1, host="here", load_seconds=1.0, engine="fake", notes=("a note",), path={"engine": "fake"},
    pinned={"warnings": ()}, differences=("core 3 is not core 2",))  # fmt: skip
PLANNED = PlannedActor("target", 0, "here", (0,), (), 1, "cpu", "", {}, (), {})
PLAN = ReplicaPlan(
    ActorPlan(ModelSpec("/models/tiny", "hf", "fp32"), PLANNED, Seat(Launch(PLANNED.pin, "affinity", (), "python3"))),
    None,
    ServeSpec(batch=4, draft_tokens=3),
)


class Future:
    """Answers are made when they are asked for, so that a harvest holds what was submitted until then."""

    def __init__(self, answer: Callable[[], Any], ready: bool = True) -> None:
        self.answer, self.ready = answer, ready


class World:
    """What the replicas do: ``deaths`` says on which rows a target dies, ``fails`` which rows it refuses."""

    def __init__(self) -> None:
        self.poison: set[int] = set()
        self.refused: set[int] = set()
        self.never_up: set[int] = set()
        self.dies_at_start: dict[int, Exception] = {}
        self.starts: list[int] = []
        self.submitted: list[int] = []
        self.cancelled: list[int] = []
        # Rows that a replica never ends, as (replica, row).
        self.hangs_on: set[tuple[int, int]] = set()
        self.after_harvest: Callable[[], None] = lambda: None
        self.draft_deaths = 0


class FakeReplica:
    def __init__(self, number: int, plan: ReplicaPlan, world: World) -> None:
        self.number, self.plan, self.world = number, plan, world
        self.report: WorkerReport | None = None
        self.pending: dict[Any, str] = {}
        self.rows: deque[Row] = deque()
        self.rounds = 0
        self.harvesting = False
        self.stopped = 0

    def start(self) -> None:
        self.world.starts.append(self.number)
        self.report = None
        self.rounds = 0
        if self.number in self.world.dies_at_start:
            self._promise("target ready", self.world.dies_at_start[self.number])
        elif self.number not in self.world.never_up:
            self._promise("target ready", REPORT)
        else:
            self.pending[Future(lambda: None, ready=False)] = "target ready"
        self.start_draft()

    def start_draft(self) -> None:
        if self.world.draft_deaths:
            self.world.draft_deaths -= 1
            self._promise("draft gone", RayActorError())

    def _promise(self, what: str, value: Any) -> None:
        self.pending[Future(lambda: value)] = what

    def target_is_ready(self, report: WorkerReport) -> None:
        self.report = report

    def draft_is_gone(self) -> bool:
        return True

    def harvested(self) -> None:
        self.harvesting = False

    def harvest(self, seconds: float) -> None:
        if self.report is not None and not self.harvesting:
            self.harvesting = True
            self.pending[Future(self._harvest)] = "harvest"

    def cancel(self, keys: Sequence[int]) -> None:
        self.world.cancelled.extend(keys)
        self.rows = deque(row for row in self.rows if row.key not in keys)

    def _harvest(self) -> Any:
        self.world.after_harvest()
        free = [row for row in self.rows if (self.number, row.key // MOST_SAMPLES) not in self.world.hangs_on]
        some = free[:2]
        self.rows = deque(row for row in self.rows if row not in some)
        if any(row.key // MOST_SAMPLES in self.world.poison for row in some):
            return RayActorError()
        self.rounds += len(some)
        ended = tuple(
            RowFailure(row.key, "cannot be")
            if row.key // MOST_SAMPLES in self.world.refused
            else RowResult(row.key, (1, 2), f"text {row.sampling.sample}", "stop", 1, 3, 2, 0.1)
            for row in some
        )
        progress = Progress(rounds=self.rounds, row_rounds=self.rounds, tokens=2 * self.rounds)
        progress.prompt_tokens, progress.prompt_tokens_reused = 5 * self.rounds, 3 * self.rounds
        return Harvest(ended, progress, self._slices())

    def _slices(self) -> Trace:
        now = time.perf_counter_ns()
        return Trace((Slice("verify", now, now + 1, 1, 1),)) if self.plan.serve.trace else Trace()

    def align(self, role: str, trace: TraceFile) -> None:
        trace.align(self.number, role, time.perf_counter)

    def last_traces(self) -> Iterator[tuple[str, Trace]]:
        yield "target", self._slices()

    def submit(self, rows: Sequence[Row]) -> None:
        self.rows.extend(rows)
        self.world.submitted.extend(row.key // MOST_SAMPLES for row in rows)

    def stop(self) -> None:
        self.report = None
        self.harvesting = False
        self.pending.clear()
        self.rows.clear()
        self.stopped += 1


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    made = World()
    monkeypatch.setattr(module, "Replica", lambda number, plan: FakeReplica(number, plan, made))

    turns = count()

    def wait(futures: list[Future], num_returns: int, timeout: float) -> tuple[list[Future], list[Future]]:
        assert 1 <= num_returns <= len(futures)
        ready = [future for future in futures if future.ready]
        # Now one answer, now all of them.
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


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    return Journal(tmp_path / "job.db")


def fill(journal: Journal, count: int, samples: int = 1) -> None:
    request = {
        "max_tokens": 5, "n": samples, "stop": [], "temperature": 0.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "seed": 1,
        "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "logit_bias": [],
    }  # fmt: skip
    journal.fill((StoredRow(n, f"id-{n}", n + 1, "completion", request, (1, 2)) for n in range(count)), [], {})


def driver(journal: Journal, replicas: int = 1, batch: int = 4, traced: bool = False, **options: Any) -> Driver:
    plan = replace(PLAN, serve=ServeSpec(batch=batch, draft_tokens=3, trace=traced))
    given = {
        "agree_on_path": lambda path: None,
        "fleet": OneHost(lambda: None),
        "show": lambda totals: None,
        "start_deadline": 60.0,
        **options,
    }
    return Driver(journal, [plan] * replicas, "tiny", **given)


def ids(journal: Journal, state: int) -> list[str]:
    return [json.loads(record)["custom_id"] for record in journal.records(state)]


@pytest.mark.parametrize("replicas", [1, 3])
def test_every_row_ends_and_is_counted(world: World, journal: Journal, replicas: int) -> None:
    fill(journal, 700)
    made = driver(journal, replicas)
    made.run()
    assert journal.counts() == Counts(700, 700, 0)
    assert ids(journal, DONE) == [f"id-{number}" for number in range(700)]
    totals = made.totals
    assert (totals.done, totals.tokens, totals.proposed, totals.accepted, totals.rounds) == (700, 1400, 2100, 1400, 700)
    assert (totals.prompt_tokens, totals.prompt_tokens_reused) == (3500, 2100)
    assert {"a note", "target of replica 0: core 3 is not core 2"} <= set(totals.notes)
    assert len(totals.notes) == len(set(totals.notes))
    assert all(replica.stopped for replica in made._replicas.values())


def test_only_what_is_missing_is_done(world: World, journal: Journal) -> None:
    fill(journal, 10)
    journal.record([(number, json.dumps({"custom_id": f"id-{number}"})) for number in (0, 3, 9)], [])
    made = driver(journal)
    assert made.totals.done == 3
    made.run()
    assert sorted(world.submitted) == [1, 2, 4, 5, 6, 7, 8]
    assert made.totals.done == 10


def test_a_row_is_done_when_all_its_samples_are(world: World, journal: Journal) -> None:
    fill(journal, 5, samples=3)
    made = driver(journal)
    made.run()
    first = json.loads(next(journal.records(DONE)))
    assert [choice["text"] for choice in first["response"]["body"]["choices"]] == ["text 0", "text 1", "text 2"]
    assert first["response"]["body"]["usage"]["completion_tokens"] == 6
    assert made.totals.tokens == 5 * 6


def test_a_row_that_the_target_refuses_fails_once(world: World, journal: Journal) -> None:
    fill(journal, 6, samples=2)
    world.refused = {2}
    made = driver(journal)
    made.run()
    assert journal.counts() == Counts(6, 5, 1)
    record = json.loads(next(journal.records(FAILED)))
    assert record["error"] == {"code": "invalid_request", "message": "cannot be"}
    assert (made.totals.done, made.totals.failed) == (5, 1)


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_poison_row_fails_and_the_others_are_done(world: World, journal: Journal, replicas: int) -> None:
    fill(journal, 40)
    world.poison = {7}
    made = driver(journal, replicas)
    made.run()
    assert ids(journal, FAILED) == ["id-7"]
    assert journal.counts() == Counts(40, 39, 1)
    assert made.totals.target_deaths == MOST_ATTEMPTS
    error = json.loads(next(journal.records(FAILED)))["error"]
    assert error == {
        "code": "replica_died",
        "message": f"its replica died {MOST_ATTEMPTS} times while doing it: its process died",
    }
    # What was done twice is counted once.
    assert made.totals.tokens == 39 * 2


def test_samples_lost_with_a_replica_are_not_counted_twice(world: World, journal: Journal) -> None:
    fill(journal, 1, samples=4)
    seen: list[int] = []

    def dies_once() -> None:
        seen.append(1)
        world.poison = {0} if len(seen) == 2 else set()

    world.after_harvest = dies_once
    made = driver(journal)
    made.run()
    assert made.totals.target_deaths == 1
    assert journal.counts() == Counts(1, 1, 0)
    assert (made.totals.tokens, made.totals.proposed, made.totals.accepted) == (8, 12, 8)


def test_the_account_goes_on_over_deaths_and_resumed_runs(world: World, journal: Journal) -> None:
    fill(journal, 40)
    made = driver(journal, replicas=2, batch=3)
    world.after_harvest = lambda: made.drain() if made.totals.done >= 10 else None
    world.poison = {7}
    made.run()
    first = summary_of(journal.meta(account.KEY))
    assert first["tokens_per_round"] == 2.0
    world.after_harvest, world.poison = lambda: None, set()
    driver(journal, replicas=2, batch=3).run()
    kept = journal.meta(account.KEY)
    # What a target did before it died is in the account up to its last harvest; rows are counted by their ends alone.
    assert sum(replica["tokens"] for replica in summary_of(kept)["replicas"]) == 2 * journal.counts().done
    assert sum(kept["latencies"].values()) == journal.counts().done


def test_a_traced_job_shows_rows_deaths_and_starts(world: World, journal: Journal, tmp_path: Path) -> None:
    fill(journal, 12)
    world.poison = {7}
    world.draft_deaths = 1
    trace = TraceFile(tmp_path / "t.json")
    made = driver(journal, trace=trace, traced=True)
    made.run()
    trace.close()
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    names = [event["name"] for event in events]
    assert names.count("target died") == MOST_ATTEMPTS
    assert names.count("start") == 1 + MOST_ATTEMPTS
    assert names.count("draft died") == 1
    assert names.count("verify") == names.count("rows received") + 1, "one slice a harvest, and what was left at the end"
    assert sum(event["args"]["rows"] for event in events if event["name"] == "rows received") == 11
    assert sum(event["args"]["rows"] for event in events if event["name"] == "rows sent") >= 12


def test_a_target_that_cannot_start_ends_the_job_with_its_reason(world: World, journal: Journal) -> None:
    fill(journal, 3)
    world.dies_at_start[0] = RayTaskError("load", "Traceback", WorkerError("no memory for the weights"))
    with pytest.raises(JobError) as caught:
        driver(journal).run()
    assert str(caught.value) == (
        "no replica stays alive: no memory for the weights; the rows already done are kept, and the job can be resumed"
    )
    assert len(world.starts) == MOST_BARREN_DEATHS


def test_a_model_that_is_wrong_is_not_tried_again(world: World, journal: Journal) -> None:
    fill(journal, 3)
    world.dies_at_start[0] = RayTaskError("load", "Traceback", ModelError("tiny lacks 3 of its weights"))
    made = driver(journal)
    with pytest.raises(ModelError, match="tiny lacks 3 of its weights"):
        made.run()
    assert world.starts == [0]
    assert made._replicas[0].stopped, "nothing is left running"  # type: ignore[attr-defined]


def test_one_broken_replica_does_not_end_the_job(world: World, journal: Journal) -> None:
    fill(journal, 30)
    world.dies_at_start[1] = RayActorError()
    driver(journal, replicas=2).run()
    assert journal.counts() == Counts(30, 30, 0)


def test_another_numeric_path_is_refused(world: World, journal: Journal) -> None:
    def refuse(path: dict[str, str]) -> None:
        assert path == {"engine": "fake"}
        raise JobChangedError("another path")

    fill(journal, 3)
    with pytest.raises(JobChangedError):
        driver(journal, agree_on_path=refuse).run()
    assert journal.counts().done == 0


def test_a_replica_that_does_not_come_up_in_time_ends_a_job_that_has_no_other(world: World, journal: Journal) -> None:
    fill(journal, 3)
    world.never_up = {0}
    with pytest.raises(WorkerError, match=r"the target of replica 0 is not up after 0.001 s; it was started with: python3"):
        driver(journal, start_deadline=0.001).run()


def test_a_replica_that_does_not_come_up_in_time_is_no_matter_where_there_are_others(
    world: World, journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter(range(100_000))
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: float(next(clock))))
    fill(journal, 60)
    world.never_up = {1}
    made = driver(journal, replicas=2, start_deadline=20.0)
    made.run()
    assert journal.counts() == Counts(60, 60, 0)


def test_a_drain_finishes_what_is_under_way(world: World, journal: Journal) -> None:
    fill(journal, 100)
    made = driver(journal, batch=3)
    world.after_harvest = lambda: made.drain() if made.totals.done >= 10 else None
    made.run()
    assert made.draining
    counts = journal.counts()
    assert 10 <= counts.done < 30
    assert counts.done == len(set(world.submitted)), "every row that was sent has ended"
    again = driver(journal)
    world.after_harvest = lambda: None
    again.run()
    assert journal.counts() == Counts(100, 100, 0)
    assert len(world.submitted) == 100, "nothing was done twice"


def test_replicas_are_stopped_when_the_loop_fails(world: World, journal: Journal) -> None:
    fill(journal, 3)

    def interrupted() -> None:
        raise KeyboardInterrupt

    world.after_harvest = interrupted
    made = driver(journal)
    with pytest.raises(KeyboardInterrupt):
        made.run()
    assert made._replicas[0].stopped  # type: ignore[attr-defined]


def test_a_dead_draft_is_counted_and_the_job_goes_on(world: World, journal: Journal) -> None:
    fill(journal, 20)
    world.draft_deaths = 3
    made = driver(journal)
    made.run()
    assert made.totals.draft_deaths == 3
    assert made.totals.target_deaths == 0
    assert journal.counts() == Counts(20, 20, 0)


def test_a_row_that_hangs_is_written_elsewhere_and_counted_once(
    world: World, journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter(range(100_000))
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: float(next(clock))))
    fill(journal, 30, samples=2)
    world.hangs_on = {(0, 3)}
    made = driver(journal, replicas=2, batch=2)
    made.run()
    assert journal.counts() == Counts(30, 30, 0)
    assert (made.totals.done, made.totals.tokens) == (30, 120)
    assert world.submitted.count(3) == 4, "two samples, twice"
    assert {3 * MOST_SAMPLES, 3 * MOST_SAMPLES + 1} <= set(world.cancelled)
    assert made._copied == {}


class NoEvent:
    """Stands for the drain's event, and counts the waits."""

    def __init__(self) -> None:
        self.waits = 0

    def is_set(self) -> bool:
        return False

    def wait(self, seconds: float) -> bool:
        self.waits += 1
        return False


def test_a_replica_without_cores_waits_for_some(world: World, journal: Journal) -> None:
    """It neither spins nor counts as dead."""
    fill(journal, 5)
    world.dies_at_start[0] = RayTaskError("load", "Traceback", LeaseError("core 1 is held by process 5"))
    asked: list[int] = []

    def seat_anew() -> ReplicaPlan | None:
        asked.append(1)
        if len(asked) < 4:
            return None
        world.dies_at_start.clear()
        return PLAN

    made = driver(journal, fleet=OneHost(seat_anew))
    made._drain = event = NoEvent()  # type: ignore[assignment]
    made.run()
    assert event.waits >= 2
    assert made.totals.target_deaths == 0
    assert journal.counts() == Counts(5, 5, 0)


class Moving:
    """A fleet of one host after the other: each leaves when its target dies, and the next one joins."""

    def __init__(self, plans: list[ReplicaPlan]) -> None:
        self.plans = plans
        self.left: list[ReplicaPlan] = []
        self.released: list[ReplicaPlan] = []

    def seats(self, seatless: int) -> list[ReplicaPlan]:
        return [self.plans.pop()] if seatless and self.plans else []

    def gone(self, plan: ReplicaPlan) -> bool:
        return plan in self.left

    def sign_of_life(self, plan: ReplicaPlan) -> Any:
        return None

    def release(self, plan: ReplicaPlan) -> None:
        self.released.append(plan)

    def host(self, plan: ReplicaPlan) -> str:
        return plan.target.actor.host


def on(host: str) -> ReplicaPlan:
    return replace(PLAN, target=replace(PLAN.target, actor=replace(PLANNED, host=host)))


def test_a_host_that_leaves_takes_no_row_with_it_and_blames_none(world: World, journal: Journal) -> None:
    fill(journal, 40)
    fleet = Moving([on(f"host {number}") for number in range(6)])
    made = driver(journal, fleet=fleet)
    made._drain = NoEvent()  # type: ignore[assignment]
    turns = count()

    def leave() -> None:
        # Row 0 is under way each time, more often than a row may see its replica die.
        leaving = next(turns) < 2 * MOST_ATTEMPTS - 1
        world.poison = {row.key // MOST_SAMPLES for row in made._replicas[0].rows} if leaving else set()  # type: ignore[attr-defined]
        fleet.left = [made._replicas[0].plan] if world.poison else []

    world.after_harvest = leave
    made.run()
    assert len(fleet.released) >= MOST_ATTEMPTS
    assert journal.counts() == Counts(40, 40, 0)
    assert made.totals.target_deaths == 0
    assert sum(made.rows_by_host.values()) == 40


def test_a_host_that_joins_gets_rows(world: World, journal: Journal) -> None:
    fill(journal, 400)
    joining = [on("new")]

    class Growing(Moving):
        def seats(self, seatless: int) -> list[ReplicaPlan]:
            return [joining.pop()] if joining else []

    made = driver(journal, fleet=Growing([]))
    made.run()
    assert set(made.rows_by_host) == {"here", "new"}
    assert journal.counts() == Counts(400, 400, 0)


def test_a_job_without_any_place_gives_up_in_the_end(world: World, journal: Journal) -> None:
    fill(journal, 5)
    world.dies_at_start[0] = RayTaskError("load", "Traceback", LeaseError("core 1 is held by process 5"))
    made = driver(journal, patience=-1.0)
    made._drain = NoEvent()  # type: ignore[assignment]
    with pytest.raises(JobError, match="no replica has had a place for"):
        made.run()


def test_a_replica_that_computes_otherwise_is_left_out(world: World, journal: Journal) -> None:
    fill(journal, 50)
    paths = count()

    def agree(path: dict[str, str]) -> None:
        if next(paths) == 1:
            raise JobChangedError("instruction_set: avx512 then, avx2 now")

    made = driver(journal, replicas=2, agree_on_path=agree)
    made.run()
    assert journal.counts() == Counts(50, 50, 0)
    assert any("is not used: instruction_set: avx512 then" in note for note in made.totals.notes)


@pytest.mark.parametrize("host_lives", [True, False])
def test_a_death_is_blamed_only_where_the_host_lives_on(world: World, journal: Journal, host_lives: bool) -> None:
    fill(journal, 20)

    class Doubted(Moving):
        def sign_of_life(self, plan: ReplicaPlan) -> Any:
            return Future(lambda: None if host_lives else RayActorError())

    made = driver(journal, fleet=Doubted([on("next")]))
    made._drain = NoEvent()  # type: ignore[assignment]
    deaths = count()

    def die_once() -> None:
        world.poison = {row.key // MOST_SAMPLES for row in made._replicas[0].rows} if next(deaths) == 1 else set()  # type: ignore[attr-defined]

    world.after_harvest = die_once
    made.run()
    assert journal.counts() == Counts(20, 20, 0)
    assert made.totals.target_deaths == host_lives
    assert set(made.rows_by_host) == ({"here"} if host_lives else {"here", "next"})
