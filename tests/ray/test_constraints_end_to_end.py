"""Constraints that are refused or have no end, on a real Ray; test_end_to_end_sampling.py has those that hold."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from command_line import outrider

pytestmark = pytest.mark.slow


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
        ["in.jsonl:1", '"structured_outputs" cannot be enforced'],
        ["in.jsonl:2", '"structured_outputs" cannot be enforced'],
    ]
    choices = [
        json.loads(line)["response"]["body"]["choices"][0]
        for line in (tmp_path / "job" / "results.jsonl").read_text().splitlines()
    ]
    assert choices[0]["finish_reason"] == "length" and choices[0]["text"].isdigit()
    assert choices[1]["text"] in ("yes", "no")
    assert choices[2]["text"].startswith("{")
