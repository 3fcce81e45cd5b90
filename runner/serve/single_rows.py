"""Single requests among the rows of batches: they wait in memory, come first, and their text is reported as it grows."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from outrider.runner.driving import schedule_events
from outrider.runner.driving.partial_results import PartialResults
from outrider.runner.job.journal import StoredRow
from outrider.runner.job.record_line import INVALID, TOO_LONG_FOR_MODEL
from outrider.runner.job.requests import MOST_SAMPLES
from outrider.runner.report.counters import JobCounters
from outrider.runner.report.latencies import Latencies
from outrider.runner.serve.running import Failure
from outrider.workers.constraints.tool_forms import certain
from outrider.workers.messages import Harvest, Row
from outrider.workers.models.reasoning import Split, split

if TYPE_CHECKING:  # it imports Ray
    from outrider.runner.driving.replica import Replica

# The replacement character, which decoding gives for an incomplete UTF-8 character.
INCOMPLETE = "\ufffd"


@dataclass(slots=True)
class SingleRow:
    """One request; ``tokens``: those reported so far, by sample."""

    request: str
    stored: StoredRow
    streamed: bool
    tokens: dict[int, list[int]] = field(default_factory=dict)


# Callbacks: the tokens so far of one sample of a request, and the request's record.
TellTokens = Callable[[SingleRow, int, tuple[int, ...]], None]
TellRecord = Callable[[SingleRow, dict[str, Any]], None]


class SingleRows:
    """The single requests that wait or are in progress, by the row numbers of their ``StoredRow``."""

    def __init__(self, model: str, tell_tokens: TellTokens, tell_record: TellRecord) -> None:
        self._rows: dict[int, SingleRow] = {}
        self._waiting: deque[int] = deque()
        self._partial_results = PartialResults(model, JobCounters(), Latencies(), None)
        self._tell_tokens = tell_tokens
        self._tell_record = tell_record

    @property
    def streaming(self) -> bool:
        return any(row.streamed for row in self._rows.values())

    def add(self, row: SingleRow) -> None:
        self._rows[row.stored.row] = row
        self._waiting.append(row.stored.row)

    def withdraw(self, request: str) -> int | None:
        """Take a request out of the queue; its row number if it has not ended. Then cancel the row, and call ``forget``."""
        number = next((number for number, row in self._rows.items() if row.request == request), None)
        if number is not None and number in self._waiting:
            self._waiting.remove(number)
        return number

    def forget(self, number: int) -> None:
        if self._rows.pop(number, None) is None:
            return
        if not self._partial_results.new([number]):
            self._partial_results.give_up(number, "nobody waits for it")

    def pending(self, count: int) -> list[tuple[int, int]]:
        return [(self._waiting.popleft(), 0) for _ in range(min(count, len(self._waiting)))]

    def rows_to_send(self, numbers: Sequence[int], replica: int) -> list[Row]:
        rows = [self._rows[number].stored for number in numbers if number in self._rows]
        return self._partial_results.add(rows, (), replica)

    def keys(self, rows: Sequence[int]) -> list[int]:
        return self._partial_results.keys(rows)

    def give_up(self, row: int, reason: str) -> None:
        if row in self._rows:
            self._end(row, self._partial_results.give_up(row, reason))

    def replica_stopped(self, replica: int) -> None:
        self._partial_results.partial_tokens.replica_gone(replica)

    def take(self, replica: Replica, harvest: Harvest) -> list[schedule_events.RowsEnded]:
        for some in harvest.written:
            number, sample = divmod(some.key, MOST_SAMPLES)
            row = self._rows.get(number)
            if row is None or not row.streamed:
                continue
            tokens = row.tokens.setdefault(sample, [])
            # Two replicas may have the row (a straggler) and report the same tokens.
            if some.start <= len(tokens) < some.start + len(some.tokens):
                tokens.extend(some.tokens[len(tokens) - some.start :])
                self._tell_tokens(row, sample, tuple(tokens))
        done, failed = self._partial_results.take(harvest, replica.number)
        for number, record in (*done, *failed):
            self._end(number, record)
        ended = tuple(number for number, _ in (*done, *failed))
        return [schedule_events.RowsEnded(replica.number, ended)] if ended else []

    def _end(self, number: int, record: str) -> None:
        if (row := self._rows.pop(number, None)) is not None:
            self._tell_record(row, json.loads(record))


class StreamedText:
    """The text of one streamed answer. What may still change (a stop string, a mark, a half character) is held back."""

    def __init__(self, stored: StoredRow) -> None:
        self._stops: Sequence[str] = stored.request["stop"]
        self._ends = frozenset(stored.request.get("end_tokens") or ())
        self._reasoning: tuple[str, str, bool] | None = stored.request.get("reasoning")
        self._marks = [*self._stops, *map(str, (self._reasoning or ())[:2])]
        tools: tuple[str, Sequence[str], str] | None = stored.request.get("tools")
        self._form = tools[0] if tools else None
        # Special tokens that are decoded as text.
        self.shown = tuple(stored.request.get("shown", ()))
        self._told = Split("", "")

    def shown_tokens(self, tokens: Sequence[int]) -> tuple[int, ...]:
        return tuple(token for token in tokens if token not in self._ends)

    def grown(self, text: str) -> Split:
        """The new part of the text so far that can be sent."""
        first = min((found for stop in self._stops if (found := text.find(stop)) >= 0), default=len(text))
        text = text[:first].rstrip(INCOMPLETE)
        text = text[: len(text) - max((_begun(mark, text) for mark in self._marks), default=0)]
        opening = self._reasoning[0] if self._reasoning else ""
        if opening.startswith(text.lstrip()):
            return Split(None, "")
        parts = split(text, *self._reasoning) if self._reasoning else Split(None, text)
        if self._form is not None:
            # Tool calls are sent whole at the end, so text that may be one is held back.
            parts = parts._replace(content=parts.content[: certain(parts.content, self._form)])
        return self._new(parts)

    def rest(self, reasoning: str | None, text: str) -> Split | None:
        """The rest of the whole answer; None if the answer does not begin with the text that was sent."""
        begun = (reasoning or "").startswith(self._told.reasoning or "") and text.startswith(self._told.content)
        return self._new(Split(reasoning, text)) if begun else None

    def _new(self, now: Split) -> Split:
        """The part after what was sent; nothing if the text has changed (``rest`` decides at the end)."""
        told_reasoning, told_content = self._told.reasoning or "", self._told.content
        reasoning, content = now.reasoning or "", now.content
        if not (reasoning.startswith(told_reasoning) and content.startswith(told_content)):
            return Split(None, "")
        self._told = Split(reasoning, content)
        return Split(reasoning[len(told_reasoning) :] or None, content[len(told_content) :])


def _begun(mark: str, text: str) -> int:
    """The length of the longest proper prefix of ``mark`` that the text ends with."""
    return next((length for length in range(len(mark) - 1, 0, -1) if text.endswith(mark[:length])), 0)


def failure_of(code: str, message: str) -> Failure:
    """The failure of a request whose row has this error."""
    status = 400 if code in (INVALID, TOO_LONG_FOR_MODEL) else 500
    return Failure(status, message, TOO_LONG_FOR_MODEL if code == TOO_LONG_FOR_MODEL else None)
