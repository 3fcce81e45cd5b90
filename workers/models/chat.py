"""Checks that a model's chat template renders every part of a conversation: a part that it would leave out is refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

# Words that no template contains, put in the place of contents, names, calls and tools.
CONTENT, NAME = "outridercontent{}x", "outridername{}x"
CALL, VALUE = "outridercall{}x{}x", "outridervalue{}x{}x"
TOOL, DESCRIPTION, PARAMETER = "outridertool", "outriderdescription", "outriderparameter"
# Ids of tool calls, of the nine characters that Mistral's templates require.
ID = "{:05d}{:04d}"
# Of a name that somebody gave, in a sentence.
LONGEST_SHOWN = 60

Message = Mapping[str, Any]
Options = Mapping[str, Any]
Tools = Sequence[Mapping[str, Any]]
Render = Callable[[list[dict[str, Any]], Options, Tools], str]


class Form(NamedTuple):
    """The structure of a message: its role, whether it has a name and a content, how many tools it calls, and which call it
    answers, as (index of the message, index of the call)."""

    role: str
    named: bool
    says: bool
    calls: int
    answers: tuple[int, int] | None


class LeftOutError(Exception):
    """The end of a sentence that begins with the template: what it leaves out, and what to do."""


def refuse_unknown(variables: Collection[str], options: Options) -> None:
    """Refuse options that the template does not read, since they would have no effect."""
    for name in options:
        if name not in variables:
            known = f"it knows {', '.join(sorted(variables))}" if variables else "it knows no such options"
            shown = name if len(name) <= LONGEST_SHOWN else f"{name[:LONGEST_SHOWN]}…"
            raise LeftOutError(f'does not use "{shown}" of "chat_template_kwargs" ({known}); remove it')


def refuse_left_out(render: Render, messages: Sequence[Message], options: Options, tools: bool = False) -> None:
    refusal = _left_out(render, tuple(_forms(messages)), json.dumps(options, sort_keys=True), tools)
    if refusal is not None:
        raise LeftOutError(refusal)


def refuse_unsaid(text: str, tools: Tools) -> None:
    """Refuse tools whose names are not in the rendered text of the conversation itself."""
    for tool in tools:
        if tool["function"]["name"] not in text:
            raise LeftOutError('does not show "tools" to the model; leave them out, or choose a model that calls tools')


def _forms(messages: Sequence[Message]) -> list[Form]:
    forms: list[Form] = []
    calls: dict[str, tuple[int, int]] = {}
    for index, message in enumerate(messages):
        made = message.get("tool_calls", ())
        answers = calls.get(message.get("tool_call_id", ""))
        # An empty content in a message with calls counts as none.
        forms.append(Form(message["role"], "name" in message, not made or bool(message["content"]), len(made), answers))
        calls |= {call["id"]: (index, place) for place, call in enumerate(made) if "id" in call}
    return forms


@lru_cache(maxsize=1024)
def _left_out(render: Render, forms: Sequence[Form], options_text: str, tools: bool) -> str | None:
    """What the template leaves out of conversations of this structure, tried with the words above; None: nothing. Cached,
    since jobs have few structures."""
    options = json.loads(options_text)
    offered = [_tool_tried()] if tools else []
    try:
        text = render(_tried(forms), options, offered)
    except Exception:  # a template may refuse these words; then the row itself is rendered, and may be refused
        return None
    if tools and (missing := [word for word in (TOOL, DESCRIPTION, PARAMETER) if word not in text]):
        if TOOL in missing:
            return 'does not show "tools" to the model; leave them out, or choose a model that calls tools'
        what = "descriptions" if DESCRIPTION in missing else "parameters"
        return f'leaves out the {what} of "tools"; choose another model for them'
    for index, form in enumerate(forms):
        if form.says and CONTENT.format(index) not in text:
            beside = ' beside "tool_calls"' if form.calls else ""
            return f'leaves out what the role "{form.role}" of messages[{index}] says{beside}; remove it'
        for call in range(form.calls):
            if CALL.format(index, call) not in text or VALUE.format(index, call) not in text:
                return f'leaves out "tool_calls" of messages[{index}]; remove it'
        if form.named and NAME.format(index) not in text and render(_tried(forms, index), options, offered) == text:
            return f'knows no "name" for the role "{form.role}" of messages[{index}]; remove it'
    return None


def _tried(forms: Sequence[Form], without: int | None = None) -> list[dict[str, Any]]:
    """Messages of this structure with the words above; ``without``: the message whose name is left out."""
    return [
        {"role": form.role, "content": CONTENT.format(index) if form.says else ""}
        | ({"name": NAME.format(index)} if form.named and index != without else {})
        | ({"tool_calls": [_call_tried(index, call) for call in range(form.calls)]} if form.calls else {})
        | ({"tool_call_id": ID.format(*form.answers)} if form.answers else {})
        for index, form in enumerate(forms)
    ]


def _call_tried(index: int, call: int) -> dict[str, Any]:
    function = {"name": CALL.format(index, call), "arguments": {PARAMETER: VALUE.format(index, call)}}
    return {"id": ID.format(index, call), "type": "function", "function": function}


def _tool_tried() -> dict[str, Any]:
    schema = {"type": "object", "properties": {PARAMETER: {"type": "string"}}, "required": [PARAMETER]}
    return {"type": "function", "function": {"name": TOOL, "description": DESCRIPTION, "parameters": schema}}
