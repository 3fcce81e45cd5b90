"""Opens a journal for reading, also in a directory that cannot be written."""

from __future__ import annotations

import shutil
import sqlite3
import tempfile
from pathlib import Path

from outrider.runner.job.lock import is_held
from outrider.workers.errors import JobError

# SQLite's files beside a database, with transactions that are not in it yet (log) or are to be undone (rollback journal).
BESIDE = ("-wal", "-journal")


def connect(path: Path) -> sqlite3.Connection:
    """A read-only connection that sees all committed transactions. May raise SQLite's errors."""
    _check_readable(path)
    try:
        return _tried(path, "mode=ro")
    except sqlite3.OperationalError:
        # With a write-ahead log even readers need to write an -shm file. If that fails while a job runs, give up.
        if is_held(path.parent) is not False:
            raise
    # No process writes: without log and rollback journal the file is complete.
    if not any(_holds_something(path, end) for end in BESIDE):
        return _tried(path, "immutable=1")
    # Else recover it in a copy.
    return _of_a_copy(path)


def _tried(path: Path, how: str) -> sqlite3.Connection:
    connection = sqlite3.connect(f"{path.absolute().as_uri()}?{how}", uri=True, isolation_level=None)
    try:
        connection.execute("PRAGMA busy_timeout = 10000")
        connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
    except sqlite3.Error:
        connection.close()
        raise
    return connection


def _check_readable(path: Path) -> None:
    try:
        with path.open("rb"):
            pass
    except OSError as error:
        raise JobError(f"{path} cannot be read: {error.strerror}") from None


def _holds_something(path: Path, end: str) -> bool:
    """Whether the file beside the journal is a regular one with content."""
    beside = path.with_name(path.name + end)
    return beside.is_file() and beside.stat().st_size > 0


def _of_a_copy(path: Path) -> sqlite3.Connection:
    beside = [path.with_name(path.name + end) for end in BESIDE if _holds_something(path, end)]
    for each in beside:
        _check_readable(each)
    try:
        with tempfile.TemporaryDirectory(prefix="outrider-") as folder:
            copy = Path(folder) / path.name
            for each in (path, *beside):
                shutil.copyfile(each, copy.with_name(each.name))
            connection = sqlite3.connect(copy, isolation_level=None)
            # Merges the log into the copy. The copy is unlinked with its folder, and lives on as long as the connection.
            connection.execute("PRAGMA journal_mode = DELETE").fetchone()
            connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
            return connection
    except OSError as error:
        raise JobError(
            f"{path} has to be copied, since its directory cannot be written, and cannot be: {error.strerror}; "
            "set TMPDIR to a directory with free space"
        ) from None
