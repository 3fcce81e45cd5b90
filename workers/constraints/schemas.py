"""Finds what llguidance would silently ignore or change in a JSON Schema: keywords, and digits of numbers.

It refuses the keywords of the schema's draft that it does not implement, but ignores those that are not in that draft:
misspelled ones, OpenAPI's, another draft's. It keeps numbers as doubles, which it reads with an error in the last place.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from decimal import Decimal
from typing import Any
from urllib.parse import unquote

# The keywords that it implements.
# fmt: off
IMPLEMENTED = frozenset((
    "type", "const", "enum", "$ref", "allOf", "anyOf", "oneOf", "properties", "patternProperties", "additionalProperties",
    "required", "minProperties", "maxProperties", "items", "prefixItems", "additionalItems", "minItems", "maxItems",
    "minLength", "maxLength", "pattern", "format", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum",
    "multipleOf",
))
# Keywords that do not constrain answers: JSON Schema's, OpenAPI's, and "strict", a flag that OpenAI has beside schemas.
ANNOTATIONS = frozenset((
    "$schema", "$id", "id", "$anchor", "$comment", "$defs", "definitions", "title", "description", "default", "examples",
    "example", "deprecated", "readOnly", "writeOnly", "contentMediaType", "contentEncoding", "contentSchema",
    "discriminator", "externalDocs", "xml", "strict",
))
# fmt: on
# Keywords whose value holds further schemas: an object of them by name, or one or a list of them.
BY_NAME = ("properties", "patternProperties", "$defs", "definitions")
# Keywords with values that answers have letter by letter, and those with bounds.
WRITTEN, BOUNDS = ("const", "enum"), ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
# Whole numbers up to this one are doubles. Other numbers are read exactly where they have no more digits than this, times a
# power of ten that is a double, too.
MOST_WHOLE, MOST_DIGITS, MOST_TENS = 1 << 53, 15, 22
# The library takes bounds beyond it for this one.
LARGEST = (1 << 63) - 1
ONE_OR_MORE = ("items", "prefixItems", "additionalItems", "additionalProperties", "allOf", "anyOf", "oneOf")


def left_out(root: Mapping[str, Any]) -> tuple[str, str] | None:
    """A keyword that would be ignored, and the JSON pointer of its schema as in a `$ref`; None where there is none."""
    found, references = _schemas_in(root)
    drafts = {str(schema["$schema"]) for schema in found.values() if "$schema" in schema}
    for place, schema in found.items():
        for key in schema:
            below = f"{place}/{_escaped(key)}/"
            # A keyword of any name may hold schemas that a `$ref` refers to.
            if not _implemented(schema, key, place, drafts) and not any(each.startswith(below) for each in references):
                return key, place
    return None


def inexact(root: Mapping[str, Any]) -> tuple[str, str, int | float] | None:
    """A number that answers would not have as the schema has it, after its keyword and place as in ``left_out``."""
    found, _ = _schemas_in(root)
    for place, schema in found.items():
        for key in WRITTEN:
            for number in _numbers(schema.get(key)):
                if not _is_kept(number):
                    return key, place, number
        for key in BOUNDS:
            if type(bound := schema.get(key)) is int and not _is_kept_bound(key, bound):
                return key, place, bound
    return None


def _numbers(value: Any) -> Iterator[int | float]:
    """All numbers within a JSON value."""
    waiting = deque([value])
    while waiting:
        each = waiting.popleft()
        if isinstance(each, int | float) and not isinstance(each, bool):
            yield each
        elif isinstance(each, Mapping):
            waiting.extend(each.values())
        elif isinstance(each, list):
            waiting.extend(each)


def _is_kept(number: int | float) -> bool:
    if isinstance(number, int):
        return abs(number) <= MOST_WHOLE or (abs(number) <= LARGEST and _is_double(number))
    _, digits, exponent = Decimal(repr(number)).normalize().as_tuple()
    return len(digits) <= MOST_DIGITS and isinstance(exponent, int) and abs(exponent) <= MOST_TENS


def _is_kept_bound(key: str, bound: int) -> bool:
    if abs(bound) <= MOST_WHOLE:
        return True
    # The largest number within an exclusive bound would be no double.
    return key in ("minimum", "maximum") and (bound == LARGEST or _is_double(bound))


def _is_double(number: int) -> bool:
    try:
        return float(number) == number
    except OverflowError:
        return False


def _implemented(schema: Mapping[str, Any], key: str, place: str, drafts: set[str]) -> bool:
    value = schema[key]
    match key:
        case "nullable":
            return value is False
        case "required":
            # Draft 3 has true here, which has no effect on a schema that is not an object's.
            return not isinstance(value, bool)
        case "additionalItems":
            return value is True or isinstance(schema.get("items"), list)
        case "const":
            return not any("draft-04" in draft for draft in drafts)
        case "prefixItems":
            return all("2020-12" in draft for draft in drafts)
        case "x-guidance":
            return place == "#"
        case _:
            return key in IMPLEMENTED or key in ANNOTATIONS or key.startswith("x-")


def _schemas_in(root: Mapping[str, Any]) -> tuple[dict[str, Mapping[str, Any]], set[str]]:
    """All schemas by their JSON pointers, and the pointers that a `$ref` names."""
    found: dict[str, Mapping[str, Any]] = {}
    references: set[str] = set()
    waiting: deque[tuple[str, Any]] = deque([("#", root)])
    while waiting:
        place, schema = waiting.popleft()
        if place in found or not isinstance(schema, dict):
            continue
        found[place] = schema
        waiting.extend((f"{place}/{name}", inner) for name, inner in _inner(schema))
        if isinstance(reference := schema.get("$ref"), str) and reference.startswith("#/"):
            reference = unquote(reference)
            references.add(reference)
            waiting.append((reference, _at(root, reference)))
    return found, references


def _inner(schema: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key in BY_NAME:
        if isinstance(named := schema.get(key), dict):
            yield from ((f"{key}/{_escaped(name)}", inner) for name, inner in named.items())
    for key in ONE_OR_MORE:
        if isinstance(listed := schema.get(key), list):
            yield from ((f"{key}/{index}", inner) for index, inner in enumerate(listed))
        else:
            yield key, schema.get(key)


def _at(root: Any, place: str) -> Any:
    """The value at a JSON pointer; None where there is none, which the library reports."""
    for part in place.split("/")[1:]:
        if isinstance(root, list):
            root = root[int(part)] if part.isdecimal() and int(part) < len(root) else None
        else:
            root = root.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(root, dict) else None
    return root


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")
