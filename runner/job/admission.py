"""Admission: checks every row of the input, encodes its prompt and fills the journal, before anything runs."""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import count, islice
from typing import Annotated, Any, Literal, NotRequired

from pydantic import Field, StrictBool, StrictFloat, StrictInt, StrictStr, TypeAdapter, ValidationError
from typing_extensions import TypedDict

from outrider.runner.job.arrow_input import ArrowSource
from outrider.runner.job.constraints import Constraint
from outrider.runner.job.damage import WHAT_TO_DO
from outrider.runner.job.journal import FAILED, FailedRow, Journal, NamelessRow, RepeatedId, StoredRow
from outrider.runner.job.prompts import BadRow, unexpected
from outrider.runner.job.reading import InputRows
from outrider.runner.job.record_line import INVALID, TOO_LONG_FOR_MODEL
from outrider.runner.job.requests import MOST_SAMPLES, Request, RowError, parse_openai
from outrider.runner.job.results import error_record, message_of
from outrider.runner.job.row_seed import derived_seed
from outrider.runner.job.source import Source
from outrider.runner.job.tokenizer_process import TokenizerProcess
from outrider.runner.job.tools import Choice
from outrider.runner.options.job import JobSpec
from outrider.runner.validation_errors import must, short, where
from outrider.workers.constraints.tool_forms import KNOWN, ToolForm
from outrider.workers.errors import InputError, JobError, UsageError
from outrider.workers.messages import Row, Sampling
from outrider.workers.models.model_info import ModelInfo
from outrider.workers.models.reasoning import ReasoningTags, prompt_ends_inside

ROWS_AT_ONCE = 1000
# Portions of rows between reading and journalling, so that the tokenizer process need not wait for either.
PORTIONS_AHEAD = 2
MOST_ERRORS_SHOWN = 50
MOST_MODELS_SHOWN = 5
LEAST_TEMPERATURE = 1e-6
UNKNOWN_FORM = (
    "the model's chat template writes calls of tools in no form that is known here "
    f'(known are {KNOWN}); leave out "tools", or choose another model'
)
# A token id as a key of logit_bias: without leading zeros, so that two keys cannot be the same token.
TOKEN_ID = re.compile("0|[1-9][0-9]{0,9}")


@dataclass(frozen=True, slots=True)
class Admitted:
    """The number of rows (with ``--skip-bad`` the bad ones included) and the first few models that rows ask for.

    ``carried``: the columns that go through to the results; ``left_out``: those that are neither read nor carried.
    """

    rows: int
    models: set[str]
    carried: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()


def admit(
    spec: JobSpec,
    source: Source | ArrowSource,
    model_info: ModelInfo,
    tokenizer_process: TokenizerProcess,
    journal: Journal,
    meta_of: Callable[[str], dict[str, Any]],
) -> Admitted:
    """Check every row and fill the journal. Rows are streamed, so memory does not grow with the file.

    The file is read once. ``meta_of`` makes the journal's meta entries from the input's digest, known after the last row.
    """
    models: set[str] = set()
    rows = InputRows(source, spec)

    def check_and_describe() -> dict[str, Any]:
        journal.add_carried(rows.carried.take(last=True))
        if rows.of_table and not journal.counts().rows:
            raise UsageError(f"{source.name} has no rows; give a table that has some")
        _check_whole_input(spec, source, journal)
        return meta_of(source.digest)

    checked = _checked_rows(spec, source, rows, model_info, tokenizer_process, journal, models)
    journal.fill(checked, (), {}, check_and_describe)
    return Admitted(journal.counts().rows, models, rows.carried_names, tuple(rows.left_out))


def _check_whole_input(spec: JobSpec, source: Source | ArrowSource, journal: Journal) -> None:
    """Checks that need all rows: repeated ids, and whether any row is bad without ``--skip-bad``."""
    if not journal.counts().rows:
        raise UsageError(f"{source.name} holds no prompts, only blank lines; give one prompt a line")
    for repeated in journal.repeated_ids():
        _fail_repeated_id(source, journal, repeated)
    for nameless in journal.nameless_rows():
        _give_unique_id(journal, nameless)
    bad = journal.counts().failed
    if bad and not spec.skip_bad:
        raise InputError(
            *refusal_of([message_of(record) for record in islice(journal.records(FAILED), MOST_ERRORS_SHOWN)], bad)
        )


def _fail_repeated_id(source: Source | ArrowSource, journal: Journal, repeated: RepeatedId) -> None:
    """Fail a row whose id an earlier row has, under its line number; the error names other errors of the row too."""
    message = f'the id "{short(repeated.custom_id)}" stands in line {repeated.earlier_line} already; ids must differ'
    failed = _failed_row(source, repeated.row, BadRow(str(repeated.line), repeated.line, message))
    record = failed.record
    if repeated.record is not None:
        record = error_record(failed.stored, INVALID, f"{message_of(repeated.record)}; {message}")
    journal.fail_at_admission(repeated.row, failed.stored.custom_id, record)


def _give_unique_id(journal: Journal, nameless: NamelessRow) -> None:
    """Give a failed row that goes by its line number another id, since that number is the id of another row."""
    custom_id = f"line {nameless.line}"
    if nameless.taken:
        custom_id = next(name for number in count(2) if not journal.has_id(name := f"{custom_id} ({number})"))
    stored = StoredRow(nameless.row, custom_id, nameless.line, "completion", {}, ())
    error = json.loads(nameless.record)["error"]
    journal.fail_at_admission(nameless.row, custom_id, error_record(stored, error["code"], error["message"]))


def refusal_of(lines: list[str], bad: int) -> tuple[str, list[str]]:
    """Arguments of an InputError: the sentence about ``bad`` rows, and the messages of the first of them."""
    if bad > len(lines):
        lines.append(f"... and {bad - len(lines)} more")
    count, them = ("one row is wrong", "it") if bad == 1 else (f"{bad} rows are wrong", "them")
    return f"{count} and nothing was started; mend {them}, or run the others with --skip-bad", lines


def _checked_rows(
    spec: JobSpec,
    source: Source | ArrowSource,
    rows: InputRows,
    model_info: ModelInfo,
    tokenizer_process: TokenizerProcess,
    journal: Journal,
    models: set[str],
) -> Iterator[StoredRow | FailedRow]:
    """Every row, numbered in input order, with its prompt as tokens, or as a failed row."""
    number, markup = 0, ChatMarkup(model_info.path, tokenizer_process)
    for some, encoded, expected, compiled in _encoded(iter(rows), model_info, tokenizer_process, markup):
        journal.add_carried(rows.carried.take())
        for row in some:
            checked: StoredRow | BadRow
            if isinstance(row, BadRow):
                checked = row
            else:
                if row.model is not None and len(models) < MOST_MODELS_SHOWN:
                    models.add(row.model)
                tokens = row.prompt_tokens if row.prompt_tokens is not None else next(encoded)
                predicted = next(expected) if row.prediction else ()
                checked = _checked(row, tokens, predicted, compiled, number, spec, model_info, markup)
            yield _failed_row(source, number, checked) if isinstance(checked, BadRow) else checked
            number += 1


class ChatMarkup:
    """How the model's chat template marks reasoning and tool calls in an answer.

    Found out when the first conversation comes, since rows with plain prompts need neither template nor transformers.
    """

    def __init__(self, path: str, tokenizer_process: TokenizerProcess) -> None:
        self._path = path
        self._tokenizer_process = tokenizer_process

    @cached_property
    def tags(self) -> ReasoningTags | None:
        return self._tokenizer_process.reasoning_tags(self._path)

    @cached_property
    def form(self) -> ToolForm | None:
        return self._tokenizer_process.tool_form(self._path)


# By constraint (as JSON): its grammar and "", or "" and why it cannot be compiled.
Compiled = dict[str, tuple[str, str]]
# The tokens of a text, or why it cannot be encoded.
Encoded = tuple[int, ...] | str
Portion = tuple[list[Request | BadRow], Iterator[Encoded], Iterator[Encoded], Compiled]


def _encoded(
    rows: Iterator[Request | BadRow], model_info: ModelInfo, tokenizer_process: TokenizerProcess, markup: ChatMarkup
) -> Iterator[Portion]:
    """Rows in portions, each with the tokens of its prompts and predictions and the grammars of its constraints.

    The tokenizer process works on the next portions meanwhile.
    """
    ahead: deque[Callable[[], Portion]] = deque()
    more = True
    while more or ahead:
        if more:
            some = list(islice(rows, ROWS_AT_ONCE))
            more = len(some) == ROWS_AT_ONCE
            ahead.append(_begin_portion(some, model_info, tokenizer_process, markup))
        if not more or len(ahead) > PORTIONS_AHEAD:
            yield ahead.popleft()()


def _begin_portion(
    rows: list[Request | BadRow], model_info: ModelInfo, tokenizer_process: TokenizerProcess, markup: ChatMarkup
) -> Callable[[], Portion]:
    requests = [row for row in rows if isinstance(row, Request)]
    texts = [text_of(row) for row in requests if row.prompt_tokens is None]
    predictions = [row.prediction for row in requests if row.prediction]
    encoding = tokenizer_process.begin_to_encode(model_info.path, texts) if texts else list
    expecting = tokenizer_process.begin_to_encode(model_info.path, predictions, continued=True) if predictions else list
    compiling = _begin_to_compile(rows, model_info, tokenizer_process, markup)
    # The answers are taken in the order in which the calls were begun.
    return lambda: (rows, iter(encoding()), iter(expecting()), compiling())


def _begin_to_compile(
    rows: list[Request | BadRow], model_info: ModelInfo, tokenizer_process: TokenizerProcess, markup: ChatMarkup
) -> Callable[[], Compiled]:
    """Compile each distinct constraint once; with tools also for a prompt that ends inside reasoning (not known yet)."""
    asked = {
        _key_of(whole): whole
        for row in rows
        if isinstance(row, Request) and row.constraint is not None
        for inside in (False, True)
        if (whole := _with_tool_form(row.constraint, markup, inside)) is not None
    }
    if not asked or not model_info.end_tokens:
        return dict
    answer = tokenizer_process.begin_to_compile(
        model_info.path, model_info.vocabulary, model_info.end_tokens[0], list(asked.values())
    )
    return lambda: dict(zip(asked, answer(), strict=True))


def _with_tool_form(constraint: Constraint, markup: ChatMarkup, inside: bool) -> Constraint | None:
    """A constraint of kind "tools" with the model's form of tool calls; None if that form is not known.

    ``inside``: the prompt ends inside reasoning.
    """
    if constraint["kind"] != "tools":
        return constraint
    if markup.form is None:
        return None
    thoughts = None if markup.tags is None else (markup.tags.opening, markup.tags.closing, inside)
    return {**constraint, "form": markup.form, "thoughts": thoughts}


def _key_of(constraint: Constraint) -> str:
    # Keys are not sorted: the order of a schema's properties is that of the answer.
    return json.dumps(constraint)


def _failed_row(source: Source | ArrowSource, number: int, bad: BadRow) -> FailedRow:
    stored = StoredRow(number, bad.custom_id, bad.line, "completion", {}, ())
    return FailedRow(stored, error_record(stored, bad.code, f"{source.location(bad.line)}: {bad.message}"))


def text_of(row: Request) -> Any:
    """What the tokenizer process encodes: the prompt's text, or the conversation."""
    if row.messages is None:
        return row.prompt
    messages = [message.model_dump(exclude_none=True) for message in row.messages]
    options = {"options": row.template_options} if row.template_options else {}
    tools = {"tools": list(row.tools)} if row.tools else {}
    return {"messages": messages, **options, **tools} if options or tools else messages


def _checked(
    row: Request,
    tokens: Encoded,
    predicted: Encoded,
    compiled: Compiled,
    number: int,
    spec: JobSpec,
    model_info: ModelInfo,
    markup: ChatMarkup,
) -> StoredRow | BadRow:
    try:
        return _check(row, tokens, predicted, compiled, number, spec, model_info, markup)
    except Exception as error:  # an unforeseen error fails this row alone
        return unexpected(row.custom_id, row.line, "admitted", error)


def admit_one(
    entry: dict[str, Any], number: int, spec: JobSpec, model_info: ModelInfo, tokenizer_process: TokenizerProcess
) -> StoredRow | BadRow:
    """Check a single request of the batch server, given as a line of OpenAI's batch format."""
    try:
        row = parse_openai(entry, number)
    except RowError as error:
        return BadRow(str(number), number, str(error))
    except Exception as error:  # an unforeseen error fails this row alone
        return unexpected(str(number), number, "read", error)
    markup = ChatMarkup(model_info.path, tokenizer_process)
    _, encoded, expected, compiled = _begin_portion([row], model_info, tokenizer_process, markup)()
    tokens = row.prompt_tokens if row.prompt_tokens is not None else next(encoded)
    return _checked(row, tokens, next(expected, ()), compiled, number, spec, model_info, markup)


def _check(
    row: Request,
    tokens: Encoded,
    predicted: Encoded,
    compiled: Compiled,
    number: int,
    spec: JobSpec,
    model_info: ModelInfo,
    markup: ChatMarkup,
) -> StoredRow | BadRow:
    if isinstance(tokens, str):
        return BadRow(row.custom_id, row.line, tokens)
    if (problem := _length_problem(row, len(tokens), model_info)) is not None:
        return BadRow(row.custom_id, row.line, problem, TOO_LONG_FOR_MODEL)
    if (problem := _vocabulary_problem(row, tokens, model_info)) is not None:
        return BadRow(row.custom_id, row.line, problem)
    kind = "completion" if row.messages is None else "chat"
    request = _resolve(row, len(tokens), spec, model_info)
    if request["min_tokens"] > request["max_tokens"]:
        least, most = request["min_tokens"], request["max_tokens"]
        problem = f'"min_tokens" is {least} and at most {most} may be written ("max_tokens"); ask for fewer or allow more'
        return BadRow(row.custom_id, row.line, problem)
    prompt = tuple(map(int, tokens))
    if kind == "chat" and markup.tags is not None:
        request["reasoning"] = (markup.tags.opening, markup.tags.closing, prompt_ends_inside(markup.tags, prompt))
        if markup.tags.shown:
            request["shown"] = list(markup.tags.shown)
    # A prediction is a hint: one that the model's vocabulary lacks is ignored, not refused.
    if predicted and not isinstance(predicted, str) and max(predicted) < model_info.vocabulary:
        request["predicted"] = list(map(int, predicted[: model_info.context]))
    if row.tools and markup.form is None:
        return BadRow(row.custom_id, row.line, UNKNOWN_FORM)
    if row.tools and markup.form is not None:
        names = [tool["function"]["name"] for tool in row.tools]
        request["tools"] = (markup.form.kind, names, row.tool_choice)
        request["shown"] = sorted({*request.get("shown", ()), *markup.form.shown})
    if row.constraint is not None:
        inside = "reasoning" in request and request["reasoning"][2]
        request["grammar"], problem = _grammar(row.constraint, compiled, request, inside, model_info, markup)
        if problem:
            return BadRow(row.custom_id, row.line, problem)
    return StoredRow(number, row.custom_id, row.line, kind, request, prompt)


def _grammar(
    constraint: Constraint,
    compiled: Compiled,
    request: dict[str, Any],
    inside: bool,
    model_info: ModelInfo,
    markup: ChatMarkup,
) -> tuple[str, str]:
    """The grammar of a row's constraint and "", or "" and why it cannot be kept."""
    key = constraint["key"]
    if not model_info.end_tokens:
        return "", f'"{key}" cannot be kept: {model_info.name} has no token that ends a text; remove it'
    if request["min_tokens"] or not set(model_info.end_tokens) & set(request["end_tokens"]):
        option = "--min-tokens" if request["min_tokens"] else "--ignore-eos"
        return "", f'"{key}" says where the answer ends, and does not go with {option}; leave out one of the two'
    whole = _with_tool_form(constraint, markup, inside)
    if inside and whole is constraint:
        return "", (
            f'"{key}" cannot be kept: the chat template begins the answer with the model\'s thoughts; ask it for none '
            '("chat_template_kwargs": {"enable_thinking": false})'
        )
    assert whole is not None, "a row with tools is refused earlier if the model's form of calls is not known"
    grammar, problem = compiled[_key_of(whole)]
    return grammar, f'"{key}" cannot be kept: {problem}' if problem else ""


def _length_problem(row: Request, length: int, model_info: ModelInfo) -> str | None:
    asked = 1 if row.parameters.max_tokens is None else row.parameters.max_tokens
    counted = f"{length} token{'s' if length != 1 else ''}"
    if length >= model_info.context:
        return f"the prompt has {counted}, and {model_info.name} holds {model_info.context} with the answer; shorten it"
    if length + asked > model_info.context:
        return (
            f'the prompt has {counted} and "max_tokens" is {asked}, together more than the '
            f"{model_info.context} that {model_info.name} holds; ask for at most {model_info.context - length}"
        )
    return None


def _vocabulary_problem(row: Request, tokens: tuple[int, ...], model_info: ModelInfo) -> str | None:
    if max(tokens) >= model_info.vocabulary and row.prompt_tokens is None:
        return (
            f"the tokenizer of {model_info.name} makes the token id {max(tokens)} of the prompt, which the model does not "
            f"know: it has {model_info.vocabulary}; mend its tokenizer.json, or leave that text out"
        )
    if max(tokens) >= model_info.vocabulary:
        return f'"prompt": {max(tokens)} is not a token id of {model_info.name}, which has {model_info.vocabulary}'
    if model_info.texts_below is not None and max(tokens) >= model_info.texts_below:
        return (
            f"the prompt has the token id {max(tokens)}, by which {model_info.name} sees or hears something: prompts are "
            "texts; leave it out"
        )
    for token in row.parameters.logit_bias or ():
        if not TOKEN_ID.fullmatch(token) or int(token) >= model_info.vocabulary:
            return (
                f'"logit_bias": "{short(token)}" is not a token id of {model_info.name}, which has {model_info.vocabulary}'
            )
    for end in row.parameters.stop_token_ids or ():
        if end >= model_info.vocabulary:
            return f'"stop_token_ids": {end} is not a token id of {model_info.name}, which has {model_info.vocabulary}'
    return None


def _resolve(row: Request, prompt_length: int, spec: JobSpec, model_info: ModelInfo) -> dict[str, Any]:
    """The parameters that decide the row's text, with the job's defaults filled in."""
    own = row.parameters

    def value(name: str) -> Any:
        given = getattr(own, name)
        return getattr(spec, name) if given is None else given

    return {
        "max_tokens": min(value("max_tokens"), model_info.context - prompt_length),
        "min_tokens": value("min_tokens"),
        "n": own.n or 1,
        "stop": list(own.stop or ()),
        "end_tokens": sorted({*(own.stop_token_ids or ()), *(() if value("ignore_eos") else model_info.end_tokens)}),
        "logprobs": own.logprobs,
        **({"echo": row.prompt or ""} if own.echo else {}),
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
    """Temperatures below LEAST_TEMPERATURE are greedy: noise cannot change a choice, and logits / T may overflow."""
    return asked if asked >= LEAST_TEMPERATURE else 0.0


class Resolved(TypedDict):
    """The parameters that ``_resolve`` makes, as they are read back from a journal (which may be damaged)."""

    max_tokens: Annotated[StrictInt, Field(ge=0)]
    min_tokens: NotRequired[StrictInt]
    n: Annotated[StrictInt, Field(ge=1, le=MOST_SAMPLES)]
    stop: list[StrictStr]
    end_tokens: NotRequired[list[StrictInt] | None]
    logprobs: NotRequired[StrictInt | None]
    echo: NotRequired[StrictStr]
    temperature: StrictFloat
    top_p: StrictFloat
    top_k: StrictInt
    min_p: StrictFloat
    seed: Annotated[StrictInt, Field(ge=0, lt=1 << 64)]
    repetition_penalty: StrictFloat
    presence_penalty: StrictFloat
    frequency_penalty: StrictFloat
    logit_bias: list[tuple[StrictInt, StrictFloat]]
    grammar: NotRequired[StrictStr]
    # The tags around the model's reasoning, and whether the prompt ends after the opening one.
    reasoning: NotRequired[tuple[StrictStr, StrictStr, StrictBool]]
    # The form of the model's tool calls, the tools' names, and the row's "tool_choice".
    tools: NotRequired[tuple[Literal["hermes", "llama", "mistral"], list[StrictStr], Choice]]
    # Special tokens that are decoded as text, since they mark reasoning or tool calls.
    shown: NotRequired[list[StrictInt]]
    # The tokens of the row's "prediction", among which candidates are looked for.
    predicted: NotRequired[list[StrictInt]]


RESOLVED = TypeAdapter(Resolved)


def samples_of(stored: StoredRow) -> list[Row]:
    """One row for the workers per sample; its key is row * MOST_SAMPLES + sample."""
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
            echo=request.get("echo"),
            shown=tuple(request.get("shown", ())),
            predicted=tuple(request.get("predicted", ())),
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
                grammar=request.get("grammar", ""),
            ),
        )
        for sample in range(request["n"])
    ]
