"""Bad rows as error records, and constraints that are refused or have no end, on a real Ray;
test_end_to_end_sampling.py has those that hold."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from command_line import outrider

pytestmark = pytest.mark.slow


def test_bad_rows_are_error_records_when_asked_and_constraints_without_end_are_cut(tmp_path: Path) -> None:
    asked: list[dict[str, Any]] = [
        {"structured_outputs": {"json": {"type": "objekt"}}},
        {"structured_outputs": {"regex": "(ab)+(?=c)"}},
        # It can only end behind more than there is room for.
        {"structured_outputs": {"regex": "[0-9]{60}"}, "max_tokens": 20},
        {"structured_outputs": {"choice": ["yes", "no"]}},
        {"response_format": {"type": "json_object"}, "max_tokens": 40, "temperature": 1},
    ]
    lines = [json.dumps({"prompt": "x =", **each}) for each in asked]
    lines += [json.dumps({"id": "bad", "prompt": ""}), json.dumps({"id": "good", "prompt": "import", "max_tokens": 4})]
    (tmp_path / "in.jsonl").write_text("\n".join(lines) + "\n")
    refused = outrider("run", "in.jsonl", "-o", "job", cwd=tmp_path)
    assert refused.returncode == 2
    assert 'in.jsonl:6: "prompt" is empty' in refused.stderr
    done = outrider("run", "in.jsonl", "-o", "job", "--skip-bad", "--draft", "none", cwd=tmp_path)
    assert done.returncode == 3, done.stderr
    records = [json.loads(line) for line in (tmp_path / "job" / "errors.jsonl").read_text().splitlines()]
    assert [record["error"]["message"].split(": ")[:2] for record in records[:2]] == [
        ["in.jsonl:1", '"structured_outputs" cannot be enforced'],
        ["in.jsonl:2", '"structured_outputs" cannot be enforced'],
    ]
    [bad] = records[2:]
    assert bad["custom_id"] == "bad" and "in.jsonl:6" in bad["error"]["message"]
    results = [json.loads(line) for line in (tmp_path / "job" / "results.jsonl").read_text().splitlines()]
    assert results[-1]["custom_id"] == "good"
    assert results[-1]["response"]["body"]["usage"]["completion_tokens"] == 4
    choices = [result["response"]["body"]["choices"][0] for result in results]
    assert choices[0]["finish_reason"] == "length" and choices[0]["text"].isdigit()
    assert choices[1]["text"] in ("yes", "no")
    assert choices[2]["text"].startswith("{")
