"""A chat's tools, tool choice and earlier tool calls, in OpenAI's form: checked and normalised."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any, Literal, NamedTuple, NoReturn

from outrider.runner.job.constraints import BadShape, Constraint, no_others
from outrider.runner.job.nesting import check_levels
from outrider.runner.validation_errors import short, shown

TOOLS, CHOICE, PARALLEL = "tools", "tool_choice", "parallel_tool_calls"
MOST_TOOLS = 128
NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
SUCH_AS = '{"type": "function", "function": {"name": "f", "parameters": {…}}}'

Choice = Literal["auto", "required", "named"]


class ToolsAsked(NamedTuple):
    """``tools`` as the chat template gets them, the choice, and the constraint on the answer, if any."""

    tools: tuple[dict[str, Any], ...] = ()
    choice: Choice = "auto"
    constraint: Constraint | None = None


def tools_of(fields: dict[str, Any]) -> ToolsAsked:
    """Remove the keys about tools from a chat's fields. With the choice "none" no tools are offered."""
    given, choice, parallel = fields.pop(TOOLS, None), fields.pop(CHOICE, None), fields.pop(PARALLEL, True)
    if not isinstance(parallel, bool):
        raise BadShape(f'"{PARALLEL}" must be true or false, got {shown(parallel)}')
    if given is not None and not isinstance(given, list):
        raise BadShape(f'"{TOOLS}" must be a list of tools such as {SUCH_AS}, got {shown(given)}')
    if given is not None and len(given) > MOST_TOOLS:
        raise BadShape(f'"{TOOLS}" holds {len(given)} tools; at most {MOST_TOOLS} are taken')
    functions = [_function(f"{TOOLS}[{index}]", tool) for index, tool in enumerate(given or ())]
    names = [function["name"] for function in functions]
    if twice := next((name for index, name in enumerate(names) if name in names[:index]), None):
        raise BadShape(f'"{TOOLS}": two functions are called "{twice}"; names must differ')
    named = _named(choice)
    if not names:
        if choice not in (None, "none", "auto"):
            raise BadShape(f'"{CHOICE}" asks for a call, and there are no "{TOOLS}"; give some, or remove it')
        return ToolsAsked()
    if choice == "none":
        return ToolsAsked()
    if named is not None and named not in names:
        raise BadShape(f'"{CHOICE}" names the function "{short(named)}", which is none of "{TOOLS}"')
    kind: Choice = "named" if named is not None else "required" if choice == "required" else "auto"
    # "strict" is for the service, not for the model.
    offered = [{key: value for key, value in function.items() if key != "strict"} for function in functions]
    tools = tuple({"type": "function", "function": function} for function in offered)
    return ToolsAsked(tools, kind, _constraint(functions, kind, named, parallel))


def _constraint(functions: list[dict[str, Any]], choice: Choice, named: str | None, parallel: bool) -> Constraint | None:
    """The constraint on the answer; None for choice "auto" without strict functions and with parallel calls.

    With "auto" the text stays free, and calls are constrained: to the schemas of strict functions, or to a single call.
    """
    strict = any(function.get("strict") for function in functions)
    if choice == "auto" and not strict and parallel:
        return None
    callable_ = [function for function in functions if named is None or function["name"] == named]
    return {
        "key": CHOICE if choice != "auto" else "strict" if strict else PARALLEL,
        "kind": "tools",
        "tools": [
            (function["name"], _schema(function) if choice != "auto" or function.get("strict") else None)
            for function in callable_
        ],
        "required": choice != "auto",
        "one": choice == "named" or not parallel,
    }


def _schema(function: dict[str, Any]) -> dict[str, Any]:
    """The schema of a function's arguments; without "parameters" it takes none."""
    schema: dict[str, Any] = function.get("parameters", {"properties": {}, "additionalProperties": False})
    return schema


def _named(choice: object) -> str | None:
    """The function that "tool_choice" names; None if it names none."""
    if choice is None or choice in ("none", "auto", "required"):
        return None
    such_as = '{"type": "function", "function": {"name": "f"}}'
    if not isinstance(choice, dict) or choice.get("type") != "function":
        raise BadShape(f'"{CHOICE}" must be none, auto, required or an object such as {such_as}, got {shown(choice)}')
    no_others(CHOICE, choice, {"type", "function"})
    function = choice.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise BadShape(f'"{CHOICE}": "function" must be an object with a "name", got {shown(function)}')
    no_others(CHOICE, function, {"name"})
    name: str = function["name"]
    return name


def _function(place: str, tool: object) -> dict[str, Any]:
    """A tool's function, its keys in the order that models were trained on."""
    if not isinstance(tool, dict):
        raise BadShape(f"{place} must be an object such as {SUCH_AS}, got {shown(tool)}")
    if tool.get("type") != "function":
        raise BadShape(f'{place}: "type" must be function, got {shown(tool.get("type"))}')
    no_others(place, tool, {"type", "function"})
    function = tool.get("function")
    if not isinstance(function, dict):
        raise BadShape(f'{place}: "function" must be an object with a "name", got {shown(function)}')
    place = f"{place}.function"
    no_others(place, function, {"name", "description", "parameters", "strict"})
    said = {key: function[key] for key in ("name", "description", "parameters", "strict") if function.get(key) is not None}
    _check_name(place, said.get("name"))
    for key, kind, what in (
        ("description", str, "a text"),
        ("parameters", dict, "a schema (an object)"),
        ("strict", bool, "true or false"),
    ):
        if key in said and not isinstance(said[key], kind):
            raise BadShape(f'{place}: "{key}" must be {what}, got {shown(said[key])}')
    if (of := said.get("parameters", {}).get("type", "object")) != "object":
        raise BadShape(f'{place}: "parameters" must be the schema of an object, got one with the "type" {shown(of)}')
    return said


def _check_name(place: str, name: object) -> None:
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise BadShape(f'{place}: "name" must be 1 to 64 letters, digits, "_", "-" and ".", got {shown(name)}')


def calls_made(place: str, calls: object) -> tuple[dict[str, Any], ...]:
    """The tool calls of an earlier answer; arguments are parsed, since templates serialise them themselves."""
    if not isinstance(calls, list):
        raise BadShape(f'{place}: "tool_calls" must be a list, got {shown(calls)}')
    made = tuple(_call_made(f"{place}.tool_calls[{index}]", call) for index, call in enumerate(calls))
    ids = [call["id"] for call in made if "id" in call]
    if len(set(ids)) < len(ids):
        raise BadShape(f'{place}: two "tool_calls" have the same "id"; ids must differ')
    return made


def _call_made(place: str, call: object) -> dict[str, Any]:
    if not isinstance(call, dict):
        raise BadShape(f"{place} must be an object, got {shown(call)}")
    # Clients that assemble a streamed answer leave "index" in.
    no_others(place, call, {"id", "type", "function", "index"})
    if call.get("type", "function") != "function":
        raise BadShape(f'{place}: "type" must be function, got {shown(call["type"])}')
    function, own = call.get("function"), call.get("id")
    if own is not None and (not isinstance(own, str) or not own):
        raise BadShape(f'{place}: "id" must be a text that is not empty, got {shown(own)}')
    if not isinstance(function, dict):
        raise BadShape(f'{place}: "function" must be an object with "name" and "arguments", got {shown(function)}')
    no_others(place, function, {"name", "arguments"})
    _check_name(place, function.get("name"))
    whole = {"name": function["name"], "arguments": _arguments(place, function.get("arguments"))}
    return {**({} if own is None else {"id": own}), "type": "function", "function": whole}


def _arguments(place: str, given: object) -> dict[str, Any]:
    found = given
    if isinstance(given, str):
        try:
            found = check_levels(given, json.loads(given, parse_constant=_no_json)) if given.strip() else {}
        except (ValueError, RecursionError):
            found = None
    if not isinstance(found, dict):
        raise BadShape(f'{place}: "arguments" must be JSON of an object, as a text, got {shown(given)}')
    return found


def _no_json(constant: str) -> NoReturn:
    raise ValueError(constant)


def in_order_of_calls(messages: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages with the answers of tools in the order of their calls, by which many templates tell them apart.

    An answer to a call that was not made just before is refused.
    """
    ordered: list[dict[str, Any]] = []
    calls: list[str] = []
    begun = 0
    for index, message in enumerate(messages):
        if message["role"] != "tool":
            calls = [call["id"] for call in message.get("tool_calls", ()) if "id" in call]
            begun = len(ordered) + 1
        elif (answered := message.get("tool_call_id")) is not None:
            if answered not in calls:
                raise BadShape(
                    f'messages[{index}]: "tool_call_id" is {shown(answered)}, and no call in the '
                    "assistant's last message before it has that id"
                )
            if answered in (earlier.get("tool_call_id") for earlier in ordered[begun:]):
                raise BadShape(f'messages[{index}]: "tool_call_id" {shown(answered)} is answered already')
        ordered.append(message)
        if message["role"] == "tool" and all("tool_call_id" in each for each in ordered[begun:]):
            ordered[begun:] = sorted(ordered[begun:], key=lambda each: calls.index(each["tool_call_id"]))
    return ordered
