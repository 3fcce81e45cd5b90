"""A job's status by its journal, for ``outrider status``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from outrider.runner.counted import counted
from outrider.runner.job.journal import FAILED, Counts, Journal
from outrider.runner.report import statistics
from outrider.runner.report.error_kinds import ErrorKind, error_kinds
from outrider.runner.report.pace import Pace, Rates, left_words, pace_of, speed_words
from outrider.runner.report.words import accepted_words, failure_lines, read_again_words

MOST_KINDS_SHOWN = 10


@dataclass(frozen=True, slots=True)
class Status:
    counts: Counts
    # Failed rows that have been put back and not ended since.
    waiting_again: int
    rates: Rates | None
    totals: dict[str, Any]
    failures: list[ErrorKind]

    def lines(self, running: bool | None) -> Iterator[str]:
        """The status in lines, without the numbers of rows."""
        speed = f"{speed_words(self.rates)}{accepted_words(self.totals)}"
        if self.counts.pending and running is not False:
            yield f"{speed}, {left_words(self.rates, self.counts.pending)}"
        elif self.rates is not None:
            yield speed
        if read_again := read_again_words(self.totals):
            yield f"read twice: {read_again}"
        if self.waiting_again:
            yield f"to be run again: {counted(self.waiting_again, 'row')} that had failed"
        if self.failures:
            yield "failed:"
            yield from (f"  {line}" for line in failure_lines(self.failures))

    def as_dict(self) -> dict[str, Any]:
        """The status for ``--json``; unknown values are null."""
        rates = self.rates
        left = None if rates is None or not self.counts.pending else rates.left(self.counts.pending)
        return {
            "waiting_again": self.waiting_again,
            "rows_per_second": None if rates is None else round(rates.rows, 4),
            "tokens_per_second": None if rates is None else round(rates.tokens, 3),
            "prompt_tokens_per_second": None if rates is None else round(rates.prompt_tokens, 3),
            "seconds_left": None if left is None else round(left, 1),
            "speed_rests_on": None if rates is None else {"rows": rates.ended, "seconds": round(rates.seconds, 1)},
            "read_again": int(self.totals.get("read_again", 0)),
            "failures": [asdict(kind) for kind in self.failures],
        }


def status_of(journal: Journal) -> Status:
    pace: Pace = pace_of(journal.meta(statistics.KEY))
    kinds = error_kinds((record for _, record in journal.whole_records(FAILED)), MOST_KINDS_SHOWN)
    return Status(journal.counts(), journal.waiting_again(), pace.rates(), journal.meta("totals") or {}, kinds)
