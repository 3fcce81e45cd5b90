"""Validation errors: one sentence that names the field, the allowed values and the value given."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from outrider.runner.job.requests import HARMLESS_IN_MESSAGES, Message, Parameters, RowError, parse_simple
from outrider.runner.options.bench import BenchSpec
from outrider.runner.options.job import JobSpec
from outrider.runner.options.option import OptionModel, build_options, flag_of
from outrider.runner.options.quality import QuantizeSpec
from outrider.runner.options.topology import TopologySpec
from outrider.runner.validation_errors import MUST, must, short, shown
from outrider.workers.errors import UsageError

WRONG: list[Any] = [
    True, 1, -1, 0, 1.5, -0.5, 1e999, -1e999, float("nan"), 10**30, -(10**30), 10**400, "", "x", "5", "\0", "\x1b[31m",
    "y" * 500, [], [[]], ["", "x"], [None], [1, "x", 2.5], list(range(-1, 200)), ["x"] * 50, {}, {"a": 1}, {"5": "x"},
    {"5": 1e999}, {"5": None}, {"": 1}, {"z" * 200: []}, [{"a": [1]}], b"bytes",
]  # fmt: skip
# What pydantic says of its own accord: "Input should be a valid string", "String should have at least 1 character".
FOREIGN = re.compile(r"should|Input|[^n]valid|instance of|unable to parse|pydantic")


def check(sentence: str) -> None:
    assert not FOREIGN.search(sentence), sentence
    assert "\n" not in sentence, sentence
    assert len(sentence) < 400, sentence
    assert re.search(r"\bmust .+, got .+|unknown parameter|unknown key|is missing|remove it|is empty", sentence), sentence


def test_a_value_is_shown_by_its_beginning_however_much_it_stands_for() -> None:
    for value in WRONG:
        assert shown(value, of_python=True) == short(repr(value))
    by_aliases: list[Any] = ["x"]
    for _ in range(80):
        by_aliases = [by_aliases, by_aliases]
    assert shown(by_aliases) == "[" * 57 + "..."
    by_aliases.append(by_aliases)
    assert shown({"a": by_aliases}).startswith("{'a': [[[")


def test_true_is_shown_as_it_was_given() -> None:
    value = [True, {"a": False, None: 1}, "True", None, 1, 0]
    assert shown(value) == "[true, {'a': false, null: 1}, 'True', null, 1, 0]"
    assert shown(value, of_python=True) == repr(value)
    with pytest.raises(RowError, match=r'^"max_tokens" must be a whole number, got true$'):
        parse_simple({"prompt": "x", "max_tokens": True}, 1)


@pytest.mark.one_in(8)
@pytest.mark.parametrize("field", [*Parameters.model_fields, "top_logprobs", "prompt", "messages", "id", "model", "stream"])
@pytest.mark.parametrize("value", WRONG, ids=lambda value: repr(value)[:20])
def test_every_field_of_a_row(field: str, value: Any) -> None:
    try:
        parse_simple({"prompt": "x", field: value} if field != "messages" else {field: value}, 1)
    except RowError as error:
        sentence = str(error)
        if (
            '"messages", not both' not in sentence
            and "belongs to chats" not in sentence
            and "several texts" not in sentence
        ):
            check(sentence)
        assert field in sentence


@pytest.mark.parametrize("field", [*Message.model_fields, *HARMLESS_IN_MESSAGES, "colour"])
def test_every_field_of_a_message(field: str) -> None:
    taken = []
    for value in [*WRONG, None]:
        message = {"role": "user", "content": "x", field: value}
        try:
            parsed = parse_simple({"messages": [{"role": "user", "content": "first"}, message]}, 1).messages
        except RowError as error:
            assert str(error).startswith("messages[1]"), error
            check(str(error).replace("are supported, got", "must be, got"))
        else:
            assert parsed is not None
            taken.append((value, parsed[1].model_dump().get(field)))
    for value, kept in taken:
        assert (
            kept == value or (field, value) in [("content", []), ("tool_calls", [])] or value in HARMLESS_IN_MESSAGES[field]
        ), "dropped silently"


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ([{"type": "text", "text": None}], 'messages[0].content[0]: "text" must be a text, got null'),
        ([{"type": "text"}], 'messages[0].content[0]: "text" must be a text, got null'),
        ([{"type": "text", "text": {"a": 1}}], """messages[0].content[0]: "text" must be a text, got {'a': 1}"""),
        (
            [{"type": "text", "text": "a"}, {"type": "text", "text": 5}],
            'messages[0].content[1]: "text" must be a text, got 5',
        ),
        (
            [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {}}],
            """messages[0].content[1]: only parts of the "type" "text" are supported, got 'image_url'""",
        ),
        ([{"text": "a"}], 'messages[0].content[0]: only parts of the "type" "text" are supported, got null'),
        ([{"type": "text", "text": "a", "cache": 1}], 'messages[0].content[0]: unknown key "cache"; remove it'),
        (["a"], """messages[0].content[0] must be an object such as {"type": "text", "text": …}, got 'a'"""),
        (None, 'messages[0]: "content" must be a text or a list of parts, got null'),
        ({"type": "text"}, """messages[0]: "content" must be a text or a list of parts, got {'type': 'text'}"""),
    ],
)
def test_parts_of_a_message(content: Any, sentence: str) -> None:
    with pytest.raises(RowError) as caught:
        parse_simple({"messages": [{"role": "user", "content": content}]}, 1)
    assert str(caught.value) == sentence


def test_what_answers_of_openai_bring_along_is_nothing() -> None:
    """An answer of theirs that stands in a conversation again."""
    nothing = {"refusal": None, "annotations": [], "audio": None, "function_call": None, "tool_calls": None, "name": None}
    request = parse_simple({"messages": [{"role": "assistant", "content": "x", **nothing}]}, 1)
    assert request.messages == (Message(role="assistant", content="x"),)


@pytest.mark.parametrize("kind", [JobSpec, BenchSpec, TopologySpec])
def test_every_option(kind: type[OptionModel], tmp_path: Path) -> None:
    refused = 0
    for field in kind.model_fields:
        for value in WRONG:
            try:
                build_options(kind, {"input": "a", field: value} if kind is JobSpec else {field: value})
            except UsageError as error:
                assert str(error).startswith(f"{flag_of(kind, field)}: must "), error
                check(str(error))
                refused += 1
    assert refused > 20 * len(kind.model_fields)


@pytest.mark.parametrize(
    ("kind", "given", "said"),
    [
        (QuantizeSpec, {"out": "x", "bits": 5}, "--bits: must be 4 or 8, got 5"),
        (
            JobSpec,
            {"input": "x", "carry": "a,,b"},
            "--carry: must be all, none, or names of columns with commas between them, got 'a,,b'",
        ),
    ],
)
def test_a_value_is_told_once(kind: type[OptionModel], given: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError) as told:
        build_options(kind, given)
    assert str(told.value) == said


def test_a_kind_of_error_that_is_new_is_a_sentence_too() -> None:
    error = ErrorDetails(type="strange", loc=("x",), msg="Of a new kind", input=5)
    assert must(error) == "must be otherwise (Of a new kind), got 5"
    assert must(ErrorDetails(type="bool_type", loc=("x",), msg="?", input=5)) == "must be true or false, got 5"
    for text in MUST.values():
        assert not FOREIGN.search(text)


@pytest.mark.parametrize(
    ("kind", "limit", "words"),
    [
        ("less_than_equal", {"le": 67_108_864}, "at most 67,108,864"),
        ("less_than_equal", {"le": 100.0}, "at most 100"),
        ("less_than", {"lt": 1 << 63}, "less than 9,223,372,036,854,775,808"),
        ("greater_than_equal", {"ge": -(1 << 63)}, "at least -9,223,372,036,854,775,808"),
        ("greater_than", {"gt": 0.5}, "greater than 0.5"),
        ("greater_than", {"gt": 0}, "greater than 0"),
    ],
)
def test_limits_have_all_their_digits(kind: str, limit: dict[str, Any], words: str) -> None:
    error = ErrorDetails(type=kind, loc=("x",), msg="?", input=67_108_865, ctx=limit)
    assert must(error) == f"must be {words}, got 67108865"


def test_pydantic_still_calls_its_errors_as_we_know_them() -> None:
    with pytest.raises(ValidationError) as caught:
        Parameters.model_validate({"max_tokens": "x", "temperature": -1, "ignore_eos": 3, "stop": [""], "logit_bias": 3})
    assert {error["type"] for error in caught.value.errors()} <= MUST.keys()
