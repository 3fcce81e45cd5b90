"""A job's ended rows as one table in input order: Parquet, CSV, lines of JSON, or a Hugging Face dataset.

Its columns: ``id``, ``text``, ``tokens`` and ``finish_reason`` (FIRST), the carried columns, and further ones of ours
(LAST). Failed rows are included, with their ``error``.
"""

from __future__ import annotations

import csv
import fcntl
import gzip
import io
import json
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import IO, Any

from outrider.runner.job.arrow_input import STATE, pyarrow_for
from outrider.runner.job.carried_columns import (
    CarriedReader,
    arrow_schema,
    as_type,
    distinct_names,
    json_columns,
)
from outrider.runner.job.directory import JOURNAL, check_apart, open_job, path_exists, read_description
from outrider.runner.job.input import KEY as INPUT
from outrider.runner.job.journal import DONE, FAILED, Journal
from outrider.runner.job.piped_input import has_no_name
from outrider.runner.job.records import Record, ended_rows
from outrider.runner.job.results import LEFTOVER_SECONDS, atomically, sync_folder
from outrider.runner.job.source import GZIP, SUFFIXES, ZSTANDARD
from outrider.runner.template import spelled
from outrider.runner.validation_errors import short
from outrider.workers.errors import UsageError

ROWS_AT_ONCE = 1000
ROWS_IN_GROUP = 50_000
BYTES_IN_GROUP = 16 << 20
PARQUET, CSV, JSONL, DATASET = "parquet", "csv", "jsonl", "dataset"
# The table's file name if only a directory is given.
NAMES = {PARQUET: "results.parquet", CSV: "results.csv", JSONL: "rows.jsonl", DATASET: "results-dataset"}
# A saved dataset consists of this file, STATE, and the data files that STATE names.
INFO = "dataset_info.json"
FORMATS = {".parquet": PARQUET, ".csv": CSV, ".jsonl": JSONL, ".ndjson": JSONL}


@dataclass(frozen=True, slots=True)
class Column:
    """A column of ours: its name, its Arrow type ("json" and "texts" are ours), and its value of a record."""

    name: str
    kind: str
    of: Callable[[Record], Any]


FIRST = (
    Column("id", "string", lambda record: record.id),
    Column("text", "string", lambda record: record.text if record.error is None else None),
    Column("tokens", "int64", lambda record: record.tokens),
    Column("finish_reason", "string", lambda record: record.finish_reason or None),
)
LAST = (
    # Objects as in results.jsonl; in Parquet and CSV they are JSON text.
    Column("logprobs", "json", lambda record: record.logprobs),
    Column("reasoning", "string", lambda record: record.reasoning),
    Column("tool_calls", "json", lambda record: list(record.tool_calls) or None),
    Column("prompt_tokens", "int64", lambda record: record.prompt_tokens),
    # All answers, for rows with more than one.
    Column("texts", "texts", lambda record: [each.text for each in record.choices] if len(record.choices) > 1 else None),
    Column("error", "string", lambda record: record.error),
    Column("error_code", "string", lambda record: record.error_code),
)
OWN = tuple(column.name for column in (*FIRST, *LAST))


def format_of(path: Path) -> str | None:
    """The form of table by a file's name; None if its suffix is unknown."""
    return FORMATS.get(Path(path.stem).suffix if path.suffix in SUFFIXES else path.suffix)


def table_of(out: Path | None, form: str | None) -> str | None:
    """The form of table by the name in ``--out``; None if that is a directory, or will be one."""
    if out is None or (path_exists(out) and out.is_dir()):
        return None
    if (named := format_of(out)) is None and out.suffix and form != DATASET:
        raise UsageError(
            f"--out: {out} does not end like a table (known forms are {', '.join(FORMATS)}); "
            "name an existing directory, or a name without a suffix"
        )
    return named


def write_table(directory: Path, path: Path, form: str) -> Path:
    """Write all ended rows to a table, which replaces an old one atomically."""
    if not path.name:
        raise UsageError(f"{path} is not a name to write a table to; give one, such as {NAMES[form]}")
    check_apart("--out", path, directory)
    if path_exists(path.parent / JOURNAL):  # another job's
        check_apart("--out", path, path.parent)
    with closing(open_job(directory)) as journal:
        check_not_input(path, directory, journal, form)
        if form == DATASET:
            _write_dataset(journal, path)
        elif form == PARQUET:
            with atomically(path, UsageError) as file:
                _write_parquet(journal, file)
        else:
            with atomically(path, UsageError) as file, _compressed(path, file) as stream:
                (_write_csv if form == CSV else _write_jsonl)(journal, stream)
    return path


def check_not_input(path: Path, directory: Path, journal: Journal, form: str | None = None) -> None:
    """Refuse to overwrite the job's input or to write into its directory: the job could not be resumed with it."""
    for given in _inputs(directory, journal):
        if given.absolute() == path.absolute() or (path_exists(given) and path_exists(path) and given.samefile(path)):
            raise UsageError(f"--out: {path} is the input of {directory}; name another")
        real, real_input = Path(os.path.realpath(path)), Path(os.path.realpath(given))
        # A directory's rows are those of all Parquet files and saved datasets in it.
        if form in (PARQUET, DATASET) and real_input in real.parents:
            raise UsageError(f"--out: {path} lies within {given}, the input of {directory}; name another")
        if form == DATASET and real in real_input.parents:
            raise UsageError(f"--out: {path} holds {given}, the input of {directory}; name another")


def _inputs(directory: Path, journal: Journal) -> list[Path]:
    """The input's paths when the job began and when it was last run."""
    begun = (journal.meta(INPUT) or {}).get("path")
    last = read_description(directory, journal)[0].get("spec", {}).get("input")
    found = [Path(each) for each in (begun, last) if isinstance(each, str) and not has_no_name(Path(each))]
    # The journal's path is absolute; that of job.json may be relative to another working directory.
    return [each for each in found if each.is_absolute()] or found


@contextmanager
def _compressed(path: Path, file: IO[bytes]) -> Iterator[Any]:
    """Compress by the file's suffix. mtime=0, so that the same rows make the same bytes."""
    kind = SUFFIXES.get(path.suffix)
    if kind == GZIP:
        with gzip.GzipFile(filename="", mode="wb", fileobj=file, mtime=0) as stream:
            yield stream
    elif kind == ZSTANDARD:
        import zstandard  # rarely needed

        with zstandard.ZstdCompressor().stream_writer(file, closefd=False) as writer:
            yield writer
    else:
        yield file


def _rows(journal: Journal) -> Iterator[tuple[int, Record]]:
    return ended_rows(journal, (DONE, FAILED))


def _write_jsonl(journal: Journal, stream: IO[bytes]) -> None:
    carried = CarriedReader(journal)
    for row, record in _rows(journal):
        others = carried.of(row)
        new_names = distinct_names(list(others), OWN)
        line = {column.name: column.of(record) for column in FIRST}
        line |= {new_names[name]: value for name, value in others.items()}
        line |= {column.name: column.of(record) for column in LAST}
        stream.write(json.dumps(line, ensure_ascii=False).encode() + b"\n")


def _write_csv(journal: Journal, stream: IO[bytes]) -> None:
    names = _carried_names(journal)
    new_names = distinct_names(names, OWN)
    text = io.TextIOWrapper(stream, encoding="utf-8", newline="")
    writer = csv.writer(text, lineterminator="\n")
    # Python before 3.13 does not quote a carriage return, which readers take for the end of a row.
    quoting = csv.writer(text, lineterminator="\n", quoting=csv.QUOTE_ALL)
    writer.writerow([*(column.name for column in FIRST), *new_names.values(), *(column.name for column in LAST)])
    carried = CarriedReader(journal)
    for row, record in _rows(journal):
        others = carried.of(row)
        values = [
            *(column.of(record) for column in FIRST),
            *(others.get(name) for name in names),
            *(column.of(record) for column in LAST),
        ]
        fields = ["" if value is None else spelled(value) for value in values]
        (quoting if any("\r" in str(field) for field in fields) else writer).writerow(fields)
    text.flush()
    text.detach()


def _write_parquet(journal: Journal, file: IO[bytes]) -> None:
    pyarrow_for("Parquet")
    from pyarrow import parquet

    for field in arrow_schema(journal) or ():
        _check_parquet_holds(field)
    table = _ArrowTable(journal, _without_runs)
    with parquet.ParquetWriter(file, table.schema) as writer:
        for group in _groups(table.portions()):
            writer.write_table(group)


def _without_runs(values: Any) -> Any:
    """Run-end encoded values decoded, since Parquet has no such type (and encodes runs itself)."""
    from pyarrow import compute, types

    return compute.run_end_decode(values) if types.is_run_end_encoded(values.type) else values


def _check_parquet_holds(field: Any) -> None:
    """Refuse a column that Parquet cannot hold. pyarrow refuses some types only with a value, so a null is written."""
    import pyarrow
    from pyarrow import parquet

    try:
        missing = _without_runs(pyarrow.nulls(1, field.type))
        parquet.write_table(pyarrow.table([missing], [field.name]), pyarrow.BufferOutputStream())
    except pyarrow.ArrowException:
        raise UsageError(
            f'Parquet cannot hold the column "{short(field.name)}" ({field.type}): choose jsonl or csv'
        ) from None


def _groups(portions: Iterator[Any]) -> Iterator[Any]:
    """Portions joined to row groups. The writer keeps each group's metadata in memory, so groups must not be small."""
    import pyarrow

    held: list[Any] = []
    for portion in portions:
        held.append(portion)
        many = sum(each.num_rows for each in held) >= ROWS_IN_GROUP
        if many or sum(each.nbytes for each in held) >= BYTES_IN_GROUP:
            yield pyarrow.concat_tables(held)
            held = []
    if held:
        yield pyarrow.concat_tables(held)


def _write_dataset(journal: Journal, path: Path) -> None:
    """Write a dataset that Hugging Face's ``load_from_disk`` reads."""
    pyarrow = pyarrow_for("a dataset's directory")
    data = "data-00000-of-00001.arrow"
    try:
        _check_replaceable(path)
        with _directory_beside(path) as beside:
            new, old = beside / "new", beside / "old"
            new.mkdir()
            table = _ArrowTable(journal)
            with atomically(new / data) as file, pyarrow.ipc.new_stream(file, table.schema) as writer:
                for some in table.portions():
                    writer.write_table(some)
            state: dict[str, Any] = {
                "_data_files": [{"filename": data}],
                "_fingerprint": secrets.token_hex(8),
                "_format_columns": None,
            }
            state |= {"_format_kwargs": {}, "_format_type": None, "_output_all_columns": False, "_split": None}
            for name, content in ((STATE, state), (INFO, {})):
                with atomically(new / name) as file:
                    file.write(json.dumps(content).encode())
            _check_replaceable(path)  # again, since writing may have taken long
            if path_exists(path):
                path.rename(old)
            try:
                new.rename(path)
            finally:
                if path_exists(old) and not path_exists(path):
                    old.rename(path)
            sync_folder(path.parent)
            shutil.rmtree(old, ignore_errors=True)
        _remove_left_beside(path)
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror or error}") from None


def _check_replaceable(path: Path) -> None:
    """Refuse to replace anything but a saved dataset, since a directory's other files would be lost."""
    if not path_exists(path):
        return
    its_own = _files_of_saved(path)
    if not its_own:
        raise UsageError(f"{path} is there and is no saved dataset; name another directory with --out")
    others = sorted(each.name for each in path.iterdir() if each.name not in its_own or not each.is_file())
    if others:
        raise UsageError(
            f"{path} holds more than a saved dataset, and {others[0]} would be lost; name another directory with --out"
        )


def _files_of_saved(path: Path) -> set[str]:
    """The names of a saved dataset's files; empty if the path is none."""
    if path.is_symlink() or not (path / STATE).is_file() or not (path / INFO).is_file():
        return set()
    try:
        listed = json.loads((path / STATE).read_bytes())["_data_files"]
        return {STATE, INFO, *(entry["filename"] for entry in listed)}
    except (ValueError, LookupError, TypeError, RecursionError):  # another program's state.json
        return set()


@contextmanager
def _directory_beside(path: Path) -> Iterator[Path]:
    """A temporary directory beside ``path``, locked as long as its writer lives."""
    beside = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}")
    beside.mkdir()
    handle = os.open(beside, os.O_RDONLY)
    try:
        with suppress(OSError):  # where the file system has no locks, other writers leave it alone
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield beside
    finally:
        shutil.rmtree(beside / "new", ignore_errors=True)
        with suppress(OSError):  # not empty if the old dataset could not be moved back
            beside.rmdir()
        os.close(handle)


def _remove_left_beside(path: Path) -> None:
    """Remove temporary directories of this dataset's writers that were killed."""
    left = re.compile(rf"\.{re.escape(path.name)}\.\d+-[0-9a-f]{{8}}")
    for each in [each for each in path.parent.iterdir() if left.fullmatch(each.name)]:
        with suppress(OSError):
            handle = os.open(each, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                # A new, empty one may not be locked yet.
                if any(each.iterdir()) or time.time() - os.fstat(handle).st_mtime > LEFTOVER_SECONDS:
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(each)
            finally:
                os.close(handle)


def _carried_names(journal: Journal) -> list[str]:
    schema = arrow_schema(journal)
    return list(json_columns(journal)) if schema is None else list(schema.names)


class _ArrowTable:
    """The rows as Arrow tables of one schema; columns that came from Arrow keep their types."""

    def __init__(self, journal: Journal, as_written: Callable[[Any], Any] = lambda values: values) -> None:
        """``as_written`` converts values of columns that came from Arrow."""
        self._pyarrow = pyarrow_for("Parquet")
        self._journal = journal
        self._as_written = as_written
        self._carried = CarriedReader(journal)
        kept = arrow_schema(journal)
        self._types = json_columns(journal) if kept is None else {}
        if kept is None:
            fields = [self._pyarrow.field(name, self._type(kind)) for name, kind in self._types.items()]
        else:
            kinds = [as_written(self._pyarrow.nulls(0, field.type)).type for field in kept]
            fields = [field.with_type(kind).with_nullable(True) for field, kind in zip(kept, kinds, strict=True)]
        new_names = distinct_names([field.name for field in fields], OWN)
        fields = [field.with_name(new_names[field.name]) for field in fields]
        self._middle = self._pyarrow.schema(fields)
        self._from_arrow = kept is not None
        self.schema = self._pyarrow.schema(
            [
                *(self._pyarrow.field(column.name, self._type(column.kind)) for column in FIRST),
                *fields,
                *(self._pyarrow.field(column.name, self._type(column.kind)) for column in LAST),
            ]
        )

    def _type(self, kind: str) -> Any:
        pyarrow = self._pyarrow
        known = {"bool": pyarrow.bool_(), "int": pyarrow.int64(), "int64": pyarrow.int64(), "float": pyarrow.float64()}
        return pyarrow.list_(pyarrow.string()) if kind == "texts" else known.get(kind, pyarrow.string())

    def portions(self) -> Iterator[Any]:
        rows = _rows(self._journal)
        while some := list(islice(rows, ROWS_AT_ONCE)):
            records = [record for _, record in some]
            columns = [self._own(column, records) for column in FIRST]
            columns += self._batches(row for row, _ in some) if self._from_arrow else self._objects(row for row, _ in some)
            columns += [self._own(column, records) for column in LAST]
            yield self._pyarrow.table(columns, schema=self.schema)

    def _own(self, column: Column, records: Iterable[Record]) -> Any:
        values = [column.of(record) for record in records]
        if column.kind == "json":
            values = [None if value is None else json.dumps(value, ensure_ascii=False) for value in values]
        return self._pyarrow.array(values, self._type(column.kind))

    def _objects(self, rows: Iterable[int]) -> list[Any]:
        found = [self._carried.of(row) for row in rows]
        return [
            self._pyarrow.array([as_type(each.get(name), kind) for each in found], self._type(kind))
            for name, kind in self._types.items()
        ]

    def _batches(self, rows: Iterable[int]) -> list[Any]:
        """Carried Arrow columns of these rows, by slices of their batches: ``take`` does not support every type."""
        runs: list[tuple[Any, int, int]] = []
        for row in rows:
            batch, place = self._carried.batch_of(row)
            if runs and runs[-1][0] is batch and sum(runs[-1][1:]) == place:
                runs[-1] = (batch, runs[-1][1], runs[-1][2] + 1)
            else:
                runs.append((batch, place, 1))
        sliced = [batch.slice(start, count) for batch, start, count in runs]
        return [
            self._pyarrow.chunked_array([self._as_written(each.column(index)) for each in sliced], field.type)
            for index, field in enumerate(self._middle)
        ]
