"""Ended rows as Python objects, streamed from a job's journal; for the Python interface and tables."""

from __future__ import annotations

import heapq
import json
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from operator import itemgetter
from pathlib import Path
from typing import Any

from outrider.runner.job.carried_columns import CarriedReader
from outrider.runner.job.directory import open_job
from outrider.runner.job.journal import DONE, FAILED, Journal

ROWS_AT_ONCE = 1000


@dataclass(frozen=True, slots=True)
class Choice:
    """One of a row's answers."""

    text: str
    finish_reason: str
    logprobs: dict[str, Any] | None
    # The model's reasoning before its answer, if its chat template marks it.
    reasoning: str | None = None
    # In OpenAI's form: objects with an "id" and a "function", whose "arguments" are JSON text.
    tool_calls: tuple[dict[str, Any], ...] = ()


@dataclass(frozen=True, slots=True)
class Record:
    """A row that has ended, with its answers or with its error.

    ``tokens``: the number of generated tokens of all answers. ``text``, ``finish_reason``, ``logprobs``, ``reasoning`` and
    ``tool_calls`` are those of the first answer. For a failed row they are empty, and ``error`` and ``error_code`` are set.
    """

    id: str
    text: str
    tokens: int
    finish_reason: str
    logprobs: dict[str, Any] | None
    prompt_tokens: int = 0
    reasoning: str | None = None
    tool_calls: tuple[dict[str, Any], ...] = ()
    choices: tuple[Choice, ...] = ()
    error: str | None = None
    error_code: str | None = None
    # Carried columns of the input, as JSON values.
    carried: dict[str, Any] = field(default_factory=dict)


def results(directory: Path) -> Iterator[Record]:
    """The rows with answers, in input order."""
    return _ended(directory, (DONE,))


def errors(directory: Path) -> Iterator[Record]:
    """The rows that failed, in input order."""
    return _ended(directory, (FAILED,))


def _ended(directory: Path, states: Sequence[int]) -> Iterator[Record]:
    with closing(open_job(directory)) as journal:
        carried = CarriedReader(journal)
        for row, record in ended_rows(journal, states):
            yield replace(record, carried=carried.of(row))


def ended_rows(journal: Journal, states: Sequence[int]) -> Iterator[tuple[int, Record]]:
    """Ended rows in input order, without their carried values."""
    return heapq.merge(*(_by_portions(journal, state) for state in states), key=itemgetter(0))


def _by_portions(journal: Journal, state: int) -> Iterator[tuple[int, Record]]:
    """Read by portions: between two queries a running job can checkpoint its write-ahead log."""
    last = -1
    while some := journal.records_after(state, last, ROWS_AT_ONCE):
        for last, text in some:
            yield last, _record(json.loads(text))


def _record(line: dict[str, Any]) -> Record:
    if line["error"] is not None:
        error = line["error"]
        return Record(line["custom_id"], "", 0, "", None, error=error["message"], error_code=error["code"])
    body = line["response"]["body"]
    choices = tuple(_choice(each) for each in body["choices"])
    first, usage = choices[0], body["usage"]
    return Record(
        id=line["custom_id"],
        text=first.text,
        tokens=usage["completion_tokens"],
        finish_reason=first.finish_reason,
        logprobs=first.logprobs,
        prompt_tokens=usage["prompt_tokens"],
        reasoning=first.reasoning,
        tool_calls=first.tool_calls,
        choices=choices,
    )


def _choice(choice: dict[str, Any]) -> Choice:
    message = choice.get("message", {})
    # An answer that only calls tools has no content.
    text = (message["content"] or "") if message else choice["text"]
    calls = tuple(message.get("tool_calls", ()))
    return Choice(text, choice["finish_reason"], choice.get("logprobs"), message.get("reasoning_content"), calls)
