"""The input file: rows in, or every problem with its file:line."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from outrider.runner.requests import Request, RowError, parse_openai, parse_simple
from outrider.workers.errors import UsageError

# Half of a surrogate pair, as JSON may spell it and as it then stands in a string.
SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
HALF = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True, slots=True)
class BadRow:
    """A row that cannot be run. ``custom_id`` is its line number where it gave none of its own."""

    custom_id: str
    line: int
    message: str


def check_input(path: Path) -> None:
    """Refuse a file that is not there, not readable or empty, before anything else is looked at."""
    try:
        if path.is_dir():
            raise UsageError(f"{path} is a directory; give a file of prompts")
        with path.open("rb") as stream:
            if not stream.read(1):
                raise UsageError(f"{path} is empty; give one prompt a line")
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from None


def file_digest(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def read_rows(path: Path, form: str = "auto") -> Iterator[Request | BadRow]:
    """Every row of the file in order, streamed; a row that is wrong comes as a ``BadRow``.

    Whether ids repeat is not looked at here: that takes all of them, and there may be millions.
    """
    parse_line = _parse_json_line if _is_jsonl(path, form) else _parse_text_line
    blank: list[int] = []
    with path.open("rb") as stream:
        for number, raw in enumerate(stream, start=1):
            raw = raw.removeprefix(b"\xef\xbb\xbf") if number == 1 else raw
            if not raw.strip():
                blank.append(number)
                continue
            # Blank lines at the end of a file are nothing; between rows they are rows that somebody lost.
            yield from (BadRow(str(line), line, "the line is blank; remove it or give a prompt") for line in blank)
            blank.clear()
            try:
                yield parse_line(raw, number)
            except RowError as error:
                yield BadRow(_claimed_id(raw, number), number, str(error))


def _is_jsonl(path: Path, form: str) -> bool:
    if form != "auto":
        return form == "jsonl"
    if path.suffix in (".jsonl", ".json", ".ndjson"):
        return True
    if path.suffix in (".txt", ".text"):
        return False
    with path.open("rb") as stream:
        first = next((line for line in stream if line.strip()), b"")
    return first.lstrip(b"\xef\xbb\xbf \t").startswith(b"{")


def _decode(raw: bytes) -> str:
    try:
        return raw.decode("utf-8").rstrip("\r\n")
    except UnicodeDecodeError as error:
        raise RowError(f"byte {error.start + 1} of the line is not UTF-8; convert the file to UTF-8") from None


def _parse_text_line(raw: bytes, number: int) -> Request:
    return Request(custom_id=str(number), line=number, prompt=_decode(raw))


def _parse_json_line(raw: bytes, number: int) -> Request:
    entry = _load_object(_decode(raw))
    if "url" in entry or "body" in entry or "custom_id" in entry:
        return parse_openai(entry, number)
    return parse_simple(entry, number)


def _load_object(text: str) -> dict[str, Any]:
    try:
        entry = json.loads(text, parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        raise RowError(f"not valid JSON: {error.msg} at column {error.colno}") from None
    except (ValueError, RecursionError) as error:
        raise RowError(f"not valid JSON: {error}") from None
    if SURROGATE.search(text):
        _refuse_halves(entry)
    if not isinstance(entry, dict):
        raise RowError(f"a line must be a JSON object, got {text[:40]!r}")
    return entry


def _refuse_halves(entry: Any) -> None:
    """JSON can spell half of a surrogate pair, which is no character and which no file can hold."""
    try:
        json.dumps(entry, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = f"\\u{ord(error.object[error.start]):04x}"
        raise RowError(f"half of a surrogate pair ({half}) is not a character") from None
    except RecursionError as error:
        raise RowError(f"not valid JSON: {error}") from None


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON value")


def _claimed_id(raw: bytes, number: int) -> str:
    """The id that a bad row would have had: its error record should carry it."""
    try:
        entry = json.loads(raw)
        claimed = entry.get("custom_id", entry.get("id"))
    except (ValueError, AttributeError, RecursionError):
        claimed = None
    usable = isinstance(claimed, str | int) and not isinstance(claimed, bool)
    return str(claimed) if usable and not HALF.search(str(claimed)) else str(number)
