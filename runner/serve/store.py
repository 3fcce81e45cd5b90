"""The server's SQLite file: its files and batches, each change one durable transaction."""

from __future__ import annotations

import json
import sqlite3
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.runner.job.damage import is_momentary
from outrider.runner.job.journal import on_network_file_system, transaction
from outrider.runner.serve.names import BATCH, FILE, Folders
from outrider.workers.errors import JobError, NoSpaceError

STORE = "serve.db"
FORMAT = 1
SCHEMA = """
CREATE TABLE files (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    created_at INTEGER NOT NULL,
    bytes INTEGER NOT NULL,
    filename TEXT NOT NULL,
    purpose TEXT NOT NULL,
    batch TEXT                        -- the batch whose output or errors it is, NULL for an uploaded file
);
CREATE TABLE batches (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    model TEXT,                       -- the model's name, NULL if the input names none that is served
    status TEXT NOT NULL,
    ending TEXT,                      -- the status that the batch will have once its files are written
    batch TEXT NOT NULL               -- as the API shows it, JSON
);
CREATE INDEX batches_by_status ON batches (status);
"""
# The final states of a batch.
ENDED = ("completed", "failed", "expired", "cancelled")
OUTPUT, ERRORS = "batch_output", "batch_error"


@dataclass(frozen=True, slots=True)
class File:
    id: str
    created_at: int
    bytes: int
    filename: str
    purpose: str
    # The batch whose output or errors it is.
    batch: str | None = None
    number: int = 0

    def shown(self) -> dict[str, Any]:
        """As the API shows it."""
        return {
            "id": self.id,
            "object": "file",
            "bytes": self.bytes,
            "created_at": self.created_at,
            "expires_at": None,
            "filename": self.filename,
            "purpose": OUTPUT if self.purpose == ERRORS else self.purpose,
            "status": "processed",
            "status_details": None,
        }


@dataclass(slots=True)
class Batch:
    """``shown``: the batch as the API shows it. ``ending``: its final status, set as soon as that is known."""

    id: str
    model: str | None
    status: str
    ending: str | None
    shown: dict[str, Any]
    number: int = 0


class Store:
    """One connection, used by one thread at a time."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / STORE
        self._lock = threading.RLock()
        self._check_not_lost(Folders(folder))
        with self._translated():
            self._db = sqlite3.connect(self.path, isolation_level=None, check_same_thread=False)
            remote = on_network_file_system(self.path.resolve(), Path("/proc/mounts").read_text())
            self._db.execute(f"PRAGMA journal_mode = {'DELETE' if remote else 'WAL'}")
            self._db.execute(f"PRAGMA synchronous = {'EXTRA' if remote else 'FULL'}")
            [found] = self._db.execute("PRAGMA user_version").fetchone()
            if not found:
                with self._transaction() as db:
                    for statement in SCHEMA.split(";"):
                        db.execute(statement)
                    db.execute(f"PRAGMA user_version = {FORMAT}")
            elif found != FORMAT:
                raise JobError(f"{self.path} has format {found}, this outrider reads {FORMAT}: use the one that made it")

    def _check_not_lost(self, folders: Folders) -> None:
        """Refuse a missing or empty store beside files or batches that it must have known."""
        exists = self.path.exists()
        if exists and self.path.stat().st_size:
            return
        for folder, ours in ((folders.files, FILE), (folders.batches, BATCH)):
            if folder.is_dir() and any(ours.fullmatch(each.name) for each in folder.iterdir()):
                raise JobError(
                    f"{self.path} is {'empty' if exists else 'not there'}, and {folder} holds files or batches that "
                    "it listed: "
                    "put back a copy of it, or name another directory with --data"
                )

    def close(self) -> None:
        with self._lock:
            self._db.close()

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            kind = NoSpaceError if is_momentary(error) else JobError
            raise kind(f"{self.path} cannot be used: {error}") from error

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._lock, self._translated(), transaction(self._db):
            yield self._db

    def _query(self, statement: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        with self._lock, self._translated():
            return self._db.execute(statement, values).fetchall()

    # Files

    def add_file(self, file: File) -> None:
        with self._transaction() as db:
            _insert(db, file)

    def file(self, name: str) -> File | None:
        found = self._query(f"SELECT {FILE_COLUMNS} FROM files WHERE id = ?", (name,))
        return File(*found[0]) if found else None

    def files(self, purpose: str | None, after: int | None, limit: int, newest_first: bool) -> list[File]:
        """The next files after number ``after``; None: from the beginning."""
        conditions, values = ["1"], list[Any]()
        if purpose == OUTPUT:
            conditions.append(f"purpose IN ('{OUTPUT}', '{ERRORS}')")
        elif purpose is not None:
            conditions.append("purpose = ?")
            values.append(purpose)
        if after is not None:
            conditions.append(f"number {'<' if newest_first else '>'} ?")
            values.append(after)
        order = "DESC" if newest_first else "ASC"
        where = " AND ".join(conditions)
        found = self._query(
            f"SELECT {FILE_COLUMNS} FROM files WHERE {where} ORDER BY number {order} LIMIT ?", (*values, limit)
        )
        return [File(*each) for each in found]

    def files_of(self, batch: str) -> list[File]:
        return [File(*each) for each in self._query(f"SELECT {FILE_COLUMNS} FROM files WHERE batch = ?", (batch,))]

    def remove_file(self, name: str) -> None:
        with self._transaction() as db:
            db.execute("DELETE FROM files WHERE id = ?", (name,))

    def file_ids(self) -> set[str]:
        """The ids of uploaded files."""
        return {name for (name,) in self._query("SELECT id FROM files WHERE batch IS NULL")}

    # Batches

    def add_batch(self, batch: Batch) -> None:
        with self._transaction() as db:
            db.execute(
                "INSERT INTO batches (id, model, status, ending, batch) VALUES (?, ?, ?, ?, ?)",
                (batch.id, batch.model, batch.status, batch.ending, json.dumps(batch.shown)),
            )

    def batch(self, name: str) -> Batch | None:
        found = self._query(f"SELECT {BATCH_COLUMNS} FROM batches WHERE id = ?", (name,))
        return _batch(*found[0]) if found else None

    def batches(self, after: int | None, limit: int) -> list[Batch]:
        """The next batches, the newest first."""
        where, values = ("number < ?", (after,)) if after is not None else ("1", ())
        found = self._query(
            f"SELECT {BATCH_COLUMNS} FROM batches WHERE {where} ORDER BY number DESC LIMIT ?", (*values, limit)
        )
        return [_batch(*each) for each in found]

    def unended(self) -> list[Batch]:
        """The batches that are not in a final state, the oldest first."""
        marks = ",".join("?" * len(ENDED))
        found = self._query(f"SELECT {BATCH_COLUMNS} FROM batches WHERE status NOT IN ({marks}) ORDER BY number", ENDED)
        return [_batch(*each) for each in found]

    def counts(self) -> dict[str, int]:
        """The number of batches in each status."""
        return dict(self._query("SELECT status, count(*) FROM batches GROUP BY status"))

    def change(self, name: str, how: Callable[[Batch], None], files: Sequence[File] = ()) -> Batch:
        """Change a batch and add its files, in one transaction."""
        with self._transaction() as db:
            [found] = db.execute(f"SELECT {BATCH_COLUMNS} FROM batches WHERE id = ?", (name,)).fetchall()
            batch = _batch(*found)
            how(batch)
            batch.shown["status"] = batch.status
            db.execute(
                "UPDATE batches SET model = ?, status = ?, ending = ?, batch = ? WHERE id = ?",
                (batch.model, batch.status, batch.ending, json.dumps(batch.shown), name),
            )
            for file in files:
                _insert(db, file)
        return batch


FILE_COLUMNS = "id, created_at, bytes, filename, purpose, batch, number"
BATCH_COLUMNS = "id, model, status, ending, batch, number"


def _insert(db: sqlite3.Connection, file: File) -> None:
    db.execute(
        "INSERT INTO files (id, created_at, bytes, filename, purpose, batch) VALUES (?, ?, ?, ?, ?, ?)",
        (file.id, file.created_at, file.bytes, file.filename, file.purpose, file.batch),
    )


def _batch(name: str, model: str | None, status: str, ending: str | None, shown: str, number: int) -> Batch:
    return Batch(name, model, status, ending, json.loads(shown), number)
