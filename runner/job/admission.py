"""From an input file to a journal full of rows: the whole file is checked before anything runs."""

from __future__ import annotations

import hashlib
import re
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Annotated, Any, NotRequired

from pydantic import Field, StrictFloat, StrictInt, StrictStr, TypeAdapter, ValidationError
from typing_extensions import TypedDict

from outrider.runner.job.damage import WHAT_TO_DO
from outrider.runner.job.journal import FAILED, FailedRow, Journal, Repeat, StoredRow
from outrider.runner.job.prompts import INVALID, BadRow, read_rows, unexpected
from outrider.runner.job.requests import MOST_SAMPLES, Request
from outrider.runner.job.results import error_record, message_of
from outrider.runner.job.source import Source
from outrider.runner.job.tokenizer_process import Office
from outrider.runner.options import JobSpec
from outrider.runner.validation_errors import must, short, where
from outrider.workers.errors import InputError, JobError, UsageError
from outrider.workers.messages import Row, Sampling
from outrider.workers.models.cards import ModelCard

ROWS_AT_ONCE = 1000
# So many portions lie between reading and writing, so that the office need not wait for either.
PORTIONS_AHEAD = 2
MOST_ERRORS_SHOWN = 50
MOST_MODELS_SHOWN = 5
LEAST_TEMPERATURE = 1e-6
# How a key spells a token id: one way only, so that no two keys are one token.
TOKEN_ID = re.compile("0|[1-9][0-9]{0,9}")


@dataclass(frozen=True, slots=True)
class Admitted:
    """How many rows there are, bad ones included where they may be skipped, and some of the models they ask for."""

    rows: int
    models: set[str]


def admit(
    spec: JobSpec,
    source: Source,
    card: ModelCard,
    office: Office,
    journal: Journal,
    meta_of: Callable[[str], dict[str, Any]],
) -> Admitted:
    """Check every row and write the journal, row by row: memory does not grow with the file.

    The file is read once. ``meta_of`` takes the digest of what was read, which is known when all of it was.
    """
    models: set[str] = set()

    def settle() -> dict[str, Any]:
        _settle(spec, source, journal)
        return meta_of(source.digest)

    journal.fill(_checked_rows(spec, source, card, office, models), (), {}, settle)
    return Admitted(journal.counts().rows, models)


def _settle(spec: JobSpec, source: Source, journal: Journal) -> None:
    """Refuse what only shows when all rows are there: ids that repeat, and a file that may not be run."""
    if not journal.counts().rows:
        raise UsageError(f"{source.name} holds no prompts, only blank lines; give one prompt a line")
    # Going by the number of its line, a refused row may take the id of a later one: hence again, until nothing changes.
    while sum(_refuse(source, journal, repeat) for repeat in journal.repeats()):
        pass
    bad = journal.counts().failed
    if bad and not spec.skip_bad:
        raise InputError(
            *_report([message_of(record) for record in islice(journal.records(FAILED), MOST_ERRORS_SHOWN)], bad)
        )


def _refuse(source: Source, journal: Journal, repeat: Repeat) -> int:
    """The first row with an id keeps it. Whatever its line holds, no other one stands in the results under it."""
    message = f'the id "{repeat.custom_id}" stands in line {repeat.earlier_line} already; ids must differ'
    failed = _failed_row(source, repeat.row, BadRow(str(repeat.line), repeat.line, message))
    record = failed.record
    if repeat.record is not None:
        record = error_record(failed.stored, INVALID, message_of(repeat.record))
    journal.refuse(repeat.row, failed.stored.custom_id, record)
    return 1


def _report(lines: list[str], bad: int) -> tuple[str, list[str]]:
    if bad > len(lines):
        lines.append(f"... and {bad - len(lines)} more")
    count = "one row is wrong" if bad == 1 else f"{bad} rows are wrong"
    return f"{count} and nothing was started; mend them, or run the others with --skip-bad", lines


def _checked_rows(
    spec: JobSpec, source: Source, card: ModelCard, office: Office, models: set[str]
) -> Iterator[StoredRow | FailedRow]:
    """Every row with its prompt in tokens, or what is wrong with it, numbered as they come."""
    number = 0
    for some, encoded in _encoded(read_rows(source, spec.format), card.path, office):
        for row in some:
            checked: StoredRow | BadRow
            if isinstance(row, BadRow):
                checked = row
            else:
                if row.model is not None and len(models) < MOST_MODELS_SHOWN:
                    models.add(row.model)
                tokens = row.prompt_tokens if row.prompt_tokens is not None else next(encoded)
                checked = _checked(row, tokens, number, spec, card)
            yield _failed_row(source, number, checked) if isinstance(checked, BadRow) else checked
            number += 1


def _encoded(
    rows: Iterator[Request | BadRow], path: str, office: Office
) -> Iterator[tuple[list[Request | BadRow], Iterator[tuple[int, ...] | str]]]:
    """Rows in portions, each with the tokens of its texts. The office works on the next ones meanwhile."""
    ahead: deque[tuple[list[Request | BadRow], Callable[[], list[tuple[int, ...] | str]]]] = deque()
    more = True
    while more or ahead:
        if more:
            some = list(islice(rows, ROWS_AT_ONCE))
            more = len(some) == ROWS_AT_ONCE
            texts = [_text_of(row) for row in some if isinstance(row, Request) and row.prompt_tokens is None]
            ahead.append((some, office.begin_to_encode(path, texts) if texts else list))
        if not more or len(ahead) > PORTIONS_AHEAD:
            some, answer = ahead.popleft()
            yield some, iter(answer())


def _failed_row(source: Source, number: int, bad: BadRow) -> FailedRow:
    stored = StoredRow(number, bad.custom_id, bad.line, "completion", {}, ())
    return FailedRow(stored, error_record(stored, bad.code, f"{source.name}:{bad.line}: {bad.message}"))


def _text_of(row: Request) -> Any:
    if row.messages is None:
        return row.prompt
    return [message.model_dump(exclude_none=True) for message in row.messages]


def _checked(
    row: Request, tokens: tuple[int, ...] | str, number: int, spec: JobSpec, card: ModelCard
) -> StoredRow | BadRow:
    try:
        return _check(row, tokens, number, spec, card)
    except Exception as error:  # one row is never the end of the others
        return unexpected(row.custom_id, row.line, "admitted", error)


def _check(row: Request, tokens: tuple[int, ...] | str, number: int, spec: JobSpec, card: ModelCard) -> StoredRow | BadRow:
    problem = tokens if isinstance(tokens, str) else _limits_problem(row, tokens, card)
    if problem is not None:
        return BadRow(row.custom_id, row.line, problem)
    kind = "completion" if row.messages is None else "chat"
    request = _resolve(row, len(tokens), spec, card)
    if request["min_tokens"] > request["max_tokens"]:
        least, most = request["min_tokens"], request["max_tokens"]
        problem = f'"min_tokens" is {least} and at most {most} may be written ("max_tokens"); ask for fewer or allow more'
        return BadRow(row.custom_id, row.line, problem)
    return StoredRow(number, row.custom_id, row.line, kind, request, tuple(map(int, tokens)))


def _limits_problem(row: Request, tokens: tuple[int, ...], card: ModelCard) -> str | None:
    asked = row.parameters.max_tokens or 1
    if len(tokens) >= card.context:
        return f"the prompt has {len(tokens)} tokens, and {card.name} holds {card.context} with the answer; shorten it"
    if len(tokens) + asked > card.context:
        return (
            f'the prompt has {len(tokens)} tokens and "max_tokens" is {asked}, together more than the '
            f"{card.context} that {card.name} holds; ask for at most {card.context - len(tokens)}"
        )
    if max(tokens) >= card.vocabulary and row.prompt_tokens is None:
        return (
            f"the tokenizer of {card.name} makes the token id {max(tokens)} of the prompt, which the model does not know: "
            f"it has {card.vocabulary}; mend its tokenizer.json, or leave that text out"
        )
    if max(tokens) >= card.vocabulary:
        return f'"prompt": {max(tokens)} is not a token id of {card.name}, which has {card.vocabulary}'
    for token in row.parameters.logit_bias or ():
        if not TOKEN_ID.fullmatch(token) or int(token) >= card.vocabulary:
            return f'"logit_bias": "{short(token)}" is not a token id of {card.name}, which has {card.vocabulary}'
    for end in row.parameters.stop_token_ids or ():
        if end >= card.vocabulary:
            return f'"stop_token_ids": {end} is not a token id of {card.name}, which has {card.vocabulary}'
    return None


def _resolve(row: Request, prompt_length: int, spec: JobSpec, card: ModelCard) -> dict[str, Any]:
    """Everything that decides the row's text, the job's defaults filled in."""
    own = row.parameters

    def value(name: str) -> Any:
        given = getattr(own, name)
        return getattr(spec, name) if given is None else given

    return {
        "max_tokens": min(value("max_tokens"), card.context - prompt_length),
        "min_tokens": value("min_tokens"),
        "n": own.n or 1,
        "stop": list(own.stop or ()),
        "end_tokens": sorted({*(own.stop_token_ids or ()), *(() if value("ignore_eos") else card.end_tokens)}),
        "logprobs": own.logprobs,
        "temperature": _temperature(float(value("temperature"))),
        "top_p": float(value("top_p")),
        "top_k": max(0, value("top_k")),
        "min_p": float(value("min_p")),
        "seed": own.seed % (1 << 64) if own.seed is not None else derived_seed(spec.seed, row.custom_id),
        "repetition_penalty": float(1.0 if own.repetition_penalty is None else own.repetition_penalty),
        "presence_penalty": float(own.presence_penalty or 0.0),
        "frequency_penalty": float(own.frequency_penalty or 0.0),
        "logit_bias": sorted((int(token), float(bias)) for token, bias in (own.logit_bias or {}).items()),
    }


def _temperature(asked: float) -> float:
    """Below this no noise can matter, and dividing by it may overflow: that is greedy."""
    return asked if asked >= LEAST_TEMPERATURE else 0.0


def derived_seed(job_seed: int, custom_id: str) -> int:
    """A row's own seed where it names none: the same wherever the row stands in the file."""
    digest = hashlib.blake2b(f"{job_seed}:{custom_id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


class Resolved(TypedDict):
    """What ``_resolve`` makes, as a journal gives it back."""

    max_tokens: Annotated[StrictInt, Field(ge=1)]
    min_tokens: NotRequired[StrictInt]
    n: Annotated[StrictInt, Field(ge=1, le=MOST_SAMPLES)]
    stop: list[StrictStr]
    end_tokens: NotRequired[list[StrictInt] | None]
    logprobs: NotRequired[StrictInt | None]
    temperature: StrictFloat
    top_p: StrictFloat
    top_k: StrictInt
    min_p: StrictFloat
    seed: Annotated[StrictInt, Field(ge=0, lt=1 << 64)]
    repetition_penalty: StrictFloat
    presence_penalty: StrictFloat
    frequency_penalty: StrictFloat
    logit_bias: list[tuple[StrictInt, StrictFloat]]


RESOLVED = TypeAdapter(Resolved)


def samples_of(stored: StoredRow) -> list[Row]:
    """The rows for the workers: one a sample. Their keys tell which row and which sample."""
    try:
        request = RESOLVED.validate_python(stored.request)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise JobError(
            f"the job's journal is damaged: row {stored.row} (line {stored.line}): {where(first)} {must(first)}; "
            f"{WHAT_TO_DO}"
        ) from None
    ends = request.get("end_tokens")
    return [
        Row(
            key=stored.row * MOST_SAMPLES + sample,
            prompt=stored.prompt,
            max_tokens=request["max_tokens"],
            stop=tuple(request["stop"]),
            logprobs=request.get("logprobs"),
            sampling=Sampling(
                temperature=request["temperature"],
                top_p=request["top_p"],
                top_k=request["top_k"],
                min_p=request["min_p"],
                seed=request["seed"],
                sample=sample,
                repetition_penalty=request["repetition_penalty"],
                presence_penalty=request["presence_penalty"],
                frequency_penalty=request["frequency_penalty"],
                logit_bias=tuple(request["logit_bias"]),
                min_tokens=request.get("min_tokens", 0),
                end_tokens=None if ends is None else tuple(ends),
            ),
        )
        for sample in range(request["n"])
    ]
