"""report.html: a job in charts, from its journal and job.json, also while it runs."""

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

# The journal's meta entries that only reports use.
STATISTICS = (statistics.KEY, "pinning", "layouts")


def write_report(journal: Journal, directory: Path, running: bool, out: Path | None = None) -> Path:
    """Write report.html into the job's directory, or into ``out``."""
    # Imported here, since it is large and needed at the end of a job only.
    from outrider.runner.report.page import page

    path = (out or directory) / REPORT
    try:
        # File names may hold bytes that are not UTF-8.
        drawn = page(gather(journal, directory, running)).encode(errors="backslashreplace").decode()
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        kept = f"{journal.path} or {directory / DESCRIPTION}"
        raise JobError(f"{path} cannot be drawn: {kept} does not hold a job's data ({first_line(error)})") from error
    write_atomically(path, [drawn])
    return path


def report_of(directory: Path, out: Path | None = None) -> tuple[Path, str | None]:
    """Write the report of a job directory; its path, and a note if job.json is damaged."""
    with closing(open_job(directory)) as journal:
        _, note = read_description(directory, journal)
        folder = output_folder(directory, out)
        check_not_input(folder / REPORT, directory, journal)
        return write_report(journal, directory, bool(is_held(directory)), folder), note


def drop_damaged_statistics(journal: Journal, directory: Path) -> str | None:
    """Before a job is resumed: drop statistics that cannot be read, and return a note about it."""
    from outrider.runner.report.page import page

    try:
        page(gather(journal, directory, running=True))
        kept = journal.meta(statistics.KEY)
        statistics.JobStatistics(kept, 1).record()
        statistics.summary_of(kept)
        statistics.over_time(kept)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, JobError):
        journal.forget(STATISTICS)
        # If something else is damaged, this raises.
        page(gather(journal, directory, running=True))
        return "the statistics that the job has kept are damaged, and begin anew"
    return None
