"""The journal: the job's SQLite file, the single source of truth about its rows and their states."""

from __future__ import annotations

import json
import os
import re
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np

from outrider.runner.job import damage
from outrider.runner.job import journal_reading as reading
from outrider.workers.errors import JobDamagedError, JobError
from outrider.workers.messages import TokenLogprobs

PENDING, DONE, FAILED = 0, 1, 2
# Types of the ``meta`` entries that more than one module reads ("account": the job's statistics).
META: dict[str, type] = {
    **dict.fromkeys(("identity", "input", "description", "totals", "account", "layouts", "numeric_path"), dict),
    **dict.fromkeys(("pinning", "ray_losses"), list),
    "model_name": str,
}
# What SQLite takes for a database without a file.
IN_MEMORY = ":memory:"
FORMAT = 1
FILLED_AT_ONCE = 1000
LONGEST_LOG = 16 << 20

SCHEMA = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE rows (
    row INTEGER PRIMARY KEY,          -- position in the input, from 0
    custom_id TEXT NOT NULL,
    line INTEGER NOT NULL,
    kind TEXT NOT NULL,               -- completion or chat
    request TEXT NOT NULL,            -- resolved parameters, JSON
    prompt BLOB NOT NULL,             -- token ids, little-endian int32
    state INTEGER NOT NULL DEFAULT 0, -- 0 pending, 1 done, 2 failed
    attempts INTEGER NOT NULL DEFAULT 0
);
CREATE INDEX rows_by_state ON rows (state, row);
CREATE TABLE records (row INTEGER PRIMARY KEY, record TEXT NOT NULL);  -- what stands in results or errors
"""
# Tokens so far of rows in progress. The journal of an older outrider gets this table when the job is resumed.
KEPT_TOKENS = """
CREATE TABLE IF NOT EXISTS kept_tokens (
    row INTEGER NOT NULL,
    sample INTEGER NOT NULL,
    start INTEGER NOT NULL,           -- tokens of the answer before these
    tokens BLOB NOT NULL,             -- token ids, little-endian int32
    logprobs TEXT,                    -- of each token, JSON, where the row asks for them
    PRIMARY KEY (row, sample, start)
) WITHOUT ROWID
"""
# Carried columns, by portions of rows (carried_columns.py), and the error records of failed rows that wait to be run again.
# The journal of an older outrider gets these tables when the job is resumed.
CARRIED = """
CREATE TABLE IF NOT EXISTS carried (
    first INTEGER PRIMARY KEY,        -- row
    count INTEGER NOT NULL,           -- rows
    kind TEXT NOT NULL,               -- json: a list of objects; arrow: a stream with one batch
    data BLOB NOT NULL
)
"""
# SQL: a failed row that goes by its line number, having no id of its own or one that an earlier row has.
NAMELESS = "state = 2 AND custom_id = CAST(line AS TEXT)"
EARLIER_ERRORS = "CREATE TABLE IF NOT EXISTS earlier_errors (row INTEGER PRIMARY KEY, record TEXT NOT NULL)"
LATER_TABLES = (KEPT_TOKENS, CARRIED, EARLIER_ERRORS)
# A file with two of these tables is a journal, of whatever format or damage.
OWN_TABLES = {"meta", "rows", "records"}

# SQLite's write-ahead log needs shared memory between processes, which these file systems lack.
NETWORK_FILE_SYSTEMS = ("nfs", "cifs", "smb", "lustre", "ceph", "gpfs", "beegfs", "glusterfs", "fuse.", "9p", "afs")


@dataclass(frozen=True, slots=True)
class StoredRow:
    row: int
    custom_id: str
    line: int
    kind: str
    request: dict[str, Any]
    prompt: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class FailedRow:
    """A row that failed before the job began, with its record."""

    stored: StoredRow
    record: str


@dataclass(frozen=True, slots=True)
class KeptTokens:
    """Tokens of an unfinished answer, from position ``start`` on."""

    row: int
    sample: int
    start: int
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] | None = None


@dataclass(frozen=True, slots=True)
class CarriedPortion:
    """The carried values of ``count`` rows from ``first`` on."""

    first: int
    count: int
    kind: str
    data: bytes


@dataclass(frozen=True, slots=True)
class RepeatedId:
    """A row whose id an earlier row has; ``record``: its error record if it has failed already."""

    row: int
    custom_id: str
    line: int
    earlier_line: int
    record: str | None


@dataclass(frozen=True, slots=True)
class NamelessRow:
    """A failed row that goes by its line number N, which is the id of another row.

    ``taken``: "line N" is the id of another row as well.
    """

    row: int
    line: int
    taken: bool
    record: str


@dataclass(frozen=True, slots=True)
class Counts:
    rows: int
    done: int
    failed: int

    @property
    def pending(self) -> int:
        return self.rows - self.done - self.failed


@contextmanager
def transaction(db: sqlite3.Connection) -> Iterator[None]:
    """Commit the block's changes together, or none of them if it raises."""
    db.execute("BEGIN IMMEDIATE")
    try:
        yield
        db.execute("COMMIT")
    except BaseException:
        # SQLite may have rolled back already (full disk).
        if db.in_transaction:
            db.execute("ROLLBACK")
        raise


def on_network_file_system(path: Path, mounts: str) -> bool:
    """Whether the path is on a network file system; ``mounts``: the text of /proc/mounts."""
    best, kind = "", ""
    for line in mounts.splitlines():
        fields = line.split()
        if len(fields) > 2:
            # Blanks, tabs, line ends and backslashes are escaped as three octal digits.
            point = re.sub(r"\\([0-7]{3})", lambda escape: chr(int(escape[1], 8)), fields[1])
            inside = str(path) == point or str(path).startswith(point.rstrip("/") + "/")
            if inside and len(point) >= len(best):
                best, kind = point, fields[2]
    return kind.startswith(NETWORK_FILE_SYSTEMS)


class Journal:
    """One connection to a job's journal. Every method that writes is one durable transaction.

    SQLite's errors (a full disk, a file that is not a journal) are raised as ``JobError``.
    """

    def __init__(self, path: Path, read_only: bool = False) -> None:
        self.path = path
        # Of a journal that is written; None: it is only read, or in memory.
        self._file: tuple[int, int] | None = None
        with self._translated():
            if read_only:
                self._db = reading.connect(path)
                self._check_own()
            else:
                if os.path.exists(path) and not path.is_file():  # noqa: PTH110  (Path.exists may raise)
                    raise JobError(f"{path} is no file, and so no job's journal; name another directory")
                for beside in (path.with_name(path.name + end) for end in ("-wal", "-shm")):
                    if os.path.exists(beside) and not beside.is_file():  # noqa: PTH110
                        raise JobError(f"{beside} is no file, and one of that name is to be written: move it away")
                self._db = sqlite3.connect(path, isolation_level=None)
                self._db.execute("PRAGMA busy_timeout = 10000")
                self._check_own()
                remote = on_network_file_system(path.resolve(), Path("/proc/mounts").read_text())
                self._db.execute(f"PRAGMA journal_mode = {'DELETE' if remote else 'WAL'}")
                # In DELETE mode deleting the rollback journal commits a transaction; only EXTRA syncs its directory.
                self._db.execute(f"PRAGMA synchronous = {'EXTRA' if remote else 'FULL'}")
                # A long reader lets the write-ahead log grow; it is truncated to this size after the next checkpoint.
                self._db.execute(f"PRAGMA journal_size_limit = {LONGEST_LOG}")
                if self._has_table("rows"):
                    for table in LATER_TABLES:
                        self._db.execute(table)
                if str(path) != IN_MEMORY:
                    found = path.stat()
                    self._file = (found.st_dev, found.st_ino)
            # A journal that is only read may be of an older outrider, and lack these tables.
            self.carries = self._has_table("carried")
            self._has_earlier_errors = self._has_table("earlier_errors")

    def close(self) -> None:
        self._db.close()

    def _check_own(self) -> None:
        """Refuse another program's database, which would otherwise be written into or removed."""
        tables = {name for (name,) in self._db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        if tables and len(tables & OWN_TABLES) < 2:
            self._db.close()
            raise JobError(f"{self.path} is another program's database, and no job's journal; name another directory")

    def _has_table(self, name: str) -> bool:
        return self._db.execute("SELECT 1 FROM sqlite_master WHERE name = ?", (name,)).fetchone() is not None

    @contextmanager
    def _translated(self) -> Iterator[None]:
        with damage.translated(self.path):
            yield

    def check_in_place(self) -> None:
        """Refuse to go on where the file is no longer at its path: nobody would find there what is done.

        Where another job was begun at the path meanwhile, its files would be written over.
        """
        if self._file is None:
            return
        try:
            found = self.path.stat()
        except (FileNotFoundError, NotADirectoryError):
            raise damage.moved(self.path) from None
        except OSError:  # not known; SQLite says what is wrong
            return
        if (found.st_dev, found.st_ino) != self._file:
            raise damage.moved(self.path)

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        self.check_in_place()
        with self._translated(), transaction(self._db):
            yield self._db

    def _query(self, statement: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        with self._translated():
            return self._db.execute(statement, values).fetchall()

    def fill(
        self,
        rows: Iterable[StoredRow | FailedRow],
        failures: Iterable[tuple[StoredRow, str]],
        meta: dict[str, Any],
        before_commit: Callable[[], dict[str, Any] | None] = lambda: None,
    ) -> None:
        """Write a new job: its rows, the error records of those that failed at admission, and its meta entries.

        One transaction: a job that is interrupted here does not exist. ``before_commit`` may read the rows, fail some or
        raise, and returns further meta entries. Rows are streamed, so memory does not grow with the job.
        """
        stream = chain(rows, (FailedRow(row, record) for row, record in failures))
        with self._transaction() as db:
            for statement in (*SCHEMA.split(";"), *LATER_TABLES):
                db.execute(statement)
            while some := list(islice(stream, FILLED_AT_ONCE)):
                db.executemany("INSERT INTO rows VALUES (?, ?, ?, ?, ?, ?, ?, 0)", map(_columns, some))
                failed = ((row.stored.row, row.record) for row in some if isinstance(row, FailedRow))
                db.executemany("INSERT INTO records VALUES (?, ?)", failed)
            more_meta = before_commit() or {}
            db.executemany(
                "INSERT INTO meta VALUES (?, ?)",
                ((key, json.dumps(value)) for key, value in {**meta, **more_meta, "format": FORMAT}.items()),
            )

        self.carries = self._has_earlier_errors = True
        # The write-ahead log holds all rows now, and would stay that large.
        self._query("PRAGMA wal_checkpoint(TRUNCATE)")

    def repeated_ids(self) -> Iterator[RepeatedId]:
        """Rows with the id of an earlier row; failed rows that go by their line number are left out.

        SQLite sorts on disk if need be, so memory does not grow with the job.
        """
        with self._translated():
            self._db.execute("DROP TABLE IF EXISTS temp.repeats")
            self._db.execute(
                "CREATE TEMP TABLE repeats AS "
                f"WITH named AS (SELECT * FROM rows WHERE NOT ({NAMELESS})), several AS MATERIALIZED "
                "(SELECT custom_id, min(row) AS first FROM named GROUP BY custom_id HAVING count(*) > 1) "
                "SELECT named.row, named.custom_id, named.line, earlier.line AS earlier_line FROM named "
                "CROSS JOIN several ON several.custom_id = named.custom_id "
                "JOIN rows AS earlier ON earlier.row = several.first WHERE named.row <> several.first"
            )
            found = self._db.execute("SELECT repeats.*, record FROM repeats LEFT JOIN records USING (row) ORDER BY row")
            for columns in found:
                yield RepeatedId(*columns)

    def nameless_rows(self) -> Iterator[NamelessRow]:
        with self._translated():
            self._db.execute("DROP TABLE IF EXISTS temp.nameless")
            self._db.execute(
                "CREATE TEMP TABLE nameless AS "
                "WITH several AS MATERIALIZED (SELECT custom_id FROM rows GROUP BY custom_id HAVING count(*) > 1) "
                "SELECT row, line, 'line ' || line IN (SELECT custom_id FROM rows) AS taken FROM rows "
                f"WHERE {NAMELESS} AND custom_id IN several"
            )
            found = self._db.execute("SELECT nameless.*, record FROM nameless JOIN records USING (row) ORDER BY row")
            for columns in found:
                row, line, taken, record = columns
                yield NamelessRow(row, line, bool(taken), record)

    def has_id(self, custom_id: str) -> bool:
        with self._translated():
            return self._db.execute("SELECT 1 FROM rows WHERE custom_id = ?", (custom_id,)).fetchone() is not None

    def fail_at_admission(self, row: int, custom_id: str, record: str) -> None:
        """While the journal is being filled: mark a row as failed, under this id."""
        with self._translated():
            self._db.execute("UPDATE rows SET state = 2, custom_id = ?, request = '{}' WHERE row = ?", (custom_id, row))
            self._db.execute("INSERT OR REPLACE INTO records VALUES (?, ?)", (row, record))

    def add_carried(self, portions: Iterable[CarriedPortion]) -> None:
        """While the journal is being filled: add carried values of its rows."""
        with self._translated():
            self._db.executemany(
                "INSERT INTO carried VALUES (?, ?, ?, ?)",
                ((each.first, each.count, each.kind, each.data) for each in portions),
            )

    def carried(self, row: int) -> CarriedPortion | None:
        """The portion of carried values that holds a row."""
        found = self._query("SELECT * FROM carried WHERE first <= ? ORDER BY first DESC LIMIT 1", (row,))
        portion = CarriedPortion(*found[0]) if found else None
        return portion if portion is not None and row < portion.first + portion.count else None

    def carried_after(self, first: int) -> CarriedPortion | None:
        """The first portion that begins after row ``first``."""
        if not self.carries:
            return None
        found = self._query("SELECT * FROM carried WHERE first > ? ORDER BY first LIMIT 1", (first,))
        return CarriedPortion(*found[0]) if found else None

    @property
    def filled(self) -> bool:
        """Whether the journal has been filled; an error if it has another format."""
        if not self._query("SELECT 1 FROM sqlite_master WHERE name = 'meta'"):
            return False
        if (found := self.meta("format")) != FORMAT:
            raise JobError(f"{self.path} has format {found}, this outrider reads {FORMAT}: use the one that began the job")
        return True

    def meta(self, key: str) -> Any:
        found = self._query("SELECT value FROM meta WHERE key = ?", (key,))
        return damage.parsed(self.path, found[0][0], f'"{key}"', META.get(key, object)) if found else None

    def set_meta(self, key: str, value: Any) -> None:
        with self._transaction() as db:
            db.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (key, json.dumps(value)))

    def forget(self, keys: Iterable[str]) -> None:
        with self._transaction() as db:
            db.executemany("DELETE FROM meta WHERE key = ?", ((key,) for key in keys))

    def check(self) -> list[str]:
        """Before a job is resumed: refuse a damaged file, and mend rows that contradict their records; returns notes."""
        damage.check(self.path, self._query)
        if not all(isinstance(value, int | float) for value in (self.meta("totals") or {}).values()):
            raise damage.damaged(self.path, '"totals" holds what is no number')
        with self._transaction() as db:
            return damage.mend(db)

    def counts(self) -> Counts:
        """The numbers of rows; a row that is marked as ended but has no record counts as pending."""
        found = self._query("SELECT state, count(*), sum(row IN (SELECT row FROM records)) FROM rows GROUP BY state")
        if strange := [state for state, _, _ in found if state not in (PENDING, DONE, FAILED)]:
            raise damage.damaged(self.path, f"a row has the state {strange[0]!r}, which does not exist")
        recorded = {state: count for state, _, count in found}
        return Counts(sum(count for _, count, _ in found), recorded.get(DONE, 0), recorded.get(FAILED, 0))

    def usage(self) -> tuple[int, int]:
        """Prompt tokens and answer tokens of all rows that are done, from their records."""
        prompt, answer = (f"json_extract(record, '$.response.body.usage.{key}_tokens')" for key in ("prompt", "completion"))
        return self._query(
            f"SELECT ifnull(sum({prompt}), 0), ifnull(sum({answer}), 0) FROM rows JOIN records USING (row) "
            "WHERE state = ? AND json_valid(record)",
            (DONE,),
        )[0]

    def longest(self, samples: int) -> list[tuple[int, int, int]]:
        """The longest pending rows, enough of them to have ``samples`` samples together.

        Of each: prompt tokens, ``max_tokens`` of an answer, and number of samples.
        """
        length = "length(prompt) / 4"
        most, of_each = (_number_of_request(key) for key in ("max_tokens", "n"))
        found = self._query(
            f"SELECT {length} AS length, {most} AS most, max(1, {of_each}) FROM rows WHERE state = 0 "
            "ORDER BY length + most DESC LIMIT ?",
            (samples,),
        )
        longest: list[tuple[int, int, int]] = []
        for row in found:
            if samples <= 0:
                break
            if all(isinstance(value, int) for value in row):
                longest.append(row)
                samples -= row[2]
        return longest

    def pending_answers(self) -> tuple[int, int]:
        """The number of samples of all pending rows, and the sum of their ``max_tokens``."""
        samples, most = f"max(1, {_number_of_request('n')})", _number_of_request("max_tokens")
        [(count, tokens)] = self._query(
            f"SELECT ifnull(sum({samples}), 0), ifnull(sum({samples} * {most}), 0) FROM rows WHERE state = 0"
        )
        return int(count), int(tokens)

    def pending(self, after: int, count: int) -> list[tuple[int, int]]:
        """The next pending rows after row ``after``, each with its attempts so far."""
        found = self._query(
            "SELECT row, attempts FROM rows WHERE state = 0 AND row > ? ORDER BY row LIMIT ?", (after, count)
        )
        if strange := [row for row, attempts in found if not isinstance(attempts, int)]:
            raise damage.damaged(self.path, f"row {strange[0]} has a number of attempts that is none")
        return [(row, attempts) for row, attempts in found]

    def load(self, rows: Sequence[int]) -> list[StoredRow]:
        marks = ",".join("?" * len(rows))
        found = self._query(
            f"SELECT row, custom_id, line, kind, request, prompt FROM rows WHERE row IN ({marks}) ORDER BY row", rows
        )
        return [self._stored(*columns) for columns in found]

    def _stored(self, row: int, custom_id: Any, line: Any, kind: Any, request: Any, prompt: Any) -> StoredRow:
        damage.check_columns(self.path, row, custom_id, line, kind)
        asked = damage.parsed(self.path, request, f"the request of row {row}", dict)
        return StoredRow(row, custom_id, line, kind, asked, damage.tokens_of(self.path, row, prompt))

    def keep_tokens(self, written: Sequence[KeptTokens]) -> None:
        """Keep the tokens that rows in progress have gained since the last call."""
        with self._transaction() as db:
            db.executemany("INSERT OR REPLACE INTO kept_tokens VALUES (?, ?, ?, ?, ?)", map(_kept_columns, written))

    def kept_tokens(self, rows: Sequence[int]) -> list[KeptTokens]:
        """The kept tokens of these rows, in order, without entries that cannot be read."""
        marks = ",".join("?" * len(rows))
        found = self._query(f"SELECT * FROM kept_tokens WHERE row IN ({marks}) ORDER BY row, sample, start", rows)
        read = (_kept(*columns) for columns in found)
        return [kept for kept in read if kept is not None]

    def record(
        self,
        done: Sequence[tuple[int, str]],
        failed: Sequence[tuple[int, str]],
        totals: dict[str, float] | None = None,
        statistics: dict[str, Any] | None = None,
    ) -> None:
        """Record rows that have ended, and the job's totals and statistics, in one transaction.

        A row that has ended before keeps its first record.
        """
        with self._transaction() as db:
            for state, records in ((DONE, done), (FAILED, failed)):
                db.executemany("INSERT OR IGNORE INTO records VALUES (?, ?)", records)
                db.executemany(
                    "UPDATE rows SET state = ? WHERE row = ? AND state = 0", ((state, row) for row, _ in records)
                )
                db.executemany("DELETE FROM kept_tokens WHERE row = ?", ((row,) for row, _ in records))
                db.executemany("DELETE FROM earlier_errors WHERE row = ?", ((row,) for row, _ in records))
            for key, value in (("totals", totals), ("account", statistics)):
                if value is not None:
                    db.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (key, json.dumps(value)))

    def put_back_failed(self) -> int:
        """Make failed rows pending again; returns how many. Rows that failed at admission have no request and stay failed.

        Their error records are kept until the rows end again.
        """
        with self._transaction() as db:
            chosen = "SELECT row FROM rows WHERE state = 2 AND request <> '{}'"
            db.execute(f"INSERT OR REPLACE INTO earlier_errors SELECT row, record FROM records WHERE row IN ({chosen})")
            db.execute(f"DELETE FROM records WHERE row IN ({chosen})")
            return db.execute("UPDATE rows SET state = 0, attempts = 0 WHERE state = 2 AND request <> '{}'").rowcount

    def waiting_again(self) -> int:
        """The number of failed rows that were put back and have not ended since."""
        return int(self._query("SELECT count(*) FROM earlier_errors")[0][0]) if self._has_earlier_errors else 0

    def count_attempt(self, rows: Sequence[int]) -> None:
        with self._transaction() as db:
            db.executemany("UPDATE rows SET attempts = attempts + 1 WHERE row = ?", ((row,) for row in rows))

    def whole_records(self, state: int) -> Iterator[tuple[int, str]]:
        """Rows in that state with their records, each checked before it is written to a file.

        Failed rows that wait to be run again count as failed.
        """
        with self._translated():
            found = self._db.execute(self._ended_rows_query("row, custom_id, record", state), (state,))
            for row, custom_id, record, whole in found:
                yield row, self._checked_record(state, row, custom_id, record, whole)

    def _ended_rows_query(self, columns: str, state: int, further: str = "") -> str:
        """SQL for the rows in that state and their records, in input order."""
        found = f"SELECT {columns}, {damage.WHOLE} FROM rows JOIN records USING (row) WHERE state = ?{further}"
        if state == FAILED and self._has_earlier_errors:
            whole = damage.WHOLE.replace("CASE state WHEN 1", "CASE 2 WHEN 1")
            found += (
                f" UNION ALL SELECT {columns}, {whole} FROM rows JOIN earlier_errors USING (row) WHERE state = 0{further}"
            )
        return f"{found} ORDER BY row"

    def records_after(self, state: int, row: int, count: int) -> list[tuple[int, str]]:
        """The next ``count`` rows in that state after row ``row``, with their records."""
        found = self._query(
            self._ended_rows_query("row, custom_id, record", state, f" AND row > {int(row)}") + " LIMIT ?", (state, count)
        )
        return [(row, self._checked_record(state, row, *others)) for row, *others in found]

    def _checked_record(self, state: int, row: int, custom_id: str, record: str, whole: int) -> str:
        if not whole and not damage.is_whole(state, custom_id, record):
            raise JobDamagedError(f"{self.path}: the record of row {row} is damaged; outrider run does that row again")
        return record

    def records(self, state: int) -> Iterator[str]:
        """The records of all rows in that state, in input order."""
        with self._translated():
            found = self._db.execute(
                "SELECT record FROM rows JOIN records USING (row) WHERE state = ? ORDER BY row", (state,)
            )
            for (record,) in found:
                yield record


def _number_of_request(key: str) -> str:
    """SQL for a number of the row's request; 0 if a damaged journal lacks it."""
    return f"ifnull(CASE WHEN json_valid(request) THEN CAST(json_extract(request, '$.{key}') AS INTEGER) END, 0)"


def _columns(given: StoredRow | FailedRow) -> tuple[int, str, int, str, str, bytes, int]:
    row, state = (given.stored, FAILED) if isinstance(given, FailedRow) else (given, PENDING)
    prompt = np.array(row.prompt, dtype="<i4").tobytes()
    return row.row, row.custom_id, row.line, row.kind, json.dumps(row.request), prompt, state


def _kept_columns(kept: KeptTokens) -> tuple[int, int, int, bytes, str | None]:
    logprobs = None if kept.logprobs is None else json.dumps(kept.logprobs)
    return kept.row, kept.sample, kept.start, np.array(kept.tokens, dtype="<i4").tobytes(), logprobs


def _kept(row: int, sample: int, start: int, tokens: bytes, logprobs: str | None) -> KeptTokens | None:
    """None if the entry cannot be read: those tokens are generated again."""
    try:
        read = None
        if logprobs is not None:
            read = tuple(tuple((int(token), float(value)) for token, value in each) for each in json.loads(logprobs))
        return KeptTokens(row, sample, start, tuple(np.frombuffer(tokens, dtype="<i4").tolist()), read)
    except (TypeError, ValueError):
        return None
