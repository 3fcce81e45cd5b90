"""The spellings of constraints in a row, OpenAI's and vLLM's, and parameters that cannot be combined with them."""

from __future__ import annotations

from typing import Any

import pytest

from outrider.runner.job.requests import RowError, parse_openai, parse_simple

SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"type": "boolean"}}}
SPACES = {"disable_any_whitespace": False}


def constraint(fields: dict[str, Any]) -> dict[str, Any] | None:
    return parse_simple({"prompt": "x", **fields}, 1).constraint


def kept(key: str, kind: str, value: object, **options: object) -> dict[str, Any]:
    return {"key": key, "kind": kind, "value": value, **({"options": options} if options else {})}


def by_format(**more: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, **more}}}


@pytest.mark.parametrize(
    ("fields", "found"),
    [
        ({}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": None, "structured_outputs": None}, None),
        ({"response_format": {"type": "json_object"}}, kept("response_format", "json", {"type": "object"})),
        (by_format(strict=True, description="y"), kept("response_format", "json", SCHEMA)),
        (by_format(strict=None), kept("response_format", "json", SCHEMA)),
        ({"structured_outputs": {"json": SCHEMA}}, kept("structured_outputs", "json", SCHEMA)),
        (
            {"structured_outputs": {"json": '{"type": "string"}', "regex": None}},
            kept("structured_outputs", "json", {"type": "string"}),
        ),
        (
            {"structured_outputs": {"json": SCHEMA, **SPACES}},
            kept("structured_outputs", "json", SCHEMA, whitespace_flexible=True),
        ),
        (
            {"structured_outputs": {"json_object": True, "whitespace_pattern": " ?"}},
            kept("structured_outputs", "json", {"type": "object"}, whitespace_flexible=True, whitespace_pattern=" ?"),
        ),
        ({"structured_outputs": {"regex": "a+"}}, kept("structured_outputs", "regex", "a+")),
        ({"structured_outputs": {"choice": ["a", "b"]}}, kept("structured_outputs", "choice", ["a", "b"])),
        (
            {"response_format": {"type": "text"}, "structured_outputs": {"grammar": "start: /a/"}},
            kept("structured_outputs", "grammar", "start: /a/"),
        ),
    ],
)
def test_what_is_asked_for(fields: dict[str, Any], found: dict[str, Any] | None) -> None:
    assert constraint(fields) == found
    line = {"custom_id": "a", "method": "POST"}
    messages = {"messages": [{"role": "user", "content": "x"}]}
    assert parse_openai({**line, "url": "/v1/completions", "body": {"prompt": "x", **fields}}, 1).constraint == found
    assert parse_openai({**line, "url": "/v1/chat/completions", "body": {**messages, **fields}}, 1).constraint == found
    if found is not None and found["value"] is SCHEMA:
        assert list(found["value"]["properties"]) == ["b", "a"]  # their order is that of the answer


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        (
            {"response_format": "json"},
            '"response_format" must be an object such as ',
        ),
        ({"response_format": {"type": "xml"}}, '"type" must be text, json_object or json_schema, got'),
        ({"response_format": {"type": "json_object", "x": 1}}, '"response_format": unknown key "x"; remove'),
        (
            {"response_format": {"type": "json_schema"}},
            '"json_schema" must be an object with a "schema"',
        ),
        (by_format(schema=None), r'"schema" must be an object, got null'),
        (by_format(strict="yes"), r'"strict" must be true or false, got'),
        (by_format(more=1), '^"json_schema": unknown key "more"; remove it$'),
        ({**by_format(), "structured_outputs": {"regex": "a"}}, "both constrain the answer; give one"),
        ({"structured_outputs": []}, '"structured_outputs" must be an object such as'),
        ({"structured_outputs": {}}, "must have one of json, regex, choice, grammar, json_object, got none"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "must have one of .*, got regex and choice"),
        ({"structured_outputs": {"regex": "a", "backend": "x"}}, 'unknown key "backend"; remove it'),
        ({"structured_outputs": {"regex": "a", **SPACES}}, '"disable_any_whitespace" belongs to json; remove it'),
        ({"structured_outputs": {"regex": ""}}, '"regex" must be a text that is not empty'),
        ({"structured_outputs": {"grammar": 3}}, '"grammar" must be a text that is not empty'),
        ({"structured_outputs": {"json": "{"}}, '"json" is a text that is no JSON'),
        ({"structured_outputs": {"json": "[1]"}}, r'"json" must be a schema \(an object\)'),
        ({"structured_outputs": {"json_object": False}}, '"json_object" must be true where it is given'),
        (
            {"structured_outputs": {"json": {}, "disable_any_whitespace": 1}},
            '"disable_any_whitespace" must be true or false',
        ),
        ({"structured_outputs": {"json": {}, "whitespace_pattern": 1}}, '"whitespace_pattern" must be a text'),
        ({"structured_outputs": {"choice": []}}, '"choice" must be a list of 1 to 1000 texts'),
        ({"structured_outputs": {"choice": ["a", ""]}}, r'"choice"\[1\] must be a text that is not empty'),
        (
            {"structured_outputs": {"regex": "a"}, "min_tokens": 3},
            '"min_tokens" cannot be combined with "structured_outputs"',
        ),
        ({**by_format(), "ignore_eos": True}, '"ignore_eos" cannot be combined with "response_format"'),
    ],
)
def test_what_is_not_right_is_named(fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(RowError, match=sentence):
        constraint(fields)
