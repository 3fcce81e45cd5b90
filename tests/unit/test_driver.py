"""The driver's loop, over fake replicas and a fake Ray that answer at once."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from driver_fakes import PLAN, REPORT, FakeReplicas, driver, fill, ids, install_fakes
from ray.exceptions import OutOfMemoryError, RayActorError, RayTaskError

from outrider.runner.driving import driver as module
from outrider.runner.driving import lifecycle
from outrider.runner.driving.replica import HARVEST_SECONDS, Replica
from outrider.runner.driving.schedule import MOST_ATTEMPTS, MOST_IDLE_DEATHS
from outrider.runner.hosts import limits
from outrider.runner.hosts.memory_kills import MemoryKills
from outrider.runner.hosts.this_machine import LocalHost
from outrider.runner.job.journal import DONE, FAILED, Counts, Journal
from outrider.runner.job.requests import MOST_SAMPLES
from outrider.runner.report import statistics
from outrider.runner.report.statistics import summary_of
from outrider.runner.report.trace import TraceFile
from outrider.workers.errors import JobChangedError, JobError, ModelError, RayLostError, WorkerError
from outrider.workers.messages import Row


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> FakeReplicas:
    return install_fakes(monkeypatch)


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    return Journal(tmp_path / "job.db")


@pytest.mark.one_in(2)
@pytest.mark.parametrize("replicas", [1, 3])
def test_every_row_ends_and_is_counted(fakes: FakeReplicas, journal: Journal, replicas: int) -> None:
    fill(journal, 700)
    made = driver(journal, replicas)
    made.run()
    assert journal.counts() == Counts(700, 700, 0)
    assert ids(journal, DONE) == [f"id-{number}" for number in range(700)]
    counters = made.counters
    assert (counters.done, counters.tokens, counters.proposed, counters.accepted, counters.rounds) == (
        700,
        1400,
        2100,
        1400,
        700,
    )
    assert (counters.prompt_tokens, counters.prompt_tokens_reused) == (3500, 2100)
    assert {"a note", "target of replica 0: core 3 is not core 2"} <= set(counters.notes)
    assert len(counters.notes) == len(set(counters.notes))
    assert all(getattr(replica, "stopped", 0) for replica in made._replicas.values())


def test_only_what_is_missing_is_done(fakes: FakeReplicas, journal: Journal) -> None:
    fill(journal, 10)
    journal.record([(number, json.dumps({"custom_id": f"id-{number}"})) for number in (0, 3, 9)], [])
    made = driver(journal)
    assert made.counters.done == 3
    made.run()
    assert sorted(fakes.submitted) == [1, 2, 4, 5, 6, 7, 8]
    assert made.counters.done == 10


def test_a_row_is_done_when_all_its_samples_are(fakes: FakeReplicas, journal: Journal) -> None:
    fill(journal, 5, samples=3)
    made = driver(journal)
    made.run()
    first = json.loads(next(journal.records(DONE)))
    assert [choice["text"] for choice in first["response"]["body"]["choices"]] == ["text 0", "text 1", "text 2"]
    assert first["response"]["body"]["usage"]["completion_tokens"] == 6
    assert made.counters.tokens == 5 * 6


def test_a_row_that_the_target_refuses_fails_once(fakes: FakeReplicas, journal: Journal) -> None:
    fill(journal, 6, samples=2)
    fakes.refused = {2}
    made = driver(journal)
    made.run()
    assert journal.counts() == Counts(6, 5, 1)
    record = json.loads(next(journal.records(FAILED)))
    assert record["error"] == {"code": "invalid_request", "message": "cannot be"}
    assert (made.counters.done, made.counters.failed) == (5, 1)


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_poison_row_fails_and_the_others_are_done(fakes: FakeReplicas, journal: Journal, replicas: int) -> None:
    fill(journal, 40)
    fakes.poison = {7}
    made = driver(journal, replicas)
    made.run()
    assert ids(journal, FAILED) == ["id-7"]
    assert journal.counts() == Counts(40, 39, 1)
    assert made.counters.target_deaths == MOST_ATTEMPTS
    error = json.loads(next(journal.records(FAILED)))["error"]
    assert error == {
        "code": "replica_died",
        "message": f"its replica died {MOST_ATTEMPTS} times while doing it: its process died",
    }
    # What was done twice is counted once.
    assert made.counters.tokens == 39 * 2


def test_what_dies_with_ray_is_not_to_blame(fakes: FakeReplicas, journal: Journal) -> None:
    fill(journal, 40)
    lost = False

    def die_with_ray() -> None:
        nonlocal lost
        lost = made.counters.done > 0
        fakes.poison = set(range(40)) if lost else set()

    fakes.after_harvest = die_with_ray
    hosts = LocalHost(lambda unplaced: [], lambda: "Ray was killed" if lost else None, lambda: None)
    for _ in range(MOST_ATTEMPTS):
        made = driver(journal, hosts=hosts)
        with pytest.raises(RayLostError, match="Ray was killed"):
            made.run()
        lost, fakes.poison = False, set()
    assert 0 < journal.counts().done < 40
    fakes.after_harvest = lambda: None
    driver(journal).run()
    assert journal.counts() == Counts(40, 40, 0)
    counters = journal.meta("totals")
    assert (counters["ray_deaths"], counters["target_deaths"]) == (MOST_ATTEMPTS, 0)


@pytest.mark.parametrize("lost", [True, False])
def test_whatever_a_lost_ray_raises_is_its_loss(fakes: FakeReplicas, journal: Journal, lost: bool) -> None:
    fill(journal, 4)
    gone = False

    def wait() -> list[Any]:
        nonlocal gone
        gone = lost
        raise RuntimeError("the object store is closed")

    made = driver(journal, hosts=LocalHost(lambda unplaced: [], lambda: "Ray was killed" if gone else None, lambda: None))
    made._wait_for_answers = wait  # type: ignore[method-assign]
    with pytest.raises(RayLostError if lost else RuntimeError, match="killed" if lost else "store is closed"):
        made.run()
    assert journal.meta("totals")["ray_deaths"] == lost


@pytest.mark.parametrize("rows", [6, 11])
def test_a_row_that_ends_in_the_tick_in_which_another_replica_gets_room_is_not_written_twice(
    fakes: FakeReplicas, journal: Journal, monkeypatch: pytest.MonkeyPatch, rows: int
) -> None:
    """At first rows are quick, and the last ones are late by that measure."""
    fill(journal, rows)
    now = 0.0

    def monotonic() -> float:
        nonlocal now
        now += 0.1 if made.counters.done < rows - 4 else 100.0
        return now

    made = driver(journal, replicas=2, batch=1)
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=monotonic))
    monkeypatch.setattr(
        module.ray, "wait", lambda futures, num_returns, timeout: (futures[:num_returns], futures[num_returns:])
    )
    made.run()
    assert (made.counters.done, made.counters.tokens) == (rows, 2 * rows)
    assert sum(journal.meta(statistics.KEY)["latencies"].values()) == rows
    assert made.record._partial_results._rows == {}


def test_a_row_that_is_cancelled_does_not_leave_for_its_target() -> None:
    """Rows travel with the next harvest, and cancelling does not wait for it."""
    cancelled: list[list[int]] = []
    harvests: list[tuple[Any, ...]] = []
    replica = Replica(0, PLAN)
    replica._target = SimpleNamespace(
        cancel=SimpleNamespace(remote=cancelled.append),
        harvest=SimpleNamespace(remote=lambda *given: harvests.append(given)),
    )
    replica.target_is_ready(REPORT)
    sent = [Row(number, (1, 2), 5) for number in range(3)]
    replica.submit(sent)
    replica.cancel([0, 2, 7])
    replica.harvest()
    assert harvests == [(HARVEST_SECONDS, [sent[1]])]
    assert cancelled == [[0, 2, 7]]


def test_samples_lost_with_a_replica_are_not_counted_twice(fakes: FakeReplicas, journal: Journal) -> None:
    fill(journal, 1, samples=4)
    seen: list[int] = []

    def dies_once() -> None:
        seen.append(1)
        fakes.poison = {0} if len(seen) == 2 else set()

    fakes.after_harvest = dies_once
    made = driver(journal)
    made.run()
    assert made.counters.target_deaths == 1
    assert journal.counts() == Counts(1, 1, 0)
    assert (made.counters.tokens, made.counters.proposed, made.counters.accepted) == (8, 12, 8)


def test_rows_that_could_not_be_recorded_are_not_counted(
    fakes: FakeReplicas, journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk is full for a moment, or somebody presses Ctrl-C twice: those rows are done again."""
    fill(journal, 20)
    record = Journal.record

    def full_once(self: Journal, done: Any, failed: Any, *kept: Any) -> None:
        if done:
            monkeypatch.setattr(Journal, "record", record)
            raise JobError("the disk is full")
        record(self, done, failed, *kept)

    monkeypatch.setattr(Journal, "record", full_once)
    with pytest.raises(JobError, match="the disk is full"):
        driver(journal).run()
    driver(journal).run()
    assert journal.counts() == Counts(20, 20, 0)
    assert journal.meta("totals")["tokens"] == 40
    assert sum(journal.meta(statistics.KEY)["latencies"].values()) == 20


def test_statistics_go_on_over_deaths_and_resumed_runs(fakes: FakeReplicas, journal: Journal) -> None:
    fill(journal, 40)
    made = driver(journal, replicas=2, batch=3)
    fakes.after_harvest = lambda: made.drain() if made.counters.done >= 10 else None
    fakes.poison = {7}
    made.run()
    first = summary_of(journal.meta(statistics.KEY))
    assert first["tokens_per_round"] == 2.0
    fakes.after_harvest, fakes.poison = lambda: None, set()
    driver(journal, replicas=2, batch=3).run()
    kept = journal.meta(statistics.KEY)
    # What a target did before it died is in the statistics up to its last harvest; rows are counted by their ends alone.
    assert sum(replica["tokens"] for replica in summary_of(kept)["replicas"]) == 2 * journal.counts().done
    assert sum(kept["latencies"].values()) == journal.counts().done


def test_a_traced_job_shows_rows_deaths_and_starts(fakes: FakeReplicas, journal: Journal, tmp_path: Path) -> None:
    fill(journal, 12)
    fakes.poison = {7}
    fakes.draft_deaths = 1
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


def test_a_target_that_cannot_start_ends_the_job_with_its_reason(fakes: FakeReplicas, journal: Journal) -> None:
    fill(journal, 3)
    fakes.dies_at_start[0] = RayTaskError("load", "Traceback", WorkerError("no memory for the weights"))
    with pytest.raises(JobError) as caught:
        driver(journal).run()
    assert str(caught.value) == (
        "no replica stays alive: no memory for the weights; the rows already done are kept, and the job can be resumed"
    )
    assert len(fakes.starts) == MOST_IDLE_DEATHS


@pytest.mark.parametrize(
    ("death", "kills", "said"),
    [
        (
            RayActorError(),
            0,
            "its process died; if memory was short, a smaller --batch, fewer --replicas or a smaller --draft needs less, "
            "and in a new job a smaller --precision or a smaller --max-tokens; ",
        ),
        (RayActorError(), 1, "its process died while the kernel was killing processes to free memory; a smaller --batch"),
        (OutOfMemoryError("1.2GB"), 0, "Ray ended its process because the machine ran short of memory; a smaller --batch"),
    ],
)
def test_a_job_whose_targets_are_killed_says_what_needs_less_memory(
    fakes: FakeReplicas, journal: Journal, monkeypatch: pytest.MonkeyPatch, death: Exception, kills: int, said: str
) -> None:
    fill(journal, 3)
    fakes.dies_at_start[0] = death
    # Each death was one of the kernel's kills, or none was.
    monkeypatch.setattr(module, "MemoryKills", lambda: MemoryKills(lambda: kills * len(fakes.starts)))
    with pytest.raises(JobError) as caught:
        driver(journal).run()
    assert f"no replica stays alive: {said}" in str(caught.value)
    assert str(caught.value).endswith("; the rows already done are kept, and the job can be resumed")


@pytest.mark.parametrize(("engine", "cache", "offered"), [("native", "auto", 1), ("native", "int8", 0), ("hf", "auto", 0)])
def test_keys_and_values_in_8_bits_are_offered_where_they_would_be_less(
    fakes: FakeReplicas, journal: Journal, engine: str, cache: str, offered: int
) -> None:
    fill(journal, 1)
    fakes.dies_at_start[0] = OutOfMemoryError("1.2GB")
    target = replace(PLAN.target, model=replace(PLAN.target.model, engine=engine, cache_precision=cache))
    with pytest.raises(JobError) as caught:
        driver(journal, plan=replace(PLAN, target=target)).run()
    assert str(caught.value).count("a smaller --precision, --cache-precision int8 or") == offered


def test_a_replica_that_memory_is_too_short_for_goes_on_with_fewer_rows_at_once(
    fakes: FakeReplicas, journal: Journal
) -> None:
    fill(journal, 12)
    fakes.fits = 3
    tested = driver(journal)
    tested.run()
    assert (journal.counts().done, journal.counts().failed) == (12, 0)
    assert fakes.starts == [0, 0, 0]
    short = "Ray ended its process because the machine ran short of memory"
    assert [note for note in tested.counters.notes if short in note] == [
        f"replica 0 works on {fewer} at once from now on instead of {before}: {short}"
        for fewer, before in (("2 rows", 4), ("1 row", 2))
    ]


FULL = (
    "its process died; /dev/shm has only 64 KiB free, and processes die when it is full: remove files from it, or "
    "make it larger (docker run --shm-size=4g)"
)


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> None:
    """No room in shared memory."""
    monkeypatch.setattr(limits.shutil, "disk_usage", mock.Mock(return_value=mock.Mock(free=64 << 10)))


@pytest.mark.parametrize(("node", "said"), [(None, FULL), ("another", "its process died; if memory was short")])
def test_targets_that_die_beside_a_full_shared_memory_are_not_told_of_want_of_memory(
    fakes: FakeReplicas, journal: Journal, full: None, node: str | None, said: str
) -> None:
    """This host's own: of another's nothing is known here."""
    fill(journal, 3)
    fakes.dies_at_start[0] = RayActorError()
    made = driver(journal)
    made._replicas[0].plan = replace(PLAN, target=replace(PLAN.target, node=node))
    with pytest.raises(JobError, match=re.escape(said)):
        made.run()


def test_a_draft_that_dies_beside_a_full_shared_memory_is_told_with_that(
    fakes: FakeReplicas, journal: Journal, full: None
) -> None:
    fill(journal, 40)
    fakes.draft_deaths = lifecycle.MOST_DRAFT_DEATHS
    made = driver(journal)
    made.run()
    assert f"replica 0 goes on without a draft, which died 5 times: {FULL}" in made.counters.notes


def test_kills_on_this_machine_say_nothing_of_another(
    fakes: FakeReplicas, journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(journal, 3)
    fakes.dies_at_start[0] = RayActorError()
    monkeypatch.setattr(module, "MemoryKills", lambda: MemoryKills(lambda: len(fakes.starts)))
    made = driver(journal)
    made._replicas[0].plan = replace(PLAN, target=replace(PLAN.target, node="another"))
    with pytest.raises(JobError, match="its process died; if memory was short"):
        made.run()


def test_a_model_that_is_wrong_is_not_tried_again(fakes: FakeReplicas, journal: Journal) -> None:
    fill(journal, 3)
    fakes.dies_at_start[0] = RayTaskError("load", "Traceback", ModelError("tiny lacks 3 of its weights"))
    made = driver(journal)
    with pytest.raises(ModelError, match="tiny lacks 3 of its weights"):
        made.run()
    assert fakes.starts == [0]
    assert made._replicas[0].stopped, "nothing is left running"  # type: ignore[attr-defined]


def test_one_broken_replica_does_not_end_the_job(fakes: FakeReplicas, journal: Journal) -> None:
    fill(journal, 30)
    fakes.dies_at_start[1] = RayActorError()
    driver(journal, replicas=2).run()
    assert journal.counts() == Counts(30, 30, 0)


def test_another_numeric_path_is_refused(fakes: FakeReplicas, journal: Journal) -> None:
    def refuse(path: dict[str, str]) -> None:
        assert path == {"engine": "fake"}
        raise JobChangedError("another path")

    fill(journal, 3)
    with pytest.raises(JobChangedError):
        driver(journal, agree_on_path=refuse).run()
    assert journal.counts().done == 0


def test_a_replica_that_does_not_come_up_in_time_ends_a_job_that_has_no_other(
    fakes: FakeReplicas, journal: Journal
) -> None:
    fill(journal, 3)
    fakes.never_up = {0}
    with pytest.raises(WorkerError, match=r"the target of replica 0 is not up after 0.001 s; it was started with: python3"):
        driver(journal, start_deadline=0.001).run()


def test_a_replica_that_does_not_come_up_in_time_is_no_matter_where_there_are_others(
    fakes: FakeReplicas, journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter(range(100_000))
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: float(next(clock))))
    fill(journal, 60)
    fakes.never_up = {1}
    made = driver(journal, replicas=2, start_deadline=20.0)
    made.run()
    assert journal.counts() == Counts(60, 60, 0)


def test_a_drain_finishes_what_is_under_way(fakes: FakeReplicas, journal: Journal) -> None:
    fill(journal, 100)
    made = driver(journal, batch=3)
    fakes.after_harvest = lambda: made.drain() if made.counters.done >= 10 else None
    made.run()
    assert made.draining
    counts = journal.counts()
    assert 10 <= counts.done < 30
    assert counts.done == len(set(fakes.submitted)), "every row that was sent has ended"
    again = driver(journal)
    fakes.after_harvest = lambda: None
    again.run()
    assert journal.counts() == Counts(100, 100, 0)
    assert len(fakes.submitted) == 100, "nothing was done twice"


def test_replicas_are_stopped_when_the_loop_fails(fakes: FakeReplicas, journal: Journal) -> None:
    fill(journal, 3)

    def interrupted() -> None:
        raise KeyboardInterrupt

    fakes.after_harvest = interrupted
    made = driver(journal)
    with pytest.raises(KeyboardInterrupt):
        made.run()
    assert made._replicas[0].stopped  # type: ignore[attr-defined]


def test_a_dead_draft_is_counted_and_the_job_goes_on(fakes: FakeReplicas, journal: Journal) -> None:
    fill(journal, 20)
    fakes.draft_deaths = 3
    made = driver(journal)
    made.run()
    assert made.counters.draft_deaths == 3
    assert made.counters.target_deaths == 0
    assert journal.counts() == Counts(20, 20, 0)


def test_a_row_that_hangs_is_written_elsewhere_and_counted_once(
    fakes: FakeReplicas, journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter(range(100_000))
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: float(next(clock))))
    fill(journal, 30, samples=2)
    fakes.hangs_on = {(0, 3)}
    made = driver(journal, replicas=2, batch=2)
    made.run()
    assert journal.counts() == Counts(30, 30, 0)
    assert (made.counters.done, made.counters.tokens) == (30, 120)
    assert fakes.submitted.count(3) == 4, "two samples, twice"
    assert {3 * MOST_SAMPLES, 3 * MOST_SAMPLES + 1} <= set(fakes.cancelled)
    assert made.record._partial_results._copied == {}
