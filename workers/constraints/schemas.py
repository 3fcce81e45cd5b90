"""What of a JSON Schema llguidance would leave out.

It refuses the keywords that the schema's draft has and it cannot keep, and leaves out, without a word, those that the draft
has not: misspelled ones, OpenAPI's, another draft's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote

# What it keeps.
# fmt: off
KEPT = frozenset((
    "type", "const", "enum", "$ref", "allOf", "anyOf", "oneOf", "properties", "patternProperties", "additionalProperties",
    "required", "minProperties", "maxProperties", "items", "prefixItems", "additionalItems", "minItems", "maxItems",
    "minLength", "maxLength", "pattern", "format", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum",
    "multipleOf",
))
# What says nothing of which answers fit: JSON Schema's, OpenAPI's, and a flag that OpenAI has beside schemas.
ANNOTATIONS = frozenset((
    "$schema", "$id", "id", "$anchor", "$comment", "$defs", "definitions", "title", "description", "default", "examples",
    "example", "deprecated", "readOnly", "writeOnly", "contentMediaType", "contentEncoding", "contentSchema",
    "discriminator", "externalDocs", "xml", "strict",
))
# fmt: on
# Where schemas stand: by name, or one or a list of them. Whatever else a keyword holds is data.
BY_NAME = ("properties", "patternProperties", "$defs", "definitions")
ONE_OR_MORE = ("items", "prefixItems", "additionalItems", "additionalProperties", "allOf", "anyOf", "oneOf")


def left_out(root: Mapping[str, Any]) -> tuple[str, str] | None:
    """A keyword that would not be kept, and the place of its schema as a `$ref` names it."""
    found, references = _schemas_in(root)
    drafts = {str(schema["$schema"]) for schema in found.values() if "$schema" in schema}
    for place, schema in found.items():
        for key in schema:
            below = f"{place}/{_escaped(key)}/"
            # Schemas may stand anywhere if something refers to them.
            if not _kept(schema, key, place, drafts) and not any(each.startswith(below) for each in references):
                return key, place
    return None


def _kept(schema: Mapping[str, Any], key: str, place: str, drafts: set[str]) -> bool:
    value = schema[key]
    match key:
        case "nullable":
            return value is False
        case "required":
            # Draft 3 has true here, which nobody would see on what is no object.
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
            return key in KEPT or key in ANNOTATIONS or key.startswith("x-")


def _schemas_in(root: Mapping[str, Any]) -> tuple[dict[str, Mapping[str, Any]], set[str]]:
    """All schemas by their places, and the places that are referred to."""
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
    """None where there is nothing, of which the library tells."""
    for part in place.split("/")[1:]:
        if isinstance(root, list):
            root = root[int(part)] if part.isdecimal() and int(part) < len(root) else None
        else:
            root = root.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(root, dict) else None
    return root


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")
