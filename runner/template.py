"""A prompt made of a row's columns: ``"Summarise: {text}"``.

Between braces stands the name of a column and nothing else. ``str.format`` is not used: its templates can reach attributes
of Python objects.
"""

from __future__ import annotations

import base64
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import Any
from uuid import UUID

# A doubled brace, a column's name, or a brace that is neither.
PIECE = re.compile(r"\{\{|\}\}|\{([^{}]*)\}|[{}]")


class TemplateError(ValueError):
    """A template that cannot be parsed, or a row that lacks a value for it."""


@dataclass(frozen=True, slots=True)
class Template:
    """``texts`` has one entry more than ``columns``: what stands before, between and behind them."""

    texts: tuple[str, ...]
    columns: tuple[str, ...]

    @staticmethod
    def parse(text: str) -> Template:
        texts, columns, end, so_far = [], [], 0, ""
        for found in PIECE.finditer(text):
            so_far += text[end : found.start()]
            end = found.end()
            if found[0] in ("{{", "}}"):
                so_far += found[0][0]
            elif not found[1]:
                what = "{}" if found[1] == "" else found[0]
                raise TemplateError(
                    f'hold names of columns in braces, such as {{text}}; "{what}" at character {found.start() + 1} is none '
                    "(a brace of the text is written twice)"
                )
            else:
                texts.append(so_far)
                columns.append(found[1])
                so_far = ""
        if not columns:
            raise TemplateError("hold the name of a column in braces, such as {text}; without one all prompts are the same")
        return Template((*texts, so_far + text[end:]), tuple(columns))

    def filled(self, row: Mapping[str, Any]) -> str:
        pieces = [self.texts[0]]
        for column, text in zip(self.columns, self.texts[1:], strict=True):
            value = row.get(column)
            if value is None:
                raise TemplateError(f'"{column}", which --template names, is {"null" if column in row else "missing"}')
            if isinstance(value, float) and not math.isfinite(value):  # JSON has no NaN and no infinity
                raise TemplateError(f'"{column}", which --template names, is {value}')
            pieces += (spelled(value), text)
        return "".join(pieces)


def spelled(value: Any) -> str:
    """A text as it is, anything else as JSON spells it."""
    value = plain(value)
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def plain(value: Any) -> Any:
    """A value as JSON can hold it: dates in ISO 8601, bytes in base64, decimals as text, null for NaN and infinities."""
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(plain(key)): plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple | set):
        return [plain(each) for each in value]
    if isinstance(value, datetime | date | time):
        return value.isoformat()
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, Decimal | UUID):
        return str(value)
    raise TypeError(f"a value of the type {type(value).__name__} cannot be spelled")
