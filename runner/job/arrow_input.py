"""Parquet and Arrow files, and directories of them (Hugging Face datasets), read by portions of rows.

Their bytes are not read in order, so a file is hashed first, kept open while its rows are read, and checked afterwards for
changes in the meantime.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.runner.counted import counted
from outrider.runner.job.source import Source
from outrider.runner.printable import printable
from outrider.runner.validation_errors import short
from outrider.workers.errors import UsageError, first_line

ROWS_AT_ONCE = 1000
# A portion has fewer rows where these are large (images, sounds).
MOST_BYTES_AT_ONCE = 16 << 20
READ_AT_ONCE = 1 << 20
PARQUET, ARROW = "parquet", "arrow"
KIND_NAMES = {PARQUET: "Parquet", ARROW: "Arrow"}
SUFFIXES = {".parquet": PARQUET, ".arrow": ARROW, ".feather": ARROW}
MAGIC = {PARQUET: b"PAR1", ARROW: b"ARROW1"}
# An Arrow stream begins with this mark and the length of its schema, and ends with the mark and the length 0.
STREAM = b"\xff\xff\xff\xff"
STREAM_END = STREAM + bytes(4)
# A part's name as Hugging Face's hub and datasets write it: train-00000-of-00003.parquet
PART = re.compile(r"(?P<split>.+?)-\d{5}-of-\d{5}(?:-[0-9a-f]+)?")
SPLITS = {"train", "test", "validation", "valid", "val", "dev", "eval"}
STATE, SPLITS_OF_DATASET = "state.json", "dataset_dict.json"
MOST_FILES = 100_000
NO_UTF8 = '{}: the column "{}" holds bytes that are not UTF-8 from there on; mend it'
# Types whose values Python's own types may not be able to hold: more years, other time zones.
BEYOND_PYTHON = ("date", "time", "duration", "interval")


def pyarrow_for(what: str) -> Any:
    """The package pyarrow; an error that says how to install it if it is missing."""
    try:
        import pyarrow
    except ImportError:
        raise UsageError(f"{what} needs pyarrow, which is not installed: pip install 'outrider[data]'") from None
    return pyarrow


def kind_of(path: Path, source: Source | None, form: str) -> str | None:
    """``parquet`` or ``arrow`` by ``--format``, else by the file's name, else by its content; None for other inputs."""
    if form != "auto":
        return form if form in (PARQUET, ARROW) else None
    if path.is_dir():
        return PARQUET
    if (named := SUFFIXES.get(Path(source.name if source is not None else path.name).suffix)) is not None:
        return named
    with path.open("rb") as stream:
        beginning = stream.read(8)
    return next((kind for kind, magic in MAGIC.items() if beginning.startswith(magic)), None)


@dataclass(frozen=True, slots=True)
class Portion:
    """Consecutive rows; ``line`` is the number of the first, counted from 1 through all files."""

    line: int
    # A pyarrow.RecordBatch.
    batch: Any


class ArrowSource:
    """The rows of one file, or of all files of a directory."""

    def __init__(self, path: Path, kind: str, name: str | None = None, split: str | None = None) -> None:
        self._pyarrow = pyarrow_for("a directory of a dataset" if path.is_dir() else KIND_NAMES[kind])
        self.path = path
        self.name = printable(path if name is None else name)
        self._kind = kind
        self._files = files_of(path, split)
        self._digest: str | None = None
        # The number of the first row of each file that has been read.
        self._begun: list[tuple[int, Path]] = []
        self.schema = self._common_schema()

    @property
    def digest(self) -> str:
        assert self._digest is not None, "the rows have not been read to their end"
        return self._digest

    def location(self, line: int) -> str:
        """``file:row`` of a row that has been read, by its number through all files."""
        first, file = next((first, file) for first, file in reversed(self._begun) if first <= line)
        return f"{self._shown(file)}:{line - first + 1}"

    def portions(self, wanted: Callable[[str], bool]) -> Iterator[Portion]:
        """All rows, with the wanted columns."""
        columns = [name for name in self.schema.names if wanted(name)]
        digests = []
        line = 1
        for file in self._files:
            self._begun.append((line, file))
            with _OpenFile(file, self._shown(file)) as open_file:
                digests.append((self._relative(file), open_file.digest))
                for batch in self._batches(open_file, columns):
                    for some in _small_enough(batch):
                        yield Portion(line, some)
                        line += some.num_rows
                open_file.check_unchanged()
        self._digest = _combined_digest(digests, self.path.is_dir())

    def _common_schema(self) -> Any:
        """The schema of the first file; an error if another file has a different one."""
        first = None
        for file in self._files:
            with _OpenFile(file, self._shown(file), hashed=False) as open_file:
                schema = self._schema(open_file)
            first = schema if first is None else first
            if not schema.equals(first):
                names = (*first.names, *schema.names)
                differs = next((name for name in names if _type(schema, name) != _type(first, name)), None)
                what = "their order" if differs is None else f'"{short(differs)}"'
                raise UsageError(
                    f"{self._shown(file)} has other columns than {self._shown(self._files[0])} ({what} differs); "
                    "run them as two jobs, or make them alike"
                )
        assert first is not None
        if len(set(first.names)) < len(first.names):
            twice = next(name for name in first.names if first.names.count(name) > 1)
            raise UsageError(f'{self.name}: two columns are called "{short(twice)}"; rename one')
        return first.remove_metadata()

    def _schema(self, open_file: _OpenFile) -> Any:
        with self._translated(open_file.name), ExitStack() as stack:
            if self._kind_of(open_file) == PARQUET:
                from pyarrow import parquet

                return stack.enter_context(parquet.ParquetFile(open_file.opened(self._pyarrow))).schema_arrow
            return stack.enter_context(self._reader(open_file)).schema

    def _batches(self, open_file: _OpenFile, columns: list[str]) -> Iterator[Any]:
        pyarrow = self._pyarrow
        schema = pyarrow.schema([self.schema.field(name) for name in columns])
        with self._translated(open_file.name):
            if self._kind_of(open_file) == PARQUET:
                from pyarrow import parquet

                # Read page by page, since a single row group may hold the whole file.
                with parquet.ParquetFile(open_file.opened(pyarrow), buffer_size=READ_AT_ONCE, pre_buffer=False) as file:
                    for batch in file.iter_batches(ROWS_AT_ONCE, columns=columns, use_threads=False):
                        yield batch.cast(schema) if batch.schema != schema else batch
                return
            with self._reader(open_file) as reader:
                stream = hasattr(reader, "read_next_batch")
                batches = reader if stream else map(reader.get_batch, range(reader.num_record_batches))
                for batch in batches:
                    yield batch.select(columns).replace_schema_metadata(None)
                if stream:
                    open_file.check_stream_ended()

    def _reader(self, open_file: _OpenFile) -> Any:
        """A reader of an Arrow file or an Arrow stream; Hugging Face's .arrow files are streams."""
        opened = open_file.opened(self._pyarrow)
        if open_file.beginning.startswith(MAGIC[ARROW]):
            return self._pyarrow.ipc.open_file(opened)
        return self._pyarrow.ipc.open_stream(opened)

    def _kind_of(self, open_file: _OpenFile) -> str:
        """The kind of a file by its content, since a directory may hold both."""
        if open_file.beginning.startswith(MAGIC[PARQUET]):
            return PARQUET
        if open_file.beginning.startswith((MAGIC[ARROW], STREAM)):
            return ARROW
        kind = KIND_NAMES[SUFFIXES.get(open_file.path.suffix, self._kind)]
        raise UsageError(f"{open_file.name} is no {kind} file: it begins otherwise; name its form with --format")

    def _translated(self, name: str) -> _ErrorsAsSentences:
        return _ErrorsAsSentences(name, self._pyarrow.ArrowException)

    def _shown(self, file: Path) -> str:
        return self.name if file == self.path else printable(file)

    def _relative(self, file: Path) -> str:
        return str(file.relative_to(self.path)) if file != self.path else ""


def digest_of_directory(path: Path, split: str | None) -> str:
    """The digest that ``ArrowSource`` has after its rows were read."""
    digests = []
    for file in files_of(path, split):
        with _OpenFile(file, printable(file)) as open_file:
            digests.append((str(file.relative_to(path)), open_file.digest))
    return _combined_digest(digests, directory=True)


def files_of(path: Path, split: str | None) -> list[Path]:
    """The file itself, or the files of a directory's split."""
    if not path.is_dir():
        if split is not None:
            raise UsageError(f"--split: {path} is a file and has no splits; leave it out")
        return [path]
    try:
        splits = _saved(path) or _parquet_files(path)
    except OSError as error:
        raise UsageError(f"{error.filename or path} cannot be read: {error.strerror}") from None
    if not splits:
        raise UsageError(f"{path} is a directory without Parquet files, and no saved dataset; give a file of prompts")
    names = ", ".join(sorted(splits))
    if split is None:
        if len(splits) > 1:
            raise UsageError(f"{path} has several splits ({names}); choose one with --split")
        return next(iter(splits.values()))
    if split not in splits:
        has = f"it has {names}" if names else "its files name none; leave it out"
        raise UsageError(f"--split: {path} has no split {split}; {has}")
    return splits[split]


def _saved(path: Path) -> dict[str, list[Path]]:
    """Files by split, of a directory that ``save_to_disk`` of Hugging Face's datasets has written."""
    if (path / SPLITS_OF_DATASET).is_file():
        names = _json(path / SPLITS_OF_DATASET).get("splits")
        if not isinstance(names, list) or not all(map(_is_plain, names)):
            raise UsageError(f"{path / SPLITS_OF_DATASET} does not name splits; save the dataset anew")
        return {name: _files_of_dataset(path / name) for name in names}
    if not (path / STATE).is_file():
        return {}
    named = _json(path / STATE).get("_split")
    return {str(named) if _is_plain(named) else "": _files_of_dataset(path)}


def _files_of_dataset(folder: Path) -> list[Path]:
    state = _json(folder / STATE)
    if state.get("_indices_data_files") or state.get("_indices_files"):
        raise UsageError(
            f"{folder} keeps an index of its rows apart, as older versions of datasets do; save the dataset anew"
        )
    listed = state.get("_data_files")
    entries = listed if isinstance(listed, list) else []
    names = [entry.get("filename") if isinstance(entry, dict) else None for entry in entries]
    if not names or not all(map(_is_plain, names)):
        raise UsageError(f"{folder / STATE} does not name the files of its rows; save the dataset anew")
    return [folder / str(name) for name in names]


def _parquet_files(path: Path) -> dict[str, list[Path]]:
    """Files by split, as the hub names them: train-00000-of-00003.parquet or train/0000.parquet."""
    found: dict[tuple[str, str], list[Path]] = {}
    for number, file in enumerate(path.rglob("*.parquet")):
        if number >= MOST_FILES:
            raise UsageError(f"{path} has more than {MOST_FILES:,} files; give a smaller directory")
        relative = file.relative_to(path)
        if any(part.startswith((".", "_")) for part in relative.parts):
            continue
        found.setdefault(_split_of(relative), []).append(file)
    # Splits of the same name in several configurations are named by their folders.
    names = [split for _, split in found]
    return {
        split if names.count(split) == 1 else f"{folder}/{split}" if folder else split: sorted(files)
        for (folder, split), files in sorted(found.items())
    }


def _split_of(relative: Path) -> tuple[str, str]:
    """A file's folder, and its split."""
    *folders, name = relative.parts
    stem = name.removesuffix(".parquet")
    if part := PART.fullmatch(stem):
        return "/".join(folders), part["split"]
    if stem in SPLITS:
        return "/".join(folders), stem
    if folders and folders[-1] in SPLITS:
        return "/".join(folders[:-1]), folders[-1]
    return "/".join(folders), "/".join(folders)


def _is_plain(name: object) -> bool:
    """Whether it is a file name without a path."""
    return isinstance(name, str) and name not in ("", ".", "..") and "/" not in name and "\0" not in name


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        raise UsageError(f"{path} is no JSON; save the dataset anew") from None
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from None
    if not isinstance(found, dict):
        raise UsageError(f"{path} is no JSON object; save the dataset anew")
    return found


def _type(schema: Any, name: str) -> Any:
    index = schema.get_field_index(name)
    return None if index < 0 else schema.field(index).type


def _small_enough(batch: Any) -> Iterator[Any]:
    """Slices of at most ROWS_AT_ONCE rows and, unless it is a single row, about MOST_BYTES_AT_ONCE bytes."""
    rows = max(1, min(ROWS_AT_ONCE, int(batch.num_rows * MOST_BYTES_AT_ONCE / max(1, batch.nbytes))))
    for start in range(0, batch.num_rows, rows):
        yield batch.slice(start, rows)


def _combined_digest(digests: Sequence[tuple[str, str]], directory: bool) -> str:
    """A single file's own digest; for a directory the digest of its files' names and digests."""
    if not directory:
        return digests[0][1]
    listed = "".join(f"{digest}  {name}\n" for name, digest in digests)
    return hashlib.sha256(listed.encode(errors="surrogateescape")).hexdigest()


def python_rows(batch: Any, where: str = "") -> list[dict[str, Any]]:
    """A batch's rows as Python values; values without a Python type (nanoseconds) as text."""
    columns = {}
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        columns[name] = _values(column, name, where)
    if not columns:
        return [{}] * batch.num_rows
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def _values(column: Any, name: str, where: str) -> list[Any]:
    try:
        return _python_values(column)
    except UnicodeDecodeError:
        raise UsageError(NO_UTF8.format(where, short(name))) from None
    except (ValueError, OverflowError, KeyError) as error:
        if column.type.num_fields:
            raise UsageError(f'{where}: the column "{short(name)}" cannot be spelled: {first_line(error)}') from None
    return [_value(column, row, name, where) for row in range(len(column))]


def _python_values(column: Any) -> list[Any]:
    if "[ns" in str(column.type) and not column.type.num_fields:
        # Python has no nanoseconds, and pyarrow would return other types if pandas is installed.
        column = column.cast("string")
    return column.to_pylist()  # type: ignore[no-any-return]


def _value(column: Any, row: int, name: str, where: str) -> Any:
    """A value; one that Python cannot hold (years after 9999, an unknown time zone) as Arrow's text, times in UTC."""
    pyarrow = pyarrow_for(where)
    kind, one = column.type, column.slice(row, 1)
    try:
        return _python_values(one)[0]
    except (ValueError, OverflowError, KeyError) as error:
        if pyarrow.types.is_timestamp(kind):
            text = one.cast(pyarrow.timestamp(kind.unit)).cast("string").to_pylist()[0]
            return text if kind.tz is None else f"{text}Z"
        if pyarrow.types.is_date(kind):
            return one.cast("string").to_pylist()[0]
        if pyarrow.types.is_duration(kind):
            return one.cast("int64").to_pylist()[0]
        raise UsageError(f'{where}: the column "{short(name)}" cannot be spelled: {first_line(error)}') from None


def check_spelled(batch: Any, where: str) -> None:
    """Refuse carried values that could not be written to the results later."""
    pyarrow = pyarrow_for(where)
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        try:
            column.validate(full=True)
        except pyarrow.ArrowInvalid:
            raise UsageError(NO_UTF8.format(where, short(name))) from None
        if any(word in str(column.type) for word in BEYOND_PYTHON):
            _values(column, name, where)


class _ErrorsAsSentences:
    """Turns pyarrow's exceptions about a file into a UsageError."""

    def __init__(self, name: str, kind: type[BaseException]) -> None:
        self._name, self._kind = name, kind

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, self._kind | OSError):
            raise UsageError(f"{self._name} cannot be read: {first_line(error)}; make the file anew") from None


class _OpenFile:
    """A file that is hashed and kept open while it is read; a change in the meantime is an error."""

    def __init__(self, path: Path, name: str, hashed: bool = True) -> None:
        self.path, self.name = path, name
        try:
            # O_NONBLOCK: opening a pipe without a writer would block.
            self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise UsageError(f"{name} cannot be read: {error.strerror}") from None
        self._before = os.fstat(self._file)
        self._streams: list[Any] = []
        try:
            if not stat.S_ISREG(self._before.st_mode):
                raise UsageError(f"{name} is not a regular file; give a file of rows")
            self.beginning = os.pread(self._file, 8, 0)
            self.digest = self._hashed() if hashed else ""
        except BaseException:
            os.close(self._file)
            raise

    def __enter__(self) -> _OpenFile:
        return self

    def __exit__(self, *_: object) -> None:
        for stream in self._streams:
            stream.close()
        os.close(self._file)

    def _hashed(self) -> str:
        found, at = hashlib.sha256(), 0
        while some := os.pread(self._file, READ_AT_ONCE, at):
            found.update(some)
            at += len(some)
        return found.hexdigest()

    def opened(self, pyarrow: Any) -> Any:
        """A pyarrow stream of the same open file that was hashed, even if the path has been replaced."""
        stream = pyarrow.OSFile(f"/proc/self/fd/{self._file}")
        self._streams.append(stream)
        return stream

    def check_stream_ended(self) -> None:
        """Refuse a stream that is cut off between two batches, or has bytes after its end: pyarrow accepts both."""
        at = self._streams[-1].tell()
        if os.pread(self._file, len(STREAM_END), max(0, at - len(STREAM_END))) != STREAM_END:
            raise UsageError(
                f"{self.name} has no end-of-stream mark, so rows may be missing; "
                "write it again, and let the writer close it"
            )
        if at < self._before.st_size:
            raise UsageError(
                f"{self.name} has {counted(self._before.st_size - at, 'byte')} after its end; "
                "put each stream into a file of its own"
            )

    def check_unchanged(self) -> None:
        after = os.fstat(self._file)
        # A program can set mtime back, but not ctime.
        if any(getattr(after, what) != getattr(self._before, what) for what in ("st_size", "st_mtime_ns", "st_ctime_ns")):
            raise UsageError(
                f"{self.name} changed while it was read, so its rows may be of two files; run it again once it is finished"
            )
