"""Rows from CSV, Parquet, Arrow and datasets' directories: prompts and parameters, carried columns, and errors."""

from __future__ import annotations

import csv
import datetime
import gzip
import io
import json
import os
import sys
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from examples import examples
from outrider.runner.job import csv_rows
from outrider.runner.job.arrow_input import ROWS_AT_ONCE, ArrowSource, digest_of_directory, files_of
from outrider.runner.job.input import open_input
from outrider.runner.job.prompts import BadRow
from outrider.runner.job.reading import InputRows
from outrider.runner.job.requests import Request
from outrider.runner.job.source import file_digest
from outrider.runner.options.job import JobSpec
from outrider.workers.errors import UsageError


def read(path: Path, **options: Any) -> list[Request | BadRow]:
    spec = JobSpec(input=path, **options)
    return list(InputRows(open_input(path, path.parent, print, spec.format, spec.split), spec))


def read_with_carried(path: Path, **options: Any) -> tuple[list[Request | BadRow], list[dict[str, Any] | None]]:
    """What is carried as JSON has it, of inputs that are none of Arrow's."""
    spec = JobSpec(input=path, **options)
    reader = InputRows(open_input(path, path.parent, print, spec.format, spec.split), spec)
    rows = list(reader)
    portions = reader.carried.take(last=True)
    return rows, [values for portion in portions for values in json.loads(portion.data)]


def prompts(path: Path, **options: Any) -> list[str | None]:
    rows = read(path, **options)
    assert all(isinstance(row, Request) for row in rows), rows
    return [row.prompt for row in rows]  # type: ignore[union-attr]


def problems(path: Path, **options: Any) -> list[tuple[int, str]]:
    return [(row.line, row.message) for row in read(path, **options) if isinstance(row, BadRow)]


def written(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


# CSV


def test_columns_with_names_of_keys_are_keys_and_others_are_carried(tmp_path: Path) -> None:
    file = written(
        tmp_path / "in.csv",
        "id,prompt,max_tokens,temperature,stop,ignore_eos,model,label\n"
        'a,"one, ""quoted""\nin two lines",16,0.5,"[""x"", ""y""]",True,gpt,7\n'
        "007,two,,,END,,,\n",
    )
    (first, second), carried = read_with_carried(file)
    assert isinstance(first, Request) and isinstance(second, Request)
    assert (first.custom_id, first.prompt, first.line) == ("a", 'one, "quoted"\nin two lines', 2)
    assert (first.parameters.max_tokens, first.parameters.temperature, first.parameters.stop) == (16, 0.5, ("x", "y"))
    assert first.parameters.ignore_eos is True
    assert (second.custom_id, second.line, second.parameters.max_tokens) == ("007", 4, None)
    assert second.parameters.stop == ("END",)
    assert carried == [{"model": "gpt", "label": "7"}, {"model": "", "label": ""}]
    assert first.model is None, "whose column that is nobody knows"


@pytest.mark.parametrize(
    ("cell", "stop"),
    [
        *(("\n", ("\n",)), ("\nQ:", ("\nQ:",)), (" END", (" END",)), ("", ())),
        *(('""\\n""', ("\n",)), ('""a\\""""', ('a"',)), ('""', ('"',)), ('""a""b""', ('"a"b"',)), ('""a', ('"a',))),
    ],
)
def test_a_bare_stop_is_the_text_of_its_cell(tmp_path: Path, cell: str, stop: tuple[str, ...]) -> None:
    (row,) = read(written(tmp_path / "in.csv", f'prompt,stop\nx,"{cell}"\n'))
    assert isinstance(row, Request) and (row.parameters.stop or ()) == stop


@pytest.mark.parametrize(
    ("name", "cell", "said"),
    [
        ("logit_bias", '{"5": 100, "5": -100}', '"logit_bias": the key "5" stands twice in one object; leave out one'),
        ("temperature", "NaN", "\"temperature\" must be spelled as in JSON, got 'NaN'"),
        ("logit_bias", '{"5": Infinity}', '"logit_bias" must be spelled as in JSON'),
        ("stop", '["\\ud800"]', '"stop": half of a surrogate pair'),
        ("stop", '"\\ud800"', "half of a surrogate pair"),
    ],
)
def test_json_in_a_cell_is_read_as_strictly_as_a_line(tmp_path: Path, name: str, cell: str, said: str) -> None:
    text = io.StringIO()
    csv.writer(text).writerows([["prompt", name], ["x", cell]])
    [(line, problem)] = problems(written(tmp_path / "in.csv", text.getvalue()))
    assert line == 2 and said in problem


TOOL = {
    "type": "function",
    "function": {
        "name": "f",
        "parameters": {"type": "object", "properties": {"a": {"default": None, "const": None}, "b": {"default": 1.0}}},
    },
}


@pytest.mark.parametrize("options", [{}, {"carry": "all"}, {"chat": True}])
def test_objects_of_json_are_taken_as_they_are_written(tmp_path: Path, options: dict[str, Any]) -> None:
    line = {"messages": [{"role": "user", "content": "x"}], "tools": [TOOL]}
    (row,) = read(written(tmp_path / "in.jsonl", json.dumps(line)), **options)
    assert isinstance(row, Request) and json.dumps(row.tools[0]) == json.dumps(TOOL)
    text = io.StringIO()
    csv.writer(text).writerows([["messages", "tools"], [json.dumps(line["messages"]), json.dumps(line["tools"])]])
    (row,) = read(written(tmp_path / "in.csv", text.getvalue()), **options)
    assert isinstance(row, Request) and json.dumps(row.tools[0]) == json.dumps(TOOL)


def test_whole_numbers_of_decimals_lose_no_digit(tmp_path: Path) -> None:
    ids = [Decimal(1801234567890123457), Decimal(1801234567890123458)]
    columns = {
        "id": pyarrow.array(ids, pyarrow.decimal128(38, 0)),
        "prompt": ["x", "y"],
        "seed": pyarrow.array([Decimal(9007199254740993), None], pyarrow.decimal128(20, 2)),
        "temperature": pyarrow.array([Decimal("0.5"), Decimal("1.0")]),
    }
    parquet.write_table(pyarrow.table(columns), tmp_path / "in.parquet")
    rows = read(tmp_path / "in.parquet")
    assert [row.custom_id for row in rows] == [str(each) for each in ids]
    assert [row.parameters.seed for row in rows if isinstance(row, Request)] == [9007199254740993, None]
    assert [row.parameters.temperature for row in rows if isinstance(row, Request)] == [0.5, 1.0]


def test_a_column_that_no_line_has_is_not_carried_in_silence(tmp_path: Path) -> None:
    file = written(tmp_path / "in.jsonl", '{"prompt": "x", "label": 1}\n{"prompt": "y"}\n')
    assert len(read(file, carry="label")) == 2
    with pytest.raises(UsageError, match=r'--carry: no line of .*in\.jsonl has "lable"; leave it out'):
        read(file, carry="label,lable")


@pytest.mark.parametrize("name", ["custom_id", "method", "url", "body", "user"])
def test_keys_of_a_batch_line_are_not_carried(tmp_path: Path, name: str) -> None:
    body = {"prompt": "y", "user": "u"}
    line = json.dumps({"custom_id": "c", "method": "POST", "url": "/v1/completions", "body": body, "tag": 1})
    file = written(tmp_path / "in.jsonl", f'{line}\n{{"prompt": "x"}}\n')
    said = f'--carry: "{name}" is a key of batch lines, in .*in.jsonl, and these are not carried; leave it out'
    with pytest.raises(UsageError, match=said):
        read(file, carry=f"tag,{name}")
    with pytest.raises(UsageError, match=r'--carry: no line of .*in\.jsonl has "model"; leave it out'):
        read(file, carry="model")
    file.write_text(f'{line}\n{{"prompt": "x", "user": 1}}\n')
    assert len(read(file, carry="user")) == 2, "one line has it as a column"
    file.write_text(line)
    for column in ("custom_id", "method", "url", "body"):
        assert prompts(file, template="{tag}", carry=column) == ["1"], "they are columns where an option makes the prompt"


def test_lines_that_cannot_be_read_are_told_before_columns_that_none_has(tmp_path: Path) -> None:
    lines = '{"prompt": "x", "label": }\n\n["label"]\n'
    file = written(tmp_path / "in.jsonl", lines)
    for skip_bad in (False, True):
        assert [line for line, _ in problems(file, carry="label", skip_bad=skip_bad)] == [1, 2, 3]
    file.write_text(lines + '{"prompt": "x"}\n')
    assert len(problems(file, carry="label")) == 3, "they may have it"
    with pytest.raises(UsageError, match=r'--carry: no line of .*in\.jsonl has "label"; leave it out'):
        read(file, carry="label", skip_bad=True)


def left_out(path: Path, **options: Any) -> list[str]:
    spec = JobSpec(input=path, **options)
    reader = InputRows(open_input(path, path.parent, print, spec.format, spec.split), spec)
    assert all(isinstance(row, Request) for row in reader)
    return list(reader.left_out)


@pytest.mark.parametrize("carry", ["label", "none"])
def test_what_is_neither_carried_nor_read_is_named(tmp_path: Path, carry: str) -> None:
    table = written(tmp_path / "in.csv", "prompt,top,label,N\nx,1,2,3\n")
    lines = written(tmp_path / "in.jsonl", '{"prompt": "x", "top": 1}\n{"prompt": "y", "label": 2, "N": 3, "seed": 1}\n')
    expected = ["top", "N"] if carry == "label" else ["top", "label", "N"]
    assert left_out(table, carry=carry) == left_out(lines, carry=carry) == expected
    assert left_out(table, template="{top}{label}{N}", carry="label") == ["prompt"], "what the prompt is made of is read"
    assert left_out(table) == left_out(lines, carry="all") == []


@pytest.mark.parametrize("name", ["max_token", "maxTokens", "Max-Tokens", "max tokns"])
def test_a_misspelled_key_is_not_left_out_in_silence(tmp_path: Path, name: str) -> None:
    said = f'"{name}" is neither a key of a row nor carried: rename it if "max_tokens" is meant, or else name it in --carry'
    table = written(tmp_path / "in.csv", f"prompt,label,{name}\nx,1,2\n")
    lines = written(tmp_path / "in.jsonl", f'{{"prompt": "x", "label": 1}}\n{{"prompt": "x", "{name}": 1}}\n')
    for carry in ("label", "none"):
        with pytest.raises(UsageError, match=f"^{tmp_path}/in.csv: {said}$"):
            read(table, carry=carry)
        assert problems(lines, carry=carry) == [(2, said)]
    for file in (table, lines):
        assert left_out(file, carry=f"label,{name}") == []


def test_an_id_that_is_carried_is_no_rows_id(tmp_path: Path) -> None:
    """And of a bad row no more than of a good one."""
    lines = written(tmp_path / "in.jsonl", '{"id": 2, "prompt": ""}\n{"id": 1, "prompt": "a"}\n')
    table = written(tmp_path / "in.csv", "id,prompt,seed\n2,,\n1,a,\n4,a,x\n")
    assert [row.custom_id for row in read(lines, carry="id")] == ["1", "2"]
    assert [row.custom_id for row in read(table, carry="id")] == ["2", "3", "4"]
    assert [row.custom_id for row in read(lines, carry="none")] == ["2", "1"]
    batch = written(tmp_path / "b.jsonl", '{"custom_id": "c", "body": {}}\n')
    assert [row.custom_id for row in read(batch, carry="none")] == ["c"]
    assert [row.custom_id for row in read(batch, template="{x}")] == ["1"], "there it is a column"


def test_a_bad_row_keeps_an_id_that_a_table_has_as_a_float(tmp_path: Path) -> None:
    parquet.write_table(pyarrow.table({"id": [10.0, 20.0, None], "prompt": ["a", "", ""]}), tmp_path / "in.parquet")
    assert [row.custom_id for row in read(tmp_path / "in.parquet")] == ["10", "20", "3"]
    lines = written(tmp_path / "in.jsonl", '{"id": 7.0, "prompt": ""}\n')
    assert [row.custom_id for row in read(lines, carry="all")] == ["7"]


def test_columns_of_lines_are_known_by_their_names(tmp_path: Path) -> None:
    """A parameter that is misspelled shows."""
    path = written(tmp_path / "in.jsonl", '{"prompt": "x", "max_token": 5}\n{"prompt": "y", "label": 5}\n')
    spec = JobSpec(input=path, carry="all")
    reader = InputRows(open_input(path, path.parent, print, spec.format, spec.split), spec)
    list(reader)
    assert reader.carried_names == ("max_token", "label")


def test_a_mark_other_line_ends_and_other_delimiters(tmp_path: Path) -> None:
    assert prompts(written(tmp_path / "a.csv", b"\xef\xbb\xbfprompt,n\r\nx,\r\ny,\r\n")) == ["x", "y"]
    assert prompts(written(tmp_path / "b.csv", "prompt;label\nx,1;2\n")) == ["x,1"]
    assert prompts(written(tmp_path / "c.tsv", "prompt\tlabel\nx,1\t2\n")) == ["x,1"]
    assert prompts(written(tmp_path / "d.csv", "prompt\tlabel\nx,1\t2\n")) == ["x,1"]
    assert prompts(written(tmp_path / "e.csv", '"prompt;a",prompt\n1,x\n')) == ["x"]
    assert prompts(written(tmp_path / "f.data", "prompt\nx\n"), format="csv") == ["x"]


@pytest.mark.parametrize("pack", [gzip.compress, zstandard.compress])
def test_compressed_csv(tmp_path: Path, pack: Any) -> None:
    end = "gz" if pack is gzip.compress else "zst"
    assert prompts(written(tmp_path / f"in.csv.{end}", pack(b"prompt\nx\n"))) == ["x"]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("prompt,a,a\n", r'in.csv:1: the column "a" stands twice in the header; rename one'),
        ("\nprompt\n", "in.csv:1: the first line is blank, and it has to name the columns"),
        ("What is the sea?,1\n", r'in.csv has no column "prompt" or "messages"; its columns are "What is the sea\?", "1"'),
        ('pro"mpt\n"a"b,prompt\n', "no column"),
        ('"prompt"x\n', "in.csv:1: the header is not CSV"),
        (b"prompt,\xff\n", "in.csv:1: the header is not UTF-8"),
    ],
)
def test_a_header_that_cannot_be_used(tmp_path: Path, content: str | bytes, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        read(written(tmp_path / "in.csv", content))


@pytest.mark.parametrize("rows", [0, 3])
def test_a_table_without_columns(tmp_path: Path, rows: int) -> None:
    """Its columns were said to be none, and one of them was to be named."""
    empty = pyarrow.table({"a": [1] * rows}).select([])
    parquet.write_table(empty, tmp_path / "in.parquet")
    with pytest.raises(UsageError, match=r"in\.parquet has no columns; give a table with a column of prompts$"):
        read(tmp_path / "in.parquet")


def test_bad_rows_are_named_by_their_first_line(tmp_path: Path) -> None:
    content = b'prompt,max_tokens\nfine,1\nx,1,2\n\n"two\nlines",no\nb\xff,1\nn\0,1\n"a"b,1\nlast,2\n\n\n'
    rows = read(written(tmp_path / "in.csv", content))
    assert [row.line for row in rows] == [2, 3, 4, 5, 7, 8, 9, 10]
    assert [row.message.split(";")[0] for row in rows if isinstance(row, BadRow)] == [
        "the row has 3 values and the header names 2",
        "the line is blank",
        "\"max_tokens\" must be spelled as in JSON, got 'no'",
        "the row is not UTF-8",
        "the row holds a NUL, which is no text",
        "not valid CSV: ',' expected after '\"'",
    ]


def test_a_quote_that_is_never_closed_says_how_much_it_took(tmp_path: Path) -> None:
    [(line, said)] = problems(written(tmp_path / "in.csv", 'prompt\nfine\n"open\nx\ny\n'))
    assert line == 3
    assert said.startswith("not valid CSV: a quote that opens in this row is never closed (all up to line 5")


def test_a_line_that_is_too_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from outrider.runner.job import source

    monkeypatch.setattr(source, "MOST_LINE_BYTES", 20)
    rows = read(written(tmp_path / "in.csv", f"prompt\nx\n{'y' * 30}\nz\n"))
    assert [(row.line, isinstance(row, BadRow)) for row in rows] == [(2, False), (3, True), (4, False)]


def test_too_many_columns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(csv_rows, "MOST_COLUMNS", 2)
    with pytest.raises(UsageError, match="the header names 3 columns, and 2 can be read"):
        read(written(tmp_path / "in.csv", "prompt,b,c\n"))


cells = st.text(st.characters(codec="utf-8", exclude_characters="\0\r"), max_size=12)


@settings(derandomize=True, max_examples=examples(60))
@given(st.lists(st.tuples(cells.filter(bool), cells), min_size=1, max_size=6))
def test_whatever_python_writes_as_csv_is_read_back(rows: list[tuple[str, str]]) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "in.csv"
        with path.open("w", newline="", encoding="utf-8") as stream:
            csv.writer(stream).writerows([("prompt", "label"), *rows])
        found, carried = read_with_carried(path)
    assert [(row.prompt, each["label"]) for row, each in zip(found, carried, strict=True)] == rows  # type: ignore[index, union-attr]


# Columns


def test_a_prompt_column_and_a_template(tmp_path: Path) -> None:
    file = written(tmp_path / "in.csv", "prompt,question,n\nignored,why?,3\n")
    assert prompts(file, prompt_column="question") == ["why?"]
    assert read_with_carried(file, prompt_column="question")[1] == [{"prompt": "ignored", "question": "why?"}], "n is a key"
    assert prompts(file, template="{{{prompt}}}: {question}") == ["{ignored}: why?"]


def test_what_is_carried_can_be_chosen(tmp_path: Path) -> None:
    file = written(tmp_path / "in.csv", "id,prompt,seed,a,b\nx,p,1,2,3\n")
    assert read_with_carried(file, carry="b")[1] == [{"b": "3"}]
    assert read_with_carried(file, carry="none")[1] == []
    rows, carried = read_with_carried(file, carry="seed, a")
    assert carried == [{"seed": "1", "a": "2"}]
    assert rows[0].parameters.seed is None, "what is carried by name is no key"  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"prompt_column": "q"}, '--prompt-column: .*in.csv has no column "q"; its columns are "prompt", "a"'),
        ({"template": "{a} {q}"}, '--template: .*in.csv has no column "q"'),
        ({"carry": "a,q"}, '--carry: .*in.csv has no column "q"'),
    ],
)
def test_columns_that_are_not_there(tmp_path: Path, options: dict[str, str], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        read(written(tmp_path / "in.csv", "prompt,a\nx,y\n"), **options)


def test_lines_of_json_with_columns(tmp_path: Path) -> None:
    lines = [
        {"id": "a", "text": "x", "url": "u", "n": 2},
        {"text": None},
        {"text": ["y"], "max_tokens": 3, "deep": {"a": [1]}},
    ]
    file = written(tmp_path / "in.jsonl", "".join(json.dumps(line) + "\n" for line in lines))
    rows, carried = read_with_carried(file, template="Say {text}", skip_bad=True)
    assert [getattr(row, "prompt", None) for row in rows] == ["Say x", None, 'Say ["y"]']
    assert problems(file, template="Say {text}") == [(2, '"text", which --template names, is null')]
    assert carried == [{"text": "x", "url": "u"}, {"text": None}, {"text": ["y"], "deep": {"a": [1]}}]
    assert problems(file) != [], "without columns a line has no other keys than those of a row"


def test_lines_whose_keys_could_be_columns_are_told_which_option_reads_them(tmp_path: Path) -> None:
    lines = [
        {"q": "x", "k": 1},
        {"id": "a"},
        {"prompt": "x", "a b": 1},
        {"messages": [], "label": 1},
        {str(n): n for n in range(9)},
    ]
    assert problems(written(tmp_path / "in.jsonl", "".join(json.dumps(line) + "\n" for line in lines))) == [
        (1, '"prompt" is missing: --prompt-column NAME takes it from another key (this line has "q", "k")'),
        (2, '"prompt" is missing'),
        (3, "unknown key \"a b\"; remove it, or let it through to the results with --carry 'a b'"),
        (4, 'unknown key "label"; remove it, or let it through to the results with --carry label'),
        (
            5,
            '"prompt" is missing: --prompt-column NAME takes it from another key '
            '(this line has "0", "1", "2", "3", "4", "5", …)',
        ),
    ]


def test_lines_of_json_may_carry_what_they_are_told_to(tmp_path: Path) -> None:
    openai = {"custom_id": "c", "method": "POST", "url": "/v1/completions", "body": {"prompt": "y"}, "tag": 1}
    file = written(tmp_path / "in.jsonl", f'{{"prompt": "x", "label": 1.5}}\n{json.dumps(openai)}\n')
    rows, carried = read_with_carried(file, carry="all")
    assert [(row.custom_id, row.prompt) for row in rows] == [("1", "x"), ("c", "y")]  # type: ignore[union-attr]
    assert carried == [{"label": 1.5}, {"tag": 1}]


def test_a_line_of_text_is_a_column_too(tmp_path: Path) -> None:
    file = written(tmp_path / "in.txt", "one\ntwo\n")
    assert prompts(file, template="<{text}>") == ["<one>", "<two>"]
    assert prompts(file, carry="all") == ["one", "two"]


def test_prompts_may_be_what_a_user_says(tmp_path: Path) -> None:
    said = [("user", "one")]
    for name, content, options in (
        ("a.csv", "prompt\none\n", {}),
        ("a.txt", "one\n", {}),
        ("b.csv", "text\none\n", {"template": "{text}"}),
        ("b.jsonl", '{"q": "one"}\n', {"prompt_column": "q"}),
    ):
        [row] = read(written(tmp_path / name, content), chat=True, **options)
        assert isinstance(row, Request) and row.prompt is None and row.messages is not None, row
        assert [(message.role, message.content) for message in row.messages] == said
    assert problems(written(tmp_path / "c.csv", "prompt,n\n,1\n"), chat=True) == [(2, '"prompt" is empty')]


def test_a_column_of_conversations(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "hi"}]
    file = tmp_path / "in.parquet"
    parquet.write_table(pyarrow.table({"talk": [chat, None], "messages": [None, [{**chat[0], "name": None}]]}), file)
    first, second = read(file, prompt_column="talk")
    assert isinstance(first, Request) and first.messages is not None and first.messages[0].content == "hi"
    assert isinstance(second, BadRow) and second.message == '"talk", the prompt column, is null or missing'
    assert [row.line for row in read(file) if isinstance(row, Request)] == [2], "a struct's nulls say nothing"


# Parquet and Arrow

TABLE = pyarrow.table(
    {
        "id": [10, 11, 12],
        "prompt": ["a", "b", "c"],
        "max_tokens": [4.0, float("nan"), None],
        "seed": pyarrow.array([1, 2, 3], pyarrow.int8()),
        "when": pyarrow.array([datetime.datetime(2026, 1, 2), None, None]),
        "price": [Decimal("1.10"), None, None],
    }
)


def test_a_table_with_gaps_is_what_was_meant(tmp_path: Path) -> None:
    parquet.write_table(TABLE, tmp_path / "in.parquet")
    rows = read(tmp_path / "in.parquet")
    assert [(row.custom_id, row.prompt, row.line) for row in rows] == [("10", "a", 1), ("11", "b", 2), ("12", "c", 3)]  # type: ignore[union-attr]
    assert [row.parameters.max_tokens for row in rows] == [4, None, None]  # type: ignore[union-attr]


def test_forms_are_known_by_name_and_by_content(tmp_path: Path) -> None:
    parquet.write_table(TABLE, tmp_path / "a.data")
    with pyarrow.ipc.new_file(tmp_path / "b.arrow", TABLE.schema) as file:
        file.write(TABLE)
    with pyarrow.ipc.new_stream(tmp_path / "c.arrow", TABLE.schema) as stream:
        stream.write(TABLE)
    for name in ("a.data", "b.arrow", "c.arrow"):
        assert prompts(tmp_path / name) == ["a", "b", "c"]
    with pytest.raises(UsageError, match="is Parquet, which has no lines; outrider run reads it with --format parquet"):
        read(tmp_path / "a.data", format="jsonl")
    with pytest.raises(UsageError, match="is no Parquet file: it begins otherwise"):
        read(written(tmp_path / "d.parquet", "prompt\n"))


def test_a_stream_that_has_no_end_or_goes_on_behind_it_is_refused(tmp_path: Path) -> None:
    """pyarrow reads one that was cut off between two batches as if these were all, and of two streams the first."""
    path = tmp_path / "in.arrow"
    with pyarrow.ipc.new_stream(path, TABLE.schema) as stream:
        stream.write(TABLE)
        stream.write(TABLE)
    whole = path.read_bytes()
    assert prompts(path) == ["a", "b", "c"] * 2
    path.write_bytes(whole[:-8])
    with pytest.raises(UsageError, match=r"has no end-of-stream mark, so rows may be missing; "):
        read(path)
    path.write_bytes(whole[:-4])
    with pytest.raises(UsageError, match=r"cannot be read: .*; make the file anew"):
        read(path)
    path.write_bytes(whole * 2)
    with pytest.raises(UsageError, match=rf"has {len(whole):,} bytes after its end; "):
        read(path)


def test_the_digest_is_that_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "in.parquet"
    parquet.write_table(TABLE, path)
    source = ArrowSource(path, "parquet")
    list(source.portions(lambda name: True))
    assert source.digest == file_digest(path)


def test_portions_are_small(tmp_path: Path) -> None:
    count = 3 * ROWS_AT_ONCE + 7
    parquet.write_table(pyarrow.table({"prompt": ["x"] * count}), tmp_path / "in.parquet", row_group_size=count)
    portions = list(ArrowSource(tmp_path / "in.parquet", "parquet").portions(lambda name: True))
    assert [portion.line for portion in portions] == [1, 1001, 2001, 3001]
    assert sum(portion.batch.num_rows for portion in portions) == count


def test_portions_of_large_values_are_of_few_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from outrider.runner.job import arrow_input

    monkeypatch.setattr(arrow_input, "MOST_BYTES_AT_ONCE", 1000)
    parquet.write_table(pyarrow.table({"prompt": ["x" * 400] * 7}), tmp_path / "in.parquet")
    source = ArrowSource(tmp_path / "in.parquet", "parquet")
    assert [portion.batch.num_rows for portion in source.portions(lambda name: True)] == [2, 2, 2, 1]


def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "in.parquet"
    parquet.write_table(TABLE, path)
    portions = ArrowSource(path, "parquet").portions(lambda name: True)
    next(portions)
    before = path.stat()
    with path.open("ab") as stream:
        stream.write(b"x")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(UsageError, match="changed while it was read"):
        list(portions)


@pytest.mark.parametrize("cut", [6, 40, 200])
def test_a_damaged_file_is_one_sentence(tmp_path: Path, cut: int) -> None:
    parquet.write_table(TABLE, tmp_path / "whole.parquet")
    content = (tmp_path / "whole.parquet").read_bytes()
    with pytest.raises(UsageError, match=r"in.parquet cannot be read: .*; make the file anew"):
        read(written(tmp_path / "in.parquet", content[:-cut]))


def test_bytes_that_are_no_text_are_named(tmp_path: Path) -> None:
    bad = pyarrow.array([b"ok", b"\xff"]).view(pyarrow.string())
    parquet.write_table(pyarrow.table({"prompt": bad}), tmp_path / "in.parquet")
    with pytest.raises(UsageError, match=r'in.parquet:1: the column "prompt" holds bytes that are not UTF-8'):
        read(tmp_path / "in.parquet")


def test_without_pyarrow_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parquet.write_table(TABLE, tmp_path / "in.parquet")
    csv_file = written(tmp_path / "in.csv", "prompt,label\nx,1\n")
    for name in [name for name in sys.modules if name.split(".")[0] == "pyarrow"]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UsageError, match=r"Parquet needs pyarrow, which is not installed: pip install 'outrider\[data\]'"):
        read(tmp_path / "in.parquet")
    assert prompts(csv_file) == ["x"], "CSV needs nothing"


# Directories


def saved(folder: Path, *tables: pyarrow.Table, **state: Any) -> Path:
    """As ``save_to_disk`` of Hugging Face's datasets writes it."""
    folder.mkdir(parents=True)
    names = [f"data-{number:05}-of-{len(tables):05}.arrow" for number in range(len(tables))]
    for name, table in zip(names, tables, strict=True):
        with pyarrow.ipc.new_stream(folder / name, table.schema) as stream:
            stream.write(table)
    content = {"_data_files": [{"filename": name} for name in names], "_split": None, **state}
    (folder / "state.json").write_text(json.dumps(content))
    (folder / "dataset_info.json").write_text("{}")
    return folder


def test_a_saved_dataset(tmp_path: Path) -> None:
    folder = saved(tmp_path / "ds", TABLE, TABLE.slice(0, 1))
    assert [row.line for row in read(folder)] == [1, 2, 3, 4]
    source = ArrowSource(folder, "parquet")
    list(source.portions(lambda name: True))
    assert source.digest == digest_of_directory(folder, None)


def test_rows_of_a_directory_are_named_by_their_file(tmp_path: Path) -> None:
    for name, table in (("a", TABLE), ("b", TABLE.slice(0, 2))):
        parquet.write_table(table, tmp_path / f"{name}.parquet")
    source = ArrowSource(tmp_path, "parquet")
    list(source.portions(lambda name: True))
    assert source.location(3) == f"{tmp_path}/a.parquet:3"
    assert source.location(4) == f"{tmp_path}/b.parquet:1"


def test_a_saved_dataset_with_splits(tmp_path: Path) -> None:
    for name, table in (("train", TABLE), ("test", TABLE.slice(2))):
        saved(tmp_path / "ds" / name, table)
    (tmp_path / "ds" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    assert prompts(tmp_path / "ds", split="test") == ["c"]
    with pytest.raises(UsageError, match=r"has several splits \(test, train\); choose one with --split"):
        read(tmp_path / "ds")
    with pytest.raises(UsageError, match=r"--split: .* has no split dev; it has test, train"):
        read(tmp_path / "ds", split="dev")


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ({"_data_files": [{"filename": "../x"}]}, "does not name the files of its rows"),
        ({"_data_files": [{"filename": None}]}, "does not name the files of its rows"),
        ({"_data_files": []}, "does not name the files of its rows"),
        ({"_indices_data_files": [{"filename": "i"}]}, "keeps an index of its rows apart"),
    ],
)
def test_a_saved_dataset_that_cannot_be_used(tmp_path: Path, state: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        read(saved(tmp_path / "ds", TABLE, **state))


def test_a_directory_of_parquet_as_the_hub_has_it(tmp_path: Path) -> None:
    for name in ("data/train-00000-of-00002", "data/train-00001-of-00002", "data/test-00000-of-00001", ".cache/x"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        parquet.write_table(TABLE.slice(0, 1), tmp_path / f"{name}.parquet")
    (tmp_path / "README.md").write_text("---\n---\n")
    assert {file.name for file in files_of(tmp_path, "train")} == {
        "train-00000-of-00002.parquet",
        "train-00001-of-00002.parquet",
    }
    assert prompts(tmp_path, split="train") == ["a", "a"]
    with pytest.raises(UsageError, match=r"has several splits \(test, train\)"):
        files_of(tmp_path, None)


def test_configurations_are_told_apart_by_their_folders(tmp_path: Path) -> None:
    for folder in ("one", "two"):
        (tmp_path / folder / "train").mkdir(parents=True)
        parquet.write_table(TABLE, tmp_path / folder / "train" / "0000.parquet")
    with pytest.raises(UsageError, match=r"has several splits \(one/train, two/train\)"):
        files_of(tmp_path, None)
    assert [file.parent.parent.name for file in files_of(tmp_path, "two/train")] == ["two"]


def test_a_directory_as_other_programs_write_it(tmp_path: Path) -> None:
    for name in ("0_000001", "0_000000"):
        parquet.write_table(TABLE, tmp_path / f"{name}.parquet")
    assert prompts(tmp_path) == ["a", "b", "c"] * 2
    assert [file.name for file in files_of(tmp_path, None)] == ["0_000000.parquet", "0_000001.parquet"]


def test_files_of_one_directory_have_the_same_columns(tmp_path: Path) -> None:
    parquet.write_table(TABLE, tmp_path / "a.parquet")
    parquet.write_table(TABLE.set_column(3, "seed", [["1", "2", "3"]]), tmp_path / "b.parquet")
    with pytest.raises(UsageError, match=r'b.parquet has other columns than .*a.parquet \("seed" differs\)'):
        read(tmp_path)


def test_a_file_has_no_splits(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is a file and has no splits"):
        read(written(tmp_path / "in.csv", "prompt\nx\n"), split="train")


def test_columns_that_are_called_the_same(tmp_path: Path) -> None:
    with pyarrow.ipc.new_stream(tmp_path / "in.arrow", schema := pyarrow.schema([("a", "int8"), ("a", "int8")])) as stream:
        stream.write(pyarrow.table([[1], [2]], schema=schema))
    with pytest.raises(UsageError, match='two columns are called "a"'):
        read(tmp_path / "in.arrow")


def test_a_pipe_may_bring_parquet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = io.BytesIO()
    parquet.write_table(TABLE, kept)
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    if (child := os.fork()) == 0:
        fifo.write_bytes(kept.getvalue())
        os._exit(0)
    spec = JobSpec(input=fifo)
    rows = list(InputRows(open_input(fifo, tmp_path, print), spec))
    os.waitpid(child, 0)
    assert [row.custom_id for row in rows] == ["10", "11", "12"]
