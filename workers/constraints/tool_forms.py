"""The forms in which models write tool calls, and the parser that finds calls in an answer.

There are three forms: ``<tool_call>`` around the JSON of each call (Hermes, Qwen), bare JSON (Llama 3), and
``[TOOL_CALLS]`` before a list (Mistral). The exact text around the JSON is taken from the model's chat template
(`workers/models/tool_detection.py`), so that a grammar has the model write what it was trained on.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any, NamedTuple, NoReturn

HERMES, LLAMA, MISTRAL = "hermes", "llama", "mistral"
KNOWN = 'Hermes\' and Qwen\'s <tool_call>{"name": …, "arguments": …}</tool_call>, Llama 3\'s {"name": …, "parameters": …}, '
KNOWN += 'Mistral\'s [TOOL_CALLS] [{"name": …, "arguments": …}]'
OPENING, CLOSING, LIST, TAG = "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>"
# Marks around calls. Those that are special tokens are kept in the text of a row whose calls are parsed.
MARKS = {HERMES: (OPENING, CLOSING), LLAMA: (TAG,), MISTRAL: (LIST,)}
# The mark that begins calls after other text. Llama 3 has none: its calls are the whole answer.
BEGINNING = {HERMES: OPENING, MISTRAL: LIST}
ARGUMENTS = {HERMES: ("arguments",), LLAMA: ("parameters", "arguments"), MISTRAL: ("arguments",)}
SPACE = " \t\r\n"


class ToolForm(NamedTuple):
    """What a template writes: ``begin``, calls with ``between`` between two of them, and ``end``.

    A call is ``head``, its name in quotes, ``middle``, its arguments as JSON with these ``separators`` (of items, of keys),
    and ``tail``. Where ``between`` is None, the template knows only one call in an answer. ``shown`` are the special tokens
    among the form's marks.
    """

    kind: str
    begin: str
    head: str
    middle: str
    tail: str
    between: str | None
    end: str
    separators: tuple[str, str]
    shown: tuple[int, ...] = ()


class Call(NamedTuple):
    """``arguments`` are JSON, letter by letter as the model has written it."""

    name: str
    arguments: str


class Parsed(NamedTuple):
    content: str
    calls: list[Call]


def calls_of(text: str, kind: str, names: Collection[str]) -> Parsed:
    """The calls of an answer, and the text around them. What is no whole call of one of the functions stays text."""
    match kind:
        case "llama":
            calls = _bare_calls(text, names)
            return Parsed("", calls) if calls else Parsed(text, [])
        case _:
            return _marked_calls(text, kind, names)


def certain(text: str, kind: str) -> int:
    """How many characters of an unfinished answer are text for certain: neither part of a call nor space before one."""
    if kind == LLAMA:
        begun = text.lstrip(SPACE)
        return 0 if begun.startswith("{") or TAG.startswith(begun[: len(TAG)]) else len(text)
    mark = BEGINNING[kind]
    found = text.find(mark)
    if found < 0:
        found = next((at for at in range(max(0, len(text) - len(mark) + 1), len(text)) if mark.startswith(text[at:])), -1)
    return len((text if found < 0 else text[:found]).rstrip(SPACE))


def _bare_calls(text: str, names: Collection[str]) -> list[Call]:
    """The whole answer is calls, or none of it is."""
    text = text.strip(SPACE).removeprefix(TAG)
    calls, at = [], 0
    try:
        while True:
            call, at = _call(text, _skip(text, at), LLAMA, names)
            calls.append(call)
            at = _skip(text, at)
            if at == len(text):
                return calls
            at = _expect(text, at, ";")
    except (ValueError, RecursionError):
        return []


def _marked_calls(text: str, kind: str, names: Collection[str]) -> Parsed:
    mark = BEGINNING[kind]
    read = _hermes_call if kind == HERMES else _listed_calls
    calls: list[Call] = []
    around, last, at = [], 0, text.find(mark)
    while at >= 0:
        try:
            found, end = read(text, at + len(mark), names)
        except (ValueError, RecursionError):
            at = text.find(mark, at + len(mark))
            continue
        calls += found
        around.append(text[last:at])
        last, at = end, text.find(mark, end)
    if not calls:
        return Parsed(text, [])
    around.append(text[last:])
    # The space around calls belongs to neither; what comes first keeps its own, since it may have been told already.
    pieces = [around[0].rstrip(SPACE), *(piece.strip(SPACE) for piece in around[1:])]
    return Parsed("\n".join(piece for piece in pieces if piece), calls)


def _hermes_call(text: str, at: int, names: Collection[str]) -> tuple[list[Call], int]:
    """One call. Its closing mark may be missing at the end of the answer or before another call."""
    call, at = _call(text, _skip(text, at), HERMES, names)
    behind = _skip(text, at)
    if behind == len(text) or text.startswith(OPENING, behind):
        return [call], behind
    return [call], _expect(text, behind, CLOSING)


def _listed_calls(text: str, at: int, names: Collection[str]) -> tuple[list[Call], int]:
    at = _expect(text, _skip(text, at), "[")
    calls = []
    while True:
        call, at = _call(text, _skip(text, at), MISTRAL, names)
        calls.append(call)
        at = _skip(text, at)
        if text.startswith("]", at):
            return calls, at + 1
        at = _expect(text, at, ",")


def _call(text: str, at: int, kind: str, names: Collection[str]) -> tuple[Call, int]:
    members, end = _members(text, at)
    name, _ = members.pop("name", (None, ""))
    given = [members.pop(key) for key in ARGUMENTS[kind] if key in members]
    members.pop("id", None)
    if members.pop("type", ("function", ""))[0] != "function" or members:
        raise ValueError("holds something else")
    if name not in names or len(given) != 1 or not isinstance(given[0][0], dict):
        raise ValueError("no call of a function that there is")
    return Call(str(name), given[0][1]), end


def _members(text: str, at: int) -> tuple[dict[str, tuple[Any, str]], int]:
    """Each member of a JSON object as (value, its text), and where the object ends."""
    at = _skip(text, _expect(text, at, "{"))
    members: dict[str, tuple[Any, str]] = {}
    while True:
        key, at = _value(text, at)
        if not isinstance(key, str) or key in members:
            raise ValueError("a key that is none, or stands there twice")
        start = _skip(text, _expect(text, _skip(text, at), ":"))
        value, at = _value(text, start)
        members[key] = value, text[start:at]
        at = _skip(text, at)
        if text.startswith("}", at):
            return members, at + 1
        at = _skip(text, _expect(text, at, ","))


def _no_json(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")


_DECODER = json.JSONDecoder(parse_constant=_no_json)


def _value(text: str, at: int) -> tuple[Any, int]:
    value, end = _DECODER.raw_decode(text, at)
    return value, end


def _skip(text: str, at: int) -> int:
    while at < len(text) and text[at] in SPACE:
        at += 1
    return at


def _expect(text: str, at: int, what: str) -> int:
    if not text.startswith(what, at):
        raise ValueError(f"{what} is missing")
    return at + len(what)
