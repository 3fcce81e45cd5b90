"""The use of each input column: a key of the row, the prompt, carried through to the results, or left out."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from difflib import get_close_matches
from functools import lru_cache
from typing import Any

from outrider.runner.job.prompts import strictly_parsed
from outrider.runner.job.requests import HARMLESS, KEYS, PROMPTS, Request, RowError, parse_simple
from outrider.runner.options.job import JobSpec
from outrider.runner.template import Template, TemplateError
from outrider.runner.validation_errors import short, shown
from outrider.workers.errors import UsageError

# Keys that an unused column's name is checked against for misspellings; the other keys are common column names themselves.
MISSPELLED = KEYS - {"id", "n", *PROMPTS, *HARMLESS}
# The least similarity (difflib) of a misspelling: "maxtoken" and "maxtokens" have 0.94, "top" and "stop" 0.86.
NEAR = 0.9
# Keys whose CSV values are text, whatever they look like; the values of other keys are JSON.
TEXTS = frozenset({"id", "prompt", "reasoning_effort"})
ALL, NONE, AUTO = "all", "none", "auto"
MOST_SHOWN = 12


@dataclass(frozen=True, slots=True)
class Columns:
    """How rows are made of columns. Without a prompt column or a template, "prompt" or "messages" is the prompt."""

    prompt_column: str | None = None
    template: Template | None = None
    # None: carry all columns that are not keys of a row.
    carry: tuple[str, ...] | None = None
    # Make a prompt that is text a conversation with one user message.
    chat: bool = False

    @property
    def own_prompt(self) -> bool:
        return self.prompt_column is None and self.template is None

    @property
    def needed(self) -> tuple[str, ...]:
        """The columns that ``--template`` or ``--prompt-column`` names."""
        return self.template.columns if self.template is not None else (self.prompt_column,) if self.prompt_column else ()

    def is_key(self, name: str) -> bool:
        if self.carry is not None and name in self.carry:
            return False
        return name in KEYS and (self.own_prompt or name not in PROMPTS)

    def is_carried(self, name: str) -> bool:
        return not self.is_key(name) if self.carry is None else name in self.carry

    def is_read(self, name: str) -> bool:
        """Whether the request is made from this column."""
        return self.is_key(name) or name in self.needed

    def left_out(self, names: Iterable[str]) -> list[str]:
        """The columns that are neither carried nor read; an error if one looks like a misspelled key."""
        names = [] if self.carry is None else [name for name in names if not self.is_read(name) and name not in self.carry]
        for name in names:
            if (key := _near(name)) is not None:
                raise RowError(
                    f'"{short(name)}" is neither a key of a row nor carried: rename it if "{key}" is meant, or else name '
                    "it in --carry"
                )
        return names

    def claimed_id(self, row: Mapping[str, Any]) -> Any:
        """The row's "id" as it is given, valid or not."""
        return _number(row.get("id")) if self.is_key("id") else None

    def check(self, where: str, names: Iterable[str]) -> None:
        """Refuse a table without a prompt column, or without a column that an option names."""
        known = list(names)
        if not known:
            raise UsageError(f"{where} has no columns; give a table with a column of prompts")
        listed = ", ".join(f'"{short(name)}"' for name in known[:MOST_SHOWN]) + (", …" if len(known) > MOST_SHOWN else "")
        for option, wanted in (("--template", self.needed), ("--carry", self.carry or ())):
            option = "--prompt-column" if self.template is None and option == "--template" else option
            if missing := [name for name in wanted if name not in known]:
                raise UsageError(f'{option}: {where} has no column "{short(missing[0])}"; its columns are {listed}')
        if self.own_prompt and not any(self.is_key(name) for name in known if name in PROMPTS):
            raise UsageError(
                f'{where} has no column "prompt" or "messages"; its columns are {listed}: name the one that holds the '
                "prompts with --prompt-column, or make prompts with --template"
            )

    def request(self, row: Mapping[str, Any], line: int, of_arrow: bool = False) -> Request:
        """The request of a row. ``of_arrow``: its objects are structs, whose missing fields are null."""
        as_written = _as_written if of_arrow else _number
        fields = {name: as_written(value) for name, value in row.items() if self.is_key(name)}
        if self.template is not None:
            try:
                fields["prompt"] = self.template.filled(row)
            except TemplateError as error:
                raise RowError(str(error)) from None
        elif self.prompt_column is not None:
            value = row.get(self.prompt_column)
            if value is None:
                raise RowError(f'"{short(self.prompt_column)}", the prompt column, is null or missing')
            # A list of objects is a conversation.
            chat = isinstance(value, list) and bool(value) and isinstance(value[0], dict)
            name = "messages" if chat else "prompt"
            fields[name] = as_written(value)
        elif fields.get("messages") is not None and fields.get("prompt") is None:
            fields.pop("prompt", None)
        if self.chat and isinstance(fields.get("prompt"), str) and fields["prompt"] and fields.get("messages") is None:
            fields["messages"] = [{"role": "user", "content": fields.pop("prompt")}]
        return parse_simple(fields, line)


def columns_of(spec: JobSpec) -> Columns | None:
    """The use of columns by the options; None if no option is about columns."""
    if spec.template is None and spec.prompt_column is None and spec.carry == AUTO and not spec.chat:
        return None
    template = None if spec.template is None else Template.parse(spec.template)
    return Columns(spec.prompt_column, template, _carry(spec.carry), spec.chat)


def _carry(asked: str) -> tuple[str, ...] | None:
    if asked in (ALL, AUTO):
        return None
    return () if asked == NONE else tuple(name.strip() for name in asked.split(","))


@lru_cache(maxsize=1000)
def _near(name: str) -> str | None:
    """The key that a name may be a misspelling of; None if there is none."""
    keys = {_letters(key): key for key in MISSPELLED}
    close = get_close_matches(_letters(name), keys, n=1, cutoff=NEAR)
    return keys[close[0]] if close else None


def _letters(name: str) -> str:
    return name.lower().translate({ord(mark): None for mark in "_- "})


def _number(value: Any) -> Any:
    """A table's number as JSON would have it: 16.0 (from a column with gaps) is 16, and NaN is null."""
    if isinstance(value, Decimal) and value.is_finite():
        return int(value) if value == value.to_integral_value() else float(value)
    if isinstance(value, float | Decimal):
        return None if math.isnan(value) else int(value) if float(value).is_integer() else float(value)
    return value


def _as_written(value: Any) -> Any:
    """A value of an Arrow table as JSON would have it."""
    if isinstance(value, Mapping):
        # A struct has null for missing fields; an object lacks them.
        return {key: found for key, each in value.items() if (found := _as_written(each)) is not None}
    if isinstance(value, list):
        return [_as_written(each) for each in value]
    return _number(value)


def from_text(name: str, text: str) -> Any:
    """The value of a row's key from CSV text. An empty value is a missing one, except for the prompt."""
    if name in TEXTS:
        return text if text or name == "prompt" else None
    if name == "stop" and text and not text.lstrip().startswith("["):
        return _quoted(text)
    text = text.strip()
    if not text:
        return None
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    try:
        return strictly_parsed(text)
    except RowError as error:
        raise RowError(f'"{name}": {error}') from None
    except (ValueError, RecursionError):
        raise RowError(f'"{name}" must be spelled as in JSON, got {shown(text)}') from None


def _quoted(text: str) -> str:
    """A text as it is, or what it spells if it is a JSON string in quotes."""
    try:
        spelled = strictly_parsed(text) if text[0] == text[-1] == '"' else text
    except RowError:
        raise
    except ValueError:
        return text
    return str(spelled)
