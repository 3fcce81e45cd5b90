"""A batch's files in its job directory: results, errors and report are written from its journal, and at last removed."""

from __future__ import annotations

import logging
import shutil
from contextlib import closing
from pathlib import Path
from typing import Any

from outrider.runner.job.directory import JOURNAL, describe, path_exists
from outrider.runner.job.journal import Counts, Journal
from outrider.runner.job.results import error_record, write_results
from outrider.runner.report.report import write_report
from outrider.runner.report.summary import summarize
from outrider.workers.errors import JobError

logger = logging.getLogger("outrider.serve")

# By how the batch has ended: error code and sentence of rows that have not ended.
NOT_DONE = {
    "cancelled": ("batch_cancelled", "This request was not executed, since the batch was cancelled."),
    "expired": ("batch_expired", "This request could not be executed before the completion window expired."),
    "failed": ("batch_failed", "This request was not executed, since the batch failed: its errors say why."),
}
ROWS_AT_ONCE = 1000


def write_files(directory: Path, ending: str) -> Counts | None:
    """Write results, errors and report; the numbers of rows, or None if no row was ever admitted."""
    with closing(Journal(directory / JOURNAL)) as journal:
        if not journal.filled:
            return None
        if ending in NOT_DONE:
            _end_rows(journal, *NOT_DONE[ending])
        write_results(journal, directory)
        describe(directory, journal, {"summary": summarize(journal)})
        write_report(journal, directory, running=False)
        return journal.counts()


def write_ended_rows(directory: Path) -> Counts | None:
    """On a full disk: write results and errors of the rows that have ended, and no report."""
    with closing(Journal(directory / JOURNAL)) as journal:
        if not journal.filled:
            return None
        counts = journal.counts()
        if counts.pending < counts.rows:
            write_results(journal, directory)
        return counts


def draw_report(directory: Path) -> None:
    """Write the report of a batch that still runs."""
    with closing(Journal(directory / JOURNAL, read_only=True)) as journal:
        write_report(journal, directory, running=True)


def counts_of(directory: Path) -> Counts | None:
    """The numbers of rows in the journal; None if it cannot be read (the process that runs the batch will report that)."""
    try:
        with closing(Journal(directory / JOURNAL, read_only=True)) as journal:
            return journal.counts()
    except JobError:
        return None


def usage_of(directory: Path) -> dict[str, Any]:
    """A batch's ``usage``: the tokens of the rows in the output file.

    Its details are null: cached tokens depend on which rows ran together, and reasoning is told apart in texts only.
    """
    with closing(Journal(directory / JOURNAL, read_only=True)) as journal:
        prompts, answers = journal.usage()
    return {
        "input_tokens": prompts,
        "input_tokens_details": {"cached_tokens": None},
        "output_tokens": answers,
        "output_tokens_details": {"reasoning_tokens": None},
        "total_tokens": prompts + answers,
    }


def has_done_rows(directory: Path) -> bool:
    """Whether the job has results; True also if the journal is damaged and that cannot be told."""
    if not path_exists(directory / JOURNAL):
        return False
    try:
        with closing(Journal(directory / JOURNAL, read_only=True)) as journal:
            return journal.filled and journal.counts().done > 0
    except JobError:
        return True


def remove_directory(directory: Path) -> None:
    shutil.rmtree(directory, ignore_errors=True)


def discard_directory(directory: Path, counted: Counts | None = None) -> None:
    """Remove the directory of a batch that ended without files, unless it may hold finished rows."""
    if has_done_rows(directory) if counted is None else counted.done:
        said = "%s ended without files, and %s holds rows that are done, or is damaged: outrider results %s writes them"
        logger.warning(said, directory.name, directory / JOURNAL, directory)
    else:
        remove_directory(directory)


def _end_rows(journal: Journal, code: str, sentence: str) -> None:
    last = -1
    while some := journal.pending(last, ROWS_AT_ONCE):
        last = some[-1][0]
        rows = journal.load([row for row, _ in some])
        journal.record([], [(row.row, error_record(row, code, sentence)) for row in rows])
