"""Sixty records from a model that knows no JSON: all fit their schema, the same bytes with a draft, killed and resumed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from command_line import outrider, start, wait_for_rows
from jsonschema import Draft202012Validator

pytestmark = pytest.mark.slow

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "colours": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "minItems": 1, "maxItems": 3},
        "home": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 10}, "number": {"type": "integer", "maximum": 999}},
            "required": ["city", "number"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "age", "colours", "home"],
    "additionalProperties": False,
}
VERDICT = {
    "type": "object",
    "properties": {"verdict": {"enum": ["good", "bad"]}, "score": {"type": "integer", "minimum": 0, "maximum": 100}},
    "required": ["verdict", "score"],
    "additionalProperties": False,
}


def rows() -> list[dict[str, Any]]:
    found = []
    for index in range(60):
        schema = VERDICT if index % 3 == 2 else PERSON
        asked: dict[str, Any] = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}
        body: dict[str, Any] = {"max_tokens": 400, "temperature": 1, "seed": index}
        if index % 2:
            body |= {"messages": [{"role": "user", "content": f"write function {index}"}], "response_format": asked}
            found.append({"url": "/v1/chat/completions", "body": body})
        else:
            body |= {"prompt": f"def f{index}(x):\n    return", "structured_outputs": {"json": schema}}
            found.append({"url": "/v1/completions", "body": body})
    return [{"custom_id": str(index), "method": "POST", **row} for index, row in enumerate(found)]


def test_sixty_records_fit_and_are_the_same_with_a_draft(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows()))
    done = outrider("run", "in.jsonl", "-o", "plain", "--draft", "none", "--batch", "1", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    process = start("run", "in.jsonl", "-o", "job", "--batch", "2", "--draft-tokens", "3", cwd=tmp_path)
    wait_for_rows(process, tmp_path / "job", 3)
    process.kill()
    process.wait()
    done = outrider("run", "in.jsonl", "-o", "job", "--draft-tokens", "5", "--batch", "8", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "job" / "results.jsonl").read_bytes() == (tmp_path / "plain" / "results.jsonl").read_bytes()
    summaries = [json.loads((tmp_path / name / "job.json").read_text())["summary"] for name in ("plain", "job")]
    assert summaries[0]["forced_tokens"] > summaries[0]["tokens"] / 5
    assert summaries[1]["accepted"] > 0
    for index, line in enumerate((tmp_path / "job" / "results.jsonl").read_text().splitlines()):
        [choice] = json.loads(line)["response"]["body"]["choices"]
        text = choice["message"]["content"] if index % 2 else choice["text"]
        assert choice["finish_reason"] == "stop"
        Draft202012Validator(VERDICT if index % 3 == 2 else PERSON).validate(json.loads(text))
        assert "\n" not in text


def test_a_schema_that_cannot_be_compiled_is_its_rows_error_and_one_without_end_is_cut(tmp_path: Path) -> None:
    asked: list[dict[str, Any]] = [
        {"structured_outputs": {"json": {"type": "objekt"}}},
        {"structured_outputs": {"regex": "(ab)+(?=c)"}},
        # It can only end behind more than there is room for.
        {"structured_outputs": {"regex": "[0-9]{60}"}, "max_tokens": 20},
        {"structured_outputs": {"choice": ["yes", "no"]}},
        {"response_format": {"type": "json_object"}, "max_tokens": 40, "temperature": 1},
    ]
    lines = [json.dumps({"prompt": "x =", **each}) for each in asked]
    (tmp_path / "in.jsonl").write_text("\n".join(lines) + "\n")
    done = outrider("run", "in.jsonl", "-o", "job", "--skip-bad", "--draft", "none", cwd=tmp_path)
    assert done.returncode == 3, done.stderr
    errors = [json.loads(line)["error"]["message"] for line in (tmp_path / "job" / "errors.jsonl").read_text().splitlines()]
    assert [error.split(": ")[:2] for error in errors] == [
        ["in.jsonl:1", '"structured_outputs" cannot be kept'],
        ["in.jsonl:2", '"structured_outputs" cannot be kept'],
    ]
    choices = [
        json.loads(line)["response"]["body"]["choices"][0]
        for line in (tmp_path / "job" / "results.jsonl").read_text().splitlines()
    ]
    assert choices[0]["finish_reason"] == "length" and choices[0]["text"].isdigit()
    assert choices[1]["text"] in ("yes", "no")
    assert choices[2]["text"].startswith("{")
