"""A process that admits one batch: its rows are checked and written into the journal, and then it ends.

Killed at any moment it leaves no half of a job: the journal is filled in one transaction.
"""

from __future__ import annotations

import json
import os
import re
import threading
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from outrider.runner.job.directory import held
from outrider.runner.job.source import Source
from outrider.runner.option import build_options
from outrider.runner.options import JobSpec
from outrider.runner.prepare_job import prepare
from outrider.runner.printable import printable
from outrider.runner.report.counters import JobCounters
from outrider.runner.serve.batch_requests import error_entry
from outrider.runner.serve.link import Line, server_line
from outrider.runner.validation_errors import shown
from outrider.workers.errors import InputError, OutriderError, UsageError

MOST_ERRORS = 50
WITH_LINE = re.compile(r"^.*?:(\d+): (.*)$", re.DOTALL)
REPEATED = re.compile(r'the id ".*" stands in line \d+ already')
KEYS = ("custom_id", "method", "url", "body")


class Notes:
    """What the preparation says on its way goes to the server's own output."""

    def __init__(self, line: Line) -> None:
        self._line = line

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        pass

    def say(self, text: str) -> None:
        self._line.send({"note": printable(text)})

    def show(self, totals: JobCounters) -> None:
        pass


def main(descriptor: int) -> None:
    line = server_line(descriptor)
    asked = line.receive()
    assert asked is not None
    threading.Thread(target=_end_with_the_server, args=(line,), daemon=True).start()
    line.send(_admitted(asked, line))


def _end_with_the_server(line: Line) -> None:
    while line.receive() is not None:
        pass
    os._exit(1)


def _admitted(asked: dict[str, Any], line: Line) -> dict[str, Any]:
    spec = build_options(JobSpec, asked["options"])
    directory = spec.out
    assert directory is not None
    try:
        with held(directory):
            if spec.input.exists() and (
                errors := list(islice(foreign_rows(spec.input, asked["endpoint"], asked["model"]), MOST_ERRORS))
            ):
                return {"refused": errors}
            journal = prepare(spec, directory, Notes(line)).journal
            rows = journal.counts().rows
            journal.close()
            return {"admitted": rows}
    except InputError as error:
        return {"refused": [entry for entry in map(_entry, error.lines) if entry is not None]}
    except UsageError as error:
        return {"refused": [error_entry("invalid_request", printable(error))]}
    except OutriderError as error:
        return {"broken": printable(error)}


def _entry(said: str) -> dict[str, Any] | None:
    """``file:line: sentence``, as the API shows it."""
    found = WITH_LINE.match(said)
    if found is None:
        return error_entry("invalid_request", said)
    code = "duplicate_custom_id" if REPEATED.search(found[2]) else "invalid_request"
    return error_entry(code, found[2], int(found[1]))


def foreign_rows(path: Path, endpoint: str, model: str) -> Iterator[dict[str, Any]]:
    """Rows that outrider itself could run, and that are no rows of this batch. What else is wrong, admission says."""
    for number, line in enumerate(Source(path).lines(), start=1):
        if line is None or not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            yield error_entry("invalid_json_line", "This line is not parseable as valid JSON.", number)
            continue
        if (problem := _foreign(row, endpoint, model)) is not None:
            code, message, param = problem
            yield error_entry(code, message, number, param)


def _foreign(row: object, endpoint: str, model: str) -> tuple[str, str, str | None] | None:
    if not isinstance(row, dict):
        return "invalid_json_line", "a line must be an object", None
    if missing := [key for key in KEYS if key not in row]:
        return "missing_required_parameter", f'"{missing[0]}" is missing', missing[0]
    if row["url"] != endpoint:
        said = f'"url" is {shown(row["url"])}, and the batch\'s endpoint {endpoint}: they must be the same'
        return "invalid_url", said, "url"
    asked = row["body"].get("model") if isinstance(row["body"], dict) else None
    if asked is not None and asked != model:
        said = f'"model" is {shown(asked)}, and {shown(model)} in the first row: a batch has one model'
        return "mismatched_model", said, "body.model"
    return None
