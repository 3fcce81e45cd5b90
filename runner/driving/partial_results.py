"""Rows in progress: collects the samples of each row from harvests, and makes the row's record when all have ended."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from outrider.runner.driving.partial_tokens import PartialTokenStore
from outrider.runner.job.journal import KeptTokens, StoredRow
from outrider.runner.job.prompts import unexpected
from outrider.runner.job.record_line import INVALID
from outrider.runner.job.requests import MOST_SAMPLES
from outrider.runner.job.resolved_request import samples_of
from outrider.runner.job.results import error_record, result_record
from outrider.runner.report.counters import JobCounters
from outrider.runner.report.latencies import Latencies
from outrider.workers.errors import encodable
from outrider.workers.messages import Harvest, Row, RowFailure, RowResult

# A row's number with its record.
Records = list[tuple[int, str]]


@dataclass(slots=True)
class _Unfinished:
    """A row in progress, and its samples that have ended."""

    stored: StoredRow
    samples: dict[int, RowResult] = field(default_factory=dict)


class PartialResults:
    """A row is counted in ``counters`` and ``latencies`` when its record is made, so work done twice counts once."""

    def __init__(self, model: str, counters: JobCounters, latencies: Latencies, source: str | None = "line") -> None:
        # It may be a path that is not UTF-8, which no record can hold.
        self._model = encodable(model)
        # The input's name in messages; None for rows that do not come from a file.
        self._source = source
        self._counters = counters
        self._latencies = latencies
        self._rows: dict[int, _Unfinished] = {}
        # Rows that went to more than one replica, with the number of their samples.
        self._copied: dict[int, int] = {}
        # Samples that a target had begun before it died: the replica that prefills them again, and the number of tokens.
        self._to_read_again: dict[int, tuple[int, int]] = {}
        self.partial_tokens = PartialTokenStore()

    def new(self, rows: Iterable[int]) -> list[int]:
        """The rows that no replica has been sent yet."""
        return [row for row in rows if row not in self._rows]

    def add(self, rows: Iterable[StoredRow], kept: Iterable[KeptTokens], replica: int) -> list[Row]:
        """The samples of these rows that have not ended, each with the tokens that it has so far, to send to a replica.

        ``kept``: the tokens that the journal has of rows that no replica has been sent yet.
        """
        self.partial_tokens.restore(kept)
        sent = []
        for row in rows:
            if row.row in self._rows:  # sent before, to a replica that has died or that still has it
                self._copied[row.row] = row.request["n"]
            unfinished = self._rows.setdefault(row.row, _Unfinished(row))
            samples = [each for each in samples_of(row) if each.sampling.sample not in unfinished.samples]
            for each in (self.partial_tokens.resumed(sample, replica) for sample in samples):
                # Tokens that a copy of a straggler prefills are not counted: the first replica still has the row.
                if each.resumed and self.partial_tokens.is_reporter(each.key, replica):
                    self._to_read_again[each.key] = replica, len(each.prompt) + len(each.resumed)
                sent.append(each)
        return sent

    def keys(self, rows: Sequence[int]) -> list[int]:
        """The keys of all samples of these rows."""
        return [row * MOST_SAMPLES + sample for row in rows for sample in range(self._samples(row))]

    def _samples(self, row: int) -> int:
        unfinished = self._rows.get(row)
        return self._copied.pop(row, 1) if unfinished is None else int(unfinished.stored.request["n"])

    def give_up(self, row: int, reason: str) -> str:
        """The error record of a row on which replicas have died repeatedly."""
        return error_record(self._remove(row), "replica_died", reason)

    def take(self, harvest: Harvest, replica: int) -> tuple[Records, Records]:
        """The records of the rows that this harvest completes: those done, and those failed."""
        self._note_read_again(replica, harvest)
        self.partial_tokens.add_reported(replica, harvest.written)
        done: Records = []
        failed: Records = []
        for ended in harvest.ended:
            number, sample = divmod(ended.key, MOST_SAMPLES)
            row = self._rows.get(number)
            if row is None:
                continue  # the row has ended already: another sample failed, or another replica was first
            if isinstance(ended, RowFailure):
                failed.append((number, error_record(self._remove(number), INVALID, ended.message)))
                continue
            row.samples[sample] = ended
            self.partial_tokens.sample_ended(ended)
            if len(row.samples) == row.stored.request["n"]:
                try:
                    done.append((number, self._record(row)))
                except Exception as error:  # a row whose record cannot be made fails alone
                    failed.append((number, self._unwritable(row.stored, error)))
                self._remove(number)
        return done, failed

    def _note_read_again(self, replica: int, harvest: Harvest) -> None:
        """Count the tokens of a resumed sample as read again once the target reports it, not while it waits there."""
        for each in (*harvest.written, *harvest.ended):
            if (reading := self._to_read_again.get(each.key)) is not None and reading[0] == replica:
                self._counters.read_again += self._to_read_again.pop(each.key)[1]

    def _remove(self, row: int) -> StoredRow:
        stored = self._rows.pop(row).stored
        for sample in range(stored.request["n"]):
            self._to_read_again.pop(row * MOST_SAMPLES + sample, None)
        self.partial_tokens.forget(row, stored.request["n"])
        return stored

    def _record(self, row: _Unfinished) -> str:
        samples = [row.samples[index] for index in sorted(row.samples)]
        record = result_record(row.stored, samples, self._model)
        record.encode()  # raises on text that SQLite cannot store (lone surrogates)
        self._count(samples)
        return record

    def _unwritable(self, stored: StoredRow, error: Exception) -> str:
        bad = unexpected(stored.custom_id, stored.line, "written down", error)
        place = "" if self._source is None else f"{self._source}:{bad.line}: "
        return error_record(stored, bad.code, f"{place}{bad.message}")

    def _count(self, samples: Sequence[RowResult]) -> None:
        for sample in samples:
            self._counters.tokens += len(sample.tokens)
        self._latencies.add(max(sample.seconds for sample in samples))
