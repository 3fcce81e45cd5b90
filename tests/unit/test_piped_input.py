"""Inputs that can be read only once: kept whole or not at all, and compared when they come again."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from outrider.runner.job.input import KEY, describe_input, digest_of_resumed_input, open_input
from outrider.runner.job.journal import Journal, StoredRow
from outrider.runner.job.piped_input import KEPT, is_piped, read_piped
from outrider.runner.job.source import Source
from outrider.workers.errors import JobError, UsageError

DATA = b"one\ntwo\n" * 30_000  # more than a pipe holds
DIGEST = hashlib.sha256(DATA).hexdigest()


def quiet(note: str) -> None:
    assert note


def fed(path: Path, data: bytes) -> threading.Thread:
    """Somebody who writes into a named pipe."""

    def write() -> None:
        with path.open("wb", buffering=0) as stream:
            stream.write(data)

    thread = threading.Thread(target=write)
    thread.start()
    return thread


@pytest.fixture
def fifo(tmp_path: Path) -> Path:
    os.mkfifo(tmp_path / "p.jsonl")
    return tmp_path / "p.jsonl"


@pytest.fixture
def job(tmp_path: Path) -> Path:
    (tmp_path / "job").mkdir()
    return tmp_path / "job"


@pytest.fixture
def resumed(job: Path) -> Iterator[Journal]:
    journal = Journal(job / "job.db")
    journal.fill([StoredRow(0, "a", 1, "completion", {}, (1,))], [], {KEY: {"path": "-", "name": "x", "piped": True}})
    yield journal
    journal.close()


def test_what_is_piped(fifo: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (fifo, Path("-"), Path("/dev/stdin"), Path("/dev/fd/7"), Path("/dev/null")):
        assert is_piped(path)
    for path in (tmp_path / "file", tmp_path, tmp_path / "none", Path("/dev/zero")):
        assert not is_piped(path)


def opened(path: Path, job: Path) -> Source:
    source = open_input(path, job, quiet)
    assert isinstance(source, Source)
    return source


def test_a_pipe_is_kept_whole_and_then_is_the_input(fifo: Path, job: Path) -> None:
    (job / f".{KEPT}.1").touch()  # a scrap of a run that was killed
    writer = fed(fifo, DATA)
    source = opened(fifo, job)
    writer.join()
    assert b"".join(line or b"" for line in source.lines()) == DATA
    assert (source.digest, source.name, source.suffix) == (DIGEST, str(fifo), ".jsonl")
    assert [entry.name for entry in job.iterdir()] == [KEPT]
    assert describe_input(fifo, source) == {"path": str(fifo), "name": str(fifo), "piped": True}


def test_a_named_pipe_that_nobody_writes_into_is_waited_for_only_at_first(fifo: Path, job: Path) -> None:
    (job / KEPT).write_bytes(b"kept\n")
    assert list(opened(fifo, job).lines()) == [b"kept\n"]
    assert read_piped(fifo, job, awaited=False, keep=False, say=quiet) is None


def test_a_pipe_that_comes_again_is_compared_and_not_kept(fifo: Path, job: Path, resumed: Journal) -> None:
    writer = fed(fifo, DATA)
    assert digest_of_resumed_input(fifo, job, resumed, quiet) == DIGEST
    writer.join()
    assert not (job / KEPT).exists()
    assert digest_of_resumed_input(fifo, job, resumed, quiet) is None, "nobody wrote, and nothing is needed"


def test_new_bytes_take_the_place_of_those_that_no_job_has_taken(fifo: Path, job: Path) -> None:
    (job / KEPT).write_bytes(b"of a run that was killed\n")
    writer = fed(fifo, DATA)
    assert b"".join(line or b"" for line in opened(fifo, job).lines()) == DATA
    writer.join()


def test_an_empty_pipe_is_refused_where_there_is_nothing_else(fifo: Path, job: Path) -> None:
    writer = fed(fifo, b"")
    with pytest.raises(UsageError, match=r"p.jsonl is empty; give one prompt a line"):
        opened(fifo, job)
    writer.join()
    with pytest.raises(UsageError, match=r"^/dev/null is empty; give one prompt a line"):
        open_input(Path("/dev/null"), job, quiet)
    assert not list(job.iterdir())


def test_a_job_of_a_file_does_not_go_on_with_an_empty_pipe(job: Path, resumed: Journal) -> None:
    resumed.set_meta(KEY, {"path": "/data/in.jsonl", "name": "in.jsonl", "piped": False})
    with pytest.raises(UsageError, match=r"^/dev/null is empty, and .*job was begun with in\.jsonl$"):
        digest_of_resumed_input(Path("/dev/null"), job, resumed, quiet)


def test_a_job_goes_on_without_its_own_file_and_not_without_another(job: Path, resumed: Journal, tmp_path: Path) -> None:
    gone = tmp_path / "gone.jsonl"
    resumed.set_meta(KEY, {"path": str(gone), "name": "gone.jsonl", "piped": False})
    said: list[str] = []
    assert digest_of_resumed_input(gone, job, resumed, said.append) is None
    assert said == [f"note: {gone} is not there any more; the job goes on with the rows that its journal holds"]
    with pytest.raises(UsageError, match=r"other.jsonl is not there, and .* was begun with .*gone.jsonl"):
        digest_of_resumed_input(tmp_path / "other.jsonl", job, resumed, quiet)
    gone.write_bytes(DATA)
    assert digest_of_resumed_input(gone, job, resumed, quiet) == DIGEST


def test_a_device_and_a_full_disk_are_sentences(job: Path, fifo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match=r"^/dev/zero is no file and no pipe; give a file of prompts"):
        open_input(Path("/dev/zero"), job, quiet)
    with pytest.raises(UsageError, match=r"cannot be read: No such device or address|cannot be read: No such file"):
        read_piped(Path("/dev/fd/977"), job, awaited=True, keep=True, say=quiet)

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    writer = fed(fifo, DATA)
    with pytest.raises(JobError, match=r"job/input, for .*p.jsonl, cannot be written: No space left on device"):
        opened(fifo, job)
    writer.join()
    assert not list(job.iterdir()), "all of it or nothing"
