"""`tools`, `tool_choice` and earlier tool calls of a chat: OpenAI's spelling, strictly checked."""

from __future__ import annotations

from typing import Any

import pytest

from outrider.runner.job.requests import Request, RowError, parse_openai, parse_simple

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
ASKED = [{"role": "user", "content": "hi"}]


def tool(name: str = "get", **function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **function}}


def called(name: str = "get", own: str | None = "call_1", arguments: object = '{"city": "Oslo"}') -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {**({} if own is None else {"id": own}), "type": "function", "function": function}


def chat(**body: Any) -> Request:
    body = {"messages": ASKED, **body}
    openai = parse_openai({"custom_id": "1", "url": "/v1/chat/completions", "body": body}, 1)
    assert parse_simple(dict(body), 1) == openai
    return openai


def messages(*behind: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [*ASKED, *behind]}


def choice(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def kept(key: str, *tools: tuple[str, Any], required: bool = True, one: bool = False) -> dict[str, Any]:
    return {"key": key, "kind": "tools", "tools": list(tools), "required": required, "one": one}


GET, NOTHING = tool("get", parameters=SCHEMA), tool("now")
NONE: dict[str, Any] = {"properties": {}, "additionalProperties": False}


@pytest.mark.parametrize(
    ("body", "offered", "how", "constraint"),
    [
        ({"tools": []}, 0, "auto", None),
        ({"tools": None, "tool_choice": None, "parallel_tool_calls": None}, 0, "auto", None),
        ({"tool_choice": "none"}, 0, "auto", None),
        ({"tools": [GET], "tool_choice": "none"}, 0, "auto", None),
        ({"tools": [GET, NOTHING]}, 2, "auto", None),
        ({"tools": [GET], "tool_choice": "auto", "response_format": {"type": "text"}}, 1, "auto", None),
        (
            {"tools": [GET], "parallel_tool_calls": False},
            1,
            "auto",
            kept("parallel_tool_calls", ("get", None), required=False, one=True),
        ),
        (
            {"tools": [tool("get", parameters=SCHEMA, strict=True), tool("other", parameters=SCHEMA), NOTHING]},
            3,
            "auto",
            kept("strict", ("get", SCHEMA), ("other", None), ("now", None), required=False),
        ),
        (
            {"tools": [GET, NOTHING], "tool_choice": "required"},
            2,
            "required",
            kept("tool_choice", ("get", SCHEMA), ("now", NONE)),
        ),
        (
            {"tools": [GET], "tool_choice": "required", "parallel_tool_calls": False},
            1,
            "required",
            kept("tool_choice", ("get", SCHEMA), one=True),
        ),
        (
            {"tools": [GET, NOTHING], "tool_choice": choice("now")},
            2,
            "named",
            kept("tool_choice", ("now", NONE), one=True),
        ),
    ],
)
def test_what_is_offered_and_what_must_be(
    body: dict[str, Any], offered: int, how: str, constraint: dict[str, Any] | None
) -> None:
    request = chat(**body)
    assert (len(request.tools), request.tool_choice, request.constraint) == (offered, how, constraint)


def test_models_read_functions_in_the_order_that_they_know() -> None:
    jumbled = {"parameters": SCHEMA, "strict": True, "name": "get", "description": "Gets it."}
    [offered] = chat(tools=[{"function": jumbled, "type": "function"}]).tools
    assert list(offered) == ["type", "function"]
    assert list(offered["function"]) == ["name", "description", "parameters"]


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ({"tools": {}}, r'^"tools" must be a list of tools such as \{"type": "function"'),
        ({"tools": ["get"]}, r"^tools\[0\] must be an object such as"),
        ({"tools": [{"type": "custom"}]}, r"""^tools\[0\]: "type" must be function, got 'custom'"""),
        ({"tools": [{"type": "function"}]}, r'^tools\[0\]: "function" must be an object with a "name", got null'),
        ({"tools": [{**GET, "cache": 1}]}, r'^"tools\[0\]": unknown key "cache"; remove it'),
        ({"tools": [GET, tool("x", returns={})]}, r'^"tools\[1\].function": unknown key "returns"; remove it'),
        ({"tools": [tool("get it")]}, r"""^tools\[0\].function: "name" must be 1 to 64 letters, .* got 'get it'"""),
        ({"tools": [tool("x" * 65)]}, r'"name" must be 1 to 64 letters'),
        ({"tools": [tool("x", description=3)]}, r'^tools\[0\].function: "description" must be a text, got 3'),
        ({"tools": [tool("x", parameters=[])]}, r'"parameters" must be a schema \(an object\), got \[\]'),
        ({"tools": [tool("x", parameters={"type": "string"})]}, r"""the schema of an object, got one .* 'string'"""),
        ({"tools": [tool("x", strict="yes")]}, r'"strict" must be true or false'),
        ({"tools": [GET, GET]}, r'^"tools": two functions are called "get"; names must differ'),
        ({"tools": [tool(f"f{n}") for n in range(129)]}, r'^"tools" holds 129 tools; at most 128'),
        ({"tools": [GET], "tool_choice": "any"}, r"""^"tool_choice" must be none, auto, required or an object .* 'any'"""),
        ({"tools": [GET], "tool_choice": {"type": "allowed_tools"}}, r'^"tool_choice" must be none, auto, required or'),
        ({"tools": [GET], "tool_choice": {"type": "function"}}, r'"function" must be an object with a "name"'),
        ({"tools": [GET], "tool_choice": {**choice("get"), "x": 1}}, r'^"tool_choice": unknown key "x"'),
        ({"tools": [GET], "tool_choice": choice("put")}, r'^"tool_choice" names the function "put", which is none of "too'),
        ({"tool_choice": "required"}, r'^"tool_choice" asks for a call, and there are no "tools"; give some, or remove it'),
        ({"tools": [], "tool_choice": choice("get")}, r"there are no"),
        ({"tools": [GET], "parallel_tool_calls": 1}, r'^"parallel_tool_calls" must be true or false, got 1'),
        (
            {"tools": [GET], "response_format": {"type": "json_object"}},
            r'^"response_format" constrains .* and "tools" .*; give one',
        ),
        (
            {"tools": [GET], "tool_choice": "required", "structured_outputs": {"regex": "a"}},
            r'^"structured_outputs" constrains .* give one',
        ),
        (
            {"tools": [GET], "tool_choice": "required", "min_tokens": 3},
            r'^"min_tokens" cannot be combined with "tool_choice"',
        ),
        ({"functions": [{"name": "x"}]}, r'^"functions" = .* is not supported; remove it$'),
    ],
)
def test_what_is_not_right_is_named(body: dict[str, Any], sentence: str) -> None:
    with pytest.raises(RowError, match=sentence):
        chat(**body)


@pytest.mark.parametrize("key", ["tools", "tool_choice"])
def test_completions_have_none(key: str) -> None:
    given: Any = {"tools": [GET], "tool_choice": "required"}[key]
    with pytest.raises(RowError, match=f'^"{key}" belongs to chats, whose template shows'):
        parse_simple({"prompt": "x", key: given}, 1)
    for parallel in (True, False):
        parse_simple({"prompt": "x", "tools": [], "tool_choice": "auto", "parallel_tool_calls": parallel}, 1)


def test_earlier_calls_are_given_to_the_template_as_objects() -> None:
    behind = (
        {"role": "assistant", "content": None, "tool_calls": [called(), called("now", "call_2", "")], "refusal": None},
        {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "cold"}]},
        {"role": "tool", "tool_call_id": "call_2", "content": "12:00"},
    )
    read = chat(**messages(*behind)).messages
    assert read is not None
    assert [message.model_dump(exclude_none=True) for message in read[1:]] == [
        {
            "role": "assistant",
            "content": "",
            "tool_calls": (called(arguments={"city": "Oslo"}), called("now", "call_2", {})),
        },
        {"role": "tool", "content": "cold", "tool_call_id": "call_1"},
        {"role": "tool", "content": "12:00", "tool_call_id": "call_2"},
    ]


def test_answers_stand_in_the_order_of_the_calls_since_many_templates_leave_out_ids() -> None:
    calls = {"role": "assistant", "content": "", "tool_calls": [called(own=own) for own in ("a", "b", "c")]}
    answers = [{"role": "tool", "tool_call_id": own, "content": own} for own in ("c", "a", "b")]
    read = chat(**messages(calls, *answers, {"role": "user", "content": "so?"})).messages
    assert read is not None and [message.content for message in read] == ["hi", "", "a", "b", "c", "so?"]
    # Two turns may use one id.
    read = chat(**messages(calls, *answers, calls, answers[0])).messages
    assert read is not None and [message.content for message in read[-2:]] == ["", "c"]


def made(*calls: object, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": None, "tool_calls": list(calls), **more}


@pytest.mark.parametrize(
    ("behind", "sentence"),
    [
        ([{"role": "assistant", "content": None}], r'^messages\[1\]: "content" must be a text'),
        ([{"role": "user", "content": "x", "tool_calls": [called()]}], r'"tool_calls" belongs to the role assistant, not'),
        ([{"role": "user", "content": "x", "tool_call_id": "a"}], r'"tool_call_id" belongs to the role tool, not to user'),
        ([{**made(), "tool_calls": called()}], r'^messages\[1\]: "tool_calls" must be a list'),
        ([made("x")], r"^messages\[1\].tool_calls\[0\] must be an object"),
        ([made({**called(), "x": 1})], r'^"messages\[1\].tool_calls\[0\]": unknown key "x"; remove it'),
        ([made({**called(), "type": "custom"})], r'"type" must be function'),
        ([made(called(own=""))], r'"id" must be a text that is not empty'),
        ([made({"id": "a"})], r'"function" must be an object with "name" and "arguments"'),
        ([made(called(name=""))], r'"name" must be 1 to 64 letters'),
        ([made(called(arguments="{"))], r"""\[0\]: "arguments" must be JSON of an object, as a text, got '\{'"""),
        ([made(called(arguments="[1]"))], r'"arguments" must be JSON of an object'),
        ([made(called(arguments='{"a": NaN}'))], r'"arguments" must be JSON of an object'),
        ([made(called(arguments=None))], r'"arguments" must be JSON of an object'),
        ([made(called(), called())], r'^messages\[1\]: two "tool_calls" have the same "id"'),
        (
            [{"role": "tool", "tool_call_id": "a", "content": "x"}],
            r"""^messages\[1\]: "tool_call_id" is 'a', and no call""",
        ),
        ([made(called()), {"role": "tool", "tool_call_id": 3, "content": "x"}], r'"tool_call_id" must be a text'),
        (
            [made(called()), *[{"role": "tool", "tool_call_id": "call_1", "content": "x"}] * 2],
            r"""^messages\[3\]: "tool_call_id" 'call_1' is answered already""",
        ),
        (
            [made(called()), {"role": "user", "content": "x"}, {"role": "tool", "tool_call_id": "call_1", "content": "x"}],
            r"^messages\[3\]: .* no call in the assistant's last message before",
        ),
    ],
)
def test_earlier_calls_that_are_none_are_named(behind: list[dict[str, Any]], sentence: str) -> None:
    with pytest.raises(RowError, match=sentence):
        chat(**messages(*behind))
