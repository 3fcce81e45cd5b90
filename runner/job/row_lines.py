"""Rows from a Python program (``outrider.run``), written as lines of JSON."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import IO, Any

from outrider.runner.job import unencodable_lines
from outrider.runner.temporary_file import write_all
from outrider.runner.validation_errors import short, shown
from outrider.workers.errors import InputError, UsageError

MOST_SHOWN = 50


def write_lines(rows: object, file: IO[bytes], skip_bad: bool = False) -> str:
    """Write a line of JSON for each row (a prompt, or a dict like a line of an input file); returns their digest.

    The same rows always make the same lines, so a resumed job is recognised by the digest. ``file`` is unbuffered.
    Rows that JSON cannot hold are refused together; with ``skip_bad`` their lines say so (``unencodable_lines.py``).
    """
    if isinstance(rows, Mapping):
        raise UsageError("the input is one row; give a list of rows, such as [row]")
    if hasattr(rows, "to_dict") and hasattr(rows, "columns"):
        raise UsageError('the input is a table; give its rows: table.to_dict("records")')
    if hasattr(rows, "to_pylist"):
        raise UsageError("the input is a table or a column of pyarrow; give its rows: input.to_pylist()")
    if isinstance(rows, set | frozenset):
        raise UsageError("the input is a set, whose order differs from run to run; give sorted(rows)")
    if isinstance(rows, bytes) or not isinstance(rows, Iterable):
        raise UsageError(f"the input must be a path or rows (dicts or prompts), got {shown(rows, of_python=True)}")
    digest = hashlib.sha256()
    bad = 0
    shown_bad: list[str] = []
    for number, row in enumerate(rows, start=1):
        line, problem = _line(row)
        if problem and len(shown_bad) < MOST_SHOWN:
            shown_bad.append(f"rows:{number}: {problem}")
        bad += bool(problem)
        digest.update(line)
        # Exceptions of the caller's iterable pass through; only errors of writing are translated.
        write_all("the rows", line, file)
    if bad and not skip_bad:
        from outrider.runner.job.admission import refusal_of  # imports much, and is rarely needed

        raise InputError(*refusal_of(shown_bad, bad))
    if not file.tell():
        raise UsageError("the input has no rows; give one prompt at least")
    return digest.hexdigest()


def _line(row: object) -> tuple[bytes, str]:
    """The line of a row, and its problem ("" if there is none)."""
    if isinstance(row, str):
        row = {"prompt": row}
    if not isinstance(row, Mapping):
        # An object's repr may contain its address, but the same rows have to make the same lines.
        got = (
            shown(row, of_python=True)
            if row is None or isinstance(row, int | float | bytes)
            else f"one of type {type(row).__name__}"
        )
        return _unencodable({}, f"must be a dict or a prompt, got {got}")
    try:
        return _json(dict(row)) + b"\n", ""
    except (TypeError, ValueError, RecursionError) as error:
        problem = f"cannot be written as JSON: {error}"
    said = {}
    for key, value in row.items():
        try:
            _json({key: value})
        except (TypeError, ValueError, RecursionError) as error:
            problem = _problem(key, value, error)
        else:
            said[key] = value
    return _unencodable(said, problem)


def _problem(key: object, value: object, error: Exception) -> str:
    name = short(str(key))
    if isinstance(value, float):
        return f'"{name}" is {float(value)}, which is no JSON value; leave the key out where it has none'
    return (
        f'"{name}" cannot be written as JSON: {error}; leave the key out, or give Python\'s own numbers, texts, lists and '
        "dicts (of numpy's numbers .item())"
    )


def _json(entry: Mapping[Any, Any]) -> bytes:
    # ASCII, so that a lone surrogate can be written; the reader of the line refuses it.
    return json.dumps(entry, allow_nan=False).encode()


def _unencodable(said: Mapping[Any, Any], problem: str) -> tuple[bytes, str]:
    return unencodable_lines.written(_json(said), problem), problem
