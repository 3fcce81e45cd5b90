"""Journals in read-only directories: all committed rows are read, those in the write-ahead log too."""

from __future__ import annotations

import errno
import os
import shutil
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from outrider.runner.job import journal_reading as reading
from outrider.runner.job.directory import job_lock, open_job, output_folder
from outrider.runner.job.journal import Counts, Journal, StoredRow
from outrider.workers.errors import JobError, UsageError


def stored(number: int) -> StoredRow:
    return StoredRow(number, f"id-{number}", number + 1, "completion", {}, (1,))


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """One row of three is done; that stands in the log alone, as a killed run leaves it."""
    made, job = tmp_path / "made", tmp_path / "job"
    made.mkdir()
    journal = Journal(made / "job.db")
    journal.fill(map(stored, range(3)), [], {})
    journal.record([(0, "x")], [])
    shutil.copytree(made, job)
    journal.close()
    (job / "lock").touch()
    return job


@pytest.fixture
def read_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """As SQLite behaves where it can make no files, which root's tests cannot have otherwise."""
    tried = reading._tried

    def refuse(path: Path, how: str) -> sqlite3.Connection:
        if how == "mode=ro":
            raise sqlite3.OperationalError("unable to open database file")
        return tried(path, how)

    monkeypatch.setattr(reading, "_tried", refuse)


def test_the_log_counts_where_nothing_may_be_written(job: Path, read_only: None) -> None:
    assert (job / "job.db-wal").stat().st_size > 0
    before = {entry.name: entry.read_bytes() for entry in job.iterdir()}
    journal = open_job(job)
    assert journal.counts() == Counts(3, 1, 0)
    assert list(journal.records(1)) == ["x"]
    journal.close()
    assert {entry.name: entry.read_bytes() for entry in job.iterdir()} == before


def test_a_file_without_a_log_is_read_as_it_is(job: Path, read_only: None) -> None:
    Journal(job / "job.db").close()
    assert not (job / "job.db-wal").exists()
    journal = open_job(job)
    assert journal.counts() == Counts(3, 1, 0)
    journal.close()


@pytest.mark.parametrize("kind", ["folder", "link to itself", "pipe"])
def test_what_is_called_like_a_log_and_is_none_is_left_aside(job: Path, read_only: None, kind: str) -> None:
    Journal(job / "job.db").close()
    log = job / "job.db-wal"
    if kind == "folder":
        (log / "x").mkdir(parents=True)
    elif kind == "pipe":
        os.mkfifo(log)
    else:
        log.symlink_to(log.name)
    journal = open_job(job)
    assert journal.counts() == Counts(3, 1, 0)
    journal.close()


def test_a_log_that_cannot_be_read_is_named(job: Path, read_only: None, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = Path.open

    def refuse(path: Path, *arguments: Any, **options: Any) -> Any:
        if path.name.endswith("-wal"):
            raise PermissionError(errno.EACCES, "Permission denied")
        return opened(path, *arguments, **options)

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(JobError, match=r"/job\.db-wal cannot be read: Permission denied$"):
        open_job(job)


def test_what_was_rolled_back_is_not_read(tmp_path: Path, read_only: None) -> None:
    """The journal of a file on a network file system holds what stood there before."""
    made, job = tmp_path / "made", tmp_path / "job"
    made.mkdir()
    journal = Journal(made / "job.db")
    journal.fill(map(stored, range(3)), [], {})
    journal.close()
    db = sqlite3.connect(made / "job.db", isolation_level=None)
    db.execute("PRAGMA journal_mode = DELETE")
    db.execute("PRAGMA cache_spill = 1")
    db.execute("PRAGMA cache_size = 1")
    db.execute("BEGIN IMMEDIATE")
    db.executemany("INSERT INTO records VALUES (?, ?)", ((row, "y" * 5000) for row in range(100)))
    db.execute("UPDATE rows SET state = 1")
    shutil.copytree(made, job)  # as a run that was killed there leaves it
    db.execute("ROLLBACK")
    db.close()
    assert (job / "job.db-journal").stat().st_size > 0
    journal = open_job(job)
    assert journal.counts() == Counts(3, 0, 0)
    journal.close()


def test_a_job_that_runs_is_never_read_past_its_log(job: Path, read_only: None) -> None:
    with job_lock(job), pytest.raises(JobError, match="cannot be used: unable to open database file"):
        open_job(job)


OTHER = 65534
LOOK = """
import os, sys
# As this user, who may read this installation.
from outrider.runner.cli import main as cli
from outrider.runner.options import job as options
from outrider.runner.job import directory as job
from outrider.runner.job import lock
from outrider.runner.report import report
from outrider.runner.job import results
from outrider.runner.cli.main import main
os.setgroups([]); os.setgid(65534); os.setuid(65534)
sys.argv = ["outrider", *sys.argv[1:]]
main()
"""


def by_another(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", LOOK, *map(str, arguments)], capture_output=True, text=True, check=False)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.slow
def test_another_user_reads_what_he_may(job: Path) -> None:
    place = Path("/var/tmp") / f"a-job-of-{os.getpid()}"
    shutil.copytree(job, place)
    try:
        place.chmod(0o755)
        for entry in place.iterdir():
            entry.chmod(0o644)
        looked = by_another("status", place)
        assert (looked.returncode, looked.stdout) == (0, f"{place}: 3 rows, 1 done, 0 failed, not running\n"), looked.stderr
        refused = by_another("results", place)
        assert (refused.returncode, refused.stderr) == (
            2,
            f"outrider: {place} cannot be written; name another directory with --out\n",
        )
        (place / "lock").chmod(0o600)
        assert '"running": null' in by_another("status", place, "--json").stdout
        (place / "job.db").chmod(0o600)
        assert by_another("status", place).stderr == f"outrider: {place / 'job.db'} cannot be read: Permission denied\n"
        place.chmod(0o700)
        assert by_another("status", place).stderr == f"outrider: {place} cannot be read: Permission denied\n"
    finally:
        shutil.rmtree(place)


def test_where_things_are_written_instead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert output_folder(tmp_path, None) == tmp_path
    assert output_folder(tmp_path, tmp_path / "a" / "b") == tmp_path / "a" / "b"
    assert (tmp_path / "a" / "b").is_dir()
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=r"^--out: .*file is not a directory; name one, or for a table a file"):
        output_folder(tmp_path, tmp_path / "file", or_table=True)
    with pytest.raises(UsageError, match=r"^--out: .*file is not a directory; name one$"):
        output_folder(tmp_path, tmp_path / "file")
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(UsageError, match="cannot be written; name another directory with --out"):
        output_folder(tmp_path, None)


def test_no_room_for_a_copy_is_a_sentence(job: Path, read_only: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shutil, "copyfile", full)
    with pytest.raises(JobError, match=r"has to be copied, .*No space left on device"):
        open_job(job)
