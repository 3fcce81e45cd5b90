"""The rows of an input of any form, with what is carried of each: the one place where forms differ ends here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from outrider.runner.job.arrow_input import ArrowSource, check_spelled, python_rows
from outrider.runner.job.carried import CarriedRows
from outrider.runner.job.columns import Columns, columns_of, from_text
from outrider.runner.job.csv_rows import CsvFile, CsvRow
from outrider.runner.job.prompts import BadRow, read_rows, unexpected
from outrider.runner.job.requests import Request, RowError, parse_openai
from outrider.runner.job.source import Source
from outrider.runner.options import JobSpec
from outrider.runner.validation_errors import short
from outrider.workers.errors import UsageError

CSV = "csv"
CSV_SUFFIXES = (".csv", ".tsv")
# Of lines, each of which may have others.
MOST_NAMES = 1000
OF_OPENAI = frozenset({"custom_id", "method", "url", "body"})


class InputRows:
    """Every row in order, streamed; a row that is wrong comes as a ``BadRow``. ``carried`` has each row's columns."""

    def __init__(self, source: Source | ArrowSource, spec: JobSpec) -> None:
        self.carried = CarriedRows()
        # Of tables all columns that are carried, of lines those that came so far.
        self.carried_names: tuple[str, ...] = ()
        self._source, self._spec = source, spec
        self._columns = columns_of(spec)

    def __iter__(self) -> Iterator[Request | BadRow]:
        if isinstance(self._source, ArrowSource):
            return self._arrow(self._source, self._columns or Columns())
        if self._spec.format == CSV or (self._spec.format == "auto" and self._source.suffix in CSV_SUFFIXES):
            return self._csv(self._source, self._columns or Columns())
        if self._columns is None:
            return read_rows(self._source, self._spec.format)
        return self._lines(self._source, self._columns)

    def _lines(self, source: Source, columns: Columns) -> Iterator[Request | BadRow]:
        mapped = _Mapped(columns)
        names: dict[str, None] = {}
        read = unread = False
        for row in read_rows(source, self._spec.format, mapped):
            carried = mapped.taken()
            if carried is None:
                unread = True
            else:
                read = True
            if len(names) < MOST_NAMES:
                names |= dict.fromkeys(carried or ())
                self.carried_names = tuple(names)
            self.carried.add(carried)
            yield row
        # Lines that cannot be read may have it, and are told first where they are refused.
        if not read or (unread and not self._spec.skip_bad):
            return
        for name in columns.carry or ():
            if name not in names and len(names) < MOST_NAMES:
                if name in mapped.not_carried:
                    raise UsageError(
                        f'--carry: "{short(name)}" is a key of batch lines, in {source.name}, and these are not carried; '
                        "leave it out"
                    )
                raise UsageError(f'--carry: no line of {source.name} has "{short(name)}"; leave it out')

    def _csv(self, source: Source, columns: Columns) -> Iterator[Request | BadRow]:
        file = CsvFile(source)
        self._begin(columns, source.name, file.columns)
        for row in file.rows():
            values = row.values or {}
            self.carried.add({name: values[name] for name in values if columns.is_carried(name)})
            yield _of_csv(row, columns)

    def _arrow(self, source: ArrowSource, columns: Columns) -> Iterator[Request | BadRow]:
        names = source.schema.names
        self._begin(columns, source.name, names)
        carried = [name for name in names if columns.is_carried(name)]
        read = [name for name in names if columns.is_read(name)]
        for portion in source.portions(lambda name: columns.is_read(name) or columns.is_carried(name)):
            where = source.location(portion.line)
            check_spelled(portion.batch.select(carried), where)
            self.carried.add_batch(portion.batch.select(carried))
            rows = python_rows(portion.batch.select(read), where)
            for line, row in enumerate(rows, start=portion.line):
                yield _requested(columns, row, line, of_arrow=True)

    def _begin(self, columns: Columns, name: str, names: list[str]) -> None:
        columns.check(name, names)
        self.carried_names = tuple(each for each in names if columns.is_carried(each))


class _Mapped:
    """What a line of JSON, or of text, becomes by columns."""

    def __init__(self, columns: Columns) -> None:
        self._columns = columns
        self.own_prompt = columns.own_prompt
        # Of the names that are to be carried: those that are keys of a batch line, or of its body.
        self.not_carried: set[str] = set()
        self._carried: dict[str, Any] | None = None

    def __call__(self, entry: dict[str, Any], line: int) -> Request:
        if self.own_prompt and ("body" in entry or "custom_id" in entry):
            others = {name: value for name, value in entry.items() if name not in OF_OPENAI}
            self._carried = {name: value for name, value in others.items() if self._columns.is_carried(name)}
            body = entry.get("body")
            keys = {*(entry.keys() & OF_OPENAI), *(body if isinstance(body, dict) else ())}
            self.not_carried |= keys.intersection(self._columns.carry or ())
            return parse_openai({name: value for name, value in entry.items() if name in OF_OPENAI}, line)
        self._carried = {name: value for name, value in entry.items() if self._columns.is_carried(name)}
        return self._columns.request(entry, line)

    def taken(self) -> dict[str, Any] | None:
        """What is carried of the line that was last looked at, once; None of one that could not be read."""
        carried, self._carried = self._carried, None
        return carried


def _of_csv(row: CsvRow, columns: Columns) -> Request | BadRow:
    if row.values is None:
        return BadRow(str(row.line), row.line, row.problem)
    try:
        # The prompt's own columns are texts as they are.
        values = {
            name: from_text(name, text) if columns.is_key(name) and name not in columns.needed else text
            for name, text in row.values.items()
            if columns.is_read(name)
        }
    except RowError as error:
        return BadRow(_claimed_id(row.values, row.line), row.line, str(error))
    return _requested(columns, values, row.line)


def _requested(columns: Columns, row: Mapping[str, Any], line: int, of_arrow: bool = False) -> Request | BadRow:
    try:
        return columns.request(row, line, of_arrow)
    except RowError as error:
        return BadRow(_claimed_id(row, line), line, str(error))
    except Exception as error:  # one row is never the end of the others
        return unexpected(_claimed_id(row, line), line, "read", error)


def _claimed_id(row: Mapping[str, Any], line: int) -> str:
    """The id that a bad row would have had: its error record should carry it."""
    claimed = row.get("id")
    return str(claimed) if isinstance(claimed, str | int) and not isinstance(claimed, bool) and claimed != "" else str(line)
