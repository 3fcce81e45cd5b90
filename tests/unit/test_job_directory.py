"""A job's directory: its lock, and whether a command asks for the same job that the directory holds."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from rich.console import Console
from small_job import FakeTokenizerProcess, local_host
from sysfs_trees import build
from virtual_ray import VirtualRay, in_place_of_ray

from outrider.runner import drive_job, prepare_job
from outrider.runner import run_job as run_job_module
from outrider.runner.hosts.ray_restart import ANEW
from outrider.runner.job import results
from outrider.runner.job.directory import (
    check_apart,
    check_free,
    default_directory,
    describe,
    job_lock,
    open_job,
    read_description,
)
from outrider.runner.job.identity import check_same, identity
from outrider.runner.job.journal import Journal, StoredRow
from outrider.runner.job.lock import is_held
from outrider.runner.job.tables import write_table
from outrider.runner.options.job import JobSpec
from outrider.runner.planning.replica_memory import PROCESS_BYTES
from outrider.runner.planning.topology import read_topology
from outrider.runner.report.display import Display
from outrider.runner.report.report import report_of
from outrider.runner.run_job import run_job
from outrider.runner.writable import check_new_folder
from outrider.workers.errors import (
    JobChangedError,
    JobDamagedError,
    JobError,
    JobHeldError,
    OutriderError,
    PlacementError,
    UsageError,
)
from outrider.workers.models.digests import KIND
from outrider.workers.models.model_info import ModelInfo
from outrider.workers.models.model_memory import ModelMemory

HOLDER = """
import sys
from pathlib import Path
from outrider.runner.job.directory import job_lock
with job_lock(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def model_info() -> ModelInfo:
    return ModelInfo("m", "/m", "llama", 100, 10, "float32", (0,), 5, "d" * 64)


def test_a_second_process_is_refused_and_told_who_is_first(tmp_path: Path) -> None:
    directory = tmp_path / "job"
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(directory)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdin is not None
    assert process.stdout.readline() == "held\n"
    assert is_held(directory)
    with (
        pytest.raises(JobHeldError, match=rf"job is being run by process {process.pid} on \S+; wait for it or stop it"),
        job_lock(directory),
    ):
        pass
    assert is_held(directory), "asking must not free it"
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    process.stdin.close()
    process.stdout.close()
    assert not is_held(directory), "the kernel frees a killed holder's job"
    with job_lock(directory):
        assert is_held(directory)
    assert not is_held(directory)


def test_the_name_of_an_earlier_longer_holder_is_gone(tmp_path: Path) -> None:
    (tmp_path / "lock").write_text("x" * 150)
    with job_lock(tmp_path):
        assert f"process {os.getpid()} on " in (tmp_path / "lock").read_text()
        assert "xx" not in (tmp_path / "lock").read_text()


def test_a_directory_that_was_made_for_nothing_is_removed(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="refused"), job_lock(tmp_path / "new"):
        raise UsageError("refused")
    assert not (tmp_path / "new").exists()
    (tmp_path / "old").mkdir()
    with job_lock(tmp_path / "old"):
        pass
    with job_lock(tmp_path / "used"):
        (tmp_path / "used" / "input").touch()
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["input", "lock", "lock", "old", "used"]


@pytest.mark.parametrize("name", ["file", "link"])
def test_an_out_that_is_no_directory_is_called_that(name: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    said = rf"^--out: {tmp_path / name} is not a directory, or is a broken link; name another$"
    with pytest.raises(UsageError, match=said), job_lock(tmp_path / name):
        raise AssertionError("it was held")


def test_asking_for_a_lock_that_is_a_pipe_does_not_wait_for_its_writer(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "lock")
    asking = f"from pathlib import Path; from outrider.runner.job.lock import is_held; print(is_held(Path('{tmp_path}')))"
    done = subprocess.run([sys.executable, "-c", asking], capture_output=True, text=True, check=True, timeout=20)
    assert done.stdout == "False\n"


@pytest.mark.parametrize("again", [False, True])
def test_a_directory_that_goes_while_it_is_looked_at_is_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, again: bool
) -> None:
    """Between the attempt to make it and the look at what is there, its maker removes it; ``again``: another is there."""
    directory = tmp_path / "job"
    directory.mkdir()
    looks, is_dir = [], Path.is_dir

    def gone(path: Path) -> bool:
        looks.append(path)
        if len(looks) == 1:
            path.rmdir()
            found = is_dir(path)
            if again:
                path.mkdir()
            return found
        return is_dir(path)

    monkeypatch.setattr(Path, "is_dir", gone)
    with job_lock(directory):
        assert looks
        assert is_held(directory)
    assert directory.exists() == again


@pytest.mark.parametrize("step", ["between directory and lock", "between lock and its being held"])
def test_a_directory_that_goes_while_it_is_waited_for_is_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """Somebody else has made it for an input that is refused."""
    directory = tmp_path / "job"
    other = job_lock(directory)
    other.__enter__()
    left = []

    def leave() -> None:
        if not left:
            left.append(True)
            other.__exit__(None, None, None)

    opened, flock = os.open, fcntl.flock

    def open_(*arguments: Any, **options: Any) -> int:
        if step == "between directory and lock":
            leave()
        return opened(*arguments, **options)

    def flock_(*arguments: Any) -> None:
        leave()
        flock(*arguments)

    monkeypatch.setattr(os, "open", open_)
    monkeypatch.setattr(fcntl, "flock", flock_)
    with job_lock(directory):
        assert left
        monkeypatch.undo()
        assert is_held(directory), "it holds a lock that others see"
        with pytest.raises(JobHeldError), job_lock(directory):
            pass
    assert not directory.exists()


def test_whoever_asks_whether_a_job_is_held_keeps_nobody_from_holding_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asking holds the lock for a moment."""
    refusals = [BlockingIOError()] * 2
    flock = fcntl.flock

    def flock_(handle: int, how: int) -> None:
        if refusals:
            raise refusals.pop()
        flock(handle, how)

    monkeypatch.setattr(fcntl, "flock", flock_)
    with job_lock(tmp_path):
        assert not refusals
        assert is_held(tmp_path)


OURS = "process 5 on host\n"


@pytest.mark.parametrize("name", ["results.jsonl", "errors.jsonl", "report.html", "job.json", "lock", "input"])
@pytest.mark.parametrize("journal", [False, True])
def test_a_new_job_writes_over_no_file_that_is_not_its_own(tmp_path: Path, name: str, journal: bool) -> None:
    (tmp_path / name).write_text("mine")
    (tmp_path / "other.txt").write_text("mine, too")
    said = rf"^--out: .* holds a file {name} that is not this job's and would be written over; name another$"
    if journal and name != "job.json":
        (tmp_path / "job.db").touch()  # of a run that was killed as it began
    with pytest.raises(UsageError, match=said):
        check_free(tmp_path, piped=True)
    assert {path.name for path in tmp_path.iterdir()} - {"job.db"} == {name, "other.txt"}
    if name != "lock":
        (tmp_path / "lock").write_text(OURS)
        if name == "input":
            check_free(tmp_path, piped=True)  # that run has kept its input
        else:
            with pytest.raises(UsageError, match=said):
                check_free(tmp_path, piped=True)
    (tmp_path / "job.db").write_bytes(b"SQLite")
    check_free(tmp_path, piped=True)


def test_a_directory_in_which_nothing_is_lost_is_free(tmp_path: Path) -> None:
    check_free(tmp_path / "new", piped=True)
    check_free(tmp_path, piped=True)
    (tmp_path / "input").write_text("mine")
    (tmp_path / "lock").touch()
    check_free(tmp_path, piped=False)  # a job of a file keeps no input
    (tmp_path / "job.db").touch()
    check_free(tmp_path, piped=False)


def test_a_lock_that_was_half_written_is_the_jobs_own(tmp_path: Path) -> None:
    """Its process was killed, or its disk was full: the same command goes on. It had kept no input by then."""
    for size in range(len(OURS) + 1):
        (tmp_path / "lock").write_text(OURS[:size])
        check_free(tmp_path, piped=True)
    for other in ("processes", "process x", "process 5 off"):
        (tmp_path / "lock").write_text(other)
        with pytest.raises(UsageError, match="holds a file lock that is not this job's"):
            check_free(tmp_path, piped=True)
    (tmp_path / "lock").write_text(OURS[:12])
    (tmp_path / "input").write_text("mine")
    with pytest.raises(UsageError, match="holds a file input that is not this job's"):
        check_free(tmp_path, piped=True)


def test_an_empty_journal_beside_what_a_job_was_is_damaged(tmp_path: Path) -> None:
    for name in ("job.db", "job.json"):
        (tmp_path / name).touch()
    with pytest.raises(JobError, match=r"job\.db is damaged: it is empty, and job\.json belongs to a job; put back a copy"):
        check_free(tmp_path, piped=False)
    with pytest.raises(JobError, match=r"job\.db is damaged: it is empty"):
        open_job(tmp_path)


def test_a_journal_that_is_gone_from_beside_what_a_job_was_is_missed(heard: Heard) -> None:
    run_job(spec_of(ROW), heard)
    Path("job/job.db").unlink()
    said = r"^job/job\.db is missing, and job\.json belongs to a job; put back a copy of it, or begin the job"
    with pytest.raises(JobError, match=said):
        run_job(spec_of(ROW), heard)
    with pytest.raises(JobError, match=said):
        open_job(Path("job"))
    assert not Path("job/job.db").exists()


def test_a_job_without_a_target_has_written_what_it_reads(heard: Heard) -> None:
    """All of its rows were wrong, so no model was loaded, and there is no numeric path."""
    run_job(spec_of(BAD, skip_bad=True), heard)
    described = json.loads(Path("job/job.json").read_text())
    assert described["numeric_path"] == {}
    with closing(open_job(Path("job"))) as journal:
        assert read_description(Path("job"), journal) == (described, None)
        Path("job/job.json").write_text(json.dumps({**described, "numeric_path": None}))
        assert read_description(Path("job"), journal) == (described, None), "as earlier versions wrote it"
    assert report_of(Path("job")) == (Path("job/report.html"), None)


def test_a_place_that_cannot_be_a_job(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"is not a job directory: it has no job.db"):
        open_job(tmp_path)
    assert not is_held(tmp_path)
    (tmp_path / "lock").symlink_to(tmp_path / "none" / "lock")
    for place in (tmp_path, Path("/proc/outrider"), tmp_path / ("a" * 300), tmp_path / ("a" * 300) / "b"):
        with pytest.raises(UsageError, match=r"--out: .* cannot be written: "), job_lock(place):
            pass


def test_a_name_that_is_too_long_is_told(heard: Heard) -> None:
    long = Path("a" * 300)
    with pytest.raises(UsageError, match=r"^--out: a+ cannot be written: File name too long$"):
        run_job(spec_of(BAD, skip_bad=True).model_copy(update={"out": long}), heard)
    run_job(spec_of(BAD, skip_bad=True), heard)
    with pytest.raises(UsageError, match=r"^a+\.csv cannot be written: File name too long$"):
        write_table(Path("job"), long.with_suffix(".csv"), "csv")
    with pytest.raises(UsageError, match=r"^--out: a+ cannot be made in .*: File name too long$"):
        check_new_folder("--out", long)


@pytest.mark.parametrize("name", ["results.jsonl", "errors.jsonl", "report.html"])
def test_a_folder_in_the_place_of_a_file_is_told_before_anything_runs(heard: Heard, name: str) -> None:
    said = rf"^job/{name} is a directory, and a file of that name is to be written: move it away$"
    run_job(spec_of(BAD, skip_bad=True), heard)
    Path("job", name).unlink()
    Path("job", name).mkdir()
    with pytest.raises(UsageError, match=said):
        run_job(spec_of(BAD, skip_bad=True), heard)
    with pytest.raises(OutriderError, match=said):
        report_of(Path("job")) if name == "report.html" else results.write_results(open_job(Path("job")), Path("job"))


def test_a_pipe_in_the_place_of_a_file_stays_and_is_told(heard: Heard) -> None:
    run_job(spec_of(BAD, skip_bad=True), heard)
    Path("job", "results.jsonl").unlink()
    for pipe in (Path("job", "results.jsonl"), Path("pipe.csv")):
        os.mkfifo(pipe)
    said = r"^{} is a pipe, a socket or a device, and a file of that name is to be written: move it away$"
    with pytest.raises(UsageError, match=said.format(r"job/results\.jsonl")):
        run_job(spec_of(BAD, skip_bad=True), heard)
    with pytest.raises(UsageError, match=said.format(r"pipe\.csv")):
        write_table(Path("job"), Path("pipe.csv"), "csv")
    assert Path("pipe.csv").is_fifo()


def test_a_trace_that_cannot_be_written_is_told_before_the_rows_are_read(heard: Heard) -> None:
    Path("file").touch()
    with pytest.raises(UsageError, match=r"^--trace: file/t\.json cannot be written: Not a directory$"):
        run_job(spec_of(ROW).model_copy(update={"trace": Path("file/t.json")}), heard)
    assert not Path("job").exists()


@pytest.mark.parametrize(("kind", "what"), [("folder", "a directory"), ("pipe", "a pipe, a socket or a device")])
def test_a_lock_that_is_no_file_is_told(tmp_path: Path, kind: str, what: str) -> None:
    os.mkfifo(tmp_path / "lock") if kind == "pipe" else (tmp_path / "lock").mkdir()
    said = rf"/lock is {what}, and a file of that name is to be written: move it away$"
    with pytest.raises(UsageError, match=said), job_lock(tmp_path):
        pass


def test_a_job_on_a_disk_that_is_read_only_is_told_without_an_option(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``retry`` has no --out."""
    (tmp_path / "job.db").touch()
    monkeypatch.setattr(os, "open", mock.Mock(side_effect=OSError(errno.EROFS, "Read-only file system")))
    said = rf"^{tmp_path} holds a job and cannot be written: Read-only file system; make it writable, or go on with a copy"
    with pytest.raises(UsageError, match=said), job_lock(tmp_path):
        pass


def test_a_job_whose_input_was_refused_is_no_job_yet(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "job.db")
    with pytest.raises(UsageError, match="holds no job yet"):
        open_job(tmp_path)
    journal.fill([StoredRow(0, "a", 1, "completion", {}, (1,))], [], {})
    assert open_job(tmp_path).counts().rows == 1
    journal.close()


def test_a_job_that_is_being_started_is_said_to_be(tmp_path: Path) -> None:
    """Without its journal, and while that is filled."""
    with job_lock(tmp_path):
        who = rf"process {os.getpid()} on \S+"
        said = rf"^{tmp_path} is being started by {who}: its input has not been accepted yet; wait until it is$"
        with pytest.raises(UsageError, match=said):
            open_job(tmp_path)
        with closing(Journal(tmp_path / "job.db")), pytest.raises(UsageError, match=said):
            open_job(tmp_path)
    with pytest.raises(UsageError, match=r"holds no job yet: its input has not been accepted$"):
        open_job(tmp_path)


def test_what_decides_the_text_is_the_identity_and_the_rest_may_change(model_info: ModelInfo, tmp_path: Path) -> None:
    base = JobSpec(input=tmp_path)
    kept = identity(base, model_info, "digest", "hf", "fp32")
    harmless: tuple[dict[str, Any], ...] = (
        {"batch": 3},
        {"replicas": 2},
        {"draft": "none"},
        {"draft_tokens": 5},
        {"out": tmp_path},
    )
    for change in harmless:
        assert identity(base.model_copy(update=change), model_info, "digest", "hf", "fp32") == kept, change
    changes: tuple[dict[str, Any], ...] = (
        {"seed": 2},
        {"temperature": 1.0},
        {"top_p": 0.5},
        {"top_k": 5},
        {"min_p": 0.1},
        {"max_tokens": 3},
        {"skip_bad": True},
        {"format": "text"},
        {"cache_precision": "int8"},
    )
    for change in changes:
        assert identity(base.model_copy(update=change), model_info, "digest", "hf", "fp32") != kept, change
    with pytest.raises(JobChangedError, match=r"\(cache_precision: auto then, int8 now\)"):
        asked = identity(base.model_copy(update={"cache_precision": "int8"}), model_info, "digest", "hf", "fp32")
        check_same(kept, asked, "a parameter", Path("job"))
    assert identity(base, model_info, "other", "hf", "fp32") != kept
    assert identity(base, model_info, "digest", "native", "fp32") != kept
    assert identity(base, model_info, "digest", "hf", "bf16") != kept


def test_a_difference_is_shown() -> None:
    check_same({"a": 1}, {"a": 1}, "a parameter", Path("job"))
    with pytest.raises(JobChangedError) as caught:
        kept, asked = {"seed": 1, "model": f"{KIND}:{'a' * 64}", "gone": 3}, {"seed": 2, "model": f"{KIND}:{'b' * 64}"}
        check_same(kept, asked, "a parameter", Path("job"))
    assert str(caught.value) == (
        "job holds a job that was begun with a parameter other than now "
        "(gone: 3 then, None now; model: aaaaaaaaaaaa… then, bbbbbbbbbbbb… now; seed: 1 then, 2 now); "
        "run it as it was begun, or give another directory with --out"
    )


def test_a_job_of_an_older_outrider_is_not_gone_on_with() -> None:
    """It knew large weights by samples of them, so that nobody can tell whether they are the same."""
    with pytest.raises(JobChangedError, match=r"begun by an older outrider.*finish it with that version, or give another"):
        check_same({"model": "a" * 64, "seed": 1}, {"model": f"{KIND}:{'a' * 64}", "seed": 1}, "a model", Path("job"))


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    journal = Journal(tmp_path / "job.db")
    journal.fill([StoredRow(0, "a", 1, "completion", {}, (1,))], [], {})
    yield journal
    journal.close()


def test_a_description_keeps_what_it_does_not_replace(tmp_path: Path, journal: Journal) -> None:
    assert read_description(tmp_path, journal) == ({}, None)
    describe(tmp_path, journal, {"a": 1, "b": 2})
    describe(tmp_path, journal, {"b": 3})
    assert read_description(tmp_path, journal) == ({"a": 1, "b": 3}, None)


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff\xfe", b'{"spec": 5}', b"[" * 100_000, None])
def test_a_broken_description_is_made_anew(tmp_path: Path, journal: Journal, content: bytes | None) -> None:
    describe(tmp_path, journal, {"a": 1, "spec": {"batch": 8}})
    file = tmp_path / "job.json"
    if content is None:  # a directory with something in it
        file.unlink()
        (file / "x").mkdir(parents=True)
    else:
        file.write_bytes(content)
    found, note = read_description(tmp_path, journal)
    assert found == {"a": 1, "spec": {"batch": 8}}
    assert note is not None
    assert note.startswith(f"{file} cannot be used (")
    describe(tmp_path, journal, {"b": 2})
    assert json.loads(file.read_text()) == {"a": 1, "spec": {"batch": 8}, "b": 2}
    assert (tmp_path / "job.json.1").is_dir() == (content is None), "nothing of the user's is removed"


@pytest.mark.parametrize("kind", ["pipe", "device", "link to itself"])
def test_a_description_that_is_no_file_is_not_waited_for(tmp_path: Path, journal: Journal, kind: str) -> None:
    describe(tmp_path, journal, {"a": 1})
    file = tmp_path / "job.json"
    file.unlink()
    if kind == "pipe":
        os.mkfifo(file)
    else:
        file.symlink_to("/dev/zero" if kind == "device" else file.name)
    found, note = read_description(tmp_path, journal)
    assert found == {"a": 1}
    said = "Too many levels of symbolic links" if kind == "link to itself" else "it is no file"
    assert note == f"{file} cannot be used ({said}): what it said is taken from job.db"
    describe(tmp_path, journal, {"b": 2})
    assert json.loads(file.read_text()) == {"a": 1, "b": 2}
    assert os.path.lexists(tmp_path / "job.json.1") == (kind != "link to itself"), "it is put aside"


def test_a_pipe_where_a_journal_may_be_gone_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "job.json")
    with pytest.raises(UsageError, match=r"is not a job directory: it has no job\.db$"):
        open_job(tmp_path)


@pytest.mark.parametrize("kind", ["pipe", "folder"])
def test_a_journal_that_is_no_file_is_not_said_to_be_gone(tmp_path: Path, kind: str) -> None:
    os.mkfifo(tmp_path / "job.db") if kind == "pipe" else (tmp_path / "job.db").mkdir()
    with pytest.raises(JobError, match=r"/job\.db is no file, and so no job's journal; name another directory$"):
        open_job(tmp_path)


def test_a_description_that_was_removed_is_made_anew(tmp_path: Path, journal: Journal) -> None:
    describe(tmp_path, journal, {"a": 1})
    (tmp_path / "job.json").unlink()
    describe(tmp_path, journal, {"b": 2})
    assert read_description(tmp_path, journal) == ({"a": 1, "b": 2}, None)


def test_default_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert default_directory(Path("/data/my.prompts.jsonl")) == Path("my.prompts-job")
    assert default_directory(Path("/data/my.prompts.jsonl.gz")) == Path("my.prompts-job")
    assert default_directory(Path("a.zst")) == Path("a-job")
    assert default_directory(Path("/dev/shm/prompts.jsonl")) == Path("prompts-job")
    assert default_directory(Path("data/tables")) == Path("tables-job")
    (tmp_path / "tables" / "train").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "tables" / "train")
    assert default_directory(Path()) == Path("train-job")
    assert default_directory(Path("..")) == Path("tables-job")
    for nameless in ("-", "/dev/stdin", "/dev/fd/63", "/proc/self/fd/0"):
        assert default_directory(Path(nameless)) == Path("stdin-job")


def test_a_full_disk_is_a_sentence_from_the_first_byte_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(handle: int, content: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(JobError, match=r"lock cannot be written: No space left on device"), job_lock(tmp_path / "job"):
        pass


@pytest.mark.parametrize(
    "name", ["job.db", "job.db-wal", "job.json", "lock", "results.jsonl", "errors.jsonl", "report.html"]
)
def test_files_of_the_jobs_own_are_no_input(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match=f"^INPUT: .*{name} is a file of the job's own in .*; copy it"):
        check_apart("INPUT", tmp_path / name, tmp_path)
    (tmp_path / name).touch()
    linked = tmp_path / "other"
    linked.hardlink_to(tmp_path / name)
    with pytest.raises(UsageError, match="is a file of the job's own"):
        check_apart("--trace", linked, tmp_path)
    check_apart("INPUT", tmp_path / "in.jsonl", tmp_path)


def test_the_input_that_a_job_keeps_is_read_again_and_never_written_over(tmp_path: Path) -> None:
    check_apart("INPUT", tmp_path / "input", tmp_path)
    with pytest.raises(UsageError, match=r"^--trace: .*input is a file of the job's own"):
        check_apart("--trace", tmp_path / "input", tmp_path)


class Heard(Display):
    """Keeps what is said."""

    def __init__(self) -> None:
        super().__init__(Console(quiet=True))
        self.said: list[str] = []

    def say(self, text: str) -> None:
        self.said.append(text)


@pytest.fixture
def heard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Heard]:
    """Of jobs in ``tmp_path``, whose models and Ray are none."""
    ray = VirtualRay(1)
    monkeypatch.setattr(prepare_job, "TokenizerProcess", FakeTokenizerProcess)
    monkeypatch.setattr(drive_job, "local_host", local_host(ray))
    monkeypatch.chdir(tmp_path)
    with in_place_of_ray(ray):
        yield Heard()


def spec_of(*lines: str, **options: Any) -> JobSpec:
    Path("in.jsonl").write_text("".join(f"{line}\n" for line in lines))
    return JobSpec(input=Path("in.jsonl"), out=Path("job"), engine="hf", **options)


ROW, BAD = '{"prompt": "x", "max_tokens": 3}', '{"prompt": ""}'


def test_an_input_that_is_refused_leaves_nothing_behind(heard: Heard) -> None:
    with pytest.raises(UsageError, match="nothing was started"):
        run_job(spec_of(ROW, BAD), heard)
    assert not Path("job").exists()
    assert run_job(spec_of(ROW), heard).summary["done"] == 1


def test_an_input_that_is_replaced_while_a_job_runs_does_not_keep_it_from_another_ray(
    heard: Heard, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = spec_of(ROW)
    run_job(spec, heard)
    for other in ("", ROW * 2):
        Path("in.jsonl").write_text(other)
        monkeypatch.delenv(ANEW, raising=False)
        with pytest.raises(OutriderError, match="is empty" if not other else "an input, model or parameter other than now"):
            run_job(spec, heard)
        monkeypatch.setenv(ANEW, "1")
        assert run_job(spec, heard).summary["done"] == 1


def test_a_pipe_that_is_empty_leaves_nothing_behind(heard: Heard) -> None:
    with pytest.raises(UsageError, match=r"^/dev/null is empty; give one prompt a line$"):
        run_job(JobSpec(input=Path("/dev/null"), out=Path("job"), engine="hf"), heard)
    assert not Path("job").exists()


def test_an_input_that_is_refused_takes_no_file_with_it_that_is_not_the_jobs(heard: Heard) -> None:
    Path("job").mkdir()
    own = ("job.db.bak", "job.db-2026", "job.dbx")
    for name in own:
        Path("job", name).write_text("mine")
    with pytest.raises(UsageError, match="nothing was started"):
        run_job(spec_of(ROW, BAD), heard)
    assert sorted(path.name for path in Path("job").iterdir()) == sorted([*own, "lock"])


def test_an_input_that_is_refused_takes_no_database_with_it_that_is_another_programs(heard: Heard) -> None:
    Path("job").mkdir()
    with closing(sqlite3.connect("job/job.db")) as db, db:
        db.execute("CREATE TABLE notes (x)")
    before = Path("job/job.db").read_bytes()
    with pytest.raises(JobError, match=r"^job/job\.db is another program's database"):
        run_job(spec_of(ROW, BAD), heard)
    assert Path("job/job.db").read_bytes() == before


def test_a_job_for_which_this_machine_is_too_small_leaves_nothing_behind(heard: Heard) -> None:
    with pytest.raises(PlacementError):
        run_job(spec_of(ROW, replicas=4096), heard)
    assert not Path("job").exists()


MEGABYTE = 1 << 20


@pytest.fixture
def small_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 1,024 MiB, and a model of which a token of context takes one."""
    machine = read_topology(build(tmp_path / "machine", {0: [(0,), (1,)]}, memory={0: 1 << 30}))
    monkeypatch.setattr(prepare_job, "read_topology", lambda: machine)
    monkeypatch.setattr(prepare_job, "available_bytes", lambda: None)
    memory = ModelMemory(weights=MEGABYTE, token=MEGABYTE, first_tokens=4)
    monkeypatch.setattr(FakeTokenizerProcess, "memory_of", lambda self, model, rows, shortlist: memory, raising=False)


@pytest.mark.usefixtures("small_machine")
def test_rows_that_fit_the_memory_run_without_a_word(heard: Heard) -> None:
    assert run_job(spec_of(ROW, ROW, prefix_tokens=0), heard).summary["done"] == 2
    assert not [said for said in heard.said if "memory" in said]


@pytest.mark.usefixtures("small_machine")
def test_memory_that_other_programs_use_is_told_of(heard: Heard, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row takes four tokens of a mebibyte, beside weights of one and a process of 0.4 GB."""
    monkeypatch.setattr(prepare_job, "available_bytes", lambda: 300_000_000)
    assert run_job(spec_of(ROW, prefix_tokens=0), heard).summary["done"] == 1
    [said] = [said for said in heard.said if "memory" in said]
    assert "memory that 0.30 GB are left, and this job takes at least 0.41 GB" in said


@pytest.mark.usefixtures("small_machine")
def test_rows_that_may_need_more_memory_than_there_is_are_told_of_and_run(
    heard: Heard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 100 rows 64 run at once, each of four tokens; there are 303 MB left beside the processes."""
    monkeypatch.setitem(PROCESS_BYTES, "hf", 470_000_000)
    long = '{"prompt": "x", "max_tokens": 15}'
    assert run_job(spec_of(*[long] * 64, batch=64, prefix_tokens=0), heard).summary["done"] == 64
    [said] = [said for said in heard.said if "memory" in said]
    told = "64 rows at once may have 1,024 tokens, with their answers and 0 kept of earlier prompts; target "
    assert said.startswith(f"note: memory may run short: {told}")
    assert said.endswith("; a smaller --batch, a smaller --max-tokens in a new job or fewer --replicas needs less")


@pytest.mark.usefixtures("small_machine")
def test_all_samples_of_a_row_that_run_at_once_are_counted(heard: Heard, monkeypatch: pytest.MonkeyPatch) -> None:
    """One row of 40 samples with as many answers, of which 32 run at once."""
    monkeypatch.setitem(PROCESS_BYTES, "hf", 470_000_000)
    row = '{"prompt": "x", "max_tokens": 15, "n": 40, "temperature": 1}'
    assert run_job(spec_of(row, batch=32, prefix_tokens=0), heard).summary["done"] == 1
    [said] = [said for said in heard.said if "memory" in said]
    assert said.startswith("note: memory may run short: 32 rows at once may have 512 tokens, with their answers and 0 kept")


def test_replicas_are_told_of_samples_as_their_rows(heard: Heard) -> None:
    """Memory is taken beforehand for as many as will run at once."""
    spec = spec_of('{"prompt": "x", "max_tokens": 3, "n": 5, "temperature": 1}', ROW)
    Path("job").mkdir()
    prepared = prepare_job.prepare(spec, Path("job"), heard, running_tokenizer=FakeTokenizerProcess())  # type: ignore[arg-type]
    prepared.journal.close()
    assert prepared.replica_template.rows == 6


def test_samples_of_a_row_share_its_prompt_where_the_engine_can() -> None:
    lengths = [(1000, 10, 3), (500, 20, 4)]
    assert prepare_job._most_at_once(lengths, 5, shared=False) == (5, 3 * 1010 + 2 * 520)
    assert prepare_job._most_at_once(lengths, 5, shared=True) == (5, 1000 + 30 + 500 + 40)
    assert prepare_job._most_at_once(lengths, 9, shared=True) == (7, 1000 + 30 + 500 + 80)


@pytest.mark.usefixtures("small_machine")
def test_a_prompt_that_fits_no_memory_is_refused_and_leaves_nothing_behind(
    heard: Heard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(PROCESS_BYTES, "hf", 765_000_000)
    long = '{"prompt": "xxxxxxxxxxxxxxxxxx", "max_tokens": 1}'
    with pytest.raises(PlacementError, match=r"the longest prompt has 18 tokens, with 1 row at once: target 1\.05 MB"):
        run_job(spec_of(long, batch=1), heard)
    assert not Path("job").exists()
    assert run_job(spec_of(ROW, batch=1, prefix_tokens=0), heard).summary["done"] == 1


def test_a_users_own_files_are_left_as_they_are(heard: Heard) -> None:
    own = ("results.jsonl", "lock", "job.json")
    Path("job").mkdir()
    for name in own:
        Path("job", name).write_text("mine")
    with pytest.raises(UsageError, match=r"^--out: job holds a file job\.json that is not this job's"):
        run_job(spec_of(ROW), heard)
    assert {path.name: path.read_text() for path in Path("job").iterdir()} == dict.fromkeys(own, "mine")


def test_a_job_that_was_copied_away_from_its_input_says_how_it_goes_on(
    heard: Heard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_job(spec_of(ROW), heard)
    elsewhere = tmp_path / "elsewhere"
    shutil.copytree("job", elsewhere / "job")
    monkeypatch.chdir(elsewhere)
    said = rf"^in\.jsonl is not there, and job was begun with {tmp_path}/in\.jsonl; name the input .* outrider retry$"
    with pytest.raises(UsageError, match=said):
        run_job(JobSpec(input=Path("in.jsonl"), out=Path("job"), engine="hf"), heard)
    assert run_job(JobSpec(input=Path("../in.jsonl"), out=Path("job"), engine="hf"), heard).summary["done"] == 1


def test_columns_that_nothing_reads_are_told(heard: Heard) -> None:
    run_job(spec_of('{"prompt": "x", "max_tokens": 3, "label": 1, "topic": 2}', carry="label"), heard)
    assert "note: columns that go through to the results as they are: label" in heard.said
    assert "note: columns that are neither read nor carried: topic" in heard.said


def test_only_a_job_that_ran_before_is_resumed(heard: Heard, monkeypatch: pytest.MonkeyPatch) -> None:
    record = Journal.record

    def stops(self: Journal, done: Any, failed: Any, *kept: Any) -> None:
        record(self, done, failed, *kept)
        if done:
            raise KeyboardInterrupt

    spec = spec_of(ROW, BAD, *[ROW] * 5, skip_bad=True)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Journal, "record", stops)
        run_job(spec, heard)
    assert not [each for each in heard.said if "resuming" in each], "a row that was wrong in the input has not run"
    run_job(spec, heard)
    [said] = [each for each in heard.said if "resuming" in each]
    assert re.fullmatch(r"resuming job: [2-6] of 7 rows ended", said)


def test_the_models_name_in_results_is_the_one_that_the_job_was_begun_with(heard: Heard) -> None:
    """A model may be named by another path when its job goes on."""
    run_job(spec_of(ROW, ROW, model="m"), heard)
    with closing(sqlite3.connect("job/job.db")) as db, db:
        db.executescript("UPDATE rows SET state = 0 WHERE row = 1; DELETE FROM records WHERE row = 1")
    run_job(spec_of(ROW, ROW, model="elsewhere/m"), heard)
    lines = Path("job/results.jsonl").read_text().splitlines()
    assert [json.loads(line)["response"]["body"]["model"] for line in lines] == ["m", "m"]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("dropped", [True, False])
def test_a_job_whose_answers_would_begin_otherwise_now_is_not_gone_on_with(
    heard: Heard, monkeypatch: pytest.MonkeyPatch, dropped: bool
) -> None:
    """An older outrider began it, and did not say so."""
    asked = mock.Mock(return_value=dropped)
    monkeypatch.setattr(prepare_job, "drops_first_space", asked)
    spec = spec_of(ROW, ROW)

    def older(*statements: str) -> None:
        with closing(sqlite3.connect("job/job.db")) as db, db:
            db.executescript("; ".join(statements))

    run_job(spec, heard)
    older(undone := "UPDATE rows SET state = 0 WHERE row = 1; DELETE FROM records WHERE row = 1")
    run_job(spec, heard)
    asked.assert_not_called()
    older("DELETE FROM meta WHERE key = 'texts'")
    run_job(spec, heard)
    asked.assert_not_called()  # nothing is left to do
    older(undone)
    if dropped:
        with pytest.raises(JobChangedError, match=r"^job holds a job that was begun by .*, whose answers lacked the space"):
            run_job(spec, heard)
        older("UPDATE rows SET state = 0; DELETE FROM records")
    assert run_job(spec, heard).summary["done"] == 2, "none was done, or all begin alike"
    older(undone)
    assert run_job(spec, heard).summary["done"] == 2, "this version has done the first row"


@pytest.fixture
def signals() -> Iterator[None]:
    """Those that end a job, as by default."""
    before = {number: signal.signal(number, signal.SIG_DFL) for number in (signal.SIGHUP, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(
    ("first", "again"),
    [(signal.SIGHUP, signal.SIGHUP), (signal.SIGTERM, signal.SIGHUP), (signal.SIGTERM, signal.SIGTERM)],
)
def test_a_job_that_is_told_twice_to_end_finishes_what_is_under_way(
    heard: Heard, monkeypatch: pytest.MonkeyPatch, signals: None, first: signal.Signals, again: signal.Signals
) -> None:
    """The kernel and the shell both tell that a terminal closes, also a job that was asked to end; `timeout` asks twice."""
    record, raised = Journal.record, list[int]()

    def closes(self: Journal, done: Any, failed: Any, *kept: Any) -> None:
        record(self, done, failed, *kept)
        if done:
            raised.append(first)
            if len(raised) == 1:
                said = len(heard.said)
                signal.raise_signal(first)
                signal.raise_signal(again)
                assert len(heard.said) == said, "printed within a signal's handler, which may interrupt a print"
            signal.raise_signal(signal.SIGHUP)

    monkeypatch.setattr(Journal, "record", closes)
    outcome = run_job(spec_of(*[ROW] * 30, on_end="kill -HUP $PPID; echo $OUTRIDER_EXIT > ended"), heard)
    assert raised and outcome.interrupted and outcome.exit_code == 130
    assert 0 < outcome.summary["done"] < 30
    assert len(Path("job/results.jsonl").read_text().splitlines()) == outcome.summary["done"]
    assert Path("ended").read_text() == "130\n"
    assert len([each for each in heard.said if "finishing the rows under way" in each]) == 1


def test_a_job_that_is_stopped_at_once_says_so_in_its_description(
    heard: Heard, monkeypatch: pytest.MonkeyPatch, signals: None
) -> None:
    """Its summary counts the rows that are done, too, as results.jsonl has them."""
    record = Journal.record

    def stops(self: Journal, done: Any, failed: Any, *kept: Any) -> None:
        record(self, done, failed, *kept)
        if done:
            monkeypatch.setattr(Journal, "record", record)
            monkeypatch.setattr(drive_job, "is_repeated_signal", lambda: False)
            signal.raise_signal(signal.SIGTERM)
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(Journal, "record", stops)
    with pytest.raises(KeyboardInterrupt):
        run_job(spec_of(*[ROW] * 30), heard)
    description = json.loads(Path("job/job.json").read_text())
    done = len(Path("job/results.jsonl").read_text().splitlines())
    assert description["interrupted"] and 0 < done < 30
    assert description["summary"]["done"] == done


def test_the_files_of_a_job_are_written_once(heard: Heard, monkeypatch: pytest.MonkeyPatch) -> None:
    """For a million rows that takes a while; a retry or a run with nothing left writes them as well."""
    written: list[str] = []
    for name in ("write_results", "write_report"):
        write = getattr(drive_job, name)

        def once(*asked: Any, of: str = name, call: Any = write, **options: Any) -> Any:
            written.append(of)
            return call(*asked, **options)

        monkeypatch.setattr(drive_job, name, once)
    run_job(spec_of(*[ROW] * 3), heard)
    assert written == ["write_results", "write_report"]
    assert "summary" in Path("job/report.html").read_text() and json.loads(Path("job/job.json").read_text())["summary"]
    run_job(spec_of(*[ROW] * 3), heard)
    assert written == ["write_results", "write_report"] * 2


@pytest.mark.parametrize("begun_anew", [False, True], ids=["moved", "and begun anew"])
def test_a_job_whose_directory_is_moved_ends_and_writes_into_no_other(
    heard: Heard, monkeypatch: pytest.MonkeyPatch, begun_anew: bool
) -> None:
    """It ran to its end for nobody; its results were written over those of a job that was begun there meanwhile."""
    record, moved = Journal.record, list[int]()

    def moves(self: Journal, done: Any, failed: Any, *kept: Any) -> None:
        record(self, done, failed, *kept)
        if done and not moved:
            moved.append(len(done))
            Path("job").rename("elsewhere")
            if begun_anew:
                Path("job").mkdir()
                Path("job/job.db").write_bytes(b"another job's")
                Path("job/results.jsonl").write_text("another job's\n")

    said = "^job/job.db was moved, removed or replaced while the job ran; put it back and run the job again, or go on in"
    with monkeypatch.context() as patch, pytest.raises(JobDamagedError, match=said):
        patch.setattr(Journal, "record", moves)
        run_job(spec_of(*[ROW] * 30), heard)
    assert not any("was moved" in each for each in heard.said), "once, as the error"
    assert Path("job").exists() == begun_anew
    if begun_anew:
        assert sorted(file.name for file in Path("job").iterdir()) == ["job.db", "results.jsonl"]
        assert Path("job/results.jsonl").read_text() == "another job's\n"
    outcome = run_job(spec_of(*[ROW] * 30).model_copy(update={"out": Path("elsewhere")}), heard)
    assert outcome.exit_code == 0 and outcome.summary["done"] == 30
    assert any(f"{moved[0]} of 30 rows ended" in each for each in heard.said), "what was done is kept"


def test_a_first_interrupt_as_results_are_written_leaves_nothing_unwritten(
    heard: Heard, monkeypatch: pytest.MonkeyPatch, signals: None
) -> None:
    written = drive_job.write_results

    def interrupted(*asked: Any) -> Any:
        assert signal.getsignal(signal.SIGTERM) != signal.SIG_DFL, "the job no longer takes it as a first one"
        signal.raise_signal(signal.SIGTERM)
        return written(*asked)

    with monkeypatch.context() as patch:
        patch.setattr(drive_job, "write_results", interrupted)
        assert run_job(spec_of(ROW), heard).exit_code == 0
    assert len(Path("job/results.jsonl").read_text().splitlines()) == 1


def test_what_is_asked_for_a_job_with_nothing_left_and_not_done_is_told(heard: Heard) -> None:
    spec = spec_of(ROW)
    run_job(spec, heard)
    heard.said.clear()
    run_job(spec.model_copy(update={"trace": Path("t.json"), "metrics_port": 8080}), heard)
    assert heard.said == [
        "note: --trace: nothing was left to do, so there is nothing to trace",
        "note: --metrics-port: nothing was left to do, so no metrics are served",
    ]
    with mock.patch.object(run_job_module, "require_token"):
        run_job(spec.model_copy(update={"address": "127.0.0.1:1"}), heard)
    assert heard.said[-1] == "note: --address: nothing was left to do, so no cluster is joined"
    assert not Path("t.json").exists()


def test_a_disk_that_is_full_is_the_reason_and_all_that_can_be_written_is(
    heard: Heard, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = JobError("job.db is full")

    def record(*_: Any) -> None:
        raise full

    def write(path: Path, lines: Any) -> None:
        raise JobError(f"{path} cannot be written: No space left on device")

    with monkeypatch.context() as patch, pytest.raises(JobError) as told:
        patch.setattr(Journal, "record", record)
        patch.setattr(results, "write_atomically", write)
        run_job(spec_of(ROW), heard)
    assert told.value is full
    assert "note: job/results.jsonl cannot be written: No space left on device" in heard.said
    assert Path("job/report.html").exists()
    assert "pinning" in json.loads(Path("job/job.json").read_text())
    # Without another reason it is the reason.
    with monkeypatch.context() as patch, pytest.raises(JobError, match=r"^job/results.jsonl cannot be written"):
        patch.setattr(results, "write_atomically", write)
        run_job(spec_of(ROW), heard)
    assert run_job(spec_of(ROW), heard).summary["done"] == 1
