"""Admission: checks every row of the input, encodes its prompt and fills the journal, before anything runs."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count, islice
from typing import Any

from outrider.runner.job.arrow_input import ArrowSource
from outrider.runner.job.encoded_rows import ChatMarkup, encoded_portions
from outrider.runner.job.journal import FAILED, FailedRow, Journal, NamelessRow, RepeatedId, StoredRow
from outrider.runner.job.prompts import BadRow
from outrider.runner.job.reading import InputRows
from outrider.runner.job.record_line import INVALID
from outrider.runner.job.requests import Request
from outrider.runner.job.results import error_record, message_of
from outrider.runner.job.row_check import RowCheck
from outrider.runner.job.source import Source
from outrider.runner.job.tokenizer_process import TokenizerProcess
from outrider.runner.options.job import JobSpec
from outrider.runner.validation_errors import short
from outrider.workers.errors import InputError, UsageError
from outrider.workers.models.model_info import ModelInfo

MOST_ERRORS_SHOWN = 50
MOST_MODELS_SHOWN = 5


@dataclass(frozen=True, slots=True)
class Admitted:
    """The number of rows (with ``--skip-bad`` the bad ones included) and the first few models that rows ask for.

    ``carried``: the columns that go through to the results; ``left_out``: those that are neither read nor carried.
    """

    rows: int
    models: set[str]
    carried: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()


def admit(
    spec: JobSpec,
    source: Source | ArrowSource,
    model_info: ModelInfo,
    tokenizer_process: TokenizerProcess,
    journal: Journal,
    meta_of: Callable[[str], dict[str, Any]],
) -> Admitted:
    """Check every row and fill the journal. Rows are streamed, so memory does not grow with the file.

    The file is read once. ``meta_of`` makes the journal's meta entries from the input's digest, known after the last row.
    """
    models: set[str] = set()
    rows = InputRows(source, spec)

    def check_and_describe() -> dict[str, Any]:
        journal.add_carried(rows.carried.take(last=True))
        if rows.of_table and not journal.counts().rows:
            raise UsageError(f"{source.name} has no rows; give a table that has some")
        _check_whole_input(spec, source, journal)
        return meta_of(source.digest)

    checked = _checked_rows(spec, source, rows, model_info, tokenizer_process, journal, models)
    journal.fill(checked, (), {}, check_and_describe)
    return Admitted(journal.counts().rows, models, rows.carried_names, tuple(rows.left_out))


def _checked_rows(
    spec: JobSpec,
    source: Source | ArrowSource,
    rows: InputRows,
    model_info: ModelInfo,
    tokenizer_process: TokenizerProcess,
    journal: Journal,
    models: set[str],
) -> Iterator[StoredRow | FailedRow]:
    """Every row, numbered in input order, with its prompt as tokens, or as a failed row."""
    markup = ChatMarkup(model_info.path, tokenizer_process)
    check, number = RowCheck(spec, model_info, markup).check, 0
    for portion in encoded_portions(iter(rows), model_info, tokenizer_process, markup):
        journal.add_carried(rows.carried.take())
        for row in portion.rows:
            if isinstance(row, Request) and row.model is not None and len(models) < MOST_MODELS_SHOWN:
                models.add(row.model)
            checked = row if isinstance(row, BadRow) else check(row, number, portion)
            yield _failed_row(source, number, checked) if isinstance(checked, BadRow) else checked
            number += 1


def _failed_row(source: Source | ArrowSource, number: int, bad: BadRow) -> FailedRow:
    stored = StoredRow(number, bad.custom_id, bad.line, "completion", {}, ())
    return FailedRow(stored, error_record(stored, bad.code, f"{source.location(bad.line)}: {bad.message}"))


def _check_whole_input(spec: JobSpec, source: Source | ArrowSource, journal: Journal) -> None:
    """Checks that need all rows: repeated ids, and whether any row is bad without ``--skip-bad``."""
    if not journal.counts().rows:
        raise UsageError(f"{source.name} holds no prompts, only blank lines; give one prompt a line")
    for repeated in journal.repeated_ids():
        _fail_repeated_id(source, journal, repeated)
    for nameless in journal.nameless_rows():
        _give_unique_id(journal, nameless)
    bad = journal.counts().failed
    if bad and not spec.skip_bad:
        raise InputError(
            *refusal_of([message_of(record) for record in islice(journal.records(FAILED), MOST_ERRORS_SHOWN)], bad)
        )


def _fail_repeated_id(source: Source | ArrowSource, journal: Journal, repeated: RepeatedId) -> None:
    """Fail a row whose id an earlier row has, under its line number; the error names other errors of the row too."""
    message = f'the id "{short(repeated.custom_id)}" stands in line {repeated.earlier_line} already; ids must differ'
    failed = _failed_row(source, repeated.row, BadRow(str(repeated.line), repeated.line, message))
    record = failed.record
    if repeated.record is not None:
        record = error_record(failed.stored, INVALID, f"{message_of(repeated.record)}; {message}")
    journal.fail_at_admission(repeated.row, failed.stored.custom_id, record)


def _give_unique_id(journal: Journal, nameless: NamelessRow) -> None:
    """Give a failed row that goes by its line number another id, since that number is the id of another row."""
    custom_id = f"line {nameless.line}"
    if nameless.taken:
        custom_id = next(name for number in count(2) if not journal.has_id(name := f"{custom_id} ({number})"))
    stored = StoredRow(nameless.row, custom_id, nameless.line, "completion", {}, ())
    error = json.loads(nameless.record)["error"]
    journal.fail_at_admission(nameless.row, custom_id, error_record(stored, error["code"], error["message"]))


def refusal_of(lines: list[str], bad: int) -> tuple[str, list[str]]:
    """Arguments of an InputError: the sentence about ``bad`` rows, and the messages of the first of them."""
    if bad > len(lines):
        lines.append(f"... and {bad - len(lines)} more")
    count, them = ("one row is wrong", "it") if bad == 1 else (f"{bad} rows are wrong", "them")
    return f"{count} and nothing was started; mend {them}, or run the others with --skip-bad", lines
