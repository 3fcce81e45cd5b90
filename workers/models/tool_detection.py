"""Detects the form in which a chat template writes tool calls, by rendering calls with known names and arguments."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from outrider.workers.constraints.tool_forms import (
    ARGUMENTS,
    CLOSING,
    HERMES,
    LIST,
    LLAMA,
    MARKS,
    MISTRAL,
    OPENING,
    ToolForm,
)

# Words that no template contains. Mistral's templates require ids of nine letters and digits.
NAMES, IDS = ("outridercallone", "outridercalltwo"), ("outrider1", "outrider2")
_WRITTEN = (
    r'\{{"name":(?P<name>\s*)"{name}",(?P<gap>\s*)"{key}":(?P<key>\s*)\{{"a":(?P<keys>\s*)"b",(?P<items>\s*)"c":\s*1\}}'
)
_ID = r'(?:,\s*"id":\s*"outrider\d")?'
# Patterns before and after that JSON.
_AROUND = {HERMES: (rf"{OPENING}(?P<open>\s*)", r"(?P<close>\s*)\}" + rf"(?P<shut>\s*){CLOSING}")}
_BARE = ("(?P<open>)", _ID + r"(?P<close>\s*)\}(?P<shut>)")

# A conversation with tools, and its text; "" where the template refuses it.
Render = Callable[[list[dict[str, Any]], Sequence[dict[str, Any]]], str]


def tools_tried() -> list[dict[str, Any]]:
    schema = {"type": "object", "properties": {"a": {"type": "string"}, "c": {"type": "integer"}}}
    return [
        {"type": "function", "function": {"name": name, "description": "tried", "parameters": schema}} for name in NAMES
    ]


def conversation_tried(count: int) -> list[dict[str, Any]]:
    """A conversation with this many tool calls in one message."""
    calls = [
        {"id": IDS[each], "type": "function", "function": {"name": NAMES[each], "arguments": {"a": "b", "c": 1}}}
        for each in range(count)
    ]
    answers = [{"role": "tool", "tool_call_id": IDS[each], "content": "answered"} for each in range(count)]
    asked = {"role": "user", "content": "asked"}
    return [asked, {"role": "assistant", "content": "", "tool_calls": calls}, *answers]


def form_of(texts: Sequence[str], special: Callable[[Sequence[str]], tuple[int, ...]]) -> ToolForm | None:
    """The form of tool calls in ``texts``: the renderings of one call and of two ("" where the template failed); None where
    it is unknown. ``special`` gives the ids of those marks that are special tokens.
    """
    for kind in (HERMES, MISTRAL, LLAMA):
        if texts[0] and (form := _form(kind, *texts)) is not None:
            return form._replace(shown=special(MARKS[kind]))
    return None


def _form(kind: str, one: str, two: str) -> ToolForm | None:
    before, after = _AROUND.get(kind, _BARE)
    first = ARGUMENTS[kind][0]
    patterns = [re.compile(before + _WRITTEN.format(name=name, key=first) + after) for name in NAMES]
    found = patterns[0].search(one)
    if found is None:
        return None
    begin = end = ""
    if kind == MISTRAL:
        listed = re.compile(re.escape(LIST) + r"\s*\[\s*$").search(one[: found.start()])
        ended = re.compile(r"\s*\]").match(one, found.end())
        if listed is None or ended is None:
            return None
        begin, end = listed[0], ended[0]
    both = [pattern.search(two) for pattern in patterns]
    between = None
    if both[0] is not None and both[1] is not None:
        between = two[both[0].end() : both[1].start()]
        if between.strip() != ("," if kind == MISTRAL else ""):
            return None
    opening = f"{OPENING}{found['open']}" if kind == HERMES else ""
    closing = f"{found['shut']}{CLOSING}" if kind == HERMES else ""
    return ToolForm(
        kind=kind,
        begin=begin,
        head=f'{opening}{{"name":{found["name"]}',
        middle=f',{found["gap"]}"{first}":{found["key"]}',
        tail=f"{found['close']}}}{closing}",
        between=between,
        end=end,
        separators=(f",{found['items']}", f":{found['keys']}"),
    )
