"""``outrider submit``: the command line of a job as it reaches the cluster, the same for the same directory."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import requests
import typer
from ray.dashboard.modules.dashboard_sdk import SubmissionClient

import outrider.runner.hosts.submit as submit_module
from outrider.runner.cli import main as cli
from outrider.runner.cli.arguments import given
from outrider.runner.cli.cluster import _spec
from outrider.runner.hosts.submit import (
    AGENT_SECONDS,
    DIRECTORY,
    NO_AGENT,
    POLL_SECONDS,
    JobServer,
    Submitted,
    absolute,
    absolute_model,
    command_line,
    complaint,
    job_id,
    once_there_is_an_agent,
)
from outrider.runner.options.job import JobSpec, build_spec
from outrider.workers.errors import JobError, JobHeldError, UsageError


@pytest.mark.parametrize(
    "name", ["~nobody-of-this-name/x", "x" * 5000, "a\0b", "hub/name", "pocket", "pocket-draft+lookup"]
)
def test_what_is_no_directory_here_is_left_to_whoever_opens_it(name: str) -> None:
    assert absolute_model(name) == name


def test_a_directory_and_a_link_that_leads_nowhere_are_said_in_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "loop").symlink_to("loop")
    assert absolute_model("model+lookup") == f"{tmp_path}/model+lookup"
    assert absolute_model("model+suffix") == f"{tmp_path}/model+suffix"
    assert absolute_model("loop") == f"{tmp_path}/loop"
    assert absolute_model("model/mtp+suffix") == f"{tmp_path}/model/mtp+suffix", "its layer for multi-token prediction"


@pytest.mark.parametrize("address", ["http://", "x:y", "[::1", "ftp://a", "a" * 300, "a..b"])
def test_an_address_that_is_none_is_told(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(submit_module, "require_token", lambda say: None)
    with pytest.raises(JobError, match=r"no job server of Ray answers at .*: run this on the cluster's head"):
        JobServer(address, print)


@pytest.mark.parametrize("answer", [b"<html>", b"[]", b"{}", b"null", b"5"])
def test_another_program_at_the_address_is_told(answer: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that wants a key, too, so that it passes for a guarded job server until Ray's client asks for its version."""
    response = requests.Response()
    response.status_code, response._content = 401, b""
    monkeypatch.setattr(submit_module, "require_token", lambda say: None)
    monkeypatch.setattr(requests, "get", lambda *_, **__: response)
    version = requests.Response()
    version.status_code, version._content = 200, answer
    monkeypatch.setattr(SubmissionClient, "_do_request", lambda *_, **__: version)
    with pytest.raises(
        JobError, match=r"^what answers at http://h:1 is no job server of Ray; name that one with --address$"
    ):
        JobServer("h:1", print)


class Jobs:
    """What Ray's job server has seen."""

    def __init__(self, *directories: Path) -> None:
        self.jobs = [
            SimpleNamespace(
                metadata={DIRECTORY: str(directory)},
                submission_id=f"{job_id(directory)}-1",
                status="RUNNING",
                start_time=1000,
                message="",
            )
            for directory in directories
        ]

    def list_jobs(self) -> list[Any]:
        return self.jobs


def test_a_job_is_found_however_its_directory_is_spelled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    (tmp_path / "link").symlink_to("b")
    spellings = [tmp_path / "b/job", tmp_path / "a/../b/job", tmp_path / "link/job"]
    assert len({job_id(each) for each in spellings}) == 1
    assert job_id(tmp_path / "a/job") != job_id(tmp_path / "b/job")
    server = object.__new__(JobServer)
    server.address = "http://here"
    server._client = Jobs(spellings[1])
    monkeypatch.chdir(tmp_path / "b")
    for spelling in ("job", "../link/job", *map(str, spellings)):
        assert server.find(spelling).directory == str(spellings[1])
    with pytest.raises(UsageError, match=r"knows no job \.\./a/job"):
        server.find("../a/job")
    for directory in spellings:
        with pytest.raises(JobHeldError, match="is being run as outrider-job-"):
            server.submit(build_spec({"input": "rows.jsonl", "out": directory}))


def test_every_option_has_its_key_and_every_key_its_option() -> None:
    # What has no key of its own is an old spelling of others, or about the command line itself.
    run = typer.main.get_command(cli.app).get_command(None, "run")  # type: ignore[attr-defined]
    options = {each.name for each in run.make_context("run", []).command.params}
    assert options - {"config", "json_", "assisted", "do_sample"} == set(JobSpec.model_fields)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"model": "-m odd; name", "draft": "lookup", "temperature": 0.25, "skip_bad": True, "draft_tokens": 4},
        {"fast_attention": False, "trace": Path("/data/trace.json"), "min_tokens": 2, "ignore_eos": True},
        {"draft_tokens": 0, "seed": 7, "replicas": 3, "devices": "cuda:0,cpu", "address": "auto", "share_cores": True},
    ],
)
def test_a_command_line_says_the_specification_and_nothing_else(options: dict[str, Any]) -> None:
    spec = build_spec({"input": "/data/rows.jsonl", "out": "/data/job", **options})
    words = command_line(spec)
    assert words[:2] == ["outrider", "run"]
    run = typer.main.get_command(cli.app).get_command(None, "run")  # type: ignore[attr-defined]
    assert build_spec(given(run.make_context("run", words[2:]), JobSpec)) == spec
    assert len(words) == 4 + len(options)


def test_paths_are_made_to_hold_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "weights").mkdir()
    spec = absolute(build_spec({"input": "rows.txt", "model": "weights", "draft": "some/hub-id"}))
    assert (spec.input, spec.out) == (tmp_path / "rows.txt", tmp_path / "rows-job")
    assert (spec.model, spec.draft) == (str(tmp_path / "weights"), "some/hub-id")
    assert absolute(build_spec({"input": "a", "draft": "weights+lookup"})).draft == f"{tmp_path}/weights+lookup"


def submitted(*words: object) -> JobSpec:
    program = typer.main.get_command(cli.app)
    context = program.make_context("outrider", ["submit"])
    submit = program.get_command(context, "submit")  # type: ignore[attr-defined]
    spec: JobSpec = _spec(submit.make_context("submit", list(map(str, words)), parent=context))
    return spec


def test_a_job_file_is_told_by_its_name(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text("input: rows.jsonl\nmax-tokens: 7\n")
    spec = submitted(file, "--seed", "3")
    assert (spec.input, spec.max_tokens, spec.seed) == (Path("rows.jsonl"), 7, 3)
    with pytest.raises(UsageError, match="--max-tokens"):
        submitted(file, "--max-tokens", "0")


def test_one_file_holds_the_options(tmp_path: Path) -> None:
    for name in ("job.yaml", "job.YML", "more.yaml"):
        (tmp_path / name).write_text("input: rows.jsonl\n")
    for name in ("job.yaml", "job.YML"):
        said = f"{tmp_path / name} is a file of options, and so is --config {tmp_path}/more.yaml: leave out one"
        with pytest.raises(UsageError, match=f"^{said}$"):
            submitted(tmp_path / name, "--config", tmp_path / "more.yaml")
    assert submitted(tmp_path / "job.YML").input == Path("rows.jsonl")


class Server:
    """A job server of which a job ends in a given way: while it is waited for, or while it is followed."""

    def __init__(self, state: str, message: str, accepted: bool = True) -> None:
        self._before = Submitted("outrider-x-1", "/data/job", 1, "RUNNING", "", 1.0)
        self._after = dataclasses.replace(self._before, state=state, message=message)
        self._accepted = accepted

    def __call__(self, *_: object) -> Server:
        return self

    def submit(self, spec: JobSpec) -> Submitted:
        return self._before

    def wait_until_accepted(self, job: Submitted) -> Submitted:
        return self._before if self._accepted else self._after

    def follow(self, job: Submitted) -> Iterator[str]:
        yield "4 rows accepted; results will be in /jobs/here\n"
        yield "outrider: as it ended\n"

    def find(self, job: str) -> Submitted:
        return self._after

    def logs(self, job: Submitted) -> str:
        return ""


def typed(monkeypatch: pytest.MonkeyPatch, server: Server, *words: str) -> int | str | None:
    """The exit code of a command."""
    monkeypatch.setattr(submit_module, "JobServer", server)
    monkeypatch.setattr("sys.argv", ["outrider", *words])
    with pytest.raises(SystemExit) as ended:
        cli._run()
    return ended.value.code


FAILED = "Job entrypoint command failed with exit code"


@pytest.mark.parametrize(
    ("state", "message", "code", "said"),
    [
        ("SUCCEEDED", "", 0, ""),
        ("STOPPED", "", 130, ""),
        ("FAILED", f"{FAILED} 3, last available logs: exit code 5", 3, ""),
        ("FAILED", f"{FAILED} -9, last available logs: rows", 1, "its process was ended by signal 9"),
        ("FAILED", "Traceback:\nnobody answers", 1, "nobody answers"),
    ],
)
@pytest.mark.parametrize("words", [("submit", "rows.jsonl", "--follow"), ("logs", "-f", "outrider-x-1")])
def test_whoever_follows_a_job_ends_as_it_did(
    words: tuple[str, ...],
    state: str,
    message: str,
    code: int,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert typed(monkeypatch, Server(state, message), *words) == code
    shown = capsys.readouterr()
    assert "outrider: as it ended" in shown.out
    assert shown.err.endswith(f"outrider-x-1 has failed on the driver's host: {said}\n") == bool(said), shown.err


def test_whoever_has_read_enough_is_told_nothing_of_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.runner.cli.cluster.is_taken", lambda: False)
    assert typed(monkeypatch, Server("FAILED", f"{FAILED} 1"), "logs", "-f", "outrider-x-1") == 0


def test_a_job_that_is_stopped_while_it_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert typed(monkeypatch, Server("STOPPED", "", accepted=False), "submit", "rows.jsonl") == 130
    assert "outrider-x-1 was stopped while it was waited for; submit it again to go on" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["submit", "retry", "run"])
def test_a_usage_is_that_of_the_command(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert typed(monkeypatch, Server("", ""), command, "rows.jsonl", "--colour") == 2
    assert f"outrider {command} [OPTIONS]" in capsys.readouterr().err


def test_ids_belong_to_directories() -> None:
    first = job_id(Path("/data/a job!"))
    assert first == job_id(Path("/data/a job!"))
    assert first.startswith("outrider-a-job-")
    assert first != job_id(Path("/other/a job!"))


def test_what_a_driver_complained_of() -> None:
    assert complaint("x\noutrider: rows.jsonl is empty\n\n") == "rows.jsonl is empty"
    assert complaint("sh: outrider: not found\n") == "sh: outrider: not found"
    assert complaint("") == "nothing was said"


def test_a_head_that_is_not_all_up_is_waited_for() -> None:
    answers, waited = [RuntimeError(f"status code 500: {NO_AGENT} to submit job"), None], []

    def send() -> None:
        if (answer := answers.pop(0)) is not None:
            raise answer

    once_there_is_an_agent(send, waited.append)
    assert (answers, waited) == ([], [POLL_SECONDS])


@pytest.mark.parametrize(("message", "most_waits"), [(NO_AGENT, AGENT_SECONDS / POLL_SECONDS), ("no such job", 0)])
def test_what_does_not_pass_is_said(message: str, most_waits: float) -> None:
    waited: list[float] = []

    def send() -> None:
        raise RuntimeError(message)

    with pytest.raises(RuntimeError, match=message):
        once_there_is_an_agent(send, waited.append)
    assert len(waited) == most_waits


@pytest.mark.parametrize("piped", ["-", "/dev/stdin", "/dev/fd/63"])
def test_what_comes_through_a_pipe_here_cannot_be_sent(piped: str) -> None:
    with pytest.raises(UsageError, match="cannot be sent, since the driver's host reads the input itself"):
        absolute(build_spec({"input": piped}))
