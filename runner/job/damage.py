"""A journal that was damaged, or edited by hand: what is wrong with it as one sentence, or mended where no row is lost."""

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

# A larger file is looked at only where its rows and records are: reading all of it takes seconds a gigabyte.
MOST_BYTES_CHECKED = 1 << 30
DONE = 1
# The bits of SQLite's codes that say what kind of error it is; those above say where it came about.
PRIMARY = 0xFF
# A disk that is full, or no more files that can be opened: another try may succeed.
MOMENTARY = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN)
WHAT_TO_DO = "put back a copy of it, or begin the job anew in another directory with --out"
# Whether a record is what its row's state says: of the row, an answer or an error, on one line.
WHOLE = """
    CASE WHEN typeof(record) = 'text' AND json_valid(record) THEN
        instr(record, char(10)) = 0 AND json_extract(record, '$.custom_id') IS rows.custom_id AND
        CASE state WHEN 1 THEN json_type(record, '$.response') = 'object'
        ELSE json_type(record, '$.error.message') = 'text' AND json_type(record, '$.error.code') = 'text' END
    ELSE 0 END
"""


@contextmanager
def translated(path: Path) -> Iterator[None]:
    """What SQLite, or a value of the wrong kind, has to complain about as a ``JobError``."""
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
    # What the sqlite3 module says of itself has none.
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
    """Not that a disk fails, or that the file may not be written."""
    return not isinstance(error, sqlite3.OperationalError | sqlite3.IntegrityError)


def without_advice(error: OutriderError) -> str:
    """For whoever has other advice than what a job's user can do."""
    return str(error).removesuffix(f"; {WHAT_TO_DO}")


def damaged(path: Path, what: str) -> JobDamagedError:
    return JobDamagedError(f"{path} is damaged: {what}; {WHAT_TO_DO}")


def gone(path: Path) -> JobDamagedError:
    return JobDamagedError(f"{path} is not there, or empty; {WHAT_TO_DO}")


def parsed(path: Path, text: Any, what: str, kind: type | tuple[type, ...] = object) -> Any:
    """JSON that the journal holds."""
    try:
        value = json.loads(text)
    except (ValueError, TypeError, RecursionError):
        raise damaged(path, f"{what} is no JSON") from None
    if not isinstance(value, kind):
        raise damaged(path, f"{what} is of the wrong kind")
    return value


def tokens_of(path: Path, row: int, prompt: Any) -> tuple[int, ...]:
    """A row's prompt: token ids, four bytes each."""
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
    """Before a job goes on: whether its file is whole, and what stands in it can be."""
    if path.stat().st_size <= MOST_BYTES_CHECKED and (said := query("PRAGMA quick_check(1)")) != [("ok",)]:
        raise damaged(path, str(said[0][0]).splitlines()[0])
    # The index answers these without reading the rows.
    for strange in ("state < 0", "state > 2", "state > 0 AND state < 1", "state > 1 AND state < 2", "row < 0"):
        if found := query(f"SELECT row, state FROM rows WHERE {strange} LIMIT 1"):
            row, state = found[0]
            raise damaged(path, f"row {row} has the state {state!r}, which does not exist")


def mend(db: sqlite3.Connection) -> list[str]:
    """Rows and records that contradict one another. What to tell of it.

    Such a row is to be done again, but for one that was wrong in the input, which nobody can do.
    """
    hollow = {row for (row,) in db.execute("SELECT row FROM rows WHERE state > 0 AND row NOT IN (SELECT row FROM records)")}
    for row, state, custom_id, record in db.execute(
        f"SELECT row, state, custom_id, record FROM rows JOIN records USING (row) WHERE state > 0 AND NOT ({WHOLE})"
    ):
        if not is_whole(state, custom_id, record):
            hollow.add(row)
    stray = [
        row
        for (row,) in db.execute("SELECT records.row FROM records LEFT JOIN rows USING (row) WHERE coalesce(state, 0) = 0")
    ]
    wrong = _wrong_in_the_input(db, hollow)
    hollow -= wrong.keys()
    db.executemany("UPDATE rows SET state = 0 WHERE row = ?", ((row,) for row in hollow))
    db.executemany("DELETE FROM records WHERE row = ?", ((row,) for row in (*hollow, *stray)))
    db.executemany("INSERT OR REPLACE INTO records VALUES (?, ?)", wrong.items())
    notes = []
    if wrong:
        notes.append(f"{_rows(len(wrong))} wrong in the input without a whole record of why, and cannot be done again")
    if hollow:
        notes.append(f"{_rows(len(hollow))} marked as ended without a whole record, and will be done again")
    if stray:
        notes.append(f"{_rows(len(stray))} not marked as ended but had a record, which is not used")
    return notes


def _wrong_in_the_input(db: sqlite3.Connection, rows: Iterable[int]) -> dict[int, str]:
    """Those of the rows that failed without a request, each with a new record."""
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
    """What ``WHOLE`` asks, of a record that SQLite may have misread: it ends a text at a NUL."""
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
