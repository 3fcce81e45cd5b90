"""report.html: a job in pictures, from its journal and its job.json, at any time, also while it runs."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

from outrider.runner.job.directory import DESCRIPTION, REPORT, open_job, output_folder, read_description
from outrider.runner.job.journal import Journal
from outrider.runner.job.lock import is_held
from outrider.runner.job.results import write_atomically
from outrider.runner.job.tables import check_not_input
from outrider.runner.report import statistics
from outrider.runner.report.report_data import gather
from outrider.workers.errors import JobError, first_line

# What the journal keeps for a report alone.
STATISTICS = (statistics.KEY, "pinning", "layouts")


def write_report(journal: Journal, directory: Path, running: bool, out: Path | None = None) -> Path:
    """Into the job's directory, or another."""
    # The page is most of the code, and only a finished job needs it.
    from outrider.runner.report.page import page

    path = (out or directory) / REPORT
    try:
        # The names of files may hold bytes that are no UTF-8, which no file of text can.
        drawn = page(gather(journal, directory, running)).encode(errors="backslashreplace").decode()
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        kept = f"{journal.path} or {directory / DESCRIPTION}"
        raise JobError(f"{path} cannot be drawn: what {kept} holds is not what a job is ({first_line(error)})") from error
    write_atomically(path, [drawn])
    return path


def report_of(directory: Path, out: Path | None = None) -> tuple[Path, str | None]:
    """The same for a job that is only a directory; with what there is to tell of its job.json."""
    with closing(open_job(directory)) as journal:
        _, note = read_description(directory, journal)
        folder = output_folder(directory, out)
        check_not_input(folder / REPORT, directory, journal)
        return write_report(journal, directory, bool(is_held(directory)), folder), note


def drop_damaged_statistics(journal: Journal, directory: Path) -> str | None:
    """Before a job adds to what its journal keeps for a report: what of that cannot be read begins anew, with a note."""
    from outrider.runner.report.page import page

    try:
        page(gather(journal, directory, running=True))
        kept = journal.meta(statistics.KEY)
        statistics.JobStatistics(kept, 1).record()
        statistics.summary_of(kept)
        statistics.over_time(kept)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, JobError):
        journal.forget(STATISTICS)
        # If it was something else, that is told now.
        page(gather(journal, directory, running=True))
        return "the statistics that the job has kept are damaged, and begin anew"
    return None
