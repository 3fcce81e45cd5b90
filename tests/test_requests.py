"""What OpenAI's clients really send is accepted, and means what it says."""

from __future__ import annotations

from typing import Any

import pytest

from outrider.runner.requests import Message, RowError, parse_openai, parse_simple


def chat(**body: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": "hi"}]
    return {
        "custom_id": "a",
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {"model": "gpt-4o-mini", "messages": messages, **body},
    }


def completion(**body: Any) -> dict[str, Any]:
    return {"custom_id": "a", "url": "/v1/completions", "body": {"model": "m", "prompt": "hi", **body}}


def test_a_line_as_the_openai_cookbook_writes_it() -> None:
    request = parse_openai(
        chat(
            max_tokens=300,
            temperature=0.1,
            top_p=1,
            n=1,
            stop=None,
            stream=False,
            presence_penalty=0,
            frequency_penalty=0,
            logit_bias={},
            user="someone",
            seed=42,
            response_format={"type": "text"},
            tools=[],
            tool_choice="auto",
            logprobs=False,
            metadata={"run": "7"},
            store=False,
            parallel_tool_calls=True,
            service_tier=None,
        ),
        line=1,
    )
    assert request.messages == (Message(role="user", content="hi"),)
    assert request.parameters.max_tokens == 300
    assert request.parameters.temperature == 0.1
    assert request.parameters.seed == 42


def test_max_completion_tokens_is_max_tokens() -> None:
    assert parse_openai(chat(max_completion_tokens=9), 1).parameters.max_tokens == 9


@pytest.mark.parametrize(
    ("prompt", "text", "tokens"),
    [("hi", "hi", None), (["hi"], "hi", None), ([1, 2], None, (1, 2)), ([[3, 4]], None, (3, 4)), ([7], None, (7,))],
)
def test_the_forms_of_a_prompt(prompt: Any, text: str | None, tokens: tuple[int, ...] | None) -> None:
    request = parse_openai(completion(prompt=prompt), 1)
    assert (request.prompt, request.prompt_tokens) == (text, tokens)


@pytest.mark.parametrize(("stop", "parsed"), [("x", ("x",)), (["x", "yz"], ("x", "yz")), ([], ()), (None, None)])
def test_the_forms_of_stop(stop: Any, parsed: Any) -> None:
    assert parse_openai(completion(stop=stop), 1).parameters.stop == parsed


def test_content_in_parts() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    request = parse_openai(chat(messages=[{"role": "user", "content": parts}]), 1)
    assert request.messages == (Message(role="user", content="ab"),)
    picture = [{"type": "image_url", "image_url": {"url": "http://x"}}]
    with pytest.raises(RowError, match=r'"messages"\[0\]: "content" must be a valid string'):
        parse_openai(chat(messages=[{"role": "user", "content": picture}]), 1)


@pytest.mark.parametrize("role", ["system", "developer", "user", "assistant", "tool"])
def test_roles(role: str) -> None:
    parse_openai(chat(messages=[{"role": role, "content": "x", "name": "n"}]), 1)


@pytest.mark.parametrize(
    "body",
    [
        {"stream": True},
        {"logprobs": True},
        {"logprobs": 5},
        {"echo": True},
        {"best_of": 3},
        {"tools": [{"type": "function"}]},
        {"response_format": {"type": "json_object"}},
        {"suffix": "x"},
    ],
)
def test_what_would_change_the_answer_is_refused(body: dict[str, Any]) -> None:
    key = next(iter(body))
    with pytest.raises(RowError, match=f'^"{key}" = .* is not supported; remove it$'):
        parse_openai(completion(**body), 1)


def test_simple_rows() -> None:
    request = parse_simple({"id": 17, "prompt": "x", "temperature": 1, "top_k": -1}, 4)
    assert (request.custom_id, request.line, request.parameters.temperature) == ("17", 4, 1)
    assert parse_simple({"prompt": "x"}, 4).custom_id == "4"
    assert parse_simple({"id": "a", "messages": [{"role": "user", "content": "x"}]}, 1).messages is not None


def test_parsing_leaves_the_entry_alone() -> None:
    entry = chat(max_completion_tokens=9, stream=False)
    before = repr(entry)
    parse_openai(entry, 1)
    assert repr(entry) == before
