"""Results and errors of a cancelled batch that found no room on the disk: read from its journal when they are asked for.

A cancelled batch's rows, and so these files, do not change any more.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

from outrider.runner.job.directory import JOURNAL
from outrider.runner.job.journal import DONE, FAILED, Counts, Journal
from outrider.runner.job.results import ERRORS, RESULTS

STATES = {RESULTS: DONE, ERRORS: FAILED}
ROWS_AT_ONCE = 100


def leave_unwritten(directory: Path) -> Counts | None:
    """Remove incomplete files, and return the numbers of rows; None if no row was ever admitted."""
    with closing(Journal(directory / JOURNAL)) as journal:
        if not journal.filled:
            return None
        for name in STATES:
            (directory / name).unlink(missing_ok=True)
        return journal.counts()


def size_of(path: Path) -> int:
    """The size of a batch's file, written or not."""
    return path.stat().st_size if path.exists() else sum(map(len, lines_of(path)))


def lines_of(path: Path) -> Iterator[bytes]:
    """The content of the file, in portions. The journal is closed in between, since a client may read slowly."""
    last = -1
    while True:
        with closing(Journal(path.with_name(JOURNAL), read_only=True)) as journal:
            some = journal.records_after(STATES[path.name], last, ROWS_AT_ONCE)
        if not some:
            return
        last = some[-1][0]
        yield "".join(f"{record}\n" for _, record in some).encode()
