"""The command of --on-end: its environment and arguments, and that its failure does not change the job's result."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from test_journal import row

from outrider.runner import run_job as module
from outrider.runner.job.journal import Journal
from outrider.runner.on_end import environment, run_on_end
from outrider.runner.options.job import JobSpec
from outrider.workers.errors import JobError, JobHeldError

BEFORE = {"PATH": "/usr/bin:/bin", "RAY_AUTH_TOKEN": "secret", "OUTRIDER_ANEW": "1"}


def run(command: str, directory: Path, code: int = 0) -> list[str]:
    said: list[str] = []
    run_on_end(command, BEFORE, directory, code, said.append)
    return said


def test_it_is_told_of_the_job_and_nothing_of_its_rows(tmp_path: Path) -> None:
    job = tmp_path / "a job; with $(odd) name"
    job.mkdir()
    journal = Journal(job / "job.db")
    journal.fill([row(number) for number in range(5)], [], {})
    journal.record([(0, "{}")], [(1, "{}")])
    journal.close()
    assert run('env | sort > "$OUTRIDER_JOB/env"; pwd >> "$OUTRIDER_JOB/env"', job, 3) == []
    lines = (job / "env").read_text().splitlines()
    assert [line for line in lines if line.startswith(("OUTRIDER", "RAY"))] == [
        "OUTRIDER_DONE=1",
        "OUTRIDER_EXIT=3",
        "OUTRIDER_FAILED=1",
        f"OUTRIDER_JOB={job}",
        "OUTRIDER_PENDING=3",
        "OUTRIDER_ROWS=5",
    ]


def test_its_own_failure_is_told(tmp_path: Path) -> None:
    assert run("exit 7", tmp_path, 3) == [
        "note: --on-end: the command ended with exit code 7; the job's own exit code is 3"
    ]
    assert run("kill -9 $$", tmp_path) == [
        "note: --on-end: the command was killed by signal 9; the job's own exit code is 0"
    ]


def test_a_directory_without_a_job_is_no_matter(tmp_path: Path) -> None:
    assert run('test -z "$OUTRIDER_ROWS" && test -n "$OUTRIDER_JOB"', tmp_path / "none") == []
    (tmp_path / "job.db").write_bytes(b"no journal, but as long as the head of one" * 10)
    assert run('test -z "$OUTRIDER_ROWS"', tmp_path) == []


def test_the_numbers_of_the_job_whose_end_runs_this_one_are_not_its_own(tmp_path: Path) -> None:
    outer = {f"OUTRIDER_{name}": "1000" for name in ("ROWS", "DONE", "FAILED", "PENDING", "JOB", "EXIT", "CACHE")}
    assert environment(outer, tmp_path / "none", 2) == {
        "OUTRIDER_CACHE": "1000",
        "OUTRIDER_EXIT": "2",
        "OUTRIDER_JOB": str(tmp_path / "none"),
    }


class Quiet:
    def __init__(self) -> None:
        self.said: list[str] = []

    def say(self, text: str) -> None:
        self.said.append(text)


@pytest.mark.parametrize(("error", "code"), [(JobError("no"), 1), (KeyboardInterrupt(), 130), (RuntimeError("a fault"), 1)])
def test_it_runs_whatever_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int) -> None:
    def ends(*_: Any) -> None:
        raise error

    monkeypatch.setattr(module, "_run_job", ends)
    spec = JobSpec(input=tmp_path / "in", out=tmp_path, on_end=f'echo $OUTRIDER_EXIT > "{tmp_path}/code"')
    with pytest.raises(type(error)):
        module.run_job(spec, Quiet())  # type: ignore[arg-type]
    assert (tmp_path / "code").read_text() == f"{code}\n"


def test_a_job_that_goes_on_elsewhere_has_not_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def ends(*_: Any) -> None:
        raise JobHeldError("held")

    monkeypatch.setattr(module, "_run_job", ends)
    with pytest.raises(JobHeldError):
        module.run_job(JobSpec(input=tmp_path / "in", out=tmp_path, on_end=f"touch {tmp_path}/x"), Quiet())  # type: ignore[arg-type]
    assert not (tmp_path / "x").exists()
