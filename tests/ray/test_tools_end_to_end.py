"""``outrider run`` over rows with tools: with a draft and without, the same bytes. Taken up in the middle:
tests/unit/test_tool_answers.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from command_line import outrider
from jsonschema import Draft202012Validator
from tool_models import tool_model

pytestmark = pytest.mark.slow
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": CITY, "strict": True}}


def rows(count: int) -> list[dict[str, Any]]:
    choices: list[Any] = ["required", {"type": "function", "function": {"name": "weather"}}, "auto", "none"]
    return [
        {
            "id": f"row {number}",
            "messages": [{"role": "user", "content": f"What of city {number}?"}],
            "tools": [TOOL],
            "tool_choice": choices[number % 4],
            "parallel_tool_calls": False,
            "temperature": 1,
            "seed": number,
            "max_tokens": 120,
            "label": number,
        }
        for number in range(count)
    ]


def test_calls_fit_and_are_the_same_with_a_draft(tmp_path: Path) -> None:
    tool_model(tmp_path / "target", "special")
    tool_model(tmp_path / "draft", "special", seed=1)
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows(40)))
    asked = ("in.jsonl", "-m", "target", "--carry", "all")
    done = outrider("run", *asked, "-o", "plain", "--draft", "none", "--batch", "1", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    done = outrider("run", *asked, "-o", "job", "--draft", "draft", "--draft-tokens", "5", "--batch", "8", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = (tmp_path / "job" / "results.jsonl").read_text()
    assert lines == (tmp_path / "plain" / "results.jsonl").read_text()
    ids = set()
    for number, line in enumerate(map(json.loads, lines.rstrip("\n").split("\n"))):
        [choice] = line["response"]["body"]["choices"]
        calls = choice["message"].get("tool_calls", [])
        assert len(calls) == 1 if number % 4 < 2 else len(calls) <= (number % 4 == 2)
        assert (
            choice["finish_reason"]
            in (("tool_calls",), ("stop",), ("tool_calls", "stop", "length"), ("stop", "length"))[number % 4]
        )
        for call in calls:
            Draft202012Validator(CITY).validate(json.loads(call["function"]["arguments"]))
            ids.add(call["id"])
    assert len(ids) >= 20
    done = outrider("results", "job", "-o", "out.jsonl", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    table = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().rstrip("\n").split("\n")]
    assert [row["label"] for row in table] == list(range(40)) and table[1]["tool_calls"][0]["function"]["name"] == "weather"
