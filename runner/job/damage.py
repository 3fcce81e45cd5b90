"""Journals that were damaged or edited by hand: refused in a sentence, or mended where no row is lost by that."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from outrider.runner.job.record_line import INVALID, error_line
from outrider.workers.errors import JobDamagedError, JobError, NoSpaceError, OutriderError

# Larger files get no quick_check of all pages, which takes seconds per gigabyte; rows and records are still checked.
MOST_BYTES_CHECKED = 1 << 30
DONE = 1
# SQLite's primary result code: the low byte of an extended one.
PRIMARY = 0xFF
# A full disk, or too many open files: another try may succeed.
MOMENTARY = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN)
WHAT_TO_DO = "put back a copy of it, or begin the job anew in another directory with --out"
WHERE_TO_GO_ON = "put it back and run the job again, or go on in its new place with --out"
# SQL: whether a record fits its row: JSON on one line, of the row's id, with an answer (done) or an error (failed).
WHOLE = """
    CASE WHEN typeof(record) = 'text' AND json_valid(record) THEN
        instr(record, char(10)) = 0 AND json_extract(record, '$.custom_id') IS rows.custom_id AND
        CASE state WHEN 1 THEN json_type(record, '$.response') = 'object'
        ELSE json_type(record, '$.error.message') = 'text' AND json_type(record, '$.error.code') = 'text' END
    ELSE 0 END
"""


@contextmanager
def translated(path: Path) -> Iterator[None]:
    """Turn SQLite's errors into a ``JobError``."""
    try:
        yield
    except sqlite3.DatabaseError as error:
        kind = NoSpaceError if is_momentary(error) else JobDamagedError if _is_damage(error) else JobError
        raise kind(f"{path} cannot be used: {error}{_what_to_do(error)}") from error
    except sqlite3.Error as error:
        raise JobError(f"{path} cannot be used: {error}") from error


def is_momentary(error: sqlite3.Error) -> bool:
    return _code(error) in MOMENTARY


def _code(error: sqlite3.Error) -> int:
    # Errors of the sqlite3 module itself have no code.
    code: int = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_OK)
    return code & PRIMARY


def _what_to_do(error: sqlite3.DatabaseError) -> str:
    code = _code(error)
    if code == sqlite3.SQLITE_FULL:
        return "; free some space, then the job can go on"
    if code == sqlite3.SQLITE_CANTOPEN:
        return "; see that its folder can be written and has room for another file (df -i)"
    if code == sqlite3.SQLITE_IOERR:
        return "; see that its disk works and has space, then the job can go on"
    return f"; {WHAT_TO_DO}" if _is_damage(error) else ""


def _is_damage(error: sqlite3.DatabaseError) -> bool:
    """Whether the file's content is damaged, as opposed to a disk error or missing permission."""
    return not isinstance(error, sqlite3.OperationalError | sqlite3.IntegrityError)


def without_advice(error: OutriderError) -> str:
    """The error without our advice, for callers that give their own (the batch server)."""
    return str(error).removesuffix(f"; {WHAT_TO_DO}").removesuffix(f"; {WHERE_TO_GO_ON}")


def damaged(path: Path, what: str) -> JobDamagedError:
    return JobDamagedError(f"{path} is damaged: {what}; {WHAT_TO_DO}")


def gone(path: Path) -> JobDamagedError:
    return JobDamagedError(f"{path} is not there, or empty; {WHAT_TO_DO}")


def moved(path: Path) -> JobDamagedError:
    return JobDamagedError(f"{path} was moved, removed or replaced while the job ran; {WHERE_TO_GO_ON}")


def parsed(path: Path, text: Any, what: str, kind: type | tuple[type, ...] = object) -> Any:
    """Parse JSON from the journal; an error if it is not of the expected type."""
    try:
        value = json.loads(text)
    except (ValueError, TypeError, RecursionError):
        raise damaged(path, f"{what} is no JSON") from None
    if not isinstance(value, kind):
        raise damaged(path, f"{what} is of the wrong kind")
    return value


def tokens_of(path: Path, row: int, prompt: Any) -> tuple[int, ...]:
    """The token ids of a prompt, stored as four bytes each."""
    if not isinstance(prompt, bytes) or len(prompt) % 4:
        raise damaged(path, f"the prompt of row {row} is cut off or no list of tokens")
    tokens: tuple[int, ...] = tuple(np.frombuffer(prompt, dtype="<i4").tolist())
    if tokens and min(tokens) < 0:
        raise damaged(path, f"the prompt of row {row} holds {min(tokens)}, which is no token id")
    return tokens


def check_columns(path: Path, row: Any, custom_id: Any, line: Any, kind: Any) -> None:
    if not isinstance(custom_id, str) or not isinstance(line, int) or kind not in ("completion", "chat"):
        raise damaged(path, f"row {row} has an id, a line or a kind that cannot be")


def check(path: Path, query: Callable[[str], list[tuple[Any, ...]]]) -> None:
    """Before a job is resumed: refuse a corrupt file, and states of rows that do not exist."""
    if path.stat().st_size <= MOST_BYTES_CHECKED and (said := query("PRAGMA quick_check(1)")) != [("ok",)]:
        raise damaged(path, str(said[0][0]).splitlines()[0])
    # The index answers these without reading the rows.
    for strange in ("state < 0", "state > 2", "state > 0 AND state < 1", "state > 1 AND state < 2", "row < 0"):
        if found := query(f"SELECT row, state FROM rows WHERE {strange} LIMIT 1"):
            row, state = found[0]
            raise damaged(path, f"row {row} has the state {state!r}, which does not exist")


def mend(db: sqlite3.Connection) -> list[str]:
    """Mend rows whose state and record contradict each other; returns notes about it.

    Such a row becomes pending again, except one that was wrong in the input, which has no request that could be run.
    """
    ended = "SELECT row FROM rows WHERE state > 0 AND row NOT IN (SELECT row FROM records)"
    without_record = {row for (row,) in db.execute(ended)}
    for row, state, custom_id, record in db.execute(
        f"SELECT row, state, custom_id, record FROM rows JOIN records USING (row) WHERE state > 0 AND NOT ({WHOLE})"
    ):
        if not is_whole(state, custom_id, record):
            without_record.add(row)
    stray = [
        row
        for (row,) in db.execute("SELECT records.row FROM records LEFT JOIN rows USING (row) WHERE coalesce(state, 0) = 0")
    ]
    wrong = _wrong_in_the_input(db, without_record)
    without_record -= wrong.keys()
    db.executemany("UPDATE rows SET state = 0 WHERE row = ?", ((row,) for row in without_record))
    db.executemany("DELETE FROM records WHERE row = ?", ((row,) for row in (*without_record, *stray)))
    db.executemany("INSERT OR REPLACE INTO records VALUES (?, ?)", wrong.items())
    notes = []
    if wrong:
        notes.append(f"{_rows(len(wrong))} wrong in the input without a whole record of why, and cannot be done again")
    if without_record:
        notes.append(f"{_rows(len(without_record))} marked as ended without a whole record, and will be done again")
    if stray:
        notes.append(f"{_rows(len(stray))} not marked as ended but had a record, which is not used")
    return notes


def _wrong_in_the_input(db: sqlite3.Connection, rows: Iterable[int]) -> dict[int, str]:
    """A new error record for each of these rows that failed at admission, and so has no request."""
    found = {}
    for row in rows:
        for custom_id, line in db.execute(
            "SELECT custom_id, line FROM rows WHERE row = ? AND state = 2 AND request = '{}' "
            "AND typeof(custom_id) = 'text' AND typeof(line) = 'integer'",
            (row,),
        ):
            said = f"line {line} was wrong in the input; what was said of it is damaged"
            found[row] = error_line(row, custom_id, INVALID, said)
    return found


def is_whole(state: int, custom_id: str, record: Any) -> bool:
    """The same check as ``WHOLE`` in Python: SQLite's functions end a text at a NUL."""
    try:
        entry = json.loads(record)
        if "\n" in record or entry["custom_id"] != custom_id:
            return False
        if state == DONE:
            return isinstance(entry["response"], dict)
        return isinstance(entry["error"]["message"], str) and isinstance(entry["error"]["code"], str)
    except (ValueError, TypeError, KeyError, RecursionError):
        return False


def _rows(count: int) -> str:
    return f"{count:,} row was" if count == 1 else f"{count:,} rows were"
