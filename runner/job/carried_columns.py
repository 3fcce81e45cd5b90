"""Carried columns: input columns that go through to the results. The journal keeps them, since the input may be gone later.

They are kept by portions of rows: as an Arrow stream, with all types, if the rows came from Arrow; else as a JSON list.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from outrider.runner.job.arrow_input import pyarrow_for, python_rows
from outrider.runner.job.damage import damaged
from outrider.runner.job.journal import CarriedPortion, Journal
from outrider.runner.template import plain

JSON, ARROW = "json", "arrow"
# The largest whole number up to which a float64 holds all of them.
MOST_EXACT = 1 << 53
ROWS_TOGETHER = 1000
BYTES_TOGETHER = 4 << 20


class CarriedRows:
    """Collects the carried values of rows in input order, in portions for the journal."""

    def __init__(self) -> None:
        self._ready: list[CarriedPortion] = []
        self._rows: list[str] = []
        self._first = self._next = self._bytes = 0
        self._any = False

    def add(self, values: Mapping[str, Any] | None) -> None:
        """Add the values of the next row; None if it has none."""
        text = json.dumps(plain(values), ensure_ascii=False) if values else "null"
        self._any = self._any or bool(values)
        self._rows.append(text)
        self._bytes += len(text)
        self._next += 1
        if len(self._rows) >= ROWS_TOGETHER or self._bytes >= BYTES_TOGETHER:
            self._close()

    def add_batch(self, batch: Any) -> None:
        """Add the values of the next rows as an Arrow batch."""
        if batch.num_columns:
            pyarrow = pyarrow_for("the input")
            sink = pyarrow.BufferOutputStream()
            with pyarrow.ipc.new_stream(sink, batch.schema) as writer:
                writer.write_batch(batch)
            self._ready.append(CarriedPortion(self._next, batch.num_rows, ARROW, sink.getvalue().to_pybytes()))
        self._next += batch.num_rows
        self._first = self._next

    def take(self, last: bool = False) -> list[CarriedPortion]:
        """Take the portions that are complete; with ``last`` also the one that is not."""
        if last and self._rows:
            self._close()
        taken, self._ready = self._ready, []
        return taken

    def _close(self) -> None:
        if self._any:
            data = f"[{','.join(self._rows)}]".encode(errors="backslashreplace")
            self._ready.append(CarriedPortion(self._first, len(self._rows), JSON, data))
        self._rows, self._bytes, self._first, self._any = [], 0, self._next, False


@dataclass(frozen=True, slots=True)
class _Opened:
    portion: CarriedPortion
    # A list of objects (JSON) or a pyarrow.RecordBatch (Arrow).
    rows: Any

    def at(self, row: int) -> dict[str, Any]:
        place = row - self.portion.first
        if self.portion.kind == JSON:
            return self.rows[place] or {}
        return {name: plain(value) for name, value in python_rows(self.rows.slice(place, 1))[0].items()}


class CarriedReader:
    """Reads the carried values of rows in rising order; keeps one portion in memory."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._opened: _Opened | None = None
        self._none = not journal.carries

    def of(self, row: int) -> dict[str, Any]:
        """The carried values of a row, as JSON can hold them."""
        opened = self._find(row)
        return {} if opened is None else opened.at(row)

    def batch_of(self, row: int) -> tuple[Any, int]:
        """The Arrow batch that holds a row, and the row's index in it."""
        opened = self._find(row)
        if opened is None or opened.portion.kind != ARROW:
            raise damaged(self._journal.path, f"what is carried of row {row} is missing")
        return opened.rows, row - opened.portion.first

    def _find(self, row: int) -> _Opened | None:
        if self._none:
            return None
        opened = self._opened
        if opened is None or not opened.portion.first <= row < opened.portion.first + opened.portion.count:
            portion = self._journal.carried(row)
            self._opened = opened = None if portion is None else _open(self._journal, portion)
        return opened


def arrow_schema(journal: Journal) -> Any:
    """The schema of columns carried from Arrow (that of the first portion, the same in all); None without such."""
    first = journal.carried_after(-1)
    return None if first is None or first.kind != ARROW else _open(journal, first).rows.schema


def json_columns(journal: Journal) -> dict[str, str]:
    """The names of columns carried from JSON, in order of appearance, each with a type that holds all of its values."""
    found: dict[str, set[str]] = {}
    after = -1
    while (portion := journal.carried_after(after)) is not None:
        after = portion.first
        if portion.kind == JSON:
            for values in _open(journal, portion).rows:
                for name, value in (values or {}).items():
                    found.setdefault(name, set()).add(_kind(value))
    return {name: _widest(kinds - {"null"}) for name, kinds in found.items()}


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "bool"
    if isinstance(value, int):
        return "int" if abs(value) <= MOST_EXACT else "large" if -(1 << 63) <= value < 1 << 63 else "json"
    return "float" if isinstance(value, float) else "text" if isinstance(value, str) else "json"


def _widest(kinds: set[str]) -> str:
    """The type of a column from the kinds of its values: int and float make float, other mixtures JSON."""
    if not kinds:
        return "text"
    if kinds <= {"int", "large"}:
        return "int"
    return next(iter(kinds)) if len(kinds) == 1 else "float" if kinds == {"int", "float"} else "json"


def as_type(value: Any, kind: str) -> Any:
    if value is None:
        return None
    return json.dumps(value, ensure_ascii=False) if kind == "json" else float(value) if kind == "float" else value


def _open(journal: Journal, portion: CarriedPortion) -> _Opened:
    what = f"what is carried of row {portion.first} and those behind it"
    rows: Any
    if portion.kind == ARROW:
        pyarrow = pyarrow_for("what this job carries")
        try:
            with pyarrow.ipc.open_stream(pyarrow.py_buffer(portion.data)) as reader:
                rows = reader.read_next_batch()
                rows.validate()
        except (pyarrow.ArrowException, OSError, StopIteration, TypeError):
            raise damaged(journal.path, f"{what} cannot be read") from None
        if rows.num_rows != portion.count:
            raise damaged(journal.path, f"{what} is not whole")
        return _Opened(portion, rows)
    try:
        rows = json.loads(portion.data)
    except (TypeError, ValueError, RecursionError):
        raise damaged(journal.path, f"{what} cannot be read") from None
    if not isinstance(rows, list) or len(rows) != portion.count or not all(isinstance(each, dict | None) for each in rows):
        raise damaged(journal.path, f"{what} is not whole")
    return _Opened(portion, rows)


def with_carried(record: str, carried: Mapping[str, Any]) -> str:
    """A line of results or errors with the row's carried values added."""
    return f'{record[:-1]}, "carried": {json.dumps(carried, ensure_ascii=False)}}}' if carried else record


def distinct_names(names: Sequence[str], taken: Iterator[str] | Sequence[str]) -> dict[str, str]:
    """New names of carried columns beside our own: one whose name is taken gets the prefix ``input_``."""
    used, found = set(taken), {}
    others = set(names)
    for name in names:
        new = name
        while new in used or (new != name and new in others):
            new = f"input_{new}"
        used.add(new)
        found[name] = new
    return found
