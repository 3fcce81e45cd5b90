"""A row's constraint on its answer: OpenAI's `response_format` or vLLM's `structured_outputs`, checked and unified."""

from __future__ import annotations

import json
from typing import Any

from outrider.runner.job.nesting import check_levels
from outrider.runner.validation_errors import short, shown

FORMAT, STRUCTURED = "response_format", "structured_outputs"
KINDS = ("json", "regex", "choice", "grammar", "json_object")
# Options for JSON that is not compact.
OPTIONS = ("disable_any_whitespace", "whitespace_pattern")
MOST_CHOICES = 1000

# Sent to the tokenizer process: "key", "kind", "value", and for JSON the "options" of llguidance.
Constraint = dict[str, Any]


class BadShape(ValueError):
    """A constraint of the wrong shape: what is wrong, and what to do."""


def constraint_of(fields: dict[str, Any]) -> Constraint | None:
    """Remove the constraint's keys from a row's fields and return the constraint; None if the answer is free."""
    by_format, by_structure = fields.pop(FORMAT, None), fields.pop(STRUCTURED, None)
    if by_format is not None and (constraint := _from_format(by_format)) is not None:
        if by_structure is not None:
            raise BadShape(f'"{FORMAT}" and "{STRUCTURED}" both constrain the answer; give one')
        return constraint
    return None if by_structure is None else _from_structure(by_structure)


def _from_format(asked: object) -> Constraint | None:
    if not isinstance(asked, dict):
        raise BadShape(f'"{FORMAT}" must be an object such as {{"type": "json_object"}}, got {shown(asked)}')
    kind = asked.get("type")
    if kind not in ("text", "json_object", "json_schema"):
        raise BadShape(f'"{FORMAT}": "type" must be text, json_object or json_schema, got {shown(kind)}')
    no_others(FORMAT, asked, {"type", "json_schema"} if kind == "json_schema" else {"type"})
    if kind == "text":
        return None
    if kind == "json_object":
        return _json(FORMAT, {"type": "object"})
    named = asked.get("json_schema")
    place = "json_schema"
    if not isinstance(named, dict):
        raise BadShape(f'"{FORMAT}": "json_schema" must be an object with a "schema", got {shown(named)}')
    # "strict" makes no difference: a schema is always kept.
    no_others(place, named, {"name", "description", "schema", "strict"})
    if not isinstance(named.get("strict"), bool | None):
        raise BadShape(f'"{place}": "strict" must be true or false, got {shown(named["strict"])}')
    if not isinstance(schema := named.get("schema"), dict):
        raise BadShape(f'"{place}": "schema" must be an object, got {shown(schema)}')
    return _json(FORMAT, schema)


def _from_structure(asked: object) -> Constraint:
    if not isinstance(asked, dict):
        raise BadShape(f'"{STRUCTURED}" must be an object such as {{"regex": "[0-9]+"}}, got {shown(asked)}')
    asked = {key: value for key, value in asked.items() if value is not None}
    no_others(STRUCTURED, asked, {*KINDS, *OPTIONS})
    given = [kind for kind in KINDS if kind in asked]
    if len(given) != 1:
        raise BadShape(f'"{STRUCTURED}" must have one of {", ".join(KINDS)}, got {" and ".join(given) or "none"}')
    kind, value = given[0], asked[given[0]]
    if kind in ("json", "json_object"):
        return _json(STRUCTURED, _schema(value) if kind == "json" else _any_object(value), _options(asked))
    if unused := [option for option in OPTIONS if option in asked]:
        raise BadShape(f'"{STRUCTURED}": "{unused[0]}" belongs to json; remove it')
    if kind == "choice":
        _check_choice(value)
    elif not isinstance(value, str) or not value:
        raise BadShape(f'"{STRUCTURED}": "{kind}" must be a text that is not empty, got {shown(value)}')
    return {"key": STRUCTURED, "kind": kind, "value": value}


def _schema(value: object) -> object:
    """A JSON schema, given as an object or as its text."""
    if isinstance(value, str):
        try:
            value = check_levels(value, json.loads(value))
        except (ValueError, RecursionError):
            raise BadShape(f'"{STRUCTURED}": "json" is a text that is no JSON: {shown(value)}') from None
    if not isinstance(value, dict):
        raise BadShape(f'"{STRUCTURED}": "json" must be a schema (an object), got {shown(value)}')
    return value


def _any_object(value: object) -> object:
    if value is not True:
        raise BadShape(f'"{STRUCTURED}": "json_object" must be true where it is given, got {shown(value)}')
    return {"type": "object"}


def _options(asked: dict[str, Any]) -> dict[str, Any]:
    """The options by llguidance's names. Without any, JSON is compact."""
    compact, pattern = asked.get("disable_any_whitespace", True), asked.get("whitespace_pattern")
    if not isinstance(compact, bool):
        raise BadShape(f'"{STRUCTURED}": "disable_any_whitespace" must be true or false, got {shown(compact)}')
    if pattern is None:
        return {} if compact else {"whitespace_flexible": True}
    if not isinstance(pattern, str):
        raise BadShape(f'"{STRUCTURED}": "whitespace_pattern" must be a text, got {shown(pattern)}')
    return {"whitespace_flexible": True, "whitespace_pattern": pattern}


def _check_choice(value: object) -> None:
    if not isinstance(value, list) or not 1 <= len(value) <= MOST_CHOICES:
        raise BadShape(f'"{STRUCTURED}": "choice" must be a list of 1 to {MOST_CHOICES} texts, got {shown(value)}')
    for index, text in enumerate(value):
        if not isinstance(text, str) or not text:
            raise BadShape(f'"{STRUCTURED}": "choice"[{index}] must be a text that is not empty, got {shown(text)}')


def _json(key: str, schema: object, options: dict[str, Any] | None = None) -> Constraint:
    return {"key": key, "kind": "json", "value": schema, **({"options": options} if options else {})}


def no_others(place: str, asked: dict[str, Any], known: set[str]) -> None:
    if unknown := sorted(asked.keys() - known):
        raise BadShape(f'"{place}": unknown key "{short(unknown[0])}"; remove it')
