"""Log-probabilities, several answers, shared prompts and sixty records that fit a schema, from a model that knows no JSON:
one job through the command line, the same bytes with a draft, killed and resumed on the way."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from command_line import outrider, start, wait_for_rows
from jsonschema import Draft202012Validator

pytestmark = pytest.mark.slow

SYSTEM = "".join(f'def rule_{index}():\n    """Keep line {index} short."""\n\n' for index in range(12))


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


def records() -> list[dict[str, Any]]:
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
    return found


def rows() -> list[dict[str, Any]]:
    ask = [{"role": "user", "content": SYSTEM + "write a function"}]
    url, chat_url = "/v1/completions", "/v1/chat/completions"
    batch: list[dict[str, Any]] = [
        {"url": url, "body": {"prompt": SYSTEM + "def main(", "max_tokens": 12, "logprobs": 2, "n": 3, "temperature": 0.9}},
        {"url": url, "body": {"prompt": SYSTEM + "import ", "max_tokens": 6, "logprobs": 0}},
        {"url": chat_url, "body": {"messages": ask, "max_tokens": 8, "logprobs": True, "top_logprobs": 3, "min_tokens": 8}},
        {"url": chat_url, "body": {"messages": ask, "max_tokens": 5, "n": 2, "temperature": 1.0, "seed": 4}},
        {
            "url": url,
            "body": {"prompt": "import os", "max_tokens": 40, "stop_token_ids": list(range(5, 21)), "min_tokens": 3},
        },
        {"url": url, "body": {"prompt": "x = ", "max_tokens": 20, "ignore_eos": True, "logit_bias": {"0": 100}}},
        {"url": url, "body": {"prompt": "x = ", "max_tokens": 20, "min_tokens": 7, "logit_bias": {"0": 100}}},
    ]
    # Enough alike between the records for the job to be killed amid them, and for what is left to last until a draft is up.
    for index, record in enumerate(records()):
        batch += [record, {"url": url, "body": {"prompt": f"{SYSTEM}y_{index} =", "max_tokens": 48, "logprobs": 1}}]
    return [{"custom_id": str(index), "method": "POST", **row} for index, row in enumerate(batch)]


def test_everything_asked_for_is_the_same_however_it_is_run(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows()))
    plain = ["--draft", "none", "--batch", "1", "--prefix-tokens", "0"]
    done = outrider("run", "in.jsonl", "-o", "plain", *plain, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    process = start("run", "in.jsonl", "-o", "job", "--batch", "2", "--draft-tokens", "3", cwd=tmp_path)
    wait_for_rows(process, tmp_path / "job", 12)
    process.kill()
    process.wait()
    others = ["--draft-tokens", "5", "--draft-shortlist", "1024", "--batch", "6"]
    done = outrider("run", "in.jsonl", "-o", "job", *others, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "the draft scores 1,024 of 4,096 tokens" in done.stderr
    assert (tmp_path / "job" / "results.jsonl").read_bytes() == (tmp_path / "plain" / "results.jsonl").read_bytes()
    summaries = [json.loads((tmp_path / name / "job.json").read_text())["summary"] for name in ("plain", "job")]
    assert summaries[0]["prompt_tokens_reused"] == 0
    assert summaries[0]["prompt_tokens"] <= summaries[1]["prompt_tokens"]
    assert summaries[1]["prompt_tokens_reused"] > summaries[1]["prompt_tokens"] / 2
    assert summaries[1]["accepted"] > 0
    bodies = [
        json.loads(line)["response"]["body"] for line in (tmp_path / "job" / "results.jsonl").read_text().splitlines()
    ]
    assert_answered(bodies)
    fit = bodies[7::2]
    assert_fit(fit)
    assert summaries[0]["forced_tokens"] > sum(body["usage"]["completion_tokens"] for body in fit) / 5


def assert_fit(bodies: list[dict[str, Any]]) -> None:
    assert len(bodies) == 60
    for index, body in enumerate(bodies):
        [choice] = body["choices"]
        text = choice["message"]["content"] if index % 2 else choice["text"]
        assert choice["finish_reason"] == "stop"
        Draft202012Validator(VERDICT if index % 3 == 2 else PERSON).validate(json.loads(text))
        assert "\n" not in text


def assert_answered(bodies: list[dict[str, Any]]) -> None:
    several, chosen_only, chat, two, stopped, endless, late = bodies[:7]
    assert [choice["index"] for choice in several["choices"]] == [0, 1, 2]
    assert len({choice["text"] for choice in several["choices"]}) > 1
    for choice in several["choices"]:
        told = choice["logprobs"]
        assert "".join(told["tokens"]) == choice["text"]
        assert told["text_offset"] == [len("".join(told["tokens"][:index])) for index in range(12)]
        for token, value, likeliest in zip(told["tokens"], told["token_logprobs"], told["top_logprobs"], strict=True):
            assert likeliest[token] == value <= 0
            assert 2 <= len(likeliest) <= 3
            assert math.fsum(math.exp(each) for each in likeliest.values()) <= 1 + 1e-9
    told = chosen_only["choices"][0]["logprobs"]
    assert told["top_logprobs"] == [
        {token: value} for token, value in zip(told["tokens"], told["token_logprobs"], strict=True)
    ]
    content = chat["choices"][0]["logprobs"]["content"]
    assert len(content) == chat["usage"]["completion_tokens"] == 8
    text = b"".join(bytes(entry["bytes"]) for entry in content).decode()
    assert text == chat["choices"][0]["message"]["content"]
    assert all(entry["top_logprobs"][0]["logprob"] == entry["logprob"] for entry in content), "greedy takes the likeliest"
    assert [choice["logprobs"] for choice in two["choices"]] == [None, None]
    assert stopped["choices"][0]["finish_reason"] == "stop"
    assert 3 < stopped["usage"]["completion_tokens"] < 40
    assert (endless["choices"][0]["finish_reason"], endless["usage"]["completion_tokens"]) == ("length", 20)
    assert (late["choices"][0]["finish_reason"], late["usage"]["completion_tokens"]) == ("stop", 8)
