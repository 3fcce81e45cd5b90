"""report.html: a job in pictures, from its journal and its job.json, at any time, also while it runs."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from outrider.runner.job.directory import DESCRIPTION, REPORT, read_description
from outrider.runner.job.journal import FAILED, Counts, Journal
from outrider.runner.job.results import write_atomically
from outrider.runner.report import statistics as account
from outrider.workers.errors import JobError, first_line

MOST_KINDS = 20
# What the journal keeps for a report alone.
STATISTICS = (account.KEY, "pinning", "layouts")
MOST_EXAMPLES = 5
# Long messages often differ only in their ends.
SAME_UP_TO = 160


@dataclass(slots=True)
class ErrorKind:
    code: str
    message: str
    rows: int = 0
    examples: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Job:
    """What there is to say of a job at one moment."""

    name: str
    running: bool
    counts: Counts
    totals: dict[str, Any]
    account: dict[str, Any]
    description: dict[str, Any]
    pinning: list[dict[str, Any]]
    layouts: dict[str, dict[str, Any]]
    errors: list[ErrorKind]


def write_report(journal: Journal, directory: Path, running: bool, out: Path | None = None) -> Path:
    """Into the job's directory, or another."""
    # The page is most of the code, and only a finished job needs it.
    from outrider.runner.report.page import page

    path = (out or directory) / REPORT
    try:
        drawn = page(gather(journal, directory, running))
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        kept = f"{journal.path} or {directory / DESCRIPTION}"
        raise JobError(f"{path} cannot be drawn: what {kept} holds is not what a job is ({first_line(error)})") from error
    write_atomically(path, [drawn])
    return path


def drop_damaged_statistics(journal: Journal, directory: Path) -> str | None:
    """Before a job adds to what its journal keeps for a report: what of that cannot be read begins anew, with a note."""
    from outrider.runner.report.page import page

    try:
        page(gather(journal, directory, running=True))
        kept = journal.meta(account.KEY)
        account.Account(kept, 1).record()
        account.summary_of(kept)
        account.over_time(kept)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, JobError):
        journal.forget(STATISTICS)
        # If it was something else, that is told now.
        page(gather(journal, directory, running=True))
        return "the statistics that the job has kept are damaged, and begin anew"
    return None


def gather(journal: Journal, directory: Path, running: bool) -> Job:
    description, _ = read_description(directory, journal)
    return Job(
        name=directory.resolve().name,
        running=running,
        counts=journal.counts(),
        totals=journal.meta("totals") or {},
        account=journal.meta(account.KEY) or {},
        description=description,
        pinning=journal.meta("pinning") or description.get("pinning") or [],
        layouts=journal.meta("layouts") or description.get("layouts") or {},
        errors=error_kinds(journal.whole_records(FAILED)),
    )


def error_kinds(records: Iterable[str]) -> list[ErrorKind]:
    """Errors that say the same, the most frequent first; the rare ones beyond the bound stand together."""
    found: dict[tuple[str, str], ErrorKind] = {}
    for record in records:
        entry = json.loads(record)
        error = entry["error"]
        key = (error["code"], _kind(error["message"]))
        if key not in found and len(found) >= 50 * MOST_KINDS:
            key = ("others", "")
        kind = found.setdefault(key, ErrorKind(key[0], error["message"] if key[1] else "of many kinds"))
        kind.rows += 1
        if len(kind.examples) < MOST_EXAMPLES:
            kind.examples.append(entry["custom_id"])
    kinds = sorted(found.values(), key=lambda kind: -kind.rows)
    shown, rest = kinds[:MOST_KINDS], kinds[MOST_KINDS:]
    if rest:
        examples = [example for kind in rest for example in kind.examples][:MOST_EXAMPLES]
        shown.append(ErrorKind("others", f"{len(rest)} other kinds", sum(kind.rows for kind in rest), examples))
    return shown


def _kind(message: str) -> str:
    """A message without its numbers, which only say where."""
    return re.sub(r"\d+", "#", message)[:SAME_UP_TO]
