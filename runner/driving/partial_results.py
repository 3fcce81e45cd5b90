"""The rows that replicas have: their samples as they come in, and the records that they become."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from outrider.runner.driving.partial_tokens import PartialTokenStore
from outrider.runner.job.admission import samples_of
from outrider.runner.job.journal import KeptTokens, StoredRow
from outrider.runner.job.prompts import unexpected
from outrider.runner.job.record_line import INVALID
from outrider.runner.job.requests import MOST_SAMPLES
from outrider.runner.job.results import error_record, result_record
from outrider.runner.report.counters import JobCounters
from outrider.runner.report.latencies import Latencies
from outrider.workers.messages import Harvest, Row, RowFailure, RowResult

# A row's number with its record.
Records = list[tuple[int, str]]


@dataclass(slots=True)
class _Unfinished:
    """A row under way: what it is, and the samples that have ended."""

    stored: StoredRow
    samples: dict[int, RowResult] = field(default_factory=dict)


class PartialResults:
    """Counts a row in ``counters`` and ``latencies`` when it is done, so what was lost and done again counts once."""

    def __init__(self, model: str, counters: JobCounters, latencies: Latencies, source: str | None = "line") -> None:
        self._model = model
        # How messages call the input; None where rows stand in none.
        self._source = source
        self._counters = counters
        self._latencies = latencies
        self._rows: dict[int, _Unfinished] = {}
        # Rows that went to more than one replica, with the number of their samples.
        self._copied: dict[int, int] = {}
        # Samples that an earlier target had begun: the replica that reads them again, and how many tokens that is.
        self._to_read_again: dict[int, tuple[int, int]] = {}
        self.written = PartialTokenStore()

    def new(self, rows: Iterable[int]) -> list[int]:
        """Those that no replica has had."""
        return [row for row in rows if row not in self._rows]

    def add(self, rows: Iterable[StoredRow], kept: Iterable[KeptTokens], replica: int) -> list[Row]:
        """What a replica is sent for these rows: the samples that have not ended, as far as they are written.

        ``kept`` is what the journal has of those that are new.
        """
        self.written.restore(kept)
        sent = []
        for row in rows:
            if row.row in self._rows:  # a second replica gets it, or a dead one had some of its samples ready
                self._copied[row.row] = row.request["n"]
            unfinished = self._rows.setdefault(row.row, _Unfinished(row))
            samples = [each for each in samples_of(row) if each.sampling.sample not in unfinished.samples]
            for each in (self.written.resumed(sample, replica) for sample in samples):
                # Not a copy of what another one is still writing.
                if each.resumed and self.written.listens_to(each.key, replica):
                    self._to_read_again[each.key] = replica, len(each.prompt) + len(each.resumed)
                sent.append(each)
        return sent

    def keys(self, rows: Sequence[int]) -> list[int]:
        """What a replica calls the samples of rows that it need not finish."""
        return [row * MOST_SAMPLES + sample for row in rows for sample in range(self._samples(row))]

    def _samples(self, row: int) -> int:
        unfinished = self._rows.get(row)
        return self._copied.pop(row, 1) if unfinished is None else int(unfinished.stored.request["n"])

    def give_up(self, row: int, reason: str) -> str:
        """The record of a row that no replica survives."""
        return error_record(self._remove(row), "replica_died", reason)

    def take(self, harvest: Harvest, replica: int) -> tuple[Records, Records]:
        """The records of the rows that a replica's harvest completes: those done and those failed."""
        self._note_read_again(replica, harvest)
        self.written.told(replica, harvest.written)
        done: Records = []
        failed: Records = []
        for ended in harvest.ended:
            number, sample = divmod(ended.key, MOST_SAMPLES)
            row = self._rows.get(number)
            if row is None:
                continue  # a sample of a row that has failed already, or that another replica has written as well
            if isinstance(ended, RowFailure):
                failed.append((number, error_record(self._remove(number), INVALID, ended.message)))
                continue
            row.samples[sample] = ended
            self.written.ended(ended)
            if len(row.samples) == row.stored.request["n"]:
                try:
                    done.append((number, self._record(row)))
                except Exception as error:  # one row is never the end of the others
                    failed.append((number, self._not_written(row.stored, error)))
                self._remove(number)
        return done, failed

    def _note_read_again(self, replica: int, harvest: Harvest) -> None:
        """A row that waits in a target has not been read; one that it tells of has."""
        for each in (*harvest.written, *harvest.ended):
            if (reading := self._to_read_again.get(each.key)) is not None and reading[0] == replica:
                self._counters.read_again += self._to_read_again.pop(each.key)[1]

    def _remove(self, row: int) -> StoredRow:
        stored = self._rows.pop(row).stored
        for sample in range(stored.request["n"]):
            self._to_read_again.pop(row * MOST_SAMPLES + sample, None)
        self.written.forget(row, stored.request["n"])
        return stored

    def _record(self, row: _Unfinished) -> str:
        samples = [row.samples[index] for index in sorted(row.samples)]
        record = result_record(row.stored, samples, self._model)
        record.encode()  # what cannot be written into the journal shows here
        self._count(samples)
        return record

    def _not_written(self, stored: StoredRow, error: Exception) -> str:
        bad = unexpected(stored.custom_id, stored.line, "written down", error)
        place = "" if self._source is None else f"{self._source}:{bad.line}: "
        return error_record(stored, bad.code, f"{place}{bad.message}")

    def _count(self, samples: Sequence[RowResult]) -> None:
        for sample in samples:
            self._counters.tokens += len(sample.tokens)
        self._latencies.add(max(sample.seconds for sample in samples))
