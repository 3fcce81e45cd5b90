"""The parser of input lines: accepted lines, and errors with their line numbers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.runner.job.prompts import ONE_A_LINE, ONE_LINE, BadRow, check_input, read_rows
from outrider.runner.job.requests import Request
from outrider.runner.job.source import Source, file_digest
from outrider.workers.errors import UsageError


def rows(path: Path, content: str | bytes, form: str = "auto") -> list[Request | BadRow]:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return list(read_rows(Source(path), form))


def only_problem(path: Path, content: str | bytes, form: str = "auto") -> str:
    found = [row for row in rows(path, content, form) if isinstance(row, BadRow)]
    assert len(found) == 1, found
    return f"{found[0].line}: {found[0].message}"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "prompts.jsonl"


GOOD = '{"id": "good", "prompt": "hello"}\n'


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"id": "a", "prompt": "x"', "not valid JSON: Expecting ',' delimiter at column 26"),
        ('{"id": "a", "prompt": "x', "not valid JSON: Unterminated string starting at column 23"),
        ('{"id": "a", "prompt": "\t"}', "not valid JSON: Invalid control character at column 24"),
        ('{"id": "a", "prompt": "\\q"}', "not valid JSON: Invalid \\escape at column 24"),
        ("[", f"not valid JSON: Expecting value at column 2; {ONE_A_LINE}"),
        ('[{"prompt": "a"}]', f"a line must be a JSON object, got '[{{\"prompt\": \"a\"}}]'; {ONE_A_LINE}"),
        ("{", f"not valid JSON: Expecting property name enclosed in double quotes at column 2; {ONE_LINE}"),
        ("", "the line is blank; remove it or give a prompt"),
        ("   \t", "the line is blank; remove it or give a prompt"),
        ("[1, 2]", "a line must be a JSON object, got '[1, 2]'"),
        ('"text"', "a line must be a JSON object, got '\"text\"'"),
        ('{"id": "a", "prompt": ""}', '"prompt" is empty'),
        ('{"id": "a"}', '"prompt" is missing'),
        ('{"id": "a", "prompt": null}', '"prompt" is missing'),
        ('{"id": "a", "prompt": 5}', '"prompt" must be a text or a list of token ids, got 5'),
        ('{"id": "a", "prompt": []}', '"prompt" must be a text or a list of token ids, got []'),
        ('{"id": "a", "prompt": [1, -1]}', '"prompt" must be a text or a list of token ids, got [1, -1]'),
        ('{"id": "a", "prompt": [1, true]}', '"prompt" must be a text or a list of token ids, got [1, true]'),
        ('{"id": "a", "prompt": ["x", "y"]}', '"prompt" holds several texts; give each a row or a request of its own'),
        ('{"custom_id": "", "url": "/v1/completions", "body": {}}', '"custom_id" is empty; rows are told apart by it'),
        ('{"id": true, "prompt": "x"}', '"id" must be a text or a whole number, got true'),
        ('{"id": "", "prompt": "x"}', '"id" is empty; leave it out to name the row by its line number'),
        ('{"id": "a", "prompt": "x", "messages": []}', 'a row has either "prompt" or "messages", not both'),
        ('{"id": "a", "prompt": "x", "max_token": 5}', 'unknown parameter "max_token"; remove it'),
        ('{"id": "a", "prompt": "x", "max_tokens": 0}', '"max_tokens" must be at least 1, got 0'),
        ('{"id": "a", "prompt": "x", "max_tokens": 1.5}', '"max_tokens" must be a whole number, got 1.5'),
        ('{"id": "a", "prompt": "x", "max_tokens": "7"}', "\"max_tokens\" must be a whole number, got '7'"),
        ('{"id": "a", "prompt": "x", "max_tokens": true}', '"max_tokens" must be a whole number, got true'),
        ('{"id": "a", "prompt": "x", "temperature": -1}', '"temperature" must be at least 0, got -1'),
        ('{"id": "a", "prompt": "x", "temperature": 1e999}', '"temperature" must be at most 100, got inf'),
        ('{"id": "a", "prompt": "x", "temperature": "hot"}', "\"temperature\" must be a number, got 'hot'"),
        ('{"id": "a", "prompt": "x", "top_p": 0}', '"top_p" must be greater than 0, got 0'),
        ('{"id": "a", "prompt": "x", "top_p": 1.5}', '"top_p" must be at most 1, got 1.5'),
        ('{"id": "a", "prompt": "x", "top_k": -2}', '"top_k" must be at least -1, got -2'),
        ('{"id": "a", "prompt": "x", "min_p": 2}', '"min_p" must be at most 1, got 2'),
        ('{"id": "a", "prompt": "x", "n": 0}', '"n" must be at least 1, got 0'),
        ('{"id": "a", "prompt": "x", "n": 1000}', '"n" must be at most 128, got 1000'),
        ('{"id": "a", "prompt": "x", "repetition_penalty": 0}', '"repetition_penalty" must be at least 0.01, got 0'),
        ('{"id": "a", "prompt": "x", "logit_bias": {"5": 101}}', '"logit_bias"["5"] must be at most 100, got 101'),
        ('{"id": "a", "prompt": "x", "logit_bias": {"5": 1e999}}', '"logit_bias"["5"] must be at most 100, got inf'),
        ('{"id": "a", "prompt": "x", "stop": 5}', '"stop" must be a text or a list of texts, got 5'),
        ('{"id": "a", "prompt": "x", "stop": [5]}', '"stop"[0] must be a text, got 5'),
        ('{"id": "a", "prompt": "x", "stream": true}', '"stream" = true is not supported; remove it'),
        ('{"id": "a", "prompt": "x", "max_tokens": 2, "max_completion_tokens": 2}',
         '"max_tokens" and "max_completion_tokens" mean the same; give one'),
        ('{"id": "a", "prompt": "x", "temperature": NaN}', "NaN is not a JSON value"),
        ('{"id": "a", "prompt": "x", "temperature": -Infinity}', "-Infinity is not a JSON value"),
        ('{"id": "a", "prompt": "\\ud800"}', "half of a surrogate pair (\\ud800) is not a character"),
        ('{"id": "\\uDFFF", "prompt": "x"}', "half of a surrogate pair (\\udfff) is not a character"),
        ('{"id": "a", "prompt": "x", "\\ud83d": 1}', "half of a surrogate pair (\\ud83d) is not a character"),
        ('{"id": "a", "messages": []}', '"messages" must be a list that is not empty, got []'),
        ('{"id": "a", "messages": "hi"}', "\"messages\" must be a list that is not empty, got 'hi'"),
        ('{"id": "a", "messages": [{"role": "user"}]}', 'messages[0]: "content" is missing'),
        ('{"id": "a", "messages": [{"content": "x"}]}', 'messages[0]: "role" is missing'),
        ('{"custom_id": "a", "url": "/v1/completions"}', '"body" must be an object, got null'),
        ('{"custom_id": 5, "url": "/v1/completions", "body": {}}', '"custom_id" must be a text that is not empty, got 5'),
        ('{"url": "/v1/completions", "body": {}}', '"custom_id" must be a text that is not empty, got null'),
        ('{"custom_id": "a", "method": "GET", "url": "/v1/completions", "body": {}}',
         "\"method\" must be \"POST\", got 'GET'"),
        ('{"custom_id": "a", "url": "/v1/embeddings", "body": {}}',
         "\"url\" must be \"/v1/completions\" or \"/v1/chat/completions\", got '/v1/embeddings'"),
        ('{"custom_id": "a", "url": "/v1/completions", "body": {"messages": []}}',
         '"messages" belongs to /v1/chat/completions; /v1/completions takes "prompt"'),
        ('{"custom_id": "a", "url": "/v1/chat/completions", "body": {"prompt": "x"}}',
         '"prompt" belongs to /v1/completions; /v1/chat/completions takes "messages"'),
        ('{"custom_id": "a", "id": 1, "url": "/v1/completions", "body": {}}',
         'unknown key "id"; a batch line has "custom_id", "method", "url" and "body"'),
    ],
)  # fmt: skip
def test_a_bad_line_is_named_with_its_problem(file: Path, line: str, message: str) -> None:
    found = only_problem(file, f"{GOOD}{line}\n" + '{"id": "last", "prompt": "x"}\n')
    assert found == f"2: {message}"


@pytest.mark.parametrize("depth", [300, 900, 960, 980, 990, 995, 5000, 100_000])
def test_deep_nesting_is_a_bad_line_and_no_traceback(file: Path, depth: int) -> None:
    for head in ('{"id": "a", "prompt": ', '{"id": "a", "messages": [{"role": "user", "content": ', '{"deep": '):
        found = rows(file, GOOD + head + "[" * depth + "]" * depth + ("}]}" if "messages" in head else "}") + "\n")
        assert isinstance(found[1], BadRow)
        assert len(found[1].message) < 300


def test_what_is_nested_too_deeply_is_told_from_what_is_not(file: Path) -> None:
    """Of many brackets side by side none is deep. Two levels are the row's own."""
    row = '{{"prompt": "x", "metadata": {{"a": {}}}}}\n'
    flat, deepest, deeper = (
        "[" + "[]," * 999 + "[]]",
        "[" * 198 + "]" * 198,
        "[" * 150 + '{"a":' * 49 + "1" + "}" * 49 + "]" * 150,
    )
    found = rows(file, row.format(flat) + row.format(deepest) + row.format(deeper))
    assert [type(each) for each in found] == [Request, Request, BadRow]
    assert isinstance(found[2], BadRow)
    assert found[2].message == "lists and objects are nested too deeply, by more than 200 levels"


def test_texts_of_json_within_a_row_are_no_deeper(file: Path) -> None:
    deep = json.dumps('{"a":' * 201 + "1" + "}" * 201)
    said = only_problem(file, f'{{"prompt": "x", "structured_outputs": {{"json": {deep}}}}}\n')
    assert said.startswith('1: "structured_outputs": "json" is a text that is no JSON: ')
    call = f'{{"id": "b", "type": "function", "function": {{"name": "f", "arguments": {deep}}}}}'
    said = only_problem(file, f'{{"messages": [{{"role": "assistant", "tool_calls": [{call}]}}]}}\n')
    assert '"arguments" must be JSON of an object, as a text, got' in said


def test_an_endless_number_is_a_bad_line(file: Path) -> None:
    assert (
        only_problem(file, '{"id": "a", "prompt": "x", "seed": ' + "9" * 5000 + "}\n") == "1: a number has too many digits"
    )


def test_not_utf8_is_said_with_the_place(file: Path) -> None:
    assert only_problem(file, GOOD.encode() + b'{"prompt": "caf\xe9"}\n') == (
        "2: byte 16 of the line is not UTF-8; convert the file to UTF-8"
    )
    assert only_problem(file, b"ab\xff\n", "text") == "1: byte 3 of the line is not UTF-8; convert the file to UTF-8"


def test_a_byte_order_mark_and_windows_line_ends_are_nothing(file: Path) -> None:
    found = rows(file, b"\xef\xbb\xbf" + GOOD.strip().encode() + b'\r\n{"id": 2, "prompt": "x\\r"}\r\n')
    assert [(row.custom_id, row.prompt) for row in found if isinstance(row, Request)] == [("good", "hello"), ("2", "x\r")]
    found = rows(file, b"\xef\xbb\xbfone\r\ntwo\r\n", "text")
    assert [row.prompt for row in found if isinstance(row, Request)] == ["one", "two"]


def test_blank_lines_are_an_error_between_rows_and_nothing_at_the_end(file: Path) -> None:
    found = rows(file, "one\n\n \ntwo\n\n\n", "text")
    assert [(row.line, type(row)) for row in found] == [(1, Request), (2, BadRow), (3, BadRow), (4, Request)]


def test_lines_that_do_not_end_as_lines_do_are_said_so(file: Path) -> None:
    assert only_problem(file, (GOOD.strip() + "\r") * 2).endswith("at column 35; let lines end with a line feed (\\n)")
    assert only_problem(file, "one\rtwo\r\n", "text") == (
        "1: the line holds a carriage return inside; let lines end with a line feed (\\n)"
    )
    assert only_problem(file, "a\0b\n", "text") == "1: the line holds a NUL, which is no text; convert the file to UTF-8"
    wide = only_problem(file, GOOD.strip().encode("utf-16-le"))
    assert wide.endswith("; the line holds a NUL: convert the file to UTF-8")


def test_many_blank_lines_take_no_memory(file: Path) -> None:
    assert [row.line for row in rows(file, "\n" * 5000 + "x" + "\n" * 5000, "text")] == list(range(1, 5002))


def test_the_last_line_needs_no_line_end(file: Path) -> None:
    assert len(rows(file, GOOD.strip())) == 1


def test_ids_of_bad_rows(file: Path) -> None:
    lines = [
        '{"id": "a", "prompt": ""}',
        '{"custom_id": "b", "url": 1, "body": {}}',
        '{"id": 7, "prompt": ""}',
        "nonsense",
        '{"id": [1], "prompt": ""}',
        '{"id": "\\ud800", "prompt": ""}',
        '{"id": "", "prompt": "x"}',
        '{"custom_id": "", "url": "/v1/completions", "body": {"prompt": "x"}}',
    ]
    assert [row.custom_id for row in rows(file, "\n".join(lines))] == ["a", "b", "7", "4", "5", "6", "7", "8"]


@given(st.lists(st.binary(max_size=40), max_size=6), st.sampled_from(["auto", "jsonl", "text"]))
def test_no_bytes_can_break_the_reader(tmp_path_factory: pytest.TempPathFactory, lines: list[bytes], form: str) -> None:
    path = tmp_path_factory.mktemp("any") / "input"
    for row in rows(path, b"\n".join(lines), form):
        row.custom_id.encode()
        if isinstance(row, BadRow):
            assert row.message


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
KEYS = [
    "id",
    "prompt",
    "messages",
    "custom_id",
    "url",
    "method",
    "body",
    "max_tokens",
    "stop",
    "n",
    "logit_bias",
    "tools",
    "x",
]


@given(
    st.dictionaries(st.sampled_from(KEYS), values, max_size=5), st.dictionaries(st.sampled_from(KEYS), values, max_size=4)
)
def test_no_json_object_can_break_the_reader(
    tmp_path_factory: pytest.TempPathFactory, entry: dict[str, object], body: dict[str, object]
) -> None:
    path = tmp_path_factory.mktemp("any") / "input.jsonl"
    batch = {"custom_id": "a", "url": "/v1/chat/completions", "body": body}
    messages = {"messages": [entry]}
    for row in rows(path, "\n".join(json.dumps(one) for one in (entry, batch, messages))):
        row.custom_id.encode()


def test_forms_are_told_apart(tmp_path: Path) -> None:
    line = '{"id": "a", "prompt": "x"}'
    assert [row.custom_id for row in rows(tmp_path / "a.jsonl", line)] == ["a"]
    assert [row.prompt for row in rows(tmp_path / "a.txt", line)] == [line]  # type: ignore[union-attr]
    assert [row.custom_id for row in rows(tmp_path / "a.data", f"  {line}")] == ["a"]
    assert [row.custom_id for row in rows(tmp_path / "b.data", "a prompt")] == ["1"]
    assert [row.custom_id for row in rows(tmp_path / "b.txt", line, "jsonl")] == ["a"]


@pytest.mark.parametrize(
    "content", ['[{"prompt": "a"}, {"prompt": "b"}]\n', '[\n  {"prompt": "a"}\n]\n', ' [ {"prompt": "a"},\n']
)
def test_a_list_of_rows_is_no_text(tmp_path: Path, content: str) -> None:
    """It would run as one prompt, or as several that are pieces of JSON."""
    first = rows(tmp_path / "rows", content)[0]
    assert isinstance(first, BadRow) and ("list" in first.message or "Expecting" in first.message)
    texts = rows(tmp_path / "rows", content, "text")
    assert [row.prompt for row in texts] == content.splitlines()  # type: ignore[union-attr]
    for text in ("[1, 2] is a list of", "[x]", "[[", "[{n} rows]"):
        assert [row.prompt for row in rows(tmp_path / "rows", text)] == [text]  # type: ignore[union-attr]


def test_files_that_are_no_input(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.touch()
    cases = {
        empty: "is empty; give one prompt a line",
        tmp_path: "is a directory without Parquet files, and no saved dataset; give a file of prompts",
        tmp_path / "missing": "cannot be read: No such file or directory",
    }
    for path, message in cases.items():
        with pytest.raises(UsageError) as caught:
            check_input(path)
        assert str(caught.value) == f"{path} {message}"


def test_a_digest_is_of_the_content(file: Path) -> None:
    file.write_bytes(b"abc")
    assert file_digest(file) == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
