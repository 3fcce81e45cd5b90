"""What one row of a job asks for: parameters as OpenAI's clients and simple lines spell them, strictly checked."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StrictBool,
    StrictFloat,
    StrictInt,
    StrictStr,
    ValidationError,
)

# What clients send of their own accord and that changes nothing here, with the values that are harmless.
HARMLESS: dict[str, tuple[Any, ...]] = {
    "stream": (False,),
    "stream_options": (),
    "echo": (False,),
    "best_of": (1,),
    "suffix": (),
    "response_format": ({"type": "text"},),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
}
IGNORED = frozenset({"model", "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"})
MOST_STOPS = 16
MOST_SAMPLES = 128
MOST_LOGPROBS = 20

Number = StrictFloat | StrictInt


def _as_tuple(value: object) -> object:
    if not isinstance(value, str | list):
        raise ValueError("be a text or a list of texts")
    return (value,) if isinstance(value, str) else tuple(value)


def _ids_as_tuple(value: object) -> object:
    if not isinstance(value, list):
        raise ValueError("be a list of token ids")
    return tuple(value)


def _text_of_parts(value: object) -> object:
    """A message's content may come as a list of text parts."""
    if isinstance(value, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in value):
        return "".join(str(part.get("text", "")) for part in value)
    return value


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Message(_Strict):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[StrictStr, BeforeValidator(_text_of_parts)]
    name: StrictStr | None = None


class Parameters(_Strict):
    """How a row is continued; None leaves it to the job's own default.

    ``logprobs`` is how many of the likeliest tokens to tell of beside each token written, in chats as in completions.
    """

    max_tokens: Annotated[StrictInt, Field(ge=1)] | None = None
    min_tokens: Annotated[StrictInt, Field(ge=0)] | None = None
    temperature: Annotated[Number, Field(ge=0, le=100)] | None = None
    top_p: Annotated[Number, Field(gt=0, le=1)] | None = None
    top_k: Annotated[StrictInt, Field(ge=-1)] | None = None
    min_p: Annotated[Number, Field(ge=0, le=1)] | None = None
    seed: Annotated[StrictInt, Field(ge=-(1 << 63), lt=1 << 63)] | None = None
    n: Annotated[StrictInt, Field(ge=1, le=MOST_SAMPLES)] | None = None
    stop: Annotated[
        tuple[Annotated[StrictStr, Field(min_length=1)], ...] | None,
        BeforeValidator(_as_tuple),
        Field(max_length=MOST_STOPS),
    ] = None
    stop_token_ids: Annotated[
        tuple[Annotated[StrictInt, Field(ge=0)], ...] | None,
        BeforeValidator(_ids_as_tuple),
        Field(max_length=MOST_STOPS),
    ] = None
    ignore_eos: StrictBool | None = None
    logprobs: int | None = None
    repetition_penalty: Annotated[Number, Field(gt=0, le=100)] | None = None
    presence_penalty: Annotated[Number, Field(ge=-100, le=100)] | None = None
    frequency_penalty: Annotated[Number, Field(ge=-100, le=100)] | None = None
    logit_bias: dict[str, Annotated[Number, Field(ge=-100, le=100)]] | None = None


class Request(_Strict):
    """One row: exactly one of ``prompt``, ``prompt_tokens`` and ``messages`` is set."""

    custom_id: str
    line: int
    prompt: str | None = None
    prompt_tokens: tuple[int, ...] | None = None
    messages: tuple[Message, ...] | None = None
    parameters: Parameters = Parameters()
    # What the row's author thinks will answer; the job's own model does.
    model: str | None = None


class RowError(ValueError):
    """What is wrong with a row, and what to do; the caller adds file:line."""


def parse_openai(entry: dict[str, Any], line: int) -> Request:
    """A line of OpenAI's batch format."""
    unknown = sorted(entry.keys() - {"custom_id", "method", "url", "body"})
    if unknown:
        raise RowError(f'unknown key "{unknown[0]}"; a batch line has "custom_id", "method", "url" and "body"')
    custom_id, body, url = entry.get("custom_id"), entry.get("body"), entry.get("url")
    if not isinstance(custom_id, str) or not custom_id:
        raise RowError(f'"custom_id" must be a text that is not empty, got {_shown(custom_id)}')
    if entry.get("method", "POST") != "POST":
        raise RowError(f'"method" must be "POST", got {_shown(entry.get("method"))}')
    if not isinstance(body, dict):
        raise RowError(f'"body" must be an object, got {_shown(body)}')
    fields, model = _clean(body), _model(body)
    if url == "/v1/completions":
        if "messages" in fields:
            raise RowError('"messages" belongs to /v1/chat/completions; /v1/completions takes "prompt"')
        _completion_logprobs(fields)
        return Request(custom_id=custom_id, line=line, **_prompt(fields), parameters=_parameters(fields), model=model)
    if url == "/v1/chat/completions":
        if "prompt" in fields:
            raise RowError('"prompt" belongs to /v1/completions; /v1/chat/completions takes "messages"')
        _chat_logprobs(fields)
        return Request(
            custom_id=custom_id, line=line, messages=_messages(fields), parameters=_parameters(fields), model=model
        )
    raise RowError(f'"url" must be "/v1/completions" or "/v1/chat/completions", got {_shown(url)}')


def parse_simple(entry: dict[str, Any], line: int) -> Request:
    """A line such as ``{"id": …, "prompt": …, "max_tokens": …}``, or with "messages" in place of "prompt"."""
    fields, model = _clean(entry), _model(entry)
    custom_id = fields.pop("id", None)
    if custom_id is None:
        custom_id = str(line)
    elif isinstance(custom_id, bool) or not isinstance(custom_id, str | int) or custom_id == "":
        raise RowError(f'"id" must be a text or a whole number, got {_shown(custom_id)}')
    if "prompt" in fields and "messages" in fields:
        raise RowError('a row has either "prompt" or "messages", not both')
    if "messages" in fields:
        _chat_logprobs(fields)
        return Request(
            custom_id=str(custom_id), line=line, messages=_messages(fields), parameters=_parameters(fields), model=model
        )
    _completion_logprobs(fields)
    return Request(custom_id=str(custom_id), line=line, **_prompt(fields), parameters=_parameters(fields), model=model)


def _clean(body: dict[str, Any]) -> dict[str, Any]:
    """The fields that matter, without nulls and without what changes nothing."""
    fields = {key: value for key, value in body.items() if value is not None and key not in IGNORED}
    for key, harmless in HARMLESS.items():
        if key in fields and fields.pop(key) not in harmless:
            raise RowError(f'"{key}" = {_shown(body[key])} is not supported; remove it')
    if "max_completion_tokens" in fields:
        if "max_tokens" in fields:
            raise RowError('"max_tokens" and "max_completion_tokens" mean the same; give one')
        fields["max_tokens"] = fields.pop("max_completion_tokens")
    return fields


def _model(body: dict[str, Any]) -> str | None:
    model = body.get("model")
    if model is not None and not isinstance(model, str):
        raise RowError(f'"model" must be a text, got {_shown(model)}')
    return model


def _prompt(fields: dict[str, Any]) -> dict[str, Any]:
    if "prompt" not in fields:
        raise RowError('"prompt" is missing')
    prompt = fields.pop("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, str):
        if not prompt:
            raise RowError('"prompt" is empty')
        return {"prompt": prompt}
    if isinstance(prompt, list) and prompt and all(type(token) is int and token >= 0 for token in prompt):
        return {"prompt_tokens": tuple(prompt)}
    if isinstance(prompt, list) and prompt and all(isinstance(part, str) for part in prompt):
        raise RowError('"prompt" holds several texts; give each a line of its own')
    raise RowError(f'"prompt" must be a text or a list of token ids, got {_shown(prompt)}')


def _messages(fields: dict[str, Any]) -> tuple[Message, ...]:
    messages = fields.pop("messages", None)
    if not isinstance(messages, list) or not messages:
        raise RowError(f'"messages" must be a list that is not empty, got {_shown(messages)}')
    parsed = []
    for index, message in enumerate(messages):
        try:
            parsed.append(Message.model_validate(message))
        except ValidationError as error:
            raise RowError(f'"messages"[{index}]: {_first_problem(error)}') from None
    return tuple(parsed)


def _completion_logprobs(fields: dict[str, Any]) -> None:
    """ "logprobs" of a completion is a number."""
    if fields.get("top_logprobs"):
        raise RowError('"top_logprobs" belongs to chats; a completion takes "logprobs" with a number')
    fields.pop("top_logprobs", None)
    wanted = fields.pop("logprobs", False)
    if wanted is not False:
        fields["logprobs"] = _count_of_logprobs("logprobs", wanted)


def _chat_logprobs(fields: dict[str, Any]) -> None:
    """ "logprobs" of a chat is true or false, with the number in "top_logprobs"."""
    wanted, top = fields.pop("logprobs", False), fields.pop("top_logprobs", 0)
    if not isinstance(wanted, bool):
        raise RowError(f'"logprobs" of a chat must be true or false (the number is "top_logprobs"), got {_shown(wanted)}')
    if top and not wanted:
        raise RowError('"top_logprobs" needs "logprobs": true')
    if wanted:
        fields["logprobs"] = _count_of_logprobs("top_logprobs", top)


def _count_of_logprobs(key: str, value: object) -> int:
    if type(value) is not int or not 0 <= value <= MOST_LOGPROBS:
        raise RowError(f'"{key}" must be a whole number from 0 to {MOST_LOGPROBS}, got {_shown(value)}')
    return value


def _parameters(fields: dict[str, Any]) -> Parameters:
    try:
        return Parameters.model_validate(fields)
    except ValidationError as error:
        raise RowError(_first_problem(error)) from None


def _first_problem(error: ValidationError) -> str:
    first = error.errors()[0]
    key = str(first["loc"][0]) if first["loc"] else "the entry"
    if first["type"] == "extra_forbidden":
        return f'unknown parameter "{key}"; remove it'
    if first["type"] == "missing":
        return f'"{key}" is missing'
    message = str(first["msg"]).removeprefix("Value error, ").removeprefix("Input ").removeprefix("should ")
    message = message.replace("greater than or equal to", "at least").replace("less than or equal to", "at most")
    return f'"{key}" must {message}, got {_shown(first["input"])}'


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
