"""The data of a report, read from a job's journal and job.json."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.runner.job.directory import read_description
from outrider.runner.job.journal import FAILED, Counts, Journal
from outrider.runner.report import statistics
from outrider.runner.report.error_kinds import ErrorKind, error_kinds


@dataclass(frozen=True, slots=True)
class ReportData:
    """The state of a job at one moment."""

    name: str
    running: bool
    counts: Counts
    totals: dict[str, Any]
    statistics: dict[str, Any]
    description: dict[str, Any]
    pinning: list[dict[str, Any]]
    layouts: dict[str, dict[str, Any]]
    errors: list[ErrorKind]


def gather(journal: Journal, directory: Path, running: bool) -> ReportData:
    description, _ = read_description(directory, journal)
    return ReportData(
        name=directory.resolve().name,
        running=running,
        counts=journal.counts(),
        totals=journal.meta("totals") or {},
        statistics=journal.meta(statistics.KEY) or {},
        description=description,
        pinning=journal.meta("pinning") or description.get("pinning") or [],
        layouts=journal.meta("layouts") or description.get("layouts") or {},
        errors=error_kinds(record for _, record in journal.whole_records(FAILED)),
    )
