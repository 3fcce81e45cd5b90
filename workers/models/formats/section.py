"""Shared by the readers of ``quantization_config``: typed access to keys, and the names and patterns of layers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from outrider.workers.errors import ModelError
from outrider.workers.models.formats.matrix import Parts
from outrider.workers.models.formats.patterns import UnusablePattern, compiled
from outrider.workers.models.headers import quoted
from outrider.workers.models.language_model import spellings

KEY = "quantization_config"


class Section:
    """An object of the configuration; a value of the wrong type is a ModelError with a sentence."""

    def __init__(self, values: Any, source: str) -> None:
        if not isinstance(values, dict):
            raise ModelError(f"{source} must be an object, got {quoted(values)}")
        self.values: dict[str, Any] = values
        self.source = source

    def refuse(self, what: str) -> ModelError:
        return ModelError(f"{self.source} {what}")

    def _typed(self, key: str, kind: type | tuple[type, ...], said: str, default: Any) -> Any:
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is int):
            raise self.refuse(f'has "{key}": {quoted(value)}, where {said} is needed')
        return value

    def text(self, key: str, default: str) -> str:
        value: str = self._typed(key, str, "a text", default)
        return value.lower()

    def flag(self, key: str, default: bool) -> bool:
        value: bool = self._typed(key, bool, "true or false", default)
        return value

    def number(self, key: str, default: int | None = None) -> int:
        value: int | None = self._typed(key, int, "a whole number", default)
        if value is None:
            raise self.refuse(f'has no "{key}"')
        return value

    def real(self, key: str, default: float) -> float:
        value: float = self._typed(key, (int, float), "a number", default)
        if isinstance(value, bool):
            raise self.refuse(f'has "{key}": {quoted(value)}, where a number is needed')
        return value

    def names(self, key: str) -> tuple[str, ...]:
        value = self._typed(key, list, "a list of names", [])
        if not all(isinstance(each, str) for each in value):
            raise self.refuse(f'has "{key}": {quoted(value)}, where a list of names is needed')
        return tuple(value)

    def one_of(self, key: str, known: Sequence[Any], default: Any) -> Any:
        value = self.values.get(key, default)
        value = default if value is None else value
        if value not in known:
            said = ", ".join(str(each) for each in known)
            raise self.refuse(f'has "{key}": {quoted(value)}; {said} {"is" if len(known) == 1 else "are"} known')
        return value

    def absent(self, key: str) -> None:
        if self.values.get(key):
            raise self.refuse(f'has "{key}", which is not known here: {quoted(self.values[key])}')


def either(parts: Parts, quantised: str, plain: Sequence[str] = ("weight",)) -> bool:
    """Whether a layer's quantised tensor exists; a plain one beside it is refused."""
    if not parts.has(quantised):
        return False
    for other in plain:
        if parts.has(other):
            parts.refuse(f'is there twice, as "{quantised}" and as "{other}"')
    return True


def refuse_kept_plain(parts: Parts, names: Sequence[str]) -> None:
    """Refuse a quantised layer that is named in ``modules_to_not_convert`` (or the like) by whole components of its name.

    Tools write "gate" for a mixture's router, which must not match the quantised "gate_proj".
    """
    module = f".{parts.module}."
    if any(name and f".{name.strip('.')}." in module for name in names):
        parts.refuse(f"is quantised, {KEY} names it among the layers that are not")


def pattern_of(section: Section, pattern: str, said: str) -> re.Pattern[str]:
    """``said``: the pattern's place, for a sentence."""
    try:
        return compiled(pattern)
    except UnusablePattern as error:
        raise section.refuse(f"has {said}, which {error}") from None


def names_of_layer(module: str) -> tuple[str, ...]:
    """A layer's name, and its names in multimodal models: patterns may be written for any of them."""
    return module, *spellings(module)
