"""The rows of an input of any form (lines, CSV, Arrow), with their carried values; later modules do not see the form."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from outrider.runner.job.arrow_input import ArrowSource, check_spelled, python_rows
from outrider.runner.job.carried_columns import CarriedRows
from outrider.runner.job.columns import Columns, columns_of, from_text
from outrider.runner.job.csv_rows import CsvFile, CsvRow
from outrider.runner.job.prompts import BadRow, id_of_bad, read_rows, unexpected
from outrider.runner.job.requests import Request, RowError, parse_openai
from outrider.runner.job.source import Source
from outrider.runner.options.job import JobSpec
from outrider.runner.validation_errors import short
from outrider.workers.errors import UsageError

CSV = "csv"
CSV_SUFFIXES = (".csv", ".tsv")
# Names that are remembered of lines, each of which may have others.
MOST_NAMES = 1000
OF_OPENAI = frozenset({"custom_id", "method", "url", "body"})


class InputRows:
    """Every row in order, streamed; a row that is wrong is a ``BadRow``. ``carried`` collects the carried values."""

    def __init__(self, source: Source | ArrowSource, spec: JobSpec) -> None:
        self.carried = CarriedRows()
        # The carried columns: all of them for a table, those seen so far for lines.
        self.carried_names: tuple[str, ...] = ()
        # The columns that are neither carried nor read, likewise.
        self.left_out: dict[str, None] = {}
        self._source, self._spec = source, spec
        self._columns = columns_of(spec)

    @property
    def of_table(self) -> bool:
        """Whether the input is a table (CSV, Arrow), whose columns are known without rows."""
        if isinstance(self._source, ArrowSource):
            return True
        return self._spec.format == CSV or (self._spec.format == "auto" and self._source.suffix in CSV_SUFFIXES)

    def __iter__(self) -> Iterator[Request | BadRow]:
        if isinstance(self._source, ArrowSource):
            return self._arrow(self._source, self._columns or Columns())
        if self.of_table:
            return self._csv(self._source, self._columns or Columns())
        if self._columns is None:
            return read_rows(self._source, self._spec.format, may_have_columns=True)
        return self._lines(self._source, self._columns)

    def _lines(self, source: Source, columns: Columns) -> Iterator[Request | BadRow]:
        mapped = _LineMapping(columns, self.left_out)
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
        # A line that could not be parsed may have the missing column; without --skip-bad it is reported first.
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
        try:
            self.left_out |= dict.fromkeys(columns.left_out(names))
        except RowError as error:
            raise UsageError(f"{name}: {error}") from None


class _LineMapping:
    """The ``ColumnMapping`` of lines of JSON or text."""

    def __init__(self, columns: Columns, left_out: dict[str, None]) -> None:
        self._columns = columns
        self._left_out = left_out
        self.own_prompt = columns.own_prompt
        # Names of --carry that are keys of a batch line or of its body, which cannot be carried.
        self.not_carried: set[str] = set()
        self._carried: dict[str, Any] | None = None

    def __call__(self, entry: dict[str, Any], line: int) -> Request:
        if self._is_batch_line(entry):
            others = {name: value for name, value in entry.items() if name not in OF_OPENAI}
            self._carried = {name: value for name, value in others.items() if self._columns.is_carried(name)}
            body = entry.get("body")
            keys = {*(entry.keys() & OF_OPENAI), *(body if isinstance(body, dict) else ())}
            self.not_carried |= keys.intersection(self._columns.carry or ())
            self._leave_out(others)
            return parse_openai({name: value for name, value in entry.items() if name in OF_OPENAI}, line)
        self._carried = {name: value for name, value in entry.items() if self._columns.is_carried(name)}
        self._leave_out(entry)
        return self._columns.request(entry, line)

    def claimed_id(self, entry: dict[str, Any]) -> object:
        return entry.get("custom_id") if self._is_batch_line(entry) else self._columns.claimed_id(entry)

    def _is_batch_line(self, entry: dict[str, Any]) -> bool:
        return self.own_prompt and ("body" in entry or "custom_id" in entry)

    def _leave_out(self, names: Iterable[str]) -> None:
        left_out = self._columns.left_out(names)
        if len(self._left_out) < MOST_NAMES:
            self._left_out |= dict.fromkeys(left_out)

    def taken(self) -> dict[str, Any] | None:
        """The carried values of the line that was last mapped; None if the last line could not be parsed."""
        carried, self._carried = self._carried, None
        return carried


def _of_csv(row: CsvRow, columns: Columns) -> Request | BadRow:
    if row.values is None:
        return BadRow(str(row.line), row.line, row.problem)
    try:
        # Columns that the prompt is made of stay text.
        values = {
            name: from_text(name, text) if columns.is_key(name) and name not in columns.needed else text
            for name, text in row.values.items()
            if columns.is_read(name)
        }
    except RowError as error:
        return BadRow(id_of_bad(columns.claimed_id(row.values), row.line), row.line, str(error))
    return _requested(columns, values, row.line)


def _requested(columns: Columns, row: Mapping[str, Any], line: int, of_arrow: bool = False) -> Request | BadRow:
    try:
        return columns.request(row, line, of_arrow)
    except RowError as error:
        return BadRow(id_of_bad(columns.claimed_id(row), line), line, str(error))
    except Exception as error:  # an unforeseen error fails this row alone
        return unexpected(id_of_bad(columns.claimed_id(row), line), line, "read", error)
