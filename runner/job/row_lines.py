"""Rows that a program hands over, as the lines of an input."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import IO

from outrider.runner.validation_errors import shown
from outrider.workers.errors import JobError, UsageError


def write_lines(rows: object, file: IO[bytes]) -> str:
    """A line of JSON for each row, which is a prompt or the object that a line would hold. The digest of it all.

    The same rows always make the same lines: by the digest a resumed job knows them. ``file`` has no buffer.
    """
    if isinstance(rows, Mapping):
        raise UsageError("the input is one row; give a list of rows, such as [row]")
    if hasattr(rows, "to_dict") and hasattr(rows, "columns"):
        raise UsageError('the input is a table; give its rows: table.to_dict("records")')
    if isinstance(rows, bytes) or not isinstance(rows, Iterable):
        raise UsageError(f"the input must be a path or rows (dicts or prompts), got {shown(rows)}")
    digest = hashlib.sha256()
    for number, row in enumerate(rows, start=1):
        line = _line(row, number)
        digest.update(line)
        _write(line, file)
    if not file.tell():
        raise UsageError("the input has no rows; give one prompt at least")
    return digest.hexdigest()


def _write(line: bytes, file: IO[bytes]) -> None:
    """What the rows themselves raise while they are made is their own, so that nothing else is tried here."""
    rest = memoryview(line)
    try:
        while rest:
            rest = rest[file.write(rest) :]
    except OSError as error:
        said = f"the rows cannot be kept in a temporary file: {error.strerror}; name a directory with room with TMPDIR"
        raise JobError(said) from None


def _line(row: object, number: int) -> bytes:
    if isinstance(row, str):
        row = {"prompt": row}
    if not isinstance(row, Mapping):
        raise UsageError(f"rows:{number}: must be a dict or a prompt, got {shown(row)}")
    try:
        # Spelled in ASCII: half of a surrogate pair is then for whoever reads the line to refuse.
        return json.dumps(dict(row), allow_nan=False).encode() + b"\n"
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(f"rows:{number}: cannot be written as JSON: {error}") from None
