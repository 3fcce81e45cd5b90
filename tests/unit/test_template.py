"""Prompts made of columns: names in braces are looked up, and nothing else is done with them."""

from __future__ import annotations

import datetime
import re
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.runner.template import Template, TemplateError, plain, spelled


def test_columns_stand_where_they_are_named() -> None:
    template = Template.parse("Summarise: {text}\n{{{n}}} {text}")
    assert template.columns == ("text", "n", "text")
    assert template.filled({"text": "a {n} b", "n": 3}) == "Summarise: a {n} b\n{3} a {n} b"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{}", '"{}" at character 1 is none'),
        ("a { b", '"{" at character 3 is none'),
        ("a } b {c}", '"}" at character 3 is none'),
        ("{a{b}}", '"{" at character 1 is none'),
        ("no column", "without one all prompts are the same"),
        ("{{text}}", "without one all prompts are the same"),
    ],
)
def test_what_is_no_template(text: str, said: str) -> None:
    with pytest.raises(TemplateError, match=re.escape(said)):
        Template.parse(text)


@pytest.mark.parametrize("name", ["a.__class__", "a[0]", "a!r", "a:>10", "0", "a.b c"])
def test_a_name_is_a_name_and_nothing_of_python(name: str) -> None:
    template = Template.parse(f"{{{name}}}")
    assert template.columns == (name,)
    with pytest.raises(TemplateError, match="which --template names, is missing"):
        template.filled({"a": "x"})
    assert template.filled({name: "x"}) == "x"


def test_a_value_that_is_not_there_is_said_so() -> None:
    with pytest.raises(TemplateError, match='"a", which --template names, is null'):
        Template.parse("{a}").filled({"a": None})
    for value, said in ((float("nan"), "nan"), (float("inf"), "inf"), (float("-inf"), "-inf")):
        with pytest.raises(TemplateError, match=f'"a", which --template names, is {said}'):
            Template.parse("{a}").filled({"a": value})
    assert Template.parse("{a}|").filled({"a": ""}) == "|"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("a\n", "a\n"),
        (1, "1"),
        (1.5, "1.5"),
        (True, "true"),
        (["a", None], '["a", null]'),
        ({"é": Decimal("1.10")}, '{"é": "1.10"}'),
        (datetime.date(2026, 1, 2), "2026-01-02"),
        (b"\xff", "/w=="),
        (float("nan"), "null"),
    ],
)
def test_values_are_spelled_as_json_does(value: Any, text: str) -> None:
    assert spelled(value) == text


def test_what_nobody_can_spell_is_an_error() -> None:
    with pytest.raises(TypeError, match="of the type object"):
        plain(object())


names = st.text(st.characters(exclude_characters="{}", codec="utf-8"), min_size=1, max_size=5)
texts = st.text(st.characters(codec="utf-8"), max_size=8)


@settings(derandomize=True)
@given(st.lists(st.tuples(texts, names, texts), min_size=1, max_size=4), texts)
def test_any_texts_and_names_come_out_again(pieces: list[tuple[str, str, str]], last: str) -> None:
    def escaped(text: str) -> str:
        return text.replace("{", "{{").replace("}", "}}")

    row = {name: value for _, name, value in pieces}
    template = Template.parse("".join(f"{escaped(text)}{{{name}}}" for text, name, _ in pieces) + escaped(last))
    assert template.filled(row) == "".join(text + row[name] for text, name, _ in pieces) + last
