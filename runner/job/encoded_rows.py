"""Rows in portions, with their prompts and predictions as tokens and their constraints as grammars.

The tokenizer process works on the next portions while the caller handles one.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterator
from functools import cached_property
from itertools import islice
from typing import Any, NamedTuple

from outrider.runner.job.constraints import Constraint
from outrider.runner.job.prompts import BadRow
from outrider.runner.job.requests import Request
from outrider.runner.job.tokenizer_process import TokenizerProcess
from outrider.workers.constraints.tool_forms import ToolForm
from outrider.workers.models.model_info import ModelInfo
from outrider.workers.models.reasoning import ReasoningTags

ROWS_AT_ONCE = 1000
# Portions of rows between reading and journalling, so that the tokenizer process need not wait for either.
PORTIONS_AHEAD = 2


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


class Portion(NamedTuple):
    """``prompts`` has an entry for each row whose prompt is text, ``predictions`` for each row that has a prediction."""

    rows: list[Request | BadRow]
    prompts: Iterator[Encoded]
    predictions: Iterator[Encoded]
    grammars: Compiled


def encoded_portions(
    rows: Iterator[Request | BadRow], model_info: ModelInfo, tokenizer_process: TokenizerProcess, markup: ChatMarkup
) -> Iterator[Portion]:
    ahead: deque[Callable[[], Portion]] = deque()
    more = True
    while more or ahead:
        if more:
            some = list(islice(rows, ROWS_AT_ONCE))
            more = len(some) == ROWS_AT_ONCE
            ahead.append(begin_portion(some, model_info, tokenizer_process, markup))
        if not more or len(ahead) > PORTIONS_AHEAD:
            yield ahead.popleft()()


def begin_portion(
    rows: list[Request | BadRow], model_info: ModelInfo, tokenizer_process: TokenizerProcess, markup: ChatMarkup
) -> Callable[[], Portion]:
    requests = [row for row in rows if isinstance(row, Request)]
    texts = [text_of(row) for row in requests if row.prompt_tokens is None]
    predictions = [row.prediction for row in requests if row.prediction]
    encoding = tokenizer_process.begin_to_encode(model_info.path, texts, context=model_info.context) if texts else list
    expecting = tokenizer_process.begin_to_encode(model_info.path, predictions, continued=True) if predictions else list
    compiling = _begin_to_compile(rows, model_info, tokenizer_process, markup)
    # The answers are taken in the order in which the calls were begun.
    return lambda: Portion(rows, iter(encoding()), iter(expecting()), compiling())


def _begin_to_compile(
    rows: list[Request | BadRow], model_info: ModelInfo, tokenizer_process: TokenizerProcess, markup: ChatMarkup
) -> Callable[[], Compiled]:
    """Compile each distinct constraint once; with tools also for a prompt that ends inside reasoning (not known yet)."""
    asked = {
        key_of(whole): whole
        for row in rows
        if isinstance(row, Request) and row.constraint is not None
        for inside in (False, True)
        if (whole := with_tool_form(row.constraint, markup, inside)) is not None
    }
    if not asked or not model_info.end_tokens:
        return dict
    answer = tokenizer_process.begin_to_compile(
        model_info.path, model_info.vocabulary, model_info.end_tokens[0], list(asked.values())
    )
    return lambda: dict(zip(asked, answer(), strict=True))


def with_tool_form(constraint: Constraint, markup: ChatMarkup, inside: bool) -> Constraint | None:
    """A constraint of kind "tools" with the model's form of tool calls; None if that form is not known.

    ``inside``: the prompt ends inside reasoning.
    """
    if constraint["kind"] != "tools":
        return constraint
    if markup.form is None:
        return None
    thoughts = None if markup.tags is None else (markup.tags.opening, markup.tags.closing, inside)
    return {**constraint, "form": markup.form, "thoughts": thoughts}


def key_of(constraint: Constraint) -> str:
    # Keys are not sorted: the order of a schema's properties is that of the answer.
    return json.dumps(constraint)


def text_of(row: Request) -> Any:
    """What the tokenizer process encodes: the prompt's text, or the conversation."""
    if row.messages is None:
        return row.prompt
    messages = [message.model_dump(exclude_none=True) for message in row.messages]
    options = {"options": row.template_options} if row.template_options else {}
    tools = {"tools": list(row.tools)} if row.tools else {}
    return {"messages": messages, **options, **tools} if options or tools else messages
