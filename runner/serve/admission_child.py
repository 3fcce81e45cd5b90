"""The admission process: checks the rows of batches, one batch after the other, and fills their journals.

A line that is not a row of the batch (no JSON, another endpoint or model, a repeated id) fails the whole batch. A row whose
body asks for something unsupported fails alone, as at OpenAI. A journal is filled in one transaction, so a kill leaves no
partial job.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterator
from contextlib import closing, suppress
from itertools import islice
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Self

from outrider.runner.job.directory import JOURNAL, is_job, job_lock
from outrider.runner.job.journal import FAILED, Journal
from outrider.runner.job.prompts import BadRow, lines_of, load_object
from outrider.runner.job.requests import RowError, frame_of
from outrider.runner.job.results import message_of
from outrider.runner.job.source import Source
from outrider.runner.job.tokenizer_process import TokenizerProcess
from outrider.runner.model_choice import may_be_native
from outrider.runner.options.job import JobSpec
from outrider.runner.options.option import build_options
from outrider.runner.prepare_job import ShownNames, prepare
from outrider.runner.printable import printable
from outrider.runner.report.counters import JobCounters
from outrider.runner.serve.batch_requests import error_entry
from outrider.runner.serve.link import Link, Message, server_link
from outrider.runner.serve.names import INPUT, shown_to_clients
from outrider.runner.validation_errors import shown
from outrider.workers.errors import JobChangedError, NoSpaceError, OutriderError, UsageError

MOST_ERRORS = 50
REPEATED = re.compile(r'.*?:(\d+): (?:.*; )?(the id ".*" stands in line \d+ already; ids must differ)', re.DOTALL)
KEYS = ("custom_id", "method", "url", "body")
NO_JSON = "This line is not parseable as valid JSON."


class Notes:
    """A ``Watcher`` of the job's preparation that forwards its messages to the server."""

    def __init__(self, line: Link) -> None:
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
    line = server_link(descriptor)
    asked: SimpleQueue[Message] = SimpleQueue()
    threading.Thread(target=_listen, args=(line, asked), daemon=True).start()
    with TokenizerProcess() as helper:
        while True:
            message = asked.get()
            if "models" in message:
                _get_ready(message["models"], helper)
            else:
                line.send(_admitted(message, line, helper))


def _listen(line: Link, asked: SimpleQueue[Message]) -> None:
    """Read requests from the server; end this process when the server ends."""
    while (message := line.receive()) is not None:
        asked.put(message)
    os._exit(0)


def _get_ready(models: list[dict[str, Any]], helper: TokenizerProcess) -> None:
    """Load the models' tokenizers beforehand, which takes seconds. An error is reported with the first batch."""
    for options in models:
        spec = build_options(JobSpec, options)
        with suppress(OutriderError):
            helper.prepare_pair(spec.model, spec.draft, native=may_be_native(spec))


def _admitted(asked: Message, line: Link, helper: TokenizerProcess) -> Message:
    spec = build_options(JobSpec, asked["options"])
    directory = spec.out
    assert directory is not None
    try:
        with job_lock(directory):
            if spec.input.exists() and (
                errors := list(islice(foreign_rows(spec.input, asked["endpoint"], asked["model"]), MOST_ERRORS))
            ):
                return {"refused": errors}
            names = ShownNames(INPUT, asked["model"])
            with closing(
                prepare(spec, directory, Notes(line), running_tokenizer=helper, shown_names=names).journal
            ) as journal:
                if errors := list(islice(repeated_rows(journal), MOST_ERRORS)):
                    return {"refused": errors}
                return {"admitted": journal.counts().rows}
    except UsageError as error:
        return {"refused": [error_entry("invalid_request", shown_to_clients(error, directory, directory.name))]}
    except NoSpaceError as error:
        return {"later": printable(error)}
    except JobChangedError as error:
        if is_job(directory):
            # The batch was admitted before, with another model or options. The model's process will report the difference.
            with closing(Journal(directory / JOURNAL, read_only=True)) as journal:
                return {"admitted": journal.counts().rows}
        return {"broken": shown_to_clients(error, directory, directory.name)}
    except OutriderError as error:
        return {"broken": shown_to_clients(error, directory, directory.name)}


def foreign_rows(path: Path, endpoint: str, model: str) -> Iterator[dict[str, Any]]:
    """Errors of lines that are not rows of this batch; what their bodies ask for is not checked here."""
    for number, line in lines_of(Source(path, INPUT, linked=True)):
        if isinstance(line, BadRow):
            yield error_entry(line.code, line.message, number)
            continue
        try:
            row = load_object(line)
        except RowError as error:
            yield error_entry("invalid_json_line", f"{NO_JSON} {error}", number)
            continue
        if (problem := _foreign(row, endpoint, model)) is not None:
            code, message, param = problem
            yield error_entry(code, message, number, param)


def _foreign(row: dict[str, Any], endpoint: str, model: str) -> tuple[str, str, str | None] | None:
    if missing := [key for key in KEYS if key not in row]:
        return "missing_required_parameter", f'"{missing[0]}" is missing', missing[0]
    try:
        _, body = frame_of(row)
    except RowError as error:
        return "invalid_request", str(error), None
    if row["url"] != endpoint:
        said = f'"url" is {shown(row["url"])}, and the batch\'s endpoint {endpoint}: they must be the same'
        return "invalid_url", said, "url"
    asked = body.get("model")
    if asked is not None and asked != model:
        said = f'"model" is {shown(asked)}, and {shown(model)} is the batch\'s: all rows of a batch ask for one model'
        return "mismatched_model", said, "body.model"
    return None


def repeated_rows(journal: Journal) -> Iterator[dict[str, Any]]:
    """Errors of rows whose id an earlier row has; the journal has them as failed."""
    for record in journal.records(FAILED):
        if found := REPEATED.fullmatch(message_of(record)):
            yield error_entry("duplicate_custom_id", found[2], int(found[1]))
