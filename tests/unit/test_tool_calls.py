"""Tool calls in answers: parsed by each model family's form, put into records, and streamed."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_results import result, stored

from examples import examples
from outrider.runner.job.results import result_record
from outrider.runner.serve.single_rows import StreamedText
from outrider.workers.constraints.tool_forms import Call, Parsed, calls_of, certain

GET, NOW = '{"name": "get", "arguments": {"city": "Oslo", "n": 1.0}}', '{"name": "now", "arguments": {}}'
GOT, NOWED = Call("get", '{"city": "Oslo", "n": 1.0}'), Call("now", "{}")
BARE = GET.replace("arguments", "parameters")
NAMES = ("get", "now")


def hermes(call: str) -> str:
    return f"<tool_call>\n{call}\n</tool_call>"


@pytest.mark.parametrize(
    ("kind", "text", "content", "calls"),
    [
        ("hermes", hermes(GET), "", [GOT]),
        ("hermes", f"{hermes(GET)}\n{hermes(NOW)}", "", [GOT, NOWED]),
        ("hermes", f" Let me see.\n\n{hermes(GET)}\n", " Let me see.", [GOT]),
        ("hermes", f"One.\n{hermes(GET)}\ntwo \n{hermes(NOW)} three\n", "One.\ntwo\nthree", [GOT, NOWED]),
        ("hermes", f"<tool_call>{GET}</tool_call><tool_call>{NOW}</tool_call>", "", [GOT, NOWED]),
        # The closing mark may be left out.
        ("hermes", f"<tool_call>\n{GET}", "", [GOT]),
        ("hermes", f"<tool_call>\n{GET}\n<tool_call>\n{NOW}\n</tool_call>", "", [GOT, NOWED]),
        # Marks in arguments are text.
        (
            "hermes",
            hermes('{"name": "get", "arguments": {"city": "</tool_call><tool_call>"}}'),
            "",
            [Call("get", '{"city": "</tool_call><tool_call>"}')],
        ),
        # What is broken stays, and what is whole beside it is called.
        ("hermes", f'<tool_call>\n{{"name": "get", "arg\n{hermes(NOW)}', '<tool_call>\n{"name": "get", "arg', [NOWED]),
        ("hermes", f"{hermes(GET)}\n<tool_call>\n{NOW[:-4]}", f"<tool_call>\n{NOW[:-4]}", [GOT]),
        # Other orders and spaces, an id, and numbers as they were written.
        (
            "hermes",
            hermes('{"id":"x","type":"function","arguments" : {"n":1e2 , "s":"\\ud83d"} ,"name":"get"}'),
            "",
            [Call("get", '{"n":1e2 , "s":"\\ud83d"}')],
        ),
        ("llama", BARE, "", [GOT]),
        ("llama", f"\n{BARE}\n", "", [GOT]),
        ("llama", f"<|python_tag|>{BARE}", "", [GOT]),
        ("llama", f"{GET}; {BARE}", "", [GOT, GOT]),
        ("mistral", f"[TOOL_CALLS] [{GET}]", "", [GOT]),
        ("mistral", f"[TOOL_CALLS][{GET},{NOW}]", "", [GOT, NOWED]),
        ("mistral", f'Well.[TOOL_CALLS] [{GET[:-1]}, "id": "abc"}}] ', "Well.", [GOT]),
    ],
)
def test_calls_and_the_text_around_them(kind: str, text: str, content: str, calls: list[Call]) -> None:
    assert calls_of(text, kind, NAMES) == Parsed(content, calls)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("hermes", "just text"),
        ("hermes", "<tool_call>"),
        ("hermes", hermes("{}")),
        ("hermes", hermes('{"name": "put", "arguments": {}}')),
        ("hermes", hermes('{"name": "get", "arguments": "{}"}')),
        ("hermes", hermes('{"name": "get", "arguments": {"a": NaN}}')),
        ("hermes", hermes('{"name": "get", "arguments": {}, "more": 1}')),
        ("hermes", hermes('{"name": "get", "name": "now", "arguments": {}}')),
        ("hermes", hermes('{"name": "get"}')),
        ("hermes", hermes('{"name": ["get"], "arguments": {}}')),
        ("hermes", hermes("[" * 100_000)),
        ("hermes", f"<tool_call>\n{GET} and more </tool_call>"),
        ("hermes", f"{GET}"),
        ("llama", f"Sure: {BARE}"),
        ("llama", f"{BARE} Done."),
        ("llama", f"{BARE};"),
        ("llama", f"{BARE}; {NOW[:-2]}"),
        ("llama", '{"answer": 42}'),
        ("llama", "<|python_tag|>print(1)"),
        ("mistral", f"[TOOL_CALLS] {GET}"),
        ("mistral", f"[TOOL_CALLS] [{GET}"),
        ("mistral", "[TOOL_CALLS] []"),
        ("mistral", f"[TOOL_CALLS] [{GET}, {{}}]"),
        ("mistral", hermes(GET)),
    ],
)
def test_what_is_no_call_stays_text(kind: str, text: str) -> None:
    assert calls_of(text, kind, NAMES) == Parsed(text, [])


PIECES = [
    "<tool_call>",
    "</tool_call>",
    "\n",
    " ",
    "<",
    "a",
    "{",
    GET,
    NOW,
    BARE,
    "[TOOL_CALLS]",
    "[",
    "]",
    ",",
    "<|python_tag|>",
]


@settings(max_examples=examples(300), deadline=None)
@given(st.sampled_from(["hermes", "llama", "mistral"]), st.lists(st.sampled_from(PIECES), max_size=8).map("".join))
def test_what_is_told_of_a_text_that_grows_is_never_taken_back(kind: str, text: str) -> None:
    content, calls = calls_of(text, kind, NAMES)
    for length in range(len(text) + 1):
        told = text[: certain(text[:length], kind)]
        assert content.startswith(told), (told, content, calls)


def row_with_tools(kind: str, choice: str = "auto", **request: Any) -> Any:
    row = stored("chat")
    row.request.update({"tools": [kind, list(NAMES), choice], "shown": [], **request})
    return row


def choices(row: Any, *texts: str, reason: str = "stop") -> list[dict[str, Any]]:
    results = [replace(result(text), finish_reason=reason) for text in texts]
    found: list[dict[str, Any]] = json.loads(result_record(row, results, "m"))["response"]["body"]["choices"]
    return found


def test_a_record_has_calls_as_openai_has_them() -> None:
    [choice] = choices(row_with_tools("hermes"), f"{hermes(GET)}\n{hermes(NOW)}")
    first, second = choice["message"]["tool_calls"]
    assert choice["message"].keys() == {"role", "content", "tool_calls"} and choice["message"]["content"] is None
    assert first["function"] == {"name": "get", "arguments": '{"city": "Oslo", "n": 1.0}'}
    assert first["type"] == second["type"] == "function" and first["id"] != second["id"]
    assert first["id"].startswith("call_") and choice["finish_reason"] == "tool_calls"


@pytest.mark.parametrize(
    ("choice", "text", "ended", "reason"),
    [
        ("auto", hermes(GET), "stop", "tool_calls"),
        ("required", hermes(GET), "stop", "tool_calls"),
        ("named", hermes(GET), "stop", "stop"),  # as OpenAI has it
        ("auto", "text", "stop", "stop"),
        ("auto", hermes(GET), "length", "length"),
        ("required", f"{hermes(GET)}\n<tool_ca", "length", "length"),
    ],
)
def test_why_it_ended(choice: str, text: str, ended: str, reason: str) -> None:
    [found] = choices(row_with_tools("hermes", choice), text, reason=ended)
    assert found["finish_reason"] == reason


def test_ids_come_from_the_row_and_the_place_alone() -> None:
    row = row_with_tools("hermes")
    text = f"{hermes(GET)}\n{hermes(GET)}"
    ids = [call["id"] for choice in choices(row, text, text) for call in choice["message"]["tool_calls"]]
    assert len(set(ids)) == 4
    assert ids == [call["id"] for choice in choices(row, text, text) for call in choice["message"]["tool_calls"]]
    # The next turn of a conversation often stands in the same place of the next file.
    later = type(row)(row.row, row.custom_id, row.line, row.kind, row.request, (*row.prompt, 1))
    assert ids[0] != choices(later, text)[0]["message"]["tool_calls"][0]["id"]
    # Mistral's templates refuse others.
    [choice] = choices(row_with_tools("mistral"), f"[TOOL_CALLS] [{GET}]")
    own = choice["message"]["tool_calls"][0]["id"]
    assert len(own) == 9 and own.isalnum()


def test_calls_come_behind_thoughts() -> None:
    row = row_with_tools("hermes", reasoning=["<think>", "</think>", True])
    [choice] = choices(row, f"so {hermes(NOW)}?\n</think>\n\n{hermes(GET)}")
    message = choice["message"]
    assert message["reasoning_content"] == f"so {hermes(NOW)}?" and message["content"] is None
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["get"]
    [choice] = choices(row, f"so {hermes(NOW)}", reason="length")
    assert choice["message"] == {"role": "assistant", "reasoning_content": f"so {hermes(NOW)}", "content": ""}


@pytest.mark.parametrize(
    ("kind", "text", "told"),
    [
        ("hermes", f"Let me see. \n{hermes(GET)}", "Let me see."),
        ("hermes", "A < b and <tool> too\n", "A < b and <tool> too"),
        ("llama", BARE, ""),
        ("llama", "Some text {", "Some text {"),
        ("llama", "\n{no call", ""),
        ("mistral", f"[TOOL_CALLS] [{GET}]", ""),
    ],
)
def test_a_stream_tells_text_and_holds_calls_back(kind: str, text: str, told: str) -> None:
    row = row_with_tools(kind, stop=[])
    stream = StreamedText(row)
    grown = "".join(stream.grown(text[:length]).content for length in range(1, len(text) + 1))
    assert grown == told
    [choice] = choices(row, text)
    rest = stream.rest(None, choice["message"]["content"] or "")
    assert rest is not None and grown + rest.content == (choice["message"]["content"] or "")


def test_a_stream_of_thoughts_and_calls() -> None:
    row = row_with_tools("hermes", stop=[], reasoning=["<think>", "</think>", False])
    stream, text = StreamedText(row), f"<think>hm</think>\n\nFirst.\n{hermes(GET)}"
    grown = [stream.grown(text[:length]) for length in range(1, len(text) + 1)]
    assert "".join(each.reasoning or "" for each in grown) == "hm"
    assert "".join(each.content for each in grown) == "First."
