"""Finds the keywords of a JSON Schema that llguidance would silently ignore.

It refuses the keywords of the schema's draft that it does not implement, but ignores those that are not in that draft:
misspelled ones, OpenAPI's, another draft's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
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
