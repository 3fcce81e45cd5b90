"""Reasoning split from answers, and the variables that a row passes to the chat template."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from one_tokenizer_process import tokenizer_process
from test_results import result, stored
from test_tokenizer import WORDS, build
from tokenizers import AddedToken
from tokenizers import Tokenizer as Fast

from outrider.runner.job.admission import admit
from outrider.runner.job.journal import Journal
from outrider.runner.job.records import results
from outrider.runner.job.requests import RowError, parse_openai, parse_simple
from outrider.runner.job.results import result_record
from outrider.runner.job.source import Source
from outrider.runner.options.job import JobSpec
from outrider.runner.serve.single_rows import StreamedText
from outrider.workers.models.model_info import ModelInfo
from outrider.workers.models.preparation import encode, reasoning_tags
from outrider.workers.models.reasoning import (
    CHANNEL,
    CHANNEL_MARKS,
    MESSAGE,
    MESSAGE_END,
    START,
    ReasoningTags,
    Split,
    prompt_ends_inside,
    split,
)
from outrider.workers.models.template_variables import template_variables
from outrider.workers.models.tokenizer import Tokenizer

TAGS = ReasoningTags("<think>", "</think>", (7,))
# As Qwen 3's: thoughts are told from the answer, and may be shut.
TEMPLATE = """{%- for message in messages %}{{ message.content.split('</think>')[-1] }} {% endfor -%}
{%- if enable_thinking is defined and enable_thinking is false %}<think> </think>{% elif eager %}<think>{% endif %}"""
CAT = [{"role": "user", "content": "cat"}]


def thinking(directory: Path, template: str | None) -> ModelInfo:
    """A model whose tags are tokens that texts show, 7 and 8."""
    model_info = build(directory, WORDS, vocabulary=9, template=template)
    fast = Fast.from_file(str(directory / "tokenizer.json"))
    fast.add_tokens(["<think>", "</think>"])
    fast.save(str(directory / "tokenizer.json"))
    return model_info


@pytest.mark.parametrize(
    ("text", "inside", "parts"),
    [
        ("<think>\nhm\n</think>\n\nyes", False, Split("hm", "yes")),
        ("\n<think>hm</think>yes", False, Split("hm", "yes")),
        ("hm\n</think>\n\nyes\n", True, Split("hm", "yes\n")),
        ("<think>\nhm\n</think>\nyes", True, Split("hm", "yes")),
        ("cut off amid", True, Split("cut off amid", "")),
        ("<think>cut off", False, Split("cut off", "")),
        ("no thoughts, but a </think> of its own", False, Split(None, "no thoughts, but a </think> of its own")),
        ("says <think> later", False, Split(None, "says <think> later")),
        ("<think>one</think>two</think>", False, Split("one", "two</think>")),
    ],
)
def test_thoughts_and_answer(text: str, inside: bool, parts: Split) -> None:
    assert split(text, "<think>", "</think>", inside) == parts


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("analysis|hm/final|yes", Split("hm", "yes")),
        ("final|yes", Split(None, "yes")),
        ("analysis|hm/analysis|so/final|yes", Split("hm\nso", "yes")),
        ("commentary|let me see/final|yes", Split(None, "let me see\nyes")),
        ("analysis|hm/commentary to=functions.find|{}", Split("hm\n{}", "")),
        ("analysis|cut o", Split("cut o", "")),
        ("analysis|hm/fin", Split("hm", "")),
        ("anal", Split(None, "")),
    ],
)
def test_channels(text: str, parts: Split) -> None:
    """A message is written "channel|text" here, and "/" ends all but the last."""
    for short, mark in (("|", MESSAGE), ("/", f"{MESSAGE_END}{START}assistant{CHANNEL}")):
        text = text.replace(short, mark)
    assert split(CHANNEL + text, CHANNEL, MESSAGE, False) == parts
    assert split(text, CHANNEL, MESSAGE, False) == Split(None, text)


@pytest.mark.parametrize(
    ("prompt", "inside"),
    [
        ((1, 7), True),
        ((1, 7, 2), True),
        ((7, 2, 2), True),
        ((7, 2, 2, 2), False),
        ((7, 8), True),
        ((1, 2), False),
        ((), False),
    ],
)
def test_a_prompt_may_open_them(prompt: tuple[int, ...], inside: bool) -> None:
    assert prompt_ends_inside(TAGS, prompt) is inside


def test_a_record_has_them_apart() -> None:
    row = stored("chat")
    row.request["reasoning"] = ["<think>", "</think>", True]
    [choice] = json.loads(result_record(row, [result("hm</think>yes")], "m"))["response"]["body"]["choices"]
    assert choice["message"] == {"role": "assistant", "reasoning_content": "hm", "content": "yes"}
    row.request["reasoning"] = ["<think>", "</think>", False]
    [choice] = json.loads(result_record(row, [result("yes")], "m"))["response"]["body"]["choices"]
    assert choice["message"] == {"role": "assistant", "content": "yes"}


def test_a_template_is_given_a_rows_options(tmp_path: Path) -> None:
    path = thinking(tmp_path / "model", TEMPLATE).path
    tokenizer = Tokenizer(path)
    assert tokenizer.template_variables(tools=False) == {"enable_thinking", "eager"}
    assert tokenizer.reasoning_tags == ReasoningTags("<think>", "</think>", (7,))
    asked: list[Any] = [CAT, {"messages": CAT, "options": {"enable_thinking": False}}]
    asked += [{"messages": CAT, "options": {"eager": 1}}, {"messages": CAT, "options": {"thinking": True}}]
    asked += [{"messages": CAT, "options": {"x" * 10**6: True}}]
    assert encode(path, asked) == [
        (2,),
        (2, 7, 8),
        (2, 7),
        'the model\'s chat template does not use "thinking" of "chat_template_kwargs" (it knows eager, '
        "enable_thinking); remove it",
        f'the model\'s chat template does not use "{"x" * 60}…" of "chat_template_kwargs" (it knows eager, '
        "enable_thinking); remove it",
    ]


def test_options_are_those_of_the_template_that_a_row_is_written_by(tmp_path: Path) -> None:
    """Some models have one for rows with tools beside the usual one."""
    path = Path(thinking(tmp_path / "model", "{{ messages[0].content }}{% if eager %} cat{% endif %}").path)
    (path / "additional_chat_templates").mkdir()
    with_tools = "{{ tools | tojson }} {{ messages[0].content }}{% if careful %} cat{% endif %}"
    (path / "additional_chat_templates" / "tool_use.jinja").write_text(with_tools)
    tool = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}

    def asked(option: str, *tools: Any) -> tuple[int, ...] | str:
        [answer] = encode(str(path), [{"messages": CAT, "options": {option: True}, "tools": list(tools)}])
        return answer

    assert asked("eager") == (2, 2)
    assert "(it knows eager)" in asked("careful")
    assert asked("careful", tool)[-2:] == (2, 2)
    assert "(it knows careful)" in asked("eager", tool)


def test_without_tags_in_the_template_nothing_is_told_apart(tmp_path: Path) -> None:
    tokenizer = Tokenizer(thinking(tmp_path / "model", "{{ messages[0].content }}").path)
    assert tokenizer.reasoning_tags is None and not tokenizer.template_variables(tools=False)
    assert Tokenizer(thinking(tmp_path / "none", None).path).reasoning_tags is None


def test_a_template_that_cannot_be_chosen_is_for_the_rows_to_say(tmp_path: Path) -> None:
    """Two templates, and neither is the one that is usual."""
    path = thinking(tmp_path / "model", None).path
    settings = json.loads((Path(path) / "tokenizer_config.json").read_text())
    settings["chat_template"] = [{"name": name, "template": TEMPLATE} for name in ("one", "other")]
    (Path(path) / "tokenizer_config.json").write_text(json.dumps(settings))
    assert reasoning_tags(path) is None
    [refusal] = encode(path, [CAT])
    assert isinstance(refusal, str) and "the model's chat template refuses the messages" in refusal


def test_variables_of_templates_as_they_are_written() -> None:
    template = """{% set shown = namespace(a=1) %}{% generation %}{{ raise_exception(mood) }}{% endgeneration %}
    {% for x in messages %}{% if loop.first %}{% continue %}{% endif %}{{ x.role }}{{ strftime_now('%d') }}{% endfor %}"""
    assert template_variables(template) == {"mood"}


def chat(**more: Any) -> dict[str, Any]:
    return {"custom_id": "a", "url": "/v1/chat/completions", "body": {"messages": CAT, **more}}


@pytest.mark.parametrize(
    ("more", "options"),
    [
        ({}, {}),
        ({"chat_template_kwargs": {"enable_thinking": False, "nothing": None}}, {"enable_thinking": False}),
        ({"reasoning_effort": "low"}, {"reasoning_effort": "low"}),
        ({"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "low"}}, {"reasoning_effort": "low"}),
    ],
)
def test_how_clients_spell_them(more: dict[str, Any], options: dict[str, Any]) -> None:
    assert parse_openai(chat(**more), 1).template_options == options
    assert parse_simple({"messages": CAT, **more}, 1).template_options == options


@pytest.mark.parametrize(
    ("entry", "sentence"),
    [
        (
            chat(chat_template_kwargs=[1]),
            r'"chat_template_kwargs" must be an object such as \{"enable',
        ),
        (chat(reasoning_effort=3), '"reasoning_effort" must be a text, got 3'),
        (chat(reasoning_effort="low", chat_template_kwargs={"reasoning_effort": "high"}), "with another value; give one"),
        (
            {"custom_id": "a", "url": "/v1/completions", "body": {"prompt": "x", "chat_template_kwargs": {}}},
            '"chat_template_kwargs" belongs to chats; a completion has no template',
        ),
    ],
)
def test_what_is_none_of_a_templates_is_refused(entry: dict[str, Any], sentence: str) -> None:
    with pytest.raises(RowError, match=sentence):
        parse_openai(entry, 1)


def test_from_the_input_to_the_record(tmp_path: Path) -> None:
    """Through the real process that knows tokenizers, and the journal."""
    model_info = thinking(tmp_path / "model", TEMPLATE)
    rows = [{"messages": CAT, "max_tokens": 3}, {"messages": CAT, "chat_template_kwargs": {"eager": True}}]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [*rows, {"prompt": "cat"}]))
    spec = JobSpec(input=tmp_path / "in.jsonl", max_tokens=3)
    journal = Journal(tmp_path / "job.db")
    admit(
        spec, Source(spec.input), model_info, tokenizer_process(), journal, lambda digest: {"identity": {"input": digest}}
    )
    loaded = journal.load([0, 1, 2])
    assert [row.request.get("reasoning") for row in loaded] == [
        ["<think>", "</think>", False],
        ["<think>", "</think>", True],
        None,
    ]
    journal.record([(row.row, result_record(row, [result("hm </think> mat")], "m")) for row in loaded], [])
    journal.close()
    found = [(record.reasoning, record.text) for record in results(tmp_path)]
    assert found == [(None, "hm </think> mat"), ("hm ", " mat"), (None, "hm </think> mat")]


def test_channels_from_the_input_to_the_streamed_text(tmp_path: Path) -> None:
    """Their marks are special tokens, and texts of such rows have them."""
    template = "{{ messages[0].content }}{% if messages[0].thinking %}<|channel|>analysis<|message|>{% endif %}"
    model_info = build(tmp_path / "model", WORDS, vocabulary=11, template=template)
    fast = Fast.from_file(str(tmp_path / "model" / "tokenizer.json"))
    fast.add_special_tokens([AddedToken(mark, special=True) for mark in CHANNEL_MARKS])
    fast.save(str(tmp_path / "model" / "tokenizer.json"))
    (tmp_path / "in.jsonl").write_text(json.dumps({"messages": CAT}) + "\n")
    spec = JobSpec(input=tmp_path / "in.jsonl", max_tokens=3)
    journal = Journal(tmp_path / "job.db")
    admit(
        spec, Source(spec.input), model_info, tokenizer_process(), journal, lambda digest: {"identity": {"input": digest}}
    )
    [row] = journal.load([0])
    assert row.request["reasoning"] == [CHANNEL, MESSAGE, False]
    channel, message, end, start = map(fast.get_vocab().__getitem__, CHANNEL_MARKS)
    assert row.request["shown"] == sorted((channel, message, end, start))
    cat, sat = map(fast.get_vocab().__getitem__, ("cat", "sat"))
    # This tokenizer lacks the word "final", so both messages are thoughts.
    written = [channel, cat, message, sat, end, start, cat, channel, sat, message, cat, sat]
    tokenizer, stream = Tokenizer(model_info.path), StreamedText(row)
    told = [stream.grown(tokenizer.decode(written[:length], stream.shown)) for length in range(1, len(written) + 1)]
    whole = split(tokenizer.decode(written, stream.shown), CHANNEL, MESSAGE, False)
    assert "".join(each.reasoning or "" for each in told) == whole.reasoning
    assert whole.reasoning is not None and whole.reasoning.split() == ["sat", "cat", "sat"] and not whole.content
    journal.close()
