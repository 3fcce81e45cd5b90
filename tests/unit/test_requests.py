"""Requests as OpenAI's clients send them are accepted with OpenAI's meaning."""

from __future__ import annotations

from typing import Any

import pytest

from outrider.runner.job.requests import Message, RowError, parse_openai, parse_simple


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
            modalities=["text"],
            function_call="none",
            prompt_cache_retention="24h",
            prompt_cache_options={"mode": "implicit"},
            prediction={"type": "content", "content": [{"type": "text", "text": "high"}]},
        ),
        line=1,
    )
    assert request.messages == (Message(role="user", content="hi"),)
    assert request.prediction == "high"
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
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b", "prompt_cache_breakpoint": {"mode": "explicit"}}]
    request = parse_openai(chat(messages=[{"role": "user", "content": parts}]), 1)
    assert request.messages == (Message(role="user", content="ab"),)
    picture = [{"type": "image_url", "image_url": {"url": "http://x"}}]
    with pytest.raises(RowError, match=r"messages\[0\]\.content\[0\]: only parts of .* got 'image_url'"):
        parse_openai(chat(messages=[{"role": "user", "content": picture}]), 1)


@pytest.mark.parametrize("role", ["system", "developer", "user", "assistant", "tool"])
def test_roles(role: str) -> None:
    parse_openai(chat(messages=[{"role": role, "content": "x", "name": "n"}]), 1)


@pytest.mark.parametrize(
    "body",
    [
        {"stream": True},
        {"best_of": 3},
        {"functions": [{"name": "x"}]},
        {"suffix": "x"},
        {"modalities": ["text", "audio"]},
        {"modalities": "text"},
        {"function_call": {"name": "x"}},
    ],
)
def test_what_would_change_the_answer_is_refused(body: dict[str, Any]) -> None:
    key = next(iter(body))
    with pytest.raises(RowError, match=f'^"{key}" = .* is not supported; remove it$'):
        parse_openai(completion(**body), 1)


def test_a_suffix_that_is_empty_asks_for_nothing() -> None:
    assert parse_openai(completion(suffix=""), 1) == parse_openai(completion(), 1)


@pytest.mark.parametrize(
    ("prediction", "message"),
    [
        ("a text", "must be an object such as"),
        ({"type": "content"}, "must be an object such as"),
        ({"type": "file", "content": "x"}, "must be an object such as"),
        ({"type": "content", "content": 3}, '"content" must be a text or a list of parts, got 3'),
        ({"type": "content", "content": [{"type": "image_url"}]}, 'only parts of the "type" "text" are supported'),
    ],
)
def test_a_prediction_that_is_none_is_refused(prediction: Any, message: str) -> None:
    with pytest.raises(RowError, match=f'^"?prediction"?.*{message}'):
        parse_openai(chat(prediction=prediction), 1)


@pytest.mark.parametrize("key", ["modalities", "function_call", "prediction"])
def test_lines_of_ones_own_have_no_keys_for_openais_clients(key: str) -> None:
    with pytest.raises(RowError, match=f'unknown parameter "{key}"'):
        parse_simple({"prompt": "x", key: ["text"]}, 1)


@pytest.mark.parametrize(
    ("entry", "count"),
    [
        (completion(logprobs=5), 5),
        (completion(logprobs=0), 0),
        (completion(logprobs=None), None),
        (completion(logprobs=False, top_logprobs=None), None),
        (chat(logprobs=True), 0),
        (chat(logprobs=True, top_logprobs=20), 20),
        (chat(logprobs=False, top_logprobs=0), None),
        (chat(), None),
    ],
)
def test_the_forms_of_logprobs(entry: dict[str, Any], count: int | None) -> None:
    assert parse_openai(entry, 1).parameters.logprobs == count


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (completion(logprobs=True), '"logprobs" must be a whole number from 0 to 20, got true'),
        (completion(logprobs=21), '"logprobs" must be a whole number from 0 to 20, got 21'),
        (
            completion(logprobs=1, top_logprobs=1),
            '"top_logprobs" belongs to chats; a completion takes "logprobs" with a number',
        ),
        (chat(logprobs=3), r'"logprobs" of a chat must be true or false \(the number is "top_logprobs"\), got 3'),
        (chat(top_logprobs=3), '"top_logprobs" needs "logprobs": true'),
        (chat(logprobs=True, top_logprobs=-1), '"top_logprobs" must be a whole number from 0 to 20, got -1'),
        (chat(logprobs=True, top_logprobs="2"), "\"top_logprobs\" must be a whole number from 0 to 20, got '2'"),
        (completion(metadata=5), '"metadata" must be an object, got 5'),
        (chat(user=[1]), r'"user" must be a text, got \[1\]'),
        (chat(store="yes"), "\"store\" must be true or false, got 'yes'"),
        (completion(min_tokens=-1), '"min_tokens" must be at least 0, got -1'),
        (completion(min_tokens=1.5), '"min_tokens" must be a whole number, got 1.5'),
        (completion(ignore_eos=1), '"ignore_eos" must be true or false, got 1'),
        (completion(stop_token_ids=7), '"stop_token_ids" must be a list of token ids, got 7'),
        (completion(stop=["x"] * 17), '"stop" must have at most 16 entries, got 17'),
        (completion(stop_token_ids=[1] * 129), '"stop_token_ids" must have at most 128 entries, got 129'),
        (completion(stop_token_ids=[-7]), r'"stop_token_ids"\[0\] must be at least 0, got -7'),
        (completion(stop_token_ids=["x"]), r"""\"stop_token_ids\"\[0\] must be a whole number, got 'x'"""),
    ],
)
def test_what_cannot_be_is_refused_in_a_sentence(entry: dict[str, Any], message: str) -> None:
    with pytest.raises(RowError, match=f"^{message}$"):
        parse_openai(entry, 1)


def test_how_a_row_ends() -> None:
    parameters = parse_openai(completion(min_tokens=3, stop_token_ids=[5, 6], ignore_eos=True), 1).parameters
    assert (parameters.min_tokens, parameters.stop_token_ids, parameters.ignore_eos) == (3, (5, 6), True)


def test_simple_rows_take_logprobs_as_their_kind_does() -> None:
    assert parse_simple({"prompt": "x", "logprobs": 2}, 1).parameters.logprobs == 2
    messages = [{"role": "user", "content": "x"}]
    assert parse_simple({"messages": messages, "logprobs": True, "top_logprobs": 2}, 1).parameters.logprobs == 2


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
