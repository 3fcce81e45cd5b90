"""Checks of a single row against the model and the job: its length, its token ids, its constraint, its tools."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from outrider.runner.job.constraints import Constraint
from outrider.runner.job.encoded_rows import ChatMarkup, Compiled, Encoded, Portion, begin_portion, key_of, with_tool_form
from outrider.runner.job.journal import StoredRow
from outrider.runner.job.prompts import BadRow, unexpected
from outrider.runner.job.record_line import INVALID, TOO_LONG_FOR_MODEL
from outrider.runner.job.requests import Request, RowError, parse_openai
from outrider.runner.job.resolved_request import resolve
from outrider.runner.job.tokenizer_process import TokenizerProcess
from outrider.runner.options.job import JobSpec
from outrider.runner.validation_errors import short
from outrider.workers.constraints.tool_forms import KNOWN
from outrider.workers.models.limits import TooManyTokens
from outrider.workers.models.model_info import ModelInfo
from outrider.workers.models.reasoning import prompt_ends_inside

UNKNOWN_FORM = (
    "the model's chat template writes calls of tools in no form that is known here "
    f'(known are {KNOWN}); leave out "tools", or choose another model'
)
# A token id as a key of logit_bias: without leading zeros, so that two keys cannot be the same token.
TOKEN_ID = re.compile("0|[1-9][0-9]{0,9}")


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
    portion = begin_portion([row], model_info, tokenizer_process, markup)()
    return RowCheck(spec, model_info, markup).check(row, number, portion)


@dataclass(frozen=True, slots=True)
class RowCheck:
    """What rows are checked against."""

    spec: JobSpec
    model_info: ModelInfo
    markup: ChatMarkup

    def check(self, row: Request, number: int, portion: Portion) -> StoredRow | BadRow:
        """Check the next request of ``portion``, which has its tokens; ``number`` is the row's in the job."""
        tokens = row.prompt_tokens if row.prompt_tokens is not None else next(portion.prompts)
        predicted = next(portion.predictions) if row.prediction else ()
        try:
            return self._check(row, number, tokens, predicted, portion.grammars)
        except Exception as error:  # an unforeseen error fails this row alone
            return unexpected(row.custom_id, row.line, "admitted", error)

    def _check(
        self, row: Request, number: int, tokens: Encoded, predicted: Encoded, compiled: Compiled
    ) -> StoredRow | BadRow:
        model_info = self.model_info
        if isinstance(tokens, str):
            code = TOO_LONG_FOR_MODEL if isinstance(tokens, TooManyTokens) else INVALID
            return BadRow(row.custom_id, row.line, tokens, code)
        if (problem := _length_problem(row, len(tokens), model_info)) is not None:
            return BadRow(row.custom_id, row.line, problem, TOO_LONG_FOR_MODEL)
        if (problem := _vocabulary_problem(row, tokens, model_info)) is not None:
            return BadRow(row.custom_id, row.line, problem)
        kind = "completion" if row.messages is None else "chat"
        request = resolve(row, len(tokens), self.spec, model_info)
        if request["min_tokens"] > request["max_tokens"]:
            least, most = request["min_tokens"], request["max_tokens"]
            problem = f'"min_tokens" is {least}, and "max_tokens" allows {most}; ask for fewer or allow more'
            return BadRow(row.custom_id, row.line, problem)
        prompt = tuple(map(int, tokens))
        # A prediction is a hint: one that the model's vocabulary lacks is ignored, not refused.
        if predicted and not isinstance(predicted, str) and max(predicted) < model_info.vocabulary:
            request["predicted"] = list(map(int, predicted[: model_info.context]))
        if row.tools and self.markup.form is None:
            return BadRow(row.custom_id, row.line, UNKNOWN_FORM)
        self._add_markup(request, row, prompt)
        if row.constraint is not None:
            request["grammar"], problem = self._grammar(row.constraint, compiled, request)
            if problem:
                return BadRow(row.custom_id, row.line, problem)
        return StoredRow(number, row.custom_id, row.line, kind, request, prompt)

    def _add_markup(self, request: dict[str, Any], row: Request, prompt: tuple[int, ...]) -> None:
        """Add how the model marks reasoning and tool calls in the row's answer."""
        if row.messages is not None and (tags := self.markup.tags) is not None:
            request["reasoning"] = (tags.opening, tags.closing, prompt_ends_inside(tags, prompt))
            if tags.shown:
                request["shown"] = list(tags.shown)
        if row.tools and (form := self.markup.form) is not None:
            names = [tool["function"]["name"] for tool in row.tools]
            request["tools"] = (form.kind, names, row.tool_choice)
            request["shown"] = sorted({*request.get("shown", ()), *form.shown})

    def _grammar(self, constraint: Constraint, compiled: Compiled, request: dict[str, Any]) -> tuple[str, str]:
        """The grammar of a row's constraint and "", or "" and why it cannot be kept."""
        key, model_info = constraint["key"], self.model_info
        if not model_info.end_tokens:
            return "", f'"{key}" cannot be enforced: {model_info.name} has no token that ends a text; remove it'
        if request["min_tokens"] or not set(model_info.end_tokens) & set(request["end_tokens"]):
            option = "--min-tokens" if request["min_tokens"] else "--ignore-eos"
            return (
                "",
                f'"{key}" determines where the answer ends, and cannot be combined with {option}; leave out one of the two',
            )
        inside = "reasoning" in request and request["reasoning"][2]
        whole = with_tool_form(constraint, self.markup, inside)
        if inside and whole is constraint:
            return "", (
                f'"{key}" cannot be enforced: the chat template begins the answer with the model\'s reasoning; turn '
                "that off "
                '("chat_template_kwargs": {"enable_thinking": false})'
            )
        assert whole is not None, "a row with tools is refused earlier if the model's form of calls is not known"
        grammar, problem = compiled[key_of(whole)]
        return grammar, f'"{key}" cannot be enforced: {problem}' if problem else ""


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
            f"the tokenizer of {model_info.name} gives the prompt the token id {max(tokens)}, and the model's "
            "vocabulary has "
            f"{model_info.vocabulary} tokens; mend its tokenizer.json, or leave that text out"
        )
    if max(tokens) >= model_info.vocabulary:
        return f'"prompt": {max(tokens)} is not a token id of {model_info.name}, which has {model_info.vocabulary}'
    if model_info.texts_below is not None and max(tokens) >= model_info.texts_below:
        return (
            f"the prompt has the token id {max(tokens)}, which stands for an image or a sound in {model_info.name}: "
            "prompts are texts; leave it out"
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
