"""The models' processes of the server: turns of several models, deaths, requests meanwhile; and the link to them."""

from __future__ import annotations

import errno
import itertools
import json
import os
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from silent_server import silent_server
from tokenizers import Tokenizer as Fast
from tokenizers import decoders, models
from transformers import PreTrainedTokenizerFast

from outrider.runner.job.damage import damaged, gone
from outrider.runner.job.journal import StoredRow
from outrider.runner.job.results import error_record, result_record
from outrider.runner.options.job import JobSpec
from outrider.runner.options.serve import ServeSpec
from outrider.runner.serve import admissions, host_child, link, model_hosts
from outrider.runner.serve.admission_child import foreign_rows
from outrider.runner.serve.host_child import _Host, _QueuedBatch
from outrider.runner.serve.link import Child, Link
from outrider.runner.serve.model_hosts import MOST_DEATHS, ModelHosts
from outrider.runner.serve.own_files import OwnFiles
from outrider.runner.serve.running import FREED_SECONDS, Admitted, Answer, BatchJob, Broken, Event, Left, Progress, Refused
from outrider.runner.serve.serve import _job_specs, named_models
from outrider.runner.serve.single_rows import SingleRow
from outrider.workers.errors import (
    JobChangedError,
    JobError,
    JobHeldError,
    NoSpaceError,
    OldAnswersError,
    OutriderError,
    UsageError,
)
from outrider.workers.messages import RowResult
from outrider.workers.models import preparation
from outrider.workers.models.tokenizer import Tokenizer
from outrider.workers.target.text_and_stop_strings import TextWriter


class FakeChild:
    """A process of which the test says what it says, and when it has ended: after a kill that takes a moment."""

    made: list[FakeChild]

    def __init__(
        self, module: str, asked: Mapping[str, Any], on_message: Callable[[Any], None], on_end: Callable[[str], None]
    ) -> None:
        self.module, self.asked, self.on_message, self.on_end = module, asked, on_message, on_end
        self.sent: list[Mapping[str, Any]] = []
        self.alive, self.killed = True, False
        FakeChild.made.append(self)

    def send(self, message: Mapping[str, Any]) -> None:
        self.sent.append(message)
        if "close" in message:
            self.end()

    def kill(self) -> None:
        self.killed = True

    def end(self, complaint: str = "its process was killed by signal 9") -> None:
        if self.alive:
            self.alive = False
            self.on_end(complaint)

    def wait(self) -> None:
        if self.killed:
            self.end()
        assert not self.alive


class Hosts:
    def __init__(self, *models: str) -> None:
        FakeChild.made = []
        self.heard: list[Event] = []
        self.said: list[str] = []
        self.changed = False
        specs = {name: JobSpec(input=Path("-"), model=f"/models/{name}") for name in models or ("small", "large")}
        told = (self.heard.append, self.said.append)
        self.hosts = ModelHosts(specs, *told, 100.0, child=FakeChild, changed=lambda: self.changed)  # type: ignore[arg-type]
        # Turns are taken when the test says so.
        self.hosts._closing.set()
        self.hosts._closing = type(self.hosts._closing)()
        self.now = 1000.0

    def look(self, seconds: float = 1.0) -> None:
        self.now += seconds
        self.hosts._change_turns(self.now)

    def child(self) -> FakeChild:
        return FakeChild.made[-1]


@pytest.fixture(autouse=True)
def still(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_hosts.threading.Thread, "start", lambda self: None)


def job(name: str = "batch", model: str = "small") -> BatchJob:
    return BatchJob(name, model, "/v1/completions", Path("/data/batches") / name)


def test_admissions_come_one_after_the_other_in_a_process_that_stays() -> None:
    world = Hosts()
    world.hosts.admit(job("first"))
    world.hosts.admit(job("second"))
    [child] = FakeChild.made
    assert child.module == "admission_child"
    assert [each["model"] for each in child.asked["models"]] == ["/models/small", "/models/large"], "it gets ready for them"
    [asked] = child.sent
    assert (asked["admit"], asked["model"]) == ("first", "small")
    assert asked["options"]["input"] == "/data/batches/first/input.jsonl"
    child.on_message({"note": "reading"})
    child.on_message({"admitted": 5})
    assert world.heard == [Admitted("first", 5)]
    assert world.said == ["first: reading"]
    child.on_message({"refused": [{"code": "x"}]})
    assert world.heard[-1] == Refused("second", [{"code": "x"}])
    world.hosts.admit(job("third", "large"))
    assert FakeChild.made == [child] and child.alive
    assert [each["admit"] for each in child.sent] == ["first", "second", "third"]


def test_it_is_there_before_anybody_asks_and_again_when_it_has_died() -> None:
    world = Hosts()
    world.hosts._admissions.look()
    [child] = FakeChild.made
    child.end()
    assert world.heard == []
    world.hosts._admissions.look()
    assert len(FakeChild.made) == 2


def test_a_small_input_does_not_wait_for_a_large_one(tmp_path: Path) -> None:
    world = Hosts()
    large = BatchJob("large", "small", "/v1/completions", tmp_path)
    with (tmp_path / "input.jsonl").open("wb") as stream:
        stream.truncate(admissions.SMALL_BYTES + 1)
    world.hosts.admit(large)
    world.hosts.admit(job("small"))
    first, second = FakeChild.made
    assert ([each["admit"] for each in first.sent], [each["admit"] for each in second.sent]) == (["large"], ["small"])
    second.on_message({"admitted": 1})
    first.on_message({"admitted": 9})
    assert world.heard == [Admitted("small", 1), Admitted("large", 9)]
    assert (first.killed, second.killed) == (True, False), "memory is not held for large ones that may never come"


def test_a_process_that_is_about_to_end_is_given_no_other(tmp_path: Path) -> None:
    """A client sends its next large batch as soon as it sees the first one run."""
    world = Hosts()
    with (tmp_path / "input.jsonl").open("wb") as stream:
        stream.truncate(admissions.SMALL_BYTES + 1)
    first, second, third = (BatchJob(name, "small", "/v1/completions", tmp_path) for name in ("first", "second", "third"))
    world.hosts.admit(first)
    leaving = world.child()
    leaving.on_message({"admitted": 9})
    assert leaving.killed
    world.hosts.admit(second)
    world.hosts.admit(third)
    world.hosts.stop("third")
    assert [each["admit"] for each in leaving.sent] == ["first"]
    leaving.end()
    assert [each["admit"] for each in world.child().sent] == ["second"]
    assert world.heard == [Admitted("first", 9), Left("third", whole=False)]


def test_the_one_behind_a_batch_that_is_stopped_as_its_check_ends_is_checked() -> None:
    world = Hosts()
    world.hosts.admit(job("first"))
    world.hosts.admit(job("second"))
    leaving = world.child()
    world.hosts.stop("first")
    leaving.on_message({"admitted": 9})
    world.hosts._admissions.look()
    assert [each["admit"] for each in leaving.sent] == ["first"]
    leaving.end()
    assert world.heard == [Admitted("first", 9)]
    assert world.child() is not leaving and [each["admit"] for each in world.child().sent] == ["second"]


def test_a_batch_over_which_its_process_dies_is_checked_again_and_given_up_at_the_third_death(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 0.0
    monkeypatch.setattr(admissions.time, "monotonic", lambda: now)
    world = Hosts()
    world.hosts.admit(job())
    world.hosts.admit(job("second"))
    world.child().end()
    assert world.heard == []
    assert world.said == ["batch: its process was killed by signal 9; its rows are checked again"]
    assert [each["admit"] for each in world.child().sent] == ["second"], "in another process, and it does not wait"
    world.child().on_message({"admitted": 1})
    for deaths in (1, 2):
        now += deaths * admissions.PAUSE_SECONDS - 0.1
        world.hosts._admissions.look()
        assert "batch" not in [each["admit"] for each in world.child().sent], "after a pause"
        now += 0.1
        world.hosts._admissions.look()
        assert world.child().sent[-1]["admit"] == "batch"
        assert world.heard == [Admitted("second", 1)]
        world.child().end()
    [_, broken] = world.heard
    assert broken == Broken("batch", "its rows could not be checked: its process was killed by signal 9")
    now += 1000.0
    world.hosts._admissions.look()
    assert world.child().sent == [], "it is given up"


def test_a_batch_is_not_to_blame_for_files_of_the_program_that_have_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(admissions.time, "monotonic", lambda: now)
    world = Hosts()
    world.changed = True
    world.hosts.admit(job())
    for _ in range(admissions.MOST_DEATHS + 1):
        world.child().end("its process ended with exit code 1 (ImportError: …)")
        now += FREED_SECONDS
        world.hosts._admissions.look()
    world.child().on_message({"broken": "the process that reads models died"})
    assert world.heard == []
    assert world.said[0] == (
        "batch: its process ended with exit code 1 (ImportError: …); outrider's own files have changed since this server "
        "was started: start it again, or this is tried again"
    )
    world.hosts.stop("batch")
    assert world.heard == [Left("batch", whole=False)], "it can be cancelled meanwhile"


def test_the_programs_files_change_by_their_size_or_age(tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "a.py").write_text("a")
    (tmp_path / "package" / "notes").write_text("a")
    (tmp_path / "linked").symlink_to("package")
    files = OwnFiles(tmp_path)
    (tmp_path / "package" / "notes").write_text("other")
    assert not files.changed()
    os.utime(tmp_path / "package" / "a.py", (1, 1))
    assert files.changed() and not OwnFiles(tmp_path).changed()
    (tmp_path / "package" / "a.py").unlink()
    assert OwnFiles(tmp_path).changed() is False and files.changed()


def test_deaths_over_a_batch_that_was_checked_after_all_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(admissions.time, "monotonic", lambda: now)
    world = Hosts()
    for _ in range(3):
        world.hosts.admit(job())
        for _ in range(admissions.MOST_DEATHS - 1):
            world.child().end()
            now += 1000.0
            world.hosts._admissions.look()
        world.child().on_message({"admitted": 1})
    assert world.heard == [Admitted("batch", 1)] * 3


def test_a_batch_that_is_stopped_while_it_is_checked_or_waits_for_that_ends_at_once() -> None:
    world = Hosts()
    world.hosts.admit(job("first"))
    world.hosts.stop("first")
    world.child().end()
    assert [type(each) for each in world.heard] == [Broken], "the service knows what it wanted instead"
    world.hosts.admit(job("second"))
    world.child().end()
    world.hosts.stop("second")
    assert world.heard[1:] == [Left("second", whole=False)]


def test_a_process_that_has_stumbled_admits_no_other() -> None:
    world = Hosts()
    world.hosts.admit(job())
    world.hosts.admit(job("second"))
    first = world.child()
    first.on_message({"broken": "the process that reads models died"})
    assert world.heard == [Broken("batch", "the process that reads models died")]
    assert first.killed and [each["admit"] for each in first.sent] == ["batch"]
    first.end()
    assert world.child() is not first and [each["admit"] for each in world.child().sent] == ["second"]


def test_what_a_full_disk_kept_from_being_checked_is_checked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(admissions.time, "monotonic", lambda: now)
    world = Hosts()
    for name in ("first", "second", "third"):
        world.hosts.admit(job(name))
    child = world.child()
    child.on_message({"later": "the disk is full"})
    child.on_message({"later": "the disk is full"})
    assert world.said == [f"{name}: the disk is full; this is tried again" for name in ("first", "second")]
    child.on_message({"admitted": 1})
    assert world.heard == [Admitted("third", 1)], "it did not wait for those"
    world.hosts.stop("second")
    assert world.heard[-1] == Left("second", whole=False)
    now = FREED_SECONDS
    world.hosts._admissions.look()
    assert [each["admit"] for each in child.sent] == ["first", "second", "third", "first"]


class Journals:
    """What ``_Host`` asks of ``SharedJobs``; ``problem`` is what a journal has to complain about."""

    def __init__(self, problem: OutriderError | None = None) -> None:
        self.problem = problem
        self.jobs: dict[int, Any] = {}
        self.path = {"engine": "fake"}

    def open(self, batch: str, directory: Path, asked: object, dropped: object) -> Any:
        if self.problem is not None:
            raise self.problem
        counters = SimpleNamespace(done=0, failed=0, tokens=0, proposed=0, accepted=0, seconds=0.0)
        record = SimpleNamespace(counters=counters)
        self.jobs[1] = SimpleNamespace(number=1, batch=batch, directory=directory, record=record, whole=False, broken=False)
        return self.jobs[1]

    def leave(self, job: Any) -> None:
        del self.jobs[job.number]
        if self.problem is not None:
            raise self.problem


def host(journals: Journals, wanted: str = "batch") -> tuple[Any, list[dict[str, Any]]]:
    said: list[dict[str, Any]] = []
    made: Any = _Host({"options": {"input": "-"}, "name": "small"}, silent_server(said.append))
    made._jobs, made._driver, made._models = journals, mock.Mock(), mock.Mock()
    made._wanted.append(_QueuedBatch(wanted, Path("/data/batches") / wanted, 0.0))
    return made, said


def test_a_batch_that_a_full_disk_stops_is_taken_up_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_child.time, "monotonic", lambda: 100.0)
    journals = Journals()
    made, said = host(journals)
    made._take_up(made._wanted[0], 0.0)
    [job] = journals.jobs.values()
    journals.problem = NoSpaceError("/data/batches/batch/job.db cannot be used: database or disk is full")
    made._break(job, journals.problem)
    assert made._driver.withdraw.call_args.args == (job,), "its rows are let go"
    [again] = made._wanted
    assert (again.batch, again.again) == ("batch", 100.0 + FREED_SECONDS)
    made._take_up(again, 130.0)
    assert [each.again for each in made._wanted] == [100.0 + FREED_SECONDS], "it is full still"
    assert [next(iter(each)) for each in said] == ["progress", "note", "note"]
    assert said[-1]["note"].endswith("database or disk is full; this is tried again")
    journals.problem = None
    made._take_up(made._wanted[0], 160.0)
    assert list(journals.jobs) == [1] and made._wanted == []
    made._stop("batch")
    assert said[-1] == {"left": "batch", "whole": False}


WAITING = [
    (
        gone(Path("/data/batches/batch/job.db")),
        "/data/batches/batch/job.db is not there, or empty; put back a copy of job.db",
    ),
    (
        damaged(Path("/data/batches/batch/job.db"), "it is no database"),
        "/data/batches/batch/job.db is damaged: it is no database; put back a copy of job.db",
    ),
    (
        JobHeldError("/data/batches/batch is being run by you; wait for it"),
        "/data/batches/batch is being run by you; wait for it; see to that",
    ),
    (
        UsageError("/data/batches/batch cannot be written: Permission denied"),
        "/data/batches/batch cannot be written: Permission denied; see to that",
    ),
]


@pytest.mark.parametrize(("problem", "said"), WAITING, ids=["gone", "damaged", "held", "unwritable"])
def test_a_batch_whose_journal_cannot_be_used_waits_for_the_next_start(problem: OutriderError, said: str) -> None:
    journals = Journals()
    made, told = host(journals)
    made._take_up(made._wanted[0], 0.0)
    [job] = journals.jobs.values()
    journals.problem = problem
    made._break(job, problem)
    sentence = f"batch waits: {said} and start outrider serve again, or cancel the batch"
    assert told[1:] == [{"waits": "batch", "sentence": sentence}] and made._wanted == []


def test_a_batch_that_no_start_of_this_version_can_go_on_with_ends() -> None:
    journals = Journals(OldAnswersError("the batch is old"))
    made, said = host(journals)
    made._take_up(made._wanted[0], 0.0)
    assert said == [{"broken": "batch", "sentence": "the batch is old"}] and made._wanted == []


def test_what_is_wrong_with_a_batch_that_is_stopped_is_told_without_the_servers_paths() -> None:
    journals = Journals()
    made, said = host(journals)
    made._take_up(made._wanted[0], 0.0)
    journals.problem = JobError("/data/batches/batch/job.db is damaged: it is no database")
    made._stop("batch")
    assert said[1:] == [{"broken": "batch", "sentence": "batch/job.db is damaged: it is no database"}]


def test_a_batch_that_was_begun_with_other_options_waits_and_keeps_no_model() -> None:
    made, said = host(Journals(JobChangedError("batch waits: temperature: 0.0 then, 0.5 now")))
    made._take_up(made._wanted[0], 0.0)
    assert made._wanted == [] and list(said[0]) == ["waits", "sentence"]
    world = Hosts()
    world.hosts.run(job("batch"))
    world.look()
    world.child().on_message(said[0])
    assert world.said == ["small: batch waits: temperature: 0.0 then, 0.5 now"] and world.heard == []
    assert not world.hosts._models["small"].wanted
    world.hosts.stop("batch")
    assert world.heard == [Left("batch", whole=False)], "when its window is over, or it is cancelled"
    world.hosts.run(job("other"))
    world.hosts.stop("other")
    world.child().on_message({"waits": "other", "sentence": "other waits"})
    assert world.heard[-1] == Left("other", whole=False), "it was stopped as it was taken up"


def test_a_process_that_cannot_be_started_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that is short of memory for a moment loses neither a batch nor the thread that takes turns."""
    world = Hosts()

    def short(*_: object) -> FakeChild:
        raise JobError("a process of the server's could not be started: Cannot allocate memory")

    monkeypatch.setattr(world.hosts, "_child", short)
    monkeypatch.setattr(world.hosts._admissions, "_child", short)
    world.hosts.admit(job())
    world.hosts.run(job("other"))
    world.look()
    assert (FakeChild.made, world.heard, world.hosts.state()["small"]) == ([], [], "waiting")
    assert all("is tried again" in each for each in world.said)
    monkeypatch.undo()
    monkeypatch.setattr(model_hosts.threading.Thread, "start", lambda self: None)
    world.hosts._admissions.look()
    assert [each["admit"] for each in world.child().sent] == ["batch"]
    world.look(10)
    assert world.child().sent == [{"run": "other", "directory": "/data/batches/other"}]


def test_one_model_is_loaded_before_anybody_asks() -> None:
    world = Hosts("only")
    world.look()
    assert world.child().asked == {"options": {"input": "-", "model": "/models/only"}, "name": "only"}
    assert world.hosts.state() == {"only": "loading"}
    world.child().on_message({"up": 1})
    assert world.hosts.state() == {"only": "loaded"}


def test_a_model_keeps_the_machine_for_its_turn_and_then_gives_it_up(monkeypatch: pytest.MonkeyPatch) -> None:
    world = Hosts()
    monkeypatch.setattr(model_hosts.time, "monotonic", lambda: world.now)
    world.hosts.run(job("first", "small"))
    world.look()
    small = world.child()
    assert small.sent == [{"run": "first", "directory": "/data/batches/first"}]
    small.on_message({"up": 1})
    world.hosts.run(job("second", "large"))
    world.look(50)
    assert {"close": "at once"} not in small.sent
    world.look(60)
    assert small.sent[-1] == {"close": "at once"}
    world.look()
    large = world.child()
    assert large.asked["name"] == "large"
    large.on_message({"up": 1})
    large.on_message({"left": "second", "whole": True})
    world.look()
    assert large.sent[-1] == {"close": "at once"}, "it has nothing to do, and another one has"
    world.look()
    assert world.child().asked["name"] == "small"
    assert world.child().sent == [{"run": "first", "directory": "/data/batches/first"}], "it goes on"
    assert world.heard == [Left("second", whole=True)]


def test_a_process_that_dies_is_started_again_with_what_it_had(monkeypatch: pytest.MonkeyPatch) -> None:
    world = Hosts("only")
    monkeypatch.setattr(model_hosts.time, "monotonic", lambda: world.now)
    answers: list[Answer] = []
    world.hosts.run(job("batch", "only"))
    world.hosts.ask("only", {"url": "/v1/completions"}, False, answers.append)
    begun: list[Answer] = []
    world.look()
    world.hosts.ask("only", {"url": "/v1/completions"}, True, begun.append)
    first = world.child()
    first.on_message({"answer": "request-1", "pieces": [{"index": 0, "text": "a"}]})
    first.end()
    assert begun[-1].error is not None and begun[-1].error[0] == 503, "what was told cannot be told again"
    world.look(0.5)
    assert world.child() is first, "after a pause"
    world.look(5)
    again = world.child()
    assert [set(message) & {"run", "ask"} for message in again.sent] == [{"run"}, {"ask"}]
    again.on_message({"answer": "request-0", "record": {"id": 1}})
    assert answers == [Answer(record={"id": 1})]


def test_while_a_model_that_died_pauses_only_one_that_is_wanted_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model takes minutes to load, the pause two seconds."""
    world = Hosts()
    monkeypatch.setattr(model_hosts.time, "monotonic", lambda: world.now)
    world.hosts.run(job("batch", "small"))
    world.look()
    small = world.child()
    small.end()
    world.look(0.5)
    assert world.child() is small, "nobody wants the large one"
    world.look(5)
    assert world.child().asked["name"] == "small"
    world.child().end()
    world.hosts.run(job("other", "large"))
    world.look(0.5)
    assert world.child().asked["name"] == "large"


def test_a_model_that_nobody_wants_is_not_loaded_to_its_end_while_another_is_wanted() -> None:
    world = Hosts()
    world.look()
    small = world.child()
    assert small.asked["name"] == "small"
    world.hosts.run(job("batch", "large"))
    world.look()
    assert small.sent[-1] == {"close": "at once"}
    world.look()
    large = world.child()
    assert (large.asked["name"], len(FakeChild.made), world.said) == ("large", 2, [])
    world.hosts.run(job("other", "small"))
    world.look(1000)
    assert {"close": "at once"} not in large.sent, "its turn begins when it is there"


def test_one_that_dies_again_and_again_gives_its_batches_up(monkeypatch: pytest.MonkeyPatch) -> None:
    world = Hosts("only")
    monkeypatch.setattr(model_hosts.time, "monotonic", lambda: world.now)
    world.hosts.run(job("batch", "only"))
    for death in range(2 * MOST_DEATHS - 2):
        world.look(100)
        assert world.heard == [] or not any(isinstance(each, Broken) for each in world.heard), f"after {death} deaths"
        if death == MOST_DEATHS - 2:
            # A row has ended in between: it is not hopeless.
            world.child().on_message({"progress": "batch", "figures": [1, 0, 5, 0, 0, 1.0]})
            world.child().on_message({"progress": "batch", "figures": [2, 0, 9, 0, 0, 1.0]})
        world.child().on_message({"error": "no core is free", "hopeless": False})
        world.child().end()
    assert world.heard[:2] == [Progress("batch", 1, 0, 5, 0, 0, 1.0), Progress("batch", 2, 0, 9, 0, 0, 1.0)]
    assert world.heard[2:] == [Broken("batch", "no core is free")]


def test_a_refused_request_does_not_make_a_model_that_dies_a_good_one(monkeypatch: pytest.MonkeyPatch) -> None:
    world = Hosts("only")
    monkeypatch.setattr(model_hosts.time, "monotonic", lambda: world.now)
    world.hosts.run(job("batch", "only"))
    answers: list[Answer] = []
    for death in range(MOST_DEATHS):
        assert world.heard == [], f"after {death} deaths"
        world.look(100)
        world.hosts.ask("only", {}, False, answers.append)
        world.child().on_message({"answer": f"request-{death}", "error": [400, "no such thing", None]})
        world.child().end()
    assert [answer.error and answer.error.status for answer in answers] == [400] * MOST_DEATHS
    assert world.heard == [Broken("batch", "its process was killed by signal 9")]


def test_a_model_that_dies_for_weeks_keeps_its_pauses_and_gives_up_who_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    world = Hosts("only")
    monkeypatch.setattr(model_hosts.time, "monotonic", lambda: world.now)
    for _ in range(2000):
        world.look(model_hosts.LONGEST_PAUSE)
        world.child().end()
    made = len(FakeChild.made)
    world.look(model_hosts.LONGEST_PAUSE - 1)
    assert (made, len(FakeChild.made)) == (2000, 2000), "after a pause"
    answers: list[Answer] = []
    world.hosts.run(job("batch", "only"))
    world.hosts.ask("only", {}, False, answers.append)
    world.look(1)
    world.child().end()
    assert world.heard == [Broken("batch", "its process was killed by signal 9")]
    assert [answer.error is not None and answer.error[0] for answer in answers] == [500]


def test_a_model_that_cannot_be_used_is_not_tried_again_for_the_same_batch() -> None:
    world = Hosts("only")
    world.hosts.run(job("batch", "only"))
    world.look()
    world.child().on_message({"error": "/models/only is gone", "hopeless": True})
    world.child().end()
    assert world.heard == [Broken("batch", "only is gone")]
    assert world.said == ["only: /models/only is gone; it is started again"], "where it lies, no client reads"


def test_a_model_whose_process_dies_of_changed_files_keeps_its_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    world = Hosts("only")
    monkeypatch.setattr(model_hosts.time, "monotonic", lambda: world.now)
    world.changed = True
    world.hosts.run(job("batch", "only"))
    for _ in range(MOST_DEATHS + 1):
        world.look(model_hosts.LONGEST_PAUSE)
        world.child().on_message({"error": "no such file", "hopeless": True})
        world.child().end()
    assert world.heard == [] and "have changed" in world.said[0]
    answers: list[Answer] = []
    world.hosts.ask("only", {}, False, answers.append)
    world.look(model_hosts.LONGEST_PAUSE)
    world.child().end()
    assert [answer.error and answer.error.status for answer in answers] == [503]
    world.changed = False
    world.look(model_hosts.LONGEST_PAUSE)
    assert [each.get("run") for each in world.child().sent] == ["batch"]


def test_a_batch_is_stopped_wherever_it_is() -> None:
    world = Hosts()
    world.hosts.admit(job("first"))
    world.hosts.admit(job("second"))
    world.hosts.stop("second")
    assert world.heard == [Left("second", whole=False)]
    world.hosts.run(job("third", "small"))
    world.hosts.stop("third")
    assert world.heard[-1] == Left("third", whole=False), "no process has it"
    world.hosts.run(job("fourth", "small"))
    world.look()
    world.hosts.stop("fourth")
    assert world.child().sent[-1] == {"stop": "fourth"}
    world.child().end()
    assert world.heard[-1] == Left("fourth", whole=False), "its process died over it"


def test_closing_ends_all_and_answers_who_waits() -> None:
    world = Hosts("only")
    answers: list[Answer] = []
    world.hosts.admit(job("first", "only"))
    world.hosts.run(job("second", "only"))
    world.look()
    world.hosts.ask("only", {}, False, answers.append)
    world.hosts.close(at_once=False)
    assert not any(child.alive for child in FakeChild.made)
    assert {"close": "drain"} in world.child().sent
    assert [answer.error is not None and answer.error[0] for answer in answers] == [503]
    assert world.heard == [], "what is left is for the next start"
    world.hosts.ask("only", {}, False, answers.append)
    assert answers[-1].error is not None


def test_open_requests_are_refused_and_batches_go_on() -> None:
    world = Hosts("only")
    answers: list[Answer] = []
    world.hosts.ask("only", {}, False, answers.append)
    world.hosts.run(job("batch", "only"))
    world.look()
    world.hosts.ask("only", {}, True, answers.append)
    world.hosts.refuse_requests()
    assert answers == [Answer(error=model_hosts.CLOSING)] * 2
    assert world.child().sent[-2:] == [{"take_back": "request-0"}, {"take_back": "request-1"}]
    world.hosts.ask("only", {}, False, answers.append)
    assert answers == [Answer(error=model_hosts.CLOSING)] * 3 and len(world.child().sent) == 5
    world.child().on_message({"left": "batch", "whole": True})
    assert world.heard == [Left("batch", whole=True)]


def test_a_line_ends_with_its_other_end() -> None:
    ours, theirs = socket.socketpair()
    line, other = Link(ours), Link(theirs)
    line.send({"text": "é\n"})
    assert other.receive() == {"text": "é\n"}
    theirs.sendall(b'{"cut": ')
    other.close()
    assert line.receive() is None
    line.send({"nobody": "hears"})


def test_models_are_named_by_hand_or_by_their_paths(tmp_path: Path) -> None:
    assert named_models(["big=/models/x", "pocket", "org/name"]) == {
        "big": "/models/x", "pocket": "pocket", "name": "org/name"}  # fmt: skip
    for given in (["a=x", "a=y"], ["=x"], ["a="], ["a b=x"], ["../a=x"]):
        with pytest.raises(UsageError):
            named_models(given)


def test_what_decides_a_text_reaches_the_jobs() -> None:
    spec = ServeSpec(models={"a": "/models/a"}, seed=7, max_tokens=9, batch=3, port=1)
    made = _job_specs(spec)["a"]
    assert (made.model, made.seed, made.max_tokens, made.batch) == ("/models/a", 7, 9, 3)


def test_rows_of_other_batches_are_told_by_line(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    row = '{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"model": "small"}}'
    lines = [row, "", "[1]", '{"prompt": "simple"}', row.replace("small", "large"), row.replace("/v1/c", "/v1/chat/c"), "{"]
    file.write_text("\n".join(lines))
    found = [(each["line"], each["code"]) for each in foreign_rows(file, "/v1/completions", "small")]
    assert found == [
        (2, "invalid_request"),
        (3, "invalid_json_line"),
        (4, "missing_required_parameter"),
        (5, "mismatched_model"),
        (6, "invalid_url"),
        (7, "invalid_json_line"),
    ]


@pytest.mark.parametrize(("module", "name"), [(link.socket, "socketpair"), (link.tempfile, "TemporaryFile")])
def test_a_process_for_which_there_is_no_file_is_one_that_cannot_be_started(
    monkeypatch: pytest.MonkeyPatch, module: Any, name: str
) -> None:
    def short(*_: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(module, name, short)
    before = sorted(Path("/proc/self/fd").iterdir())
    with pytest.raises(JobError, match="a process of the server's could not be started: Too many open files"):
        Child("host_child", {}, lambda _: None, lambda _: None)
    assert sorted(Path("/proc/self/fd").iterdir()) == before


def test_a_child_that_cannot_begin_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    heard: list[Any] = []
    ended: list[str] = []
    child = Child("no_such_module", {}, heard.append, ended.append)
    child.wait()
    assert heard == []
    assert "exit code 1" in ended[0] and "no_such_module" in ended[0]


def llama_2s(folder: Path) -> SimpleNamespace:
    """A model with a tokenizer as Llama 2 has it, for which a line feed is a byte; "." (an end token) is no special one."""
    pieces = ["<s>", "▁the", "▁cat", ".", *(f"<0x{byte:02X}>" for byte in (10, *"🎉".encode()))]
    fast = Fast(models.BPE({piece: id_ for id_, piece in enumerate(pieces)}, [], byte_fallback=True))
    fast.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    PreTrainedTokenizerFast(tokenizer_object=fast, bos_token="<s>").save_pretrained(folder)
    return SimpleNamespace(path=str(folder), end_tokens=(3,))


LINE, PARTY = 4, (5, 6, 7, 8)


@pytest.mark.parametrize(
    ("answer", "whole"),
    [
        ((1, LINE, *PARTY, 2), " the\n🎉 cat"),
        # Cut off by "max_tokens" within a character, which the decoder takes together with the bytes before it.
        ((1, LINE, *PARTY[:2]), " the" + 3 * "\ufffd"),
        ((1, *PARTY, *PARTY[:1]), " the" + 5 * "\ufffd"),
        ((1, LINE, 0, PARTY[0], 2), " the" + 2 * "\ufffd" + " cat"),
        # Of a row that ignores the model's end tokens.
        ((1, 3, 2, 3), " the cat"),
    ],
)
def test_a_streamed_text_is_that_of_the_answer_where_characters_are_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: tuple[int, ...], whole: str
) -> None:
    made, said = host(Journals())
    monkeypatch.undo()
    made._models = SimpleNamespace(target=llama_2s(tmp_path))
    made._tokenizer_process = SimpleNamespace(decode=preparation.decode)
    request = {"n": 1, "stop": [], "end_tokens": []}
    row = SingleRow("request-1", StoredRow(0, "single", 0, "completion", request, (0, 1)), streamed=True)
    for length in range(1, len(answer) + 1):
        made._tell_text(row, 0, answer[:length])
    tokenizer = Tokenizer(tmp_path)
    writer = TextWriter(tokenizer.decode, (), {0, 3}, prompt=(0, 1))
    assert not any(map(writer.stopped_by, answer)) and writer.text() == whole
    result = RowResult(0, answer, whole, "length", 1, 0, 0, 0.1)
    made._tell_end(row, json.loads(result_record(row.stored, [result], "small")))
    assert [each["error"] for each in said if "error" in each] == []
    assert "".join(piece["text"] for each in said for piece in each["pieces"]) == whole
    assert made._streams == {}


def test_what_was_streamed_is_forgotten_however_the_row_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, said = host(Journals())
    monkeypatch.undo()
    made._models = SimpleNamespace(target=llama_2s(tmp_path))
    made._tokenizer_process = SimpleNamespace(decode=preparation.decode)
    stored = StoredRow(0, "single", 0, "completion", {"n": 2, "stop": [], "end_tokens": []}, (0, 1))
    rows = [SingleRow(f"request-{number}", stored, streamed=True) for number in range(3)]
    for row, sample in itertools.product(rows, (0, 1)):
        made._tell_text(row, sample, (1, 2))
    made._withdraw("request-0")
    made._texts.shutdown(wait=True)
    assert made._driver.withdraw_single.call_args.args == ("request-0",)
    assert {request for request, _ in made._streams} == {"request-1", "request-2"}
    made._tell_end(rows[1], json.loads(error_record(stored, "replica_died", "its replica died")))
    other = [RowResult(sample, (2,), " cat", "stop", 1, 0, 0, 0.1) for sample in (0, 1)]
    made._tell_end(rows[2], json.loads(result_record(stored, other, "small")))
    assert [each["error"].sentence for each in said if "error" in each][:1] == ["its replica died"]
    assert made._streams == {}
