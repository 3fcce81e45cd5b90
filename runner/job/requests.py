"""One row's request: prompt, parameters and constraint, from a line of OpenAI's batch format or a simple line, checked."""

from __future__ import annotations

import shlex
from typing import Annotated, Any, Literal, get_args

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

from outrider.runner.job.constraints import BadShape, Constraint, constraint_of
from outrider.runner.job.tools import CHOICE, PARALLEL, TOOLS, Choice, calls_made, in_order_of_calls, tools_of
from outrider.runner.validation_errors import must, short, shown, where

# Keys that clients send by default, with the values that change nothing here; any other value is an error.
HARMLESS: dict[str, tuple[Any, ...]] = {
    "stream": (False,),
    "stream_options": (),
    "best_of": (1,),
    "suffix": ("",),
    "functions": ([],),
}
# The same for bodies of batch lines only: in a table a column of this name is data.
HARMLESS_IN_BODIES: dict[str, tuple[Any, ...]] = {"modalities": (["text"],), "function_call": ("none", "auto")}
IGNORED: dict[str, tuple[type, str]] = {
    "model": (str, "a text"),
    "user": (str, "a text"),
    "metadata": (dict, "an object"),
    "store": (bool, "true or false"),
    "service_tier": (str, "a text"),
    "safety_identifier": (str, "a text"),
    "prompt_cache_key": (str, "a text"),
    "prompt_cache_retention": (str, "a text"),
    "prompt_cache_options": (dict, "an object"),
}
# Keys of a message that are not read, with the values that say nothing; any other value is refused by name.
HARMLESS_IN_MESSAGES: dict[str, tuple[Any, ...]] = {
    "refusal": (None,),
    "audio": (None,),
    "annotations": (None, []),
    "function_call": (None,),
    "reasoning_content": (None,),
}
MOST_STOPS = 16
MOST_STOP_TOKENS = 128
MOST_SAMPLES = 128
MOST_LOGPROBS = 20
# Keys that an error names of a line without a prompt.
MOST_SHOWN = 6

# StrictFloat accepts whole numbers, but not true and false.
Number = StrictFloat


def _as_tuple(value: object) -> object:
    if not isinstance(value, str | list):
        raise ValueError("be a text or a list of texts")
    return (value,) if isinstance(value, str) else tuple(value)


def _ids_as_tuple(value: object) -> object:
    if not isinstance(value, list):
        raise ValueError("be a list of token ids")
    return tuple(value)


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


Role = Literal["system", "developer", "user", "assistant", "tool"]


class Message(_Strict):
    """One message of a conversation; ``content`` is empty if the message only calls tools."""

    role: Role
    content: StrictStr
    name: StrictStr | None = None
    tool_calls: tuple[dict[str, Any], ...] | None = None
    tool_call_id: StrictStr | None = None


class Parameters(_Strict):
    """The sampling parameters of a row; None: the job's default.

    ``logprobs``: how many of the likeliest tokens are reported for each generated token, in chats and completions alike.
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
        Field(max_length=MOST_STOP_TOKENS),
    ] = None
    ignore_eos: StrictBool | None = None
    logprobs: int | None = None
    echo: StrictBool | None = None
    repetition_penalty: Annotated[Number, Field(ge=0.01, le=100)] | None = None
    presence_penalty: Annotated[Number, Field(ge=-100, le=100)] | None = None
    frequency_penalty: Annotated[Number, Field(ge=-100, le=100)] | None = None
    logit_bias: dict[str, Annotated[Number, Field(ge=-100, le=100)]] | None = None


PROMPTS = ("prompt", "messages")
# The keys of a simple line or table row. IGNORED ones are not among them: a column called "model" or "user" is data.
KEYS = frozenset(
    {"id", *PROMPTS, "max_completion_tokens", "top_logprobs", "chat_template_kwargs", "reasoning_effort"}
    | {"structured_outputs", "response_format", "tools", "tool_choice", "parallel_tool_calls"}
    | Parameters.model_fields.keys()
    | HARMLESS.keys()
)


class Request(_Strict):
    """One row: exactly one of ``prompt``, ``prompt_tokens`` and ``messages`` is set."""

    custom_id: str
    line: int
    prompt: str | None = None
    prompt_tokens: tuple[int, ...] | None = None
    messages: tuple[Message, ...] | None = None
    # Further variables for the chat template.
    template_options: dict[str, Any] = {}
    # Tools as the chat template gets them, and whether one must be called.
    tools: tuple[dict[str, Any], ...] = ()
    tool_choice: Choice = "auto"
    parameters: Parameters = Parameters()
    # The constraint on the answer (`runner/job/constraints.py`, `runner/job/tools.py`).
    constraint: dict[str, Any] | None = None
    # The model that the row names; the job's own model answers whatever it says.
    model: str | None = None
    # OpenAI's "prediction": text that the answer may repeat, searched for candidates ("": none).
    prediction: str = ""


class RowError(ValueError):
    """What is wrong with a row, and what to do; the caller adds file:line."""


def frame_of(entry: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """The id and the body of a line of OpenAI's batch format; the body itself is not checked here."""
    unknown = sorted(entry.keys() - {"custom_id", "method", "url", "body"})
    if unknown:
        raise RowError(f'unknown key "{unknown[0]}"; a batch line has "custom_id", "method", "url" and "body"')
    custom_id, body = entry.get("custom_id"), entry.get("body")
    if custom_id == "":
        raise RowError('"custom_id" is empty; rows are told apart by it')
    if not isinstance(custom_id, str):
        raise RowError(f'"custom_id" must be a text that is not empty, got {shown(custom_id)}')
    if entry.get("method", "POST") != "POST":
        raise RowError(f'"method" must be "POST", got {shown(entry.get("method"))}')
    if not isinstance(body, dict):
        raise RowError(f'"body" must be an object, got {shown(body)}')
    return custom_id, body


def parse_openai(entry: dict[str, Any], line: int) -> Request:
    """A line of OpenAI's batch format."""
    custom_id, body = frame_of(entry)
    url = entry.get("url")
    for key, (kind, kind_name) in IGNORED.items():
        if body.get(key) is not None and not isinstance(body[key], kind):
            raise RowError(f'"{key}" must be {kind_name}, got {shown(body[key])}')
    fields, model = _clean(body), _model(body)
    _drop_harmless(HARMLESS_IN_BODIES, fields)
    prediction = _prediction(fields)
    if url == "/v1/completions":
        if "messages" in fields:
            raise RowError('"messages" belongs to /v1/chat/completions; /v1/completions takes "prompt"')
        _no_template(fields)
        _completion_logprobs(fields)
        own = {**_prompt(fields), **_asked(fields)}
        return Request(custom_id=custom_id, line=line, **own, model=model, prediction=prediction)
    if url == "/v1/chat/completions":
        if "prompt" in fields:
            raise RowError('"prompt" belongs to /v1/completions; /v1/chat/completions takes "messages"')
        _no_echo(fields)
        return Request(custom_id=custom_id, line=line, **_chat(fields), model=model, prediction=prediction)
    raise RowError(f'"url" must be "/v1/completions" or "/v1/chat/completions", got {shown(url)}')


def parse_simple(entry: dict[str, Any], line: int, may_have_columns: bool = False) -> Request:
    """A line such as ``{"id": …, "prompt": …, "max_tokens": …}``, or with "messages" in place of "prompt".

    ``may_have_columns``: the command has options for columns, and errors about unknown keys name them.
    """
    fields, model = _clean(entry), _model(entry)
    custom_id = fields.pop("id", None)
    if custom_id is None:
        custom_id = str(line)
    elif custom_id == "":
        raise RowError('"id" is empty; leave it out to name the row by its line number')
    elif isinstance(custom_id, bool) or not isinstance(custom_id, str | int):
        raise RowError(f'"id" must be a text or a whole number, got {shown(custom_id)}')
    if "prompt" in fields and "messages" in fields:
        raise RowError('a row has either "prompt" or "messages", not both')
    if may_have_columns:
        _no_columns([key for key in fields if key not in KEYS], "prompt" in fields or "messages" in fields)
    if "messages" in fields:
        _no_echo(fields)
        return Request(custom_id=str(custom_id), line=line, **_chat(fields), model=model)
    _no_template(fields)
    _completion_logprobs(fields)
    return Request(custom_id=str(custom_id), line=line, **_prompt(fields), **_asked(fields), model=model)


def _no_columns(others: list[str], has_prompt: bool) -> None:
    """Refuse unknown keys, with the option that would read them."""
    if others and not has_prompt:
        names = ", ".join(f'"{short(name)}"' for name in others[:MOST_SHOWN]) + (", …" if len(others) > MOST_SHOWN else "")
        raise RowError(f'"prompt" is missing: --prompt-column NAME takes it from another key (this line has {names})')
    if others:
        name = short(others[0])
        raise RowError(
            f'unknown key "{name}"; remove it, or let it through to the results with --carry {shlex.quote(name)}'
        )


def _is_one_of(value: Any, harmless: tuple[Any, ...]) -> bool:
    """Like ``in``, but True is not 1, and False not 0."""
    return any(type(value) is type(each) and value == each for each in harmless)


def _drop_harmless(known: dict[str, tuple[Any, ...]], fields: dict[str, Any]) -> None:
    """Remove keys whose values change nothing; an error for any other value."""
    for key, harmless in known.items():
        if key in fields and not _is_one_of(value := fields.pop(key), harmless):
            raise RowError(f'"{key}" = {shown(value)} is not supported; remove it')


def _clean(body: dict[str, Any]) -> dict[str, Any]:
    """The fields without nulls, ignored keys and harmless values."""
    fields = {key: value for key, value in body.items() if value is not None and key not in IGNORED}
    _drop_harmless(HARMLESS, fields)
    if "max_completion_tokens" in fields:
        if "max_tokens" in fields:
            raise RowError('"max_tokens" and "max_completion_tokens" mean the same; give one')
        fields["max_tokens"] = fields.pop("max_completion_tokens")
    return fields


def _model(body: dict[str, Any]) -> str | None:
    model = body.get("model")
    if model is not None and not isinstance(model, str):
        raise RowError(f'"model" must be a text, got {shown(model)}')
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
        raise RowError('"prompt" holds several texts; give each a row or a request of its own')
    raise RowError(f'"prompt" must be a text or a list of token ids, got {shown(prompt)}')


def _chat(fields: dict[str, Any]) -> dict[str, Any]:
    _chat_logprobs(fields)
    conversation = {"messages": _messages(fields), "template_options": _template_options(fields)}
    try:
        tools = tools_of(fields)
    except BadShape as error:
        raise RowError(str(error)) from None
    asked = _asked(fields, tools.constraint)
    if tools.tools and (constraint := asked["constraint"]) is not None and constraint["kind"] != "tools":
        raise RowError(f'"{constraint["key"]}" constrains the answer, and "{TOOLS}" lets it be calls; give one')
    return {**conversation, "tools": tools.tools, "tool_choice": tools.choice, **asked}


def _template_options(fields: dict[str, Any]) -> dict[str, Any]:
    """Variables for the chat template: vLLM's ``chat_template_kwargs`` and OpenAI's ``reasoning_effort``.

    A template that does not read one of them is found out when the conversation is rendered.
    """
    options = fields.pop("chat_template_kwargs", {})
    if not isinstance(options, dict):
        raise RowError(
            f'"chat_template_kwargs" must be an object such as {{"enable_thinking": false}}, got {shown(options)}'
        )
    options = {key: value for key, value in options.items() if value is not None}
    if (effort := fields.pop("reasoning_effort", None)) is None:
        return options
    if not isinstance(effort, str):
        raise RowError(f'"reasoning_effort" must be a text, got {shown(effort)}')
    if options.get("reasoning_effort", effort) != effort:
        raise RowError('"reasoning_effort" is in "chat_template_kwargs" too, with another value; give one')
    return {**options, "reasoning_effort": effort}


def _no_template(fields: dict[str, Any]) -> None:
    for key in ("chat_template_kwargs", "reasoning_effort"):
        if key in fields:
            raise RowError(f'"{key}" belongs to chats; a completion has no template')
    for key, harmless in ((TOOLS, ([],)), (CHOICE, ("none", "auto")), (PARALLEL, (True, False))):
        if key in fields and fields.pop(key) not in harmless:
            raise RowError(f'"{key}" belongs to chats, whose template shows the model its tools; give "messages"')


def _messages(fields: dict[str, Any]) -> tuple[Message, ...]:
    messages = fields.pop("messages", None)
    if not isinstance(messages, list) or not messages:
        raise RowError(f'"messages" must be a list that is not empty, got {shown(messages)}')
    try:
        read = in_order_of_calls(_message(f"messages[{index}]", message) for index, message in enumerate(messages))
    except BadShape as error:
        raise RowError(str(error)) from None
    return tuple(Message(**message) for message in read)


def _message(place: str, message: object) -> dict[str, Any]:
    """Check one message. A key that the model would not see is refused, not dropped."""
    if not isinstance(message, dict):
        raise RowError(f"{place} must be an object, got {shown(message)}")
    message = dict(message)
    calls, answered = message.pop("tool_calls", None), message.pop("tool_call_id", None)
    calls = None if calls == [] else calls
    if calls is not None and message.get("content") is None:
        message["content"] = ""
    for key in message.keys() - {"role", "content", "name"}:
        if key not in HARMLESS_IN_MESSAGES:
            raise RowError(f'{place}: unknown key "{short(key)}"; remove it')
        if message[key] not in HARMLESS_IN_MESSAGES[key]:
            raise RowError(f'{place}: "{key}" is not supported; remove it')
    for key in ("role", "content"):
        if key not in message:
            raise RowError(f'{place}: "{key}" is missing')
    role, name = message["role"], message.get("name")
    if role not in get_args(Role):
        raise RowError(f'{place}: "role" must be one of {", ".join(get_args(Role))}, got {shown(role)}')
    if name is not None and (not isinstance(name, str) or not name):
        raise RowError(f'{place}: "name" must be a text that is not empty, got {shown(name)}')
    for key, given, whose in (("tool_calls", calls, "assistant"), ("tool_call_id", answered, "tool")):
        if given is not None and role != whose:
            raise RowError(f'{place}: "{key}" belongs to the role {whose}, not to {role}; remove it')
    if answered is not None and (not isinstance(answered, str) or not answered):
        raise RowError(f'{place}: "tool_call_id" must be a text that is not empty, got {shown(answered)}')
    read = {"role": role, "content": _content(place, message["content"])}
    read |= {} if name is None else {"name": name}
    read |= {} if calls is None else {"tool_calls": calls_made(place, calls)}
    return read | ({} if answered is None else {"tool_call_id": answered})


def _content(place: str, content: object) -> str:
    """The text of a message's content, given as text or as a list of text parts."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RowError(f'{place}: "content" must be a text or a list of parts, got {shown(content)}')
    return "".join(_text_of_part(f"{place}.content[{index}]", part) for index, part in enumerate(content))


def _text_of_part(place: str, part: object) -> str:
    if not isinstance(part, dict):
        raise RowError(f'{place} must be an object such as {{"type": "text", "text": …}}, got {shown(part)}')
    if part.get("type") != "text":
        raise RowError(f'{place}: only parts of the "type" "text" are supported, got {shown(part.get("type"))}')
    # "prompt_cache_breakpoint" is about OpenAI's own prompt cache, and changes no text.
    if unknown := sorted(part.keys() - {"type", "text", "prompt_cache_breakpoint"}):
        raise RowError(f'{place}: unknown key "{short(unknown[0])}"; remove it')
    text = part.get("text")
    if not isinstance(text, str):
        raise RowError(f'{place}: "text" must be a text, got {shown(text)}')
    return text


def _completion_logprobs(fields: dict[str, Any]) -> None:
    """In a completion "logprobs" is the number of tokens."""
    if fields.get("top_logprobs"):
        raise RowError('"top_logprobs" belongs to chats; a completion takes "logprobs" with a number')
    fields.pop("top_logprobs", None)
    wanted = fields.pop("logprobs", False)
    if wanted is not False:
        fields["logprobs"] = _count_of_logprobs("logprobs", wanted)


def _chat_logprobs(fields: dict[str, Any]) -> None:
    """In a chat "logprobs" is true or false, and "top_logprobs" the number of tokens."""
    wanted, top = fields.pop("logprobs", False), fields.pop("top_logprobs", 0)
    if not isinstance(wanted, bool):
        raise RowError(f'"logprobs" of a chat must be true or false (the number is "top_logprobs"), got {shown(wanted)}')
    count = _count_of_logprobs("top_logprobs", top)
    if count and not wanted:
        raise RowError('"top_logprobs" needs "logprobs": true')
    if wanted:
        fields["logprobs"] = count


def _no_echo(fields: dict[str, Any]) -> None:
    if fields.pop("echo", False) is not False:
        raise RowError('"echo" belongs to completions, an answer to messages has no prompt to repeat; remove it')


def _prediction(fields: dict[str, Any]) -> str:
    """OpenAI's "prediction": text that lookup and suffixes search for candidates; it changes no text."""
    if (prediction := fields.pop("prediction", None)) is None:
        return ""
    if not isinstance(prediction, dict) or prediction.keys() != {"type", "content"} or prediction["type"] != "content":
        raise RowError(
            f'"prediction" must be an object such as {{"type": "content", "content": …}}, got {shown(prediction)}'
        )
    return _content("prediction", prediction["content"])


def _count_of_logprobs(key: str, value: object) -> int:
    if type(value) is not int or not 0 <= value <= MOST_LOGPROBS:
        raise RowError(f'"{key}" must be a whole number from 0 to {MOST_LOGPROBS}, got {shown(value)}')
    return value


def _asked(fields: dict[str, Any], of_tools: Constraint | None = None) -> dict[str, Any]:
    """The row's parameters, and its constraint, which may come from its tools."""
    try:
        constraint = constraint_of(fields) or of_tools
    except BadShape as error:
        raise RowError(str(error)) from None
    parameters = _parameters(fields)
    if constraint is not None:
        # Either would let the answer go on after the constraint's end.
        for key, given in (("min_tokens", parameters.min_tokens), ("ignore_eos", parameters.ignore_eos)):
            if given:
                raise RowError(
                    f'"{key}" cannot be combined with "{constraint["key"]}", which determines where the answer ends; '
                    "remove it"
                )
    return {"parameters": parameters, "constraint": constraint}


def _parameters(fields: dict[str, Any]) -> Parameters:
    # "echo" with "max_tokens": 0 asks for the prompt's own tokens only.
    echo_alone = fields.get("echo") is True and fields.get("max_tokens") == 0 and type(fields["max_tokens"]) is int
    if echo_alone:
        del fields["max_tokens"]
    try:
        parameters = Parameters.model_validate(fields)
        return parameters.model_copy(update={"max_tokens": 0}) if echo_alone else parameters
    except ValidationError as error:
        raise RowError(_first_problem(error)) from None


def _first_problem(error: ValidationError) -> str:
    first = error.errors(include_url=False)[0]
    if first["type"] == "extra_forbidden":
        return f"unknown parameter {where(first)}; remove it"
    return f"{where(first)} {must(first)}"
