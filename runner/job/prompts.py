"""Rows from an input file of lines (JSON or text); a line that is wrong becomes a ``BadRow`` with its number."""

from __future__ import annotations

import json
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, Protocol

from outrider.runner.job import unencodable_lines
from outrider.runner.job.arrow_input import files_of
from outrider.runner.job.nesting import MOST_LEVELS, check_levels
from outrider.runner.job.record_line import INTERNAL, INVALID
from outrider.runner.job.requests import Request, RowError, parse_openai, parse_simple
from outrider.runner.job.source import MOST_LINE_BYTES, Source
from outrider.runner.printable import printable
from outrider.runner.validation_errors import short
from outrider.workers.errors import UsageError, first_line

# A surrogate as an escape in JSON, and a lone one in a decoded string.
SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
LONE_SURROGATE = re.compile("[\ud800-\udfff]")
BLANK = "the line is blank; remove it or give a prompt"
ONE_A_LINE = "the file is one JSON list, and each row must be a line of its own: jq -c '.[]' writes a list so"
ONE_LINE = "each row must be one line: jq -c . writes objects so"
# How a file begins that is one JSON list of rows, whose entries are no texts to go on from.
LIST_OF_OBJECTS = re.compile(rb"\s*\[\s*(\{\s*\"|$)")
TOO_LONG = f"the line is longer than {MOST_LINE_BYTES >> 20} MiB; split it"


@dataclass(frozen=True, slots=True)
class BadRow:
    """A row that cannot be run. Without an id of its own its ``custom_id`` is its line number."""

    custom_id: str
    line: int
    message: str
    code: str = INVALID


class ColumnMapping(Protocol):
    """Makes a request from a line whose keys are columns (by the options --template, --prompt-column, --carry, --chat).

    A line of text has one column: ``prompt``, or ``text`` if the options say what the prompt is made of.
    """

    own_prompt: bool

    def __call__(self, entry: dict[str, Any], line: int) -> Request: ...

    def claimed_id(self, entry: dict[str, Any]) -> object:
        """The row's id as it is given, valid or not."""


def check_input(path: Path, split: str | None = None) -> None:
    """Refuse an input that is missing, unreadable or empty, before anything else is done."""
    try:
        kind = path.stat().st_mode
        if stat.S_ISDIR(kind) or split is not None:
            files_of(path, split)
            return
        if not stat.S_ISREG(kind):
            raise UsageError(f"{path} is no file and no pipe; give a file of prompts")
        with path.open("rb") as stream:
            if not stream.read(1):
                raise UsageError(f"{path} is empty; give one prompt a line")
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from None


def read_rows(
    source: Source, form: str = "auto", mapping: ColumnMapping | None = None, may_have_columns: bool = False
) -> Iterator[Request | BadRow]:
    """Every row of the file in order, streamed; a row that is wrong is a ``BadRow``.

    ``may_have_columns``: the command has options for columns, and errors about unknown keys name them.
    Repeated ids are found later, in the journal: there may be millions.
    """
    jsonl = _by_name(source.suffix, form)
    for number, line in lines_of(source):
        if isinstance(line, BadRow):
            yield line
            continue
        if jsonl is None:
            jsonl = line.lstrip().startswith(b"{") or LIST_OF_OBJECTS.match(line) is not None
        yield _read_row(line, number, jsonl, mapping, may_have_columns)


def lines_of(source: Source) -> Iterator[tuple[int, bytes | BadRow]]:
    """The lines that are not blank, with their numbers, and a ``BadRow`` for a blank line between two others."""
    blank = 0
    for number, raw in enumerate(source.lines(), start=1):
        line = b"" if raw is None else raw
        if number == 1:
            line = line.removeprefix(b"\xef\xbb\xbf")
        if raw is not None and not line.strip():
            blank += 1
            continue
        # Blank lines at the end of a file are ignored; between rows they are errors, since a row may be missing.
        yield from ((lost, BadRow(str(lost), lost, BLANK)) for lost in range(number - blank, number))
        blank = 0
        yield number, BadRow(str(number), number, TOO_LONG) if raw is None else line


def _read_row(
    line: bytes, number: int, jsonl: bool, mapping: ColumnMapping | None, may_have_columns: bool
) -> Request | BadRow:
    try:
        if not jsonl:
            return _parse_text_line(line, number, mapping)
        return _parse_json_line(line, number, mapping, may_have_columns)
    except RowError as error:
        said, problem = unencodable_lines.read(line) or (line, str(error))
        return BadRow(_claimed_id(said, number, mapping), number, problem)
    except Exception as error:  # an unforeseen error fails this row alone
        return unexpected(_claimed_id(line, number, mapping), number, "read", error)


def unexpected(custom_id: str, line: int, what: str, error: Exception) -> BadRow:
    """A row that failed by an unforeseen exception, that is, by a fault of outrider."""
    sentence = f'the row "{short(custom_id)}" could not be {what}: {type(error).__name__}: {first_line(error)}'
    return BadRow(custom_id, line, f"{sentence}; this is a fault of outrider, please report it", INTERNAL)


def _by_name(suffix: str, form: str) -> bool | None:
    """Whether lines are JSON, by ``--format`` or the file's name; None if the first row is to decide."""
    if form != "auto":
        return form == "jsonl"
    return {**dict.fromkeys((".jsonl", ".json", ".ndjson"), True), ".txt": False, ".text": False}.get(suffix)


def _decode(raw: bytes) -> str:
    try:
        return raw.decode("utf-8").rstrip("\r\n")
    except UnicodeDecodeError as error:
        raise RowError(f"byte {error.start + 1} of the line is not UTF-8; convert the file to UTF-8") from None


def _parse_text_line(raw: bytes, number: int, mapping: ColumnMapping | None) -> Request:
    text = _decode(raw)
    if "\0" in text:
        raise RowError("the line holds a NUL, which is no text; convert the file to UTF-8")
    if "\r" in text:
        raise RowError("the line holds a carriage return inside; let lines end with a line feed (\\n)")
    if mapping is not None:
        return mapping({"prompt" if mapping.own_prompt else "text": text}, number)
    return Request(custom_id=str(number), line=number, prompt=text)


def _parse_json_line(raw: bytes, number: int, mapping: ColumnMapping | None, may_have_columns: bool) -> Request:
    entry = load_object(raw)
    if mapping is not None:
        return mapping(entry, number)
    if "url" in entry or "body" in entry or "custom_id" in entry:
        return parse_openai(entry, number)
    return parse_simple(entry, number, may_have_columns)


def load_object(raw: bytes) -> dict[str, Any]:
    """The object of a line of JSON, strictly parsed."""
    text = _decode(raw)
    try:
        entry = strictly_parsed(text)
    except json.JSONDecodeError as error:
        hint = "; let lines end with a line feed (\\n)" if "\r" in text else ""
        hint = "; the line holds a NUL: convert the file to UTF-8" if "\0" in text else hint
        hint = {"[": f"; {ONE_A_LINE}", "{": f"; {ONE_LINE}"}.get(text.strip(), hint)
        raise RowError(f"not valid JSON: {json_problem(error)}{hint}") from None
    except RowError:
        raise
    except (ValueError, RecursionError) as error:
        raise RowError(json_problem(error)) from None
    if not isinstance(entry, dict):
        hint = f"; {ONE_A_LINE}" if isinstance(entry, list) and any(isinstance(each, dict) for each in entry) else ""
        raise RowError(f"a line must be a JSON object, got {text[:40]!r}{hint}")
    return entry


def json_problem(error: ValueError | RecursionError) -> str:
    """Why ``strictly_parsed`` or the decoding before it failed, as part of a sentence."""
    match error:
        case json.JSONDecodeError():
            # Some of Python's messages end in " at" or ":", with the position to follow.
            said = error.msg.rstrip(": ").removesuffix(" at")
            return f"{said} at {f'line {error.lineno}, ' if error.lineno > 1 else ''}column {error.colno}"
        case UnicodeDecodeError():
            return f"byte {error.start + 1} is not UTF-8"
        case RecursionError():
            return f"lists and objects are nested too deeply, by more than {MOST_LEVELS} levels"
    # Python limits whole numbers to 4,300 digits.
    return "a number has too many digits" if "digits" in str(error) else str(error)


def strictly_parsed(text: str) -> Any:
    """Parse JSON; NaN and infinities, repeated keys and lone surrogates are errors, since parsers differ on them."""
    entry = check_levels(text, json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=_without_repeated_keys))
    if SURROGATE.search(text):
        _refuse_halves(entry)
    return entry


def _without_repeated_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object; an error if a key repeats: Python would take the last value, other parsers the first."""
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise RowError(f'the key "{short(printable(twice))}" stands twice in one object; leave out one')
    return found


def _refuse_halves(entry: Any) -> None:
    """Refuse lone surrogates: JSON can spell them, but UTF-8 cannot hold them."""
    try:
        json.dumps(entry, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = f"\\u{ord(error.object[error.start]):04x}"
        raise RowError(f"half of a surrogate pair ({half}) is not a character") from None


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON value")


def _claimed_id(raw: bytes, number: int, mapping: ColumnMapping | None) -> str:
    try:
        entry = json.loads(raw)
        claimed = entry.get("custom_id", entry.get("id")) if mapping is None else mapping.claimed_id(entry)
    except (ValueError, AttributeError, RecursionError):
        claimed = None
    return id_of_bad(claimed, number)


def id_of_bad(claimed: object, number: int) -> str:
    """The id of a bad row's error record: the one that it claims if that is usable, else its line number."""
    usable = isinstance(claimed, str | int) and not isinstance(claimed, bool) and claimed != ""
    return str(claimed) if usable and not LONE_SURROGATE.search(str(claimed)) else str(number)
