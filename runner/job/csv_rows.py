"""CSV input: one row per record, with values by the column names of the header. Needs no package."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from outrider.runner.job.prompts import BLANK, LONE_SURROGATE, TOO_LONG
from outrider.runner.job.source import MOST_LINE_BYTES, Source
from outrider.runner.validation_errors import short
from outrider.workers.errors import UsageError

# The delimiter is the first of these that the header contains: spreadsheets write that of their locale.
DELIMITERS = (",", ";", "\t")
MOST_COLUMNS = 4096


@dataclass(frozen=True, slots=True)
class CsvRow:
    """A record that begins in ``line``: its values, or None and its problem."""

    line: int
    values: dict[str, str] | None
    problem: str = ""


class CsvFile:
    """The records of a CSV file after its header, streamed."""

    def __init__(self, source: Source) -> None:
        # The limit is global to the csv module.
        csv.field_size_limit(max(csv.field_size_limit(), MOST_LINE_BYTES))
        self._name = source.name
        self._lines = _Lines(source.lines())
        self.columns = self._header(source.suffix)

    def _header(self, suffix: str) -> list[str]:
        first = self._lines.peek()
        if not first.strip():
            raise UsageError(f"{self._name}:1: the first line is blank, and it has to name the columns")
        delimiter = "\t" if suffix == ".tsv" else _delimiter(first)
        self._reader = csv.reader(self._lines, delimiter=delimiter, strict=True)
        try:
            columns = next(self._reader)
        except csv.Error as error:
            raise UsageError(f"{self._name}:1: the header is not CSV: {_said(error)}") from None
        if LONE_SURROGATE.search("".join(columns)) or "\0" in "".join(columns):
            raise UsageError(f"{self._name}:1: the header is not UTF-8; convert the file to UTF-8")
        if len(columns) > MOST_COLUMNS:
            raise UsageError(f"{self._name}:1: the header names {len(columns):,} columns, and {MOST_COLUMNS:,} can be read")
        if twice := [name for name in columns if columns.count(name) > 1]:
            raise UsageError(f'{self._name}:1: the column "{short(twice[0])}" stands twice in the header; rename one')
        return columns

    def rows(self) -> Iterator[CsvRow]:
        blank: list[int] = []
        while True:
            begins = self._lines.number + 1
            try:
                record = next(self._reader)
            except StopIteration:
                return
            except csv.Error as error:
                record, problem = [], f"not valid CSV: {_said(error)}"
                if self._lines.number > begins:
                    problem += f" (all up to line {self._lines.number:,} is read as this row)"
            else:
                if not record and self._lines.number not in self._lines.too_long:
                    blank.append(begins)
                    continue
                problem = self._problem(record)
            if self._lines.too_long:
                problem = TOO_LONG
                self._lines.too_long.clear()
            # Blank lines at the end of a file are ignored; between rows they are errors, since a row may be missing.
            yield from (CsvRow(line, None, BLANK) for line in blank)
            blank.clear()
            if problem:
                yield CsvRow(begins, None, problem)
            else:
                yield CsvRow(begins, dict(zip(self.columns, record, strict=True)))

    def _problem(self, record: list[str]) -> str:
        if len(record) != len(self.columns):
            values = "one value" if len(record) == 1 else f"{len(record)} values"
            return f"the row has {values} and the header names {len(self.columns)}; quote values that hold a delimiter"
        whole = "".join(record)
        if LONE_SURROGATE.search(whole):
            return "the row is not UTF-8; convert the file to UTF-8"
        if "\0" in whole:
            return "the row holds a NUL, which is no text; convert the file to UTF-8"
        return ""


class _Lines:
    """Decoded lines with their numbers for csv.reader, which takes several for a value with line feeds in it."""

    def __init__(self, lines: Iterable[bytes | None]) -> None:
        self._lines = iter(lines)
        self._peeked: list[str] = []
        # Number of the last line that was returned, from 1.
        self.number = 0
        self.too_long: set[int] = set()

    def __iter__(self) -> Iterator[str]:
        return self

    def peek(self) -> str:
        try:
            self._peeked = [self._decoded(next(self._lines), first=True)]
        except StopIteration:
            return ""
        return self._peeked[0]

    def __next__(self) -> str:
        self.number += 1
        if self._peeked:
            return self._peeked.pop()
        line = next(self._lines, b"")
        if line == b"":
            self.number -= 1
            raise StopIteration
        if line is None:
            self.too_long.add(self.number)
        return self._decoded(line)

    @staticmethod
    def _decoded(line: bytes | None, first: bool = False) -> str:
        if line is None:
            return "\n"
        # Bytes that are not UTF-8 become lone surrogates, for which their row is refused.
        return (line.removeprefix(b"\xef\xbb\xbf") if first else line).decode("utf-8", "surrogateescape")


def _delimiter(header: str) -> str:
    """The delimiter, looked for outside of quotes."""
    bare = "".join(header.split('"')[::2])
    return next((each for each in DELIMITERS if each in bare), DELIMITERS[0])


def _said(error: csv.Error) -> str:
    known = {
        "unexpected end of data": "a quote that opens in this row is never closed",
        "new-line character": "a carriage return stands inside; let lines end with a line feed (\\n)",
        "field larger than field limit": "a value is longer than any prompt; is a quote never closed?",
    }
    return next((ours for theirs, ours in known.items() if theirs in str(error)), str(error))
