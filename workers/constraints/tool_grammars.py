"""The grammar of an answer that calls tools, in the form that the model's chat template writes.

Where calls are required, the answer consists of them. Where they are optional, the answer is any text in which each mark of
a call begins a complete one. The model's thoughts may come before either.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from outrider.workers.constraints.tool_forms import BEGINNING, LLAMA, MARKS, TAG, ToolForm

# The special token of a mark, or None.
TokenOf = Callable[[str], int | None]
ANY_TEXT = "/(?s:.*)/"


def tool_grammar(constraint: Mapping[str, Any], token_of: TokenOf) -> str:
    """``constraint`` has its ``form``, ``tools`` (name and schema of each; None: any object), whether a call is
    ``required``, whether there may be ``one`` only, and ``thoughts``: None, or the tags around them and whether they have
    begun.
    """
    form = ToolForm(*constraint["form"])
    rules = _Rules(form, token_of)
    rules.add_calls(constraint["tools"], one=constraint["one"] or form.between is None)
    thoughts = constraint["thoughts"]
    # A text that begins with the opening tag is thoughts.
    opening = "" if thoughts is None or thoughts[2] else thoughts[0]
    answer = rules.required() if constraint["required"] else rules.optional(opening, one=constraint["one"])
    rules.lines.append(f"start: {rules.thoughts(*thoughts) if thoughts else ''} {answer}")
    return "\n".join(["%llguidance {}", *rules.lines])


def schema_in(form: ToolForm, schema: Mapping[str, Any] | None) -> dict[str, Any]:
    """A function's schema: arguments are an object, spelled as the form's separators say unless it says otherwise."""
    items, keys = form.separators
    spelled = {"whitespace_flexible": False, "item_separator": items, "key_separator": keys}
    own = {} if schema is None else schema
    said = own.get("x-guidance", {})
    return {"type": "object", **own, "x-guidance": {**spelled, **said} if isinstance(said, dict) else said}


class _Rules:
    def __init__(self, form: ToolForm, token_of: TokenOf) -> None:
        self.lines: list[str] = []
        self._form = form
        self._token_of = token_of

    def add_calls(self, tools: Sequence[tuple[str, dict[str, Any] | None]], one: bool) -> None:
        form = self._form
        for number, (name, schema) in enumerate(tools):
            self.lines.append(f"function_{number}: {_quoted(json.dumps(name) + form.middle)} arguments_{number}")
            self.lines.append(f"arguments_{number}: %json {json.dumps(schema_in(form, schema))}")
        functions = " | ".join(f"function_{number}" for number in range(len(tools)))
        self.lines.append(f"call: {self._spelled(form.head)} ({functions}) {self._spelled(form.tail)}")
        # The same without the mark in front, for rules that have matched the mark already.
        self.lines.append(f"call_behind_mark: {self._behind_mark(form.head)} ({functions}) {self._spelled(form.tail)}")
        more = "" if one else f"({self._spelled(form.between or '')} call)*"
        self.lines.append(f"calls: {self._spelled(form.begin)} call {more} {self._spelled(form.end)}")
        self.lines.append(f"calls_behind_mark: {self._behind_mark(form.begin)} call {more} {self._spelled(form.end)}")

    def required(self) -> str:
        return "calls"

    def optional(self, opening: str, one: bool) -> str:
        """Text, or text with calls in it. The text does not begin with ``opening``."""
        if self._form.kind == LLAMA:
            # The parser takes an answer that begins like a call for one, so text must not begin so.
            self._add_text("TEXT", f"[ \\t\\r\\n]*(\\{{|{_escaped(TAG)})(?s:.*)", *self._beginning_with(opening))
            return f"(calls | {self._spelled(TAG)} calls | TEXT)"
        mark = BEGINNING[self._form.kind]
        self._add_text("TEXT", f"(?s:.*){_escaped(mark)}(?s:.*)")
        self._add_text("FIRST_TEXT", f"(?s:.*){_escaped(mark)}(?s:.*)", *self._beginning_with(opening))
        # Where each call has marks of its own, there is text between them.
        each = self._form.begin == ""
        call, often = "call_behind_mark" if each else "calls_behind_mark", "*" if each and not one else "?"
        if (token := self._token_of(mark)) is not None:
            first, later = f"FIRST_TEXT <[{token}]>", f"TEXT <[{token}]>"
        else:
            # The mark may begin and end within tokens: as soon as the text contains it, a call follows.
            self._add_text("ANY_FIRST", *self._beginning_with(opening))
            self.lines.append(f"to_first[lazy]: ANY_FIRST {_quoted(mark)}")
            self.lines.append(f"to_later[lazy]: {ANY_TEXT} {_quoted(mark)}")
            first, later = "to_first", "to_later"
        more = f"({later} {call})*" if often == "*" else ""
        return f"(FIRST_TEXT | {first} {call} {more} TEXT)"

    def thoughts(self, opening: str, closing: str, inside: bool) -> str:
        if (token := self._token_of(closing)) is not None:
            self._add_text("THOUGHTS", f"(?s:.*){_escaped(closing)}(?s:.*)")
            self.lines.append(f"thoughts: THOUGHTS <[{token}]> /\\n{{0,2}}/")
        else:
            self.lines.append(f"to_answer[lazy]: {ANY_TEXT} {_quoted(closing)}")
            self.lines.append("thoughts: to_answer /\\n{0,2}/")
        return "thoughts" if inside else f"({self._mark(opening)} thoughts)?"

    def _add_text(self, name: str, *none: str) -> None:
        """A text that none of these expressions matches whole."""
        self.lines.append(f"{name}: {' & '.join([ANY_TEXT, *(f'~/{each}/' for each in none)])}")

    @staticmethod
    def _beginning_with(opening: str) -> list[str]:
        return [f"\\s*{_escaped(opening)}(?s:.*)"] if opening else []

    def _spelled(self, text: str) -> str:
        """Text in Lark's notation: marks that are special tokens as these, all else as strings."""
        marks = MARKS[self._form.kind]
        parts = re.split(f"({'|'.join(map(re.escape, marks))})", text)
        return " ".join(self._mark(part) if part in marks else _quoted(part) for part in parts if part)

    def _behind_mark(self, text: str) -> str:
        mark = BEGINNING.get(self._form.kind, "")
        return self._spelled(text.removeprefix(mark))

    def _mark(self, mark: str) -> str:
        token = self._token_of(mark)
        return _quoted(mark) if token is None else f"<[{token}]>"


def _quoted(text: str) -> str:
    # A string of Lark is spelled as one of JSON.
    return json.dumps(text)


def _escaped(text: str) -> str:
    """Text escaped for a regular expression between slashes."""
    return re.sub(r"[^\w]", lambda found: f"\\x{{{ord(found[0]):x}}}", text)
