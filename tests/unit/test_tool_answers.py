"""From rows with tools to answers that call them: the families' templates, and models of random weights that must obey."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from built import target_of, write
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from one_tokenizer_process import tokenizer_process
from tool_models import TEMPLATES, VOCABULARY, tool_model, write_tokenizer

from examples import examples
from outrider.runner.job.admission import admit
from outrider.runner.job.journal import Journal, StoredRow
from outrider.runner.job.prompts import BadRow
from outrider.runner.job.records import results
from outrider.runner.job.requests import Request, parse_simple
from outrider.runner.job.resolved_request import samples_of
from outrider.runner.job.results import result_record
from outrider.runner.job.row_check import admit_one
from outrider.runner.job.source import Source
from outrider.runner.options.job import JobSpec
from outrider.workers.build import Draft, build_draft
from outrider.workers.constraints.matching import Grammars
from outrider.workers.messages import ModelSpec, ReplicaSpec, Row, RowResult
from outrider.workers.models.model_info import ModelInfo
from outrider.workers.models.opening import OpenModel, open_model
from outrider.workers.models.tokenizer import Tokenizer

FAMILIES = ("qwen", "thinking", "hermes", "special", "llama", "mistral")
# Three forms of calls; the other families write one of them.
OF_EACH_FORM = [
    name if name in ("qwen", "llama", "mistral") else pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES
]
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "minLength": 1, "maxLength": 5}, "days": {"enum": [1, 2, 3]}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
WEATHER = {"type": "function", "function": {"name": "weather", "description": "Tells it.", "parameters": CITY}}
STRICT = {"type": "function", "function": {**WEATHER["function"], "strict": True}}  # type: ignore[dict-item]
NOW = {"type": "function", "function": {"name": "now"}}
ASKED = [{"role": "user", "content": "Will it rain?"}]
# Prompts are long, a byte a token, and begin alike.
PREFIX = 100_000


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@cache
def made(folder: Path, family: str, seed: int = 0) -> ModelInfo:
    return tool_model(folder / f"{family}{seed}", family, seed)


@cache
def opened(path: str) -> OpenModel:
    return open_model(ModelSpec(path, "native", "fp32", threads=1))


@cache
def tokenizer(path: str) -> Tokenizer:
    return Tokenizer(path)


def admitted(model_info: ModelInfo, number: int = 0, **body: Any) -> StoredRow | BadRow:
    entry = {"custom_id": "single", "url": "/v1/chat/completions", "body": {"messages": ASKED, "max_tokens": 300, **body}}
    return admit_one(entry, number, JobSpec(input=Path("in")), model_info, tokenizer_process())


def stored(model_info: ModelInfo, number: int = 0, **body: Any) -> StoredRow:
    row = admitted(model_info, number, **body)
    assert isinstance(row, StoredRow), row.message
    return row


def refusal(model_info: ModelInfo, **body: Any) -> str:
    row = admitted(model_info, **body)
    assert isinstance(row, BadRow)
    return row.message


def answers(model_info: ModelInfo, rows: Sequence[StoredRow]) -> list[dict[str, Any]]:
    """The choices of each row in turn, as its record has them."""
    target = target_of(opened(model_info.path), 8, 0, prefix_tokens=PREFIX, tokenizer=tokenizer(model_info.path))
    written, _ = write(target, [sample for row in rows for sample in samples_of(row)])
    found = []
    for row in rows:
        record = json.loads(result_record(row, [written[sample.key] for sample in samples_of(row)], "m"))
        found += record["response"]["body"]["choices"]
    return found


# How templates write calls


@pytest.mark.parametrize(
    ("family", "whole", "shown"),
    [
        ("qwen", '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>', ()),
        ("hermes", '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>', ()),
        ("special", '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>', (258, 259)),
        ("llama", '{"name": "f", "parameters": {}}', (259,)),
        ("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {}}]', (259,)),
    ],
)
def test_a_template_shows_its_form(tmp_path: Path, family: str, whole: str, shown: tuple[int, ...]) -> None:
    write_tokenizer(tmp_path / "t", family)
    form = tokenizer_process().tool_form(str(tmp_path / "t"))
    assert form is not None
    assert f'{form.begin}{form.head}"f"{form.middle}{{}}{form.tail}{form.end}' == whole
    assert form.shown == shown and form.separators == (", ", ": ")
    assert form.between == {"llama": None, "mistral": ", "}.get(family, "\n")


@pytest.mark.parametrize("changed", [{"tojson": "tojson(separators=(',', ':'))"}, {"\": ' }}": "\":' }}", "}\\n</": "}</"}])
def test_spaces_are_the_templates_own(tmp_path: Path, changed: dict[str, str]) -> None:
    write_tokenizer(tmp_path / "t", "qwen")
    text = TEMPLATES["qwen"]
    for old, new in changed.items():
        assert old in text
        text = text.replace(old, new)
    (tmp_path / "t" / "chat_template.jinja").write_text(text)
    form = tokenizer_process().tool_form(str(tmp_path / "t"))
    assert form is not None
    if "tojson" in changed:
        assert form.separators == (",", ":")
    else:
        assert (form.middle, form.tail) == (', "arguments":', "}</tool_call>")


@pytest.mark.parametrize("template", ["{{ 1 / 0 }}", "{% for x in range(10**9) %}{{ x }}{% endfor %}", "{{ messages"])
def test_a_template_that_stumbles_shows_none(tmp_path: Path, template: str) -> None:
    write_tokenizer(tmp_path / "t", "plain")
    (tmp_path / "t" / "chat_template.jinja").write_text(template)
    assert tokenizer_process().tool_form(str(tmp_path / "t")) is None


def test_models_that_call_in_another_way_or_not_at_all(folder: Path) -> None:
    coder, plain = made(folder, "coder"), made(folder, "plain")
    sentence = refusal(coder, tools=[WEATHER])
    assert sentence.startswith(
        "the model's chat template writes calls of tools in no form that is known here (known are Her"
    )
    assert "<tool_call>" in sentence and '"parameters"' in sentence and "[TOOL_CALLS]" in sentence
    assert refusal(plain, tools=[WEATHER]) == (
        'the model\'s chat template does not show "tools" to the model; leave them out, or choose a model that calls tools'
    )
    # Whoever wants no call gets none, from any model.
    for model_info in (coder, plain):
        row = stored(model_info, tools=[WEATHER], tool_choice="none")
        assert "tools" not in row.request
        assert row.prompt == stored(model_info).prompt


CALL = {"id": "abc123def", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Ø", "days": 1}'}}
ANSWER = {"role": "tool", "tool_call_id": "abc123def", "content": "rain"}
TURNS = [*ASKED, {"role": "assistant", "content": None, "tool_calls": [CALL]}, ANSWER]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_prompt_says_what_there_is_to_call_and_what_was_called(folder: Path, family: str) -> None:
    model_info = made(folder, family)
    row = stored(model_info, messages=TURNS, tools=[STRICT, NOW])
    text = decoded(model_info, row.prompt)
    for word in ('"weather"', "Tells it.", '"days"', '"now"', "rain", '"Ø"'):
        assert word in text
    assert "strict" not in text
    form = tokenizer_process().tool_form(model_info.path)
    assert form is not None
    # As the model is to write it.
    call = f'{form.head}"weather"{form.middle}{{"city": "Ø", "days": 1}}'
    assert form.begin + call in text


def test_what_a_template_leaves_out_of_a_conversation_is_named(folder: Path) -> None:
    llama, mistral, plain = (made(folder, family) for family in ("llama", "mistral", "plain"))
    both = [*ASKED, {"role": "assistant", "content": "Hm.", "tool_calls": [CALL]}, ANSWER]
    assert 'leaves out what the role "assistant" of messages[1] says beside "tool_calls"; remove it' in refusal(
        llama, messages=both
    )
    assert 'leaves out "tool_calls" of messages[1]; remove it' in refusal(plain, messages=TURNS)
    twice = [*ASKED, {"role": "assistant", "content": None, "tool_calls": [CALL, {**CALL, "id": "b"}]}]
    assert "This model only supports single tool-calls at once!" in refusal(llama, messages=twice)
    other = [*ASKED, {"role": "assistant", "content": None, "tool_calls": [{**CALL, "id": "call_1"}]}]
    assert "Tool call IDs should be alphanumeric strings with length 9!" in refusal(mistral, messages=other)


# What must be called is called


def schemas() -> st.SearchStrategy[dict[str, Any]]:
    leaves: st.SearchStrategy[dict[str, Any]] = st.sampled_from(
        [
            {"type": "integer", "minimum": 0, "maximum": 99},
            {"type": "boolean"},
            {"type": "string", "maxLength": 6},
            {"type": "string", "pattern": "^[a-c]{2,4}$"},
            {"enum": ["red", 'a "b"', "grün", None, 3]},
            {"type": ["integer", "null"], "minimum": -5, "maximum": 5},
            {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 9}, "maxItems": 3},
            {"anyOf": [{"const": "<tool_call>"}, {"$ref": "#/$defs/small"}]},
        ]
    )

    def record(properties: dict[str, dict[str, Any]], required: list[str]) -> dict[str, Any]:
        return {
            "type": "object",
            "properties": properties,
            "required": [name for name in properties if name in required],
            "additionalProperties": False,
        }

    names = ("a", "b", "c d")
    flat = st.builds(record, st.dictionaries(st.sampled_from(names), leaves, max_size=3), st.lists(st.sampled_from(names)))
    deep = st.builds(
        record, st.dictionaries(st.sampled_from(names), leaves | flat, max_size=3), st.lists(st.sampled_from(names))
    )
    return deep.map(lambda schema: {**schema, "$defs": {"small": {"type": "integer", "minimum": 0, "maximum": 3}}})


@pytest.mark.parametrize("family", OF_EACH_FORM)
@settings(max_examples=examples(4), deadline=None, derandomize=True, database=None, phases=[Phase.generate])
@given(some=st.lists(schemas(), min_size=1, max_size=3), choice=st.sampled_from(["required", "named", "one"]))
def test_a_required_call_parses_and_fits(folder: Path, family: str, some: list[dict[str, Any]], choice: str) -> None:
    """Whatever the weights and the temperature."""
    model_info = made(folder, family)
    tools = [
        {"type": "function", "function": {"name": f"f{number}", "parameters": schema}} for number, schema in enumerate(some)
    ]
    body: dict[str, Any] = {"tools": tools, "temperature": 1.0, "tool_choice": "required", "n": 4}
    if choice == "named":
        body["tool_choice"] = {"type": "function", "function": {"name": "f0"}}
    elif choice == "one":
        body["parallel_tool_calls"] = False
    found = answers(model_info, [stored(model_info, number, seed=number, **body) for number in range(2)])
    for each in found:
        calls, content = each["message"].get("tool_calls", []), each["message"]["content"]
        for call in calls:
            name, arguments = call["function"]["name"], json.loads(call["function"]["arguments"])
            assert choice != "named" or name == "f0"
            Draft202012Validator(some[int(name[1:])]).validate(arguments)
        if each["finish_reason"] == "length":
            continue  # thoughts, or calls without end
        assert each["finish_reason"] == ("stop" if choice == "named" else "tool_calls")
        assert content is None and calls
        assert choice == "required" or len(calls) == 1
    assert family == "thinking" or choice == "required" or not any(each["finish_reason"] == "length" for each in found)


def decoded(model_info: ModelInfo, tokens: Sequence[int]) -> str:
    return tokenizer(model_info.path)._coder.decode(tokens, skip_special=False)


TEXTS = {
    "qwen": 'Hm.\n<tool_call>\n{{"name": "{0}", "arguments": {1}}}\n</tool_call>',
    "llama": '{{"name": "{0}", "parameters": {1}}}',
    "mistral": 'Hm.[TOOL_CALLS] [{{"name": "{0}", "arguments": {1}}}]',
}
TEXTS |= dict.fromkeys(("thinking", "hermes", "special"), TEXTS["qwen"])


@pytest.mark.parametrize("family", OF_EACH_FORM)
def test_a_free_answer_is_held_to_strict_schemas_where_it_calls(folder: Path, family: str) -> None:
    """Each text letter by letter, so that marks that are no tokens begin and end amid others."""
    model_info, text = made(folder, family), TEXTS[family]
    form = tokenizer_process().tool_form(model_info.path)
    assert form is not None
    row = stored(model_info, tools=[STRICT, NOW])
    end = model_info.end_tokens[0]
    words = tokenizer(model_info.path)
    for_grammars = words.for_grammars(VOCABULARY, end)

    def fits(answer: str) -> bool:
        grammars = Grammars(lambda: for_grammars, VOCABULARY)
        matching = grammars.matching(row.request["grammar"], [end])
        return all(map(matching.take, [*words.encode_rendered(answer), end]))

    good, other = '{"city": "Oslo", "days": 2}', '{"city": "Oslo", "days": 4}'
    assert fits(text.format("weather", good)) and not fits(text.format("weather", other))
    assert fits(text.format("now", '{"whatever": [1, {}]}')) and not fits(text.format("now", "[]"))
    assert not fits(text.format("later", "{}"))
    assert fits("Just text, and 1 < 2.") and fits("") and fits("<tool_cal")
    calls = text.format("weather", good)
    if form.kind == "hermes":
        assert fits(f"{calls}\n{calls}\nand so on") and not fits(f"{calls} <tool_call>")
    elif form.kind == "llama":
        assert fits(f"<|python_tag|>{calls}") and not fits('\n{"answer": 42}') and fits("A { b")
    else:
        both = f"{calls[:-1]}, {json.dumps({'name': 'now', 'arguments': {}})}]"
        assert fits(both) and not fits("[TOOL_CALLS] []")
    # Of any of them, what is called is what was held to it.
    one = stored(model_info, tools=[STRICT, NOW], parallel_tool_calls=False)
    row = one
    assert fits(calls) and not fits(f"{calls}\n{calls}")
    if form.kind == "mistral":
        assert not fits(both)


def test_thoughts_come_first(folder: Path) -> None:
    model_info = made(folder, "thinking")
    words, end = tokenizer(model_info.path), model_info.end_tokens[0]
    for_grammars = words.for_grammars(VOCABULARY, end)
    call = TEXTS["qwen"].removeprefix("Hm.\n").format("weather", '{"city": "Oslo", "days": 2}')

    def fits(answer: str, **body: Any) -> bool:
        row = stored(model_info, tools=[STRICT], **body)
        grammars = Grammars(lambda: for_grammars, VOCABULARY)
        return all(map(grammars.matching(row.request["grammar"], [end]).take, [*words.encode_rendered(answer), end]))

    begun: dict[str, Any] = {"chat_template_kwargs": {"always": True}}
    for asked in ({"tool_choice": "required"}, {}):
        assert fits(f"<think>\nhm\n</think>\n\n{call}", **asked) and fits(call, **asked)
        assert fits(f"hm\n</think>\n\n{call}", **asked, **begun) and not fits(call, **asked, **begun)
        assert not fits("<think>\nhm", **asked)
    assert not fits("<think>\nhm\n</think>\n\nno", tool_choice="required")
    assert fits("<think>\nhm\n</think>\n\nno")
    row = stored(model_info, tools=[STRICT], tool_choice="required", **begun)
    [found] = json.loads(result_record(row, [answer_of(row, f"hm\n</think>\n\n{call}")], "m"))["response"]["body"][
        "choices"
    ]
    assert found["message"]["reasoning_content"] == "hm" and len(found["message"]["tool_calls"]) == 1


def answer_of(row: StoredRow, text: str) -> RowResult:
    return RowResult(samples_of(row)[0].key, (1, 2), text, "stop", 1, 0, 0, 0.1)


@pytest.mark.parametrize("family", ["special", "llama", "mistral"])
def test_marks_that_are_special_tokens_stand_in_texts_of_rows_with_tools(folder: Path, family: str) -> None:
    model_info = made(folder, family)
    words = tokenizer(model_info.path)
    text = TEXTS[family].format("weather", "{}") if family != "llama" else "<|python_tag|>x"
    tokens = words.encode_rendered(text)
    end = model_info.end_tokens[0]
    row = stored(model_info, tools=[WEATHER])
    shown = samples_of(row)[0].shown
    assert shown and words.decode([*tokens, end], shown) == text
    assert words.decode([*tokens, end]) != text
    assert tokenizer_process().decode(model_info.path, tuple(tokens), shown) == text
    assert samples_of(stored(model_info))[0].shown == ()


# The same text, however it is computed


def draft_of_another(folder: Path, family: str) -> Draft:
    """Of other weights, which knows the grammar as well."""
    model_info = made(folder, family, 1)
    model = opened(model_info.path)
    words = tokenizer(model_info.path)
    grammars = Grammars(lambda: words.for_grammars(VOCABULARY, model.end_tokens[0]), VOCABULARY)
    return build_draft(ModelSpec("", model.kind, "", prefix_tokens=PREFIX), ReplicaSpec(1, None), model, grammars)


def rows_of_all_kinds(model_info: ModelInfo) -> list[Row]:
    kinds: list[dict[str, Any]] = [
        {"tool_choice": "required"},
        {"tool_choice": "required", "parallel_tool_calls": False, "temperature": 0.0},
        {"tool_choice": {"type": "function", "function": {"name": "weather"}}, "n": 3},
        {},
        {"tools": [WEATHER, NOW]},
        {"tools": [WEATHER], "parallel_tool_calls": False, "logprobs": True, "top_logprobs": 2},
    ]
    bodies = [
        {"tools": [STRICT, NOW], "temperature": 1.0, "seed": seed, "max_tokens": 40, **each}
        for seed in (1, 2)
        for each in kinds
    ]
    return [sample for number, body in enumerate(bodies) for sample in samples_of(stored(model_info, number, **body))]


def said(written: dict[int, RowResult]) -> dict[int, tuple[tuple[int, ...], str, str]]:
    return {key: (each.tokens, each.text, each.finish_reason) for key, each in written.items()}


@pytest.mark.parametrize("family", ["mistral", *(pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES[:-1])])
def test_the_same_with_a_draft_in_any_batch_and_resumed(folder: Path, family: str) -> None:
    model_info = made(folder, family)
    model, words, rows = opened(model_info.path), tokenizer(model_info.path), rows_of_all_kinds(model_info)
    plain, _ = write(target_of(model, 1, 0, prefix_tokens=PREFIX, tokenizer=words), rows)
    for batch, count, draft, lookup in ((5, 3, None, True), (16, 4, draft_of_another(folder, family), False)):
        assisted, _ = write(target_of(model, batch, count, draft, lookup, PREFIX, words), rows)
        assert said(assisted) == said(plain)
    resumed = [
        replace(
            row,
            resumed=plain[row.key].tokens[: row.key % 7 * 3],
            resumed_logprobs=()
            if row.logprobs is None
            else tuple(((token, 0.0),) for token in plain[row.key].tokens[: row.key % 7 * 3]),
        )
        for row in rows
    ]
    again, _ = write(target_of(model, 4, 2, draft_of_another(folder, family), False, PREFIX, words), resumed)
    assert said(again) == said(plain)


# Whole ways


def test_from_the_input_to_the_record(folder: Path, tmp_path: Path) -> None:
    """Through the real process that knows tokenizers, and the journal; in simple lines and OpenAI's."""
    model_info = made(folder, "qwen")
    simple = {"messages": ASKED, "tools": [WEATHER], "tool_choice": "required", "parallel_tool_calls": False}
    openai = {"custom_id": "o", "method": "POST", "url": "/v1/chat/completions", "body": simple}
    bad = {"messages": ASKED, "tools": [{"type": "function", "function": {"name": "x", "parameters": {"type": "objekt"}}}]}
    worse = {
        **simple,
        "tools": [{"type": "function", "function": {"name": "x", "parameters": {"properties": {"a": {"type": "objekt"}}}}}],
    }
    rows = [{"id": "s", **simple}, openai, bad, worse, {"id": "plain", "messages": ASKED}]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    spec = JobSpec(input=tmp_path / "in.jsonl", max_tokens=80, skip_bad=True, temperature=1.0)
    journal = Journal(tmp_path / "job.db")
    admit(
        spec, Source(spec.input), model_info, tokenizer_process(), journal, lambda digest: {"identity": {"input": digest}}
    )
    loaded = journal.load([0, 1, 4])
    assert [row.request.get("tools") for row in loaded] == [["hermes", ["weather"], "required"]] * 2 + [None]
    target = target_of(opened(model_info.path), 3, 0, tokenizer=tokenizer(model_info.path))
    samples = [sample for row in loaded for sample in samples_of(row)]
    written, _ = write(target, samples)
    journal.record([(row.row, result_record(row, [written[row.row * 128]], "m")) for row in loaded], [])
    journal.close()
    first, second, plain = results(tmp_path)
    for record in (first, second):
        [call] = record.tool_calls
        assert record.finish_reason == "tool_calls" and record.text == ""
        Draft202012Validator(CITY).validate(json.loads(call["function"]["arguments"]))
        assert record.choices[0].tool_calls == record.tool_calls
    assert first.tool_calls[0]["id"] != second.tool_calls[0]["id"]
    assert plain.tool_calls == ()


def test_a_function_whose_schema_cannot_be_kept_is_named(folder: Path) -> None:
    model_info = made(folder, "qwen")
    wrong = {"type": "function", "function": {"name": "put", "parameters": {"properties": {"a": {"type": "objekt"}}}}}
    sentence = refusal(model_info, tools=[WEATHER, wrong], tool_choice="required")
    assert sentence.startswith(
        '"tool_choice" cannot be enforced: "parameters" of the function "put": it cannot be compiled: '
    )
    # Nobody asks for it to be kept here.
    stored(model_info, tools=[WEATHER, wrong])
    options = {"x-guidance": {"lenient": True}, **CITY}
    wrong = {"type": "function", "function": {"name": "put", "parameters": options, "strict": True}}
    assert '"strict" cannot be enforced: "parameters" of the function "put": "x-guidance"' in refusal(
        model_info, tools=[wrong]
    )
    misspelled = {"properties": {"a": {"type": "string", "minlength": 3}}}
    wrong = {"type": "function", "function": {"name": "put", "parameters": misspelled, "strict": True}}
    assert 'of the function "put": "minlength" at #/properties/a of the schema' in refusal(model_info, tools=[wrong])


def test_the_row_of_the_page(folder: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "tools.md").read_text()
    [block] = re.findall(r"```json\n(.*?)```", page, re.S)
    row = json.loads(block)
    del row["id"]
    schema = row["tools"][0]["function"]["parameters"]
    assert isinstance(parse_simple(dict(row), 1), Request)
    model_info = made(folder, "mistral")
    # Its city would go on to the last token.
    [choice] = answers(model_info, [stored(model_info, **{**row, "max_tokens": 40}, parallel_tool_calls=False)])
    if choice["finish_reason"] == "length":  # a city's name may be long
        assert choice["message"]["content"].startswith("[TOOL_CALLS] [")
    else:
        [call] = choice["message"]["tool_calls"]
        Draft202012Validator(schema).validate(json.loads(call["function"]["arguments"]))
