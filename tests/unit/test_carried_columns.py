"""Carried columns: stored in the journal with their types, and written beside each row in every form of the results."""

from __future__ import annotations

import csv
import datetime
import errno
import gzip
import io
import json
import os
import re
import sqlite3
import sys
import tempfile
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow
import pytest
import zstandard
from built_once import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import ipc, parquet
from test_admission import MODEL_INFO, FakeTokenizerProcess

import outrider
from examples import examples
from outrider.runner.cli.main import app, main
from outrider.runner.job import carried_columns, tables
from outrider.runner.job.admission import admit
from outrider.runner.job.carried_columns import CarriedReader, CarriedRows, distinct_names
from outrider.runner.job.directory import describe
from outrider.runner.job.input import describe_input, open_input
from outrider.runner.job.journal import FAILED, Counts, Journal
from outrider.runner.job.results import error_record, result_record, write_results
from outrider.runner.job.tables import CSV, DATASET, JSONL, OWN, PARQUET, format_of, write_table
from outrider.runner.options.job import JobSpec
from outrider.workers.errors import InputError, JobError, UsageError
from outrider.workers.messages import RowResult

EVERY_TYPE = {
    "id": ["a", "b", "c"],
    "prompt": ["x", "y", "z"],
    "text": ["own", None, ""],
    "when": pyarrow.array([1, 1 << 60, None], pyarrow.timestamp("ns", "UTC")),
    "day": pyarrow.array([datetime.date(2026, 1, 2), None, None]),
    "price": pyarrow.array([Decimal("1.10"), None, Decimal("-2.00")]),
    "kind": pyarrow.array(["k", "l", "k"]).dictionary_encode(),
    "small": pyarrow.array([1, -2, None], pyarrow.int8()),
    "real": [float("nan"), 1.5, None],
    "raw": [b"\xff", b"", None],
    "map": pyarrow.array([[("a", 1)], [], None], pyarrow.map_(pyarrow.string(), pyarrow.int32())),
    "deep": [{"a": [1, 2], "b": None}, {"a": [], "b": "x"}, None],
}


def admitted(directory: Path, source: Path, **options: Any) -> Journal:
    directory.mkdir(exist_ok=True)
    journal = Journal(directory / "job.db")
    spec = JobSpec(input=source, out=directory, **options)
    opened = open_input(source, directory, print, spec.format, spec.split)

    def meta_of(digest: str) -> dict[str, Any]:
        return {"identity": {"input": digest}, "input": describe_input(source, opened)}

    admit(spec, opened, MODEL_INFO, FakeTokenizerProcess(), journal, meta_of)  # type: ignore[arg-type]
    return journal


def answer(journal: Journal, failing: frozenset[int] = frozenset()) -> None:
    """All rows that wait end: most with their number as text."""
    rows = journal.load([row for row, _ in journal.pending(-1, 10**6)])
    done = [
        (row.row, result_record(row, [RowResult(row.row, (1, 2), f"answer {row.row}", "stop", 1, 0, 0, 1.0)], "m"))
        for row in rows
        if row.row not in failing
    ]
    failed = [(row.row, error_record(row, "replica_died", f"row {row.row} died")) for row in rows if row.row in failing]
    journal.record(done, failed)


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """Three rows with columns of every type; the second fails."""
    parquet.write_table(pyarrow.table(EVERY_TYPE), tmp_path / "in.parquet")
    journal = admitted(tmp_path / "job", tmp_path / "in.parquet")
    answer(journal, frozenset({1}))
    write_results(journal, tmp_path / "job")
    journal.close()
    (tmp_path / "in.parquet").unlink()
    return tmp_path / "job"


def test_types_come_out_as_they_went_in(job: Path, tmp_path: Path) -> None:
    table = parquet.read_table(write_table(job, tmp_path / "out.parquet", PARQUET))
    names = [name if name != "text" else "input_text" for name in list(EVERY_TYPE)[2:]]
    assert table.column_names == ["id", "text", "tokens", "finish_reason", *names, *OWN[4:]]
    before = pyarrow.table(EVERY_TYPE)
    for name, new in zip(list(EVERY_TYPE)[2:], names, strict=True):
        assert table[new].type == before[name].type
        if name == "real":  # a number that is none equals nothing
            assert str(table[new].to_pylist()) == str(before[name].to_pylist())
        else:
            assert table[new].combine_chunks().equals(before[name].combine_chunks()), name
    assert table["text"].to_pylist() == ["answer 0", None, "answer 2"]
    assert table["error"].to_pylist() == [None, "row 1 died", None]


def test_results_and_errors_have_them(job: Path) -> None:
    [error] = map(json.loads, (job / "errors.jsonl").read_text().splitlines())
    assert list(error) == ["id", "custom_id", "response", "error", "carried"]
    first, _ = map(json.loads, (job / "results.jsonl").read_text().splitlines())
    assert first["carried"] == {
        "text": "own",
        "when": "1970-01-01 00:00:00.000000001Z",
        "day": "2026-01-02",
        "price": "1.10",
        "kind": "k",
        "small": 1,
        "real": None,
        "raw": "/w==",
        "map": [["a", 1]],
        "deep": {"a": [1, 2], "b": None},
    }
    assert [row.carried["small"] for row in outrider.open(job).results()] == [1, None]
    assert [row.carried["small"] for row in outrider.open(job).errors()] == [-2]


def test_lines_of_json_and_csv(job: Path, tmp_path: Path) -> None:
    lines = [json.loads(line) for line in outrider.open(job).to_jsonl(tmp_path / "out.jsonl").read_text().splitlines()]
    assert [line["id"] for line in lines] == ["a", "b", "c"]
    assert list(lines[0])[:6] == ["id", "text", "tokens", "finish_reason", "input_text", "when"]
    assert (lines[1]["text"], lines[1]["error"], lines[1]["error_code"]) == (None, "row 1 died", "replica_died")
    text = outrider.open(job).to_csv(tmp_path / "out.csv").read_text()
    rows = list(csv.DictReader(io.StringIO(text)))
    assert [row["small"] for row in rows] == ["1", "-2", ""]
    assert rows[0]["deep"] == '{"a": [1, 2], "b": null}'
    assert list(rows[0]) == list(lines[0])


def test_compressed_by_name(job: Path, tmp_path: Path) -> None:
    plain = write_table(job, tmp_path / "out.jsonl", JSONL).read_bytes()
    assert gzip.decompress(write_table(job, tmp_path / "out.jsonl.gz", JSONL).read_bytes()) == plain
    packed = write_table(job, tmp_path / "out.jsonl.zst", JSONL).read_bytes()
    assert zstandard.ZstdDecompressor().decompressobj().decompress(packed) == plain
    again = (tmp_path / "out.jsonl.gz").read_bytes()
    assert write_table(job, tmp_path / "out.jsonl.gz", JSONL).read_bytes() == again, "the same rows are the same bytes"


def test_a_dataset_that_is_read_as_input_again(job: Path, tmp_path: Path) -> None:
    folder = outrider.open(job).to_dataset(tmp_path / "ds")
    with ipc.open_stream(folder / "data-00000-of-00001.arrow") as stream:
        assert stream.read_all()["id"].to_pylist() == ["a", "b", "c"]
    assert outrider.open(job).to_dataset(folder) == folder, "a dataset may be replaced"
    journal = admitted(tmp_path / "next", folder, prompt_column="text", skip_bad=True)
    assert journal.counts() == Counts(3, 0, 1)
    journal.close()
    with pytest.raises(UsageError, match="cannot be written: No such file"):
        write_table(job, tmp_path / "none" / "ds", DATASET)
    with pytest.raises(UsageError, match="cannot be written: File name too long"):
        write_table(job, tmp_path / ("x" * 300), DATASET)


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({}, "is there and is no saved dataset"),
        ({"state.json": '{"my": "state"}', "src/main.py": "x"}, "is there and is no saved dataset"),
        ({"state.json": '{"my": "state"}', "dataset_info.json": "{}"}, "is there and is no saved dataset"),
        ({"state.json": '{"_data_files": [5]}', "dataset_info.json": "{}"}, "is there and is no saved dataset"),
        ({"state.json": "no JSON", "dataset_info.json": "{}"}, "is there and is no saved dataset"),
        ({"state.json": '{"_data_files": [{"filename": "a"}]}', "a": "x"}, "is there and is no saved dataset"),
        (
            {"state.json": '{"_data_files": [{"filename": "a"}]}', "dataset_info.json": "{}", "a": "x", "notes.txt": "y"},
            "holds more than a saved dataset, and notes.txt would be lost",
        ),
        (
            {"state.json": '{"_data_files": [{"filename": "a"}]}', "dataset_info.json": "{}", "a/b": "x"},
            "holds more than a saved dataset, and a would be lost",
        ),
    ],
)
def test_a_directory_that_is_more_than_a_dataset_is_left_alone(
    job: Path, tmp_path: Path, files: dict[str, str], said: str
) -> None:
    folder = tmp_path / "other"
    folder.mkdir()
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(content)
    with pytest.raises(UsageError, match=f"other {said}"):
        write_table(job, folder, DATASET)
    assert {path.relative_to(folder).as_posix(): path.read_text() for path in folder.rglob("*") if path.is_file()} == files
    assert not list(tmp_path.glob(".other*"))


def test_a_dataset_is_there_until_another_takes_its_place(
    job: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_table(job, tmp_path / "ds", DATASET)
    kept = (folder / "state.json").read_bytes()
    renames: list[str] = []
    rename = Path.rename

    def full(self: Path, target: Path) -> Path:
        renames.append(self.name)
        if self.name == "new":
            raise OSError(errno.ENOSPC, "No space left on device")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", full)
    with pytest.raises(UsageError, match="ds cannot be written: No space left on device"):
        write_table(job, folder, DATASET)
    assert renames == ["ds", "new", "old"], "put back"
    assert (folder / "state.json").read_bytes() == kept
    assert not list(tmp_path.glob(".ds*"))


def test_what_a_killed_writer_of_a_dataset_left_goes_with_the_next_one(job: Path, tmp_path: Path) -> None:
    folder = write_table(job, tmp_path / "ds", DATASET)
    if (child := os.fork()) == 0:
        # Killed where the old dataset has gone aside and the new one has not come yet.
        rename = Path.rename
        tables.Path.rename = lambda self, target: os._exit(7) if self.name == "new" else rename(self, target)  # type: ignore
        write_table(job, folder, DATASET)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    [left] = tmp_path.glob(".ds*")
    assert (left / "old" / "state.json").exists() and not folder.exists(), "nothing is lost"
    (tmp_path / ".ds.1-00000000").mkdir()
    with tables._directory_beside(folder) as alive:
        (alive / "new").mkdir()
        write_table(job, folder, DATASET)
        assert sorted(tmp_path.glob(".ds*")) == sorted([tmp_path / ".ds.1-00000000", alive]), "one that may be new stays"
    assert (folder / "state.json").exists() and not alive.exists()


@pytest.mark.parametrize("form", [CSV, DATASET, JSONL, PARQUET])
@pytest.mark.parametrize("name", ["", ".", "/"])
def test_a_table_needs_a_name(job: Path, form: str, name: str) -> None:
    with pytest.raises(UsageError, match=r"is not a name to write a table to; give one, such as (results|rows\.jsonl)"):
        write_table(job, Path(name), form)


def test_the_jobs_own_files_are_not_written_over(job: Path) -> None:
    with pytest.raises(UsageError, match=r"results.jsonl is a file of the job's own in"):
        outrider.open(job).to_jsonl(job / "results.jsonl")
    assert "custom_id" in (job / "results.jsonl").read_text()


def test_types_of_json_are_found_out(tmp_path: Path) -> None:
    values: list[dict[str, Any]] = [
        {"whole": 1, "mixed": 1, "real": 1, "flag": True, "nothing": None, "big": 1 << 70, "exact": 2**53 + 1},
        {"whole": 2**53 + 1, "mixed": "a", "real": 0.5, "late": [1], "exact": 0.5},
    ]
    lines = "".join(json.dumps({"prompt": "x", **each}) + "\n" for each in values)
    (tmp_path / "in.jsonl").write_text(lines)
    journal = admitted(tmp_path / "job", tmp_path / "in.jsonl", carry="all")
    answer(journal)
    journal.close()
    table = parquet.read_table(write_table(tmp_path / "job", tmp_path / "out.parquet", PARQUET))
    middle = [(field.name, str(field.type)) for field in table.schema][4:-7]
    assert middle == [
        ("whole", "int64"),
        ("mixed", "string"),
        ("real", "double"),
        ("flag", "bool"),
        ("nothing", "string"),
        ("big", "string"),
        ("exact", "string"),
        ("late", "string"),
    ]
    assert table.select(["whole", "mixed", "late", "big", "exact"]).to_pylist() == [
        {"whole": 1, "mixed": "1", "late": None, "big": str(1 << 70), "exact": "9007199254740993"},
        {"whole": 2**53 + 1, "mixed": '"a"', "late": "[1]", "big": None, "exact": "0.5"},
    ]


ODD_TYPES = {
    "views": pyarrow.array(["a", None, "b" * 20], pyarrow.string_view()),
    "bytes": pyarrow.array([b"a", None, b"\xff"], pyarrow.binary_view()),
    "lists": pyarrow.array([["a"], None, []], pyarrow.list_(pyarrow.string_view())),
    "runs": pyarrow.RunEndEncodedArray.from_arrays(pyarrow.array([2, 3], pyarrow.int32()), pyarrow.array(["x", None])),
}
NOT_FOR_PARQUET = {
    "empty": pyarrow.array([{}, None, {}], pyarrow.struct([])),
    "months": pyarrow.array([(1, 2, 3), None, (0, 0, 0)], pyarrow.month_day_nano_interval()),
    "either": pyarrow.UnionArray.from_sparse(
        pyarrow.array([0, 1, 0], pyarrow.int8()), [pyarrow.array([1, 2, 3]), pyarrow.array(["a", "b", "c"])]
    ),
    "words": pyarrow.DictionaryArray.from_arrays(pyarrow.array([0, 1, 0]), pyarrow.array([["a"], ["b"]])),
}


def _job_with(name: str, values: pyarrow.Array, folder: Path) -> Path:
    """The row in the middle has not ended yet."""
    table = pyarrow.table({"prompt": ["x", "y", "z"], name: values})
    with ipc.new_file(folder / "in.arrow", table.schema) as writer:
        writer.write_table(table)
    journal = admitted(folder / "job", folder / "in.arrow")
    rows = [row for row in journal.load([0, 1, 2]) if row.row != 1]
    journal.record([], [(row.row, error_record(row, "replica_died", "it died")) for row in rows])
    journal.close()
    return folder / "job"


@pytest.mark.parametrize("name", [*ODD_TYPES, *NOT_FOR_PARQUET])
def test_every_type_of_arrow_is_written_or_refused_by_name(name: str, tmp_path: Path) -> None:
    values = (ODD_TYPES | NOT_FOR_PARQUET)[name]
    ended = [values.to_pylist()[row] for row in (0, 2)]
    job = _job_with(name, values, tmp_path)
    data = write_table(job, tmp_path / "data", DATASET)
    saved = ipc.open_stream(data / "data-00000-of-00001.arrow").read_all()[name]
    assert saved.type == values.type and saved.to_pylist() == ended
    if name in ODD_TYPES:
        assert parquet.read_table(write_table(job, tmp_path / "o.parquet", PARQUET))[name].to_pylist() == ended
        return
    said = re.escape(f'Parquet cannot hold the column "{name}" ({values.type}): choose jsonl or csv')
    with pytest.raises(UsageError, match=said):
        write_table(job, tmp_path / "o.parquet", PARQUET)
    assert not (tmp_path / "o.parquet").exists()
    assert len(write_table(job, tmp_path / "o.jsonl", JSONL).read_text().splitlines()) == 2


BEYOND_PYTHON = {
    "a day": (pyarrow.array([5_000_000], pyarrow.int32()).view(pyarrow.date32()), "15659-07-15"),
    "a time": (pyarrow.array([253402300800000], pyarrow.timestamp("ms")), "10000-01-01 00:00:00.000"),
    "a time of nowhere": (pyarrow.array([1000], pyarrow.timestamp("ms", "Mars/Base")), "1970-01-01 00:00:01.000Z"),
    "nanoseconds of nowhere": (pyarrow.array([1], pyarrow.timestamp("ns", "Mars/Base")), "1970-01-01 00:00:00.000000001Z"),
    "a while": (pyarrow.array([1 << 62], pyarrow.duration("s")), 1 << 62),
}


@pytest.mark.parametrize("kind", BEYOND_PYTHON)
def test_what_python_has_no_type_for_is_spelled(kind: str, tmp_path: Path) -> None:
    values, spelled = BEYOND_PYTHON[kind]
    parquet.write_table(pyarrow.table({"prompt": ["x"], "d": values}), tmp_path / "in.parquet")
    journal = admitted(tmp_path / "job", tmp_path / "in.parquet")
    answer(journal)
    write_results(journal, tmp_path / "job")
    journal.close()
    assert json.loads((tmp_path / "job" / "results.jsonl").read_text())["carried"] == {"d": spelled}
    row = json.loads(write_table(tmp_path / "job", tmp_path / "o.jsonl", JSONL).read_text())
    assert row["d"] == spelled
    assert str(spelled) in write_table(tmp_path / "job", tmp_path / "o.csv", CSV).read_text()
    table = parquet.read_table(write_table(tmp_path / "job", tmp_path / "o.parquet", PARQUET))
    assert table.schema.field("d").type == parquet.read_table(tmp_path / "in.parquet").schema.field("d").type


def test_a_text_that_could_not_be_written_is_refused_at_once(tmp_path: Path) -> None:
    text = pyarrow.array([b"fine", b"caf\xe9"]).view(pyarrow.string())
    parquet.write_table(pyarrow.table({"prompt": ["x", "y"], "note": text}), tmp_path / "in.parquet")
    with pytest.raises(UsageError, match=r'in.parquet:1: the column "note" holds bytes that are not UTF-8 from there on'):
        admitted(tmp_path / "job", tmp_path / "in.parquet")


def test_a_carriage_return_ends_no_row_of_csv(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text(json.dumps({"prompt": "x", "note": "first\rsecond"}) + '\n{"prompt": "y"}\n')
    journal = admitted(tmp_path / "job", tmp_path / "in.jsonl", carry="all")
    answer(journal)
    journal.close()
    text = write_table(tmp_path / "job", tmp_path / "o.csv", CSV).read_bytes().decode()
    header, first, second = csv.reader(io.StringIO(text, newline=""))
    assert first[header.index("note")] == "first\rsecond" and second[header.index("note")] == ""
    assert text.splitlines()[-1].count('"') == 0, "what needs no quotes has none"


def test_a_job_without_columns_has_the_tables_it_had(tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_text("x\n")
    journal = admitted(tmp_path / "job", tmp_path / "in.txt")
    answer(journal)
    write_results(journal, tmp_path / "job")
    assert "carried" not in (tmp_path / "job" / "results.jsonl").read_text()
    journal.close()
    assert parquet.read_table(write_table(tmp_path / "job", tmp_path / "o.parquet", PARQUET)).column_names == list(OWN)
    assert write_table(tmp_path / "job", tmp_path / "o.csv", CSV).read_text().splitlines()[0] == ",".join(OWN)


def test_a_job_before_its_first_row_is_an_empty_table(tmp_path: Path) -> None:
    parquet.write_table(pyarrow.table({"prompt": ["x"], "n8": pyarrow.array([1], pyarrow.int8())}), tmp_path / "in.parquet")
    admitted(tmp_path / "job", tmp_path / "in.parquet").close()
    table = parquet.read_table(write_table(tmp_path / "job", tmp_path / "o.parquet", PARQUET))
    assert (table.num_rows, str(table.schema.field("n8").type)) == (0, "int8")


def test_bad_rows_carry_too(tmp_path: Path) -> None:
    (tmp_path / "in.csv").write_text("id,prompt,label\na,,1\na,x,2\nb\nc,y,3\na,z,4\n")
    with pytest.raises(InputError):
        admitted(tmp_path / "refused", tmp_path / "in.csv")
    journal = admitted(tmp_path / "job", tmp_path / "in.csv", skip_bad=True)
    answer(journal)
    write_results(journal, tmp_path / "job")
    errors = [json.loads(line) for line in (tmp_path / "job" / "errors.jsonl").read_text().splitlines()]
    assert [(each["custom_id"], each.get("carried")) for each in errors] == [
        ("a", {"label": "1"}),
        ("3", {"label": "2"}),
        ("4", None),
        ("6", {"label": "4"}),
    ]
    assert [row.carried for row in outrider.open(tmp_path / "job").results()] == [{"label": "3"}]
    journal.close()


def test_many_portions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(carried_columns, "ROWS_TOGETHER", 3)
    monkeypatch.setattr(tables, "ROWS_AT_ONCE", 4)
    (tmp_path / "in.csv").write_text("prompt,label\n" + "".join(f"x,{number}\n" for number in range(11)))
    journal = admitted(tmp_path / "job", tmp_path / "in.csv")
    answer(journal, frozenset({2, 9}))
    journal.close()
    found = parquet.read_table(write_table(tmp_path / "job", tmp_path / "o.parquet", PARQUET))
    assert found["label"].to_pylist() == [str(number) for number in range(11)]
    assert [number for number, error in enumerate(found["error"].to_pylist()) if error] == [2, 9]


def test_arrow_portions_are_put_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from outrider.runner.job import arrow_input

    monkeypatch.setattr(arrow_input, "ROWS_AT_ONCE", 3)
    monkeypatch.setattr(tables, "ROWS_AT_ONCE", 4)
    kinds = pyarrow.array([f"k{n % 5}" for n in range(11)]).dictionary_encode()
    parquet.write_table(pyarrow.table({"prompt": ["x"] * 11, "kind": kinds, "n": range(11)}), tmp_path / "in.parquet")
    journal = admitted(tmp_path / "job", tmp_path / "in.parquet", carry="kind,n")
    answer(journal)
    journal.close()
    found = parquet.read_table(write_table(tmp_path / "job", tmp_path / "o.parquet", PARQUET))
    assert found["n"].to_pylist() == list(range(11))
    assert found["kind"].to_pylist() == [f"k{n % 5}" for n in range(11)]


def test_names_beside_ours() -> None:
    assert distinct_names(["label", "text", "input_text", "error"], OWN) == {
        "label": "label",
        "text": "input_input_text",
        "input_text": "input_text",
        "error": "input_error",
    }


@pytest.mark.parametrize(
    ("data", "said"), [(b"[{}", "cannot be read"), (b"[{}]", "is not whole"), (b'[1, 2, "x"]', "is not whole")]
)
def test_a_damaged_portion_is_said_so(tmp_path: Path, data: bytes, said: str) -> None:
    (tmp_path / "in.csv").write_text("prompt,label\nx,1\ny,2\nz,3\n")
    journal = admitted(tmp_path / "job", tmp_path / "in.csv")
    journal._db.execute("UPDATE carried SET data = ?", (data,))
    with pytest.raises(JobError, match=f"what is carried of row 0 and those behind it {said}"):
        CarriedReader(journal).of(0)
    journal.close()


@pytest.mark.parametrize("data", [b"", b"\xff\xff\xff\xff"])
def test_a_damaged_portion_of_arrow_is_said_so(job: Path, tmp_path: Path, data: bytes) -> None:
    db = sqlite3.connect(job / "job.db")
    db.execute("UPDATE carried SET data = ?", (data,))
    db.commit()
    with pytest.raises(JobError, match="what is carried of row 0 and those behind it cannot be read"):
        write_table(job, tmp_path / "o.parquet", PARQUET)
    db.execute("DELETE FROM carried WHERE first = 0")
    db.commit()
    db.close()
    assert parquet.read_table(write_table(job, tmp_path / "o.parquet", PARQUET)).column_names == list(OWN)


def test_a_missing_portion_among_others_is_said_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from outrider.runner.job import arrow_input

    monkeypatch.setattr(arrow_input, "ROWS_AT_ONCE", 1)
    parquet.write_table(pyarrow.table({"prompt": ["x", "y"], "n": [1, 2]}), tmp_path / "in.parquet")
    journal = admitted(tmp_path / "job", tmp_path / "in.parquet", carry="n")
    answer(journal)
    journal._db.execute("DELETE FROM carried WHERE first = 1")
    journal.close()
    with pytest.raises(JobError, match="what is carried of row 1 is missing"):
        write_table(tmp_path / "job", tmp_path / "o.parquet", PARQUET)


def test_journals_of_older_outriders_are_read_and_gone_on_with(tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_text("x\ny\n")
    journal = admitted(tmp_path, tmp_path / "in.txt")
    journal.close()
    db = sqlite3.connect(tmp_path / "job.db")
    db.executescript("DROP TABLE carried; DROP TABLE earlier_errors")
    db.close()
    reader = Journal(tmp_path / "job.db", read_only=True)
    assert (list(reader.whole_records(FAILED)), reader.waiting_again(), reader.carried_after(-1)) == ([], 0, None)
    reader.close()
    assert write_table(tmp_path, tmp_path / "o.jsonl", JSONL).read_text() == ""
    journal = Journal(tmp_path / "job.db")
    assert journal.check() == []
    answer(journal, frozenset({1}))
    assert journal.put_back_failed() == 1
    journal.close()


def test_the_command_writes_tables(
    job: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)

    def results(*words: str) -> tuple[object, str]:
        monkeypatch.setattr(sys, "argv", ["outrider", "results", str(job), *words])
        with pytest.raises(SystemExit) as ended:
            main()
        printed = capsys.readouterr()
        return ended.value.code, (printed.out + printed.err).strip()

    assert results("--format", "parquet") == (0, str(job / "results.parquet"))
    assert results("-o", "some.csv.gz") == (0, "some.csv.gz")
    assert results("-o", "new", "--format", "jsonl") == (0, "new/rows.jsonl")
    assert results("-o", "ds", "--format", "dataset") == (0, "ds")
    code, said = results("--format", "xml")
    assert (code, said) == (2, 'outrider: --format: must be openai, parquet, csv, jsonl, dataset, got "xml"')
    code, said = results("-o", "some.csv", "--format", "parquet")
    assert code == 2 and "--format: parquet does not fit to the name some.csv" in said
    assert format_of(Path("a.jsonl.zst")) == JSONL
    for name, words in (("a.xlsx", ()), ("a.gz", ()), ("a.txt", ("--format", "csv")), ("a.json", ("--format", "openai"))):
        code, said = results("-o", name, *words)
        assert (
            code == 2
            and f"--out: {name} does not end like a table (known forms are .parquet, .csv, .jsonl, .ndjson" in said
        )
        assert not Path(name).exists()
    Path("v1.2").mkdir()
    assert results("-o", "v1.2", "--format", "csv") == (0, "v1.2/results.csv")
    assert results("-o", "ds.v2", "--format", "dataset") == (0, "ds.v2")


@pytest.mark.parametrize("link", [Path.symlink_to, Path.hardlink_to])
def test_the_input_is_not_written_over_by_a_table(tmp_path: Path, link: Any) -> None:
    source, other = tmp_path / "in.jsonl", tmp_path / "other.jsonl"
    source.write_text('{"prompt": "x"}\n')
    link(other, source)
    for begun, asked in ((source, source), (source, other), (other, source)):
        admitted(tmp_path / begun.stem, begun).close()
        with pytest.raises(UsageError, match=f"^--out: {asked} is the input of {tmp_path / begun.stem}; name another$"):
            write_table(tmp_path / begun.stem, asked, JSONL)
        (tmp_path / begun.stem / "job.db").unlink()
    assert source.read_text() == other.read_text() == '{"prompt": "x"}\n'


@pytest.mark.parametrize("name", ["results.jsonl", "errors.jsonl", "report.html"])
def test_the_input_is_not_written_over_by_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    source = tmp_path / name
    source.write_text('{"prompt": "x"}\n')
    admitted(tmp_path / "job", source, format="jsonl").close()
    command = "report" if name == "report.html" else "results"
    monkeypatch.setattr(sys, "argv", ["outrider", command, str(tmp_path / "job"), "-o", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert f"{name} is the input of" in capsys.readouterr().err
    assert source.read_text() == '{"prompt": "x"}\n'
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == [name], "nothing is written"


@pytest.mark.parametrize("words", [("results",), ("results", "--format", "csv"), ("report",)])
def test_another_jobs_directory_is_not_written_into(
    job: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    (tmp_path / "in.jsonl").write_text('{"prompt": "x"}\n')
    other = tmp_path / "other"
    admitted(other, tmp_path / "in.jsonl").close()
    before = sorted(other.iterdir())
    done = CliRunner().invoke(app, [*words, str(job), "-o", str(other)])
    assert isinstance(done.exception, UsageError) and f"--out: {other} holds another job" in str(done.exception)
    with pytest.raises(UsageError, match=r"results.jsonl is a file of the job's own in"):
        write_table(job, other / "results.jsonl", JSONL)
    assert sorted(other.iterdir()) == before
    (tmp_path / "link").symlink_to(job)
    assert CliRunner().invoke(app, [*words, str(job), "-o", str(tmp_path / "link")]).exit_code == 0


def test_nothing_is_written_into_a_directory_that_is_the_input(job: Path, tmp_path: Path) -> None:
    data = write_table(job, tmp_path / "data", DATASET)
    admitted(tmp_path / "next", data, prompt_column="id").close()
    before = sorted(path.name for path in data.iterdir())
    with pytest.raises(UsageError, match="data is the input of"):
        write_table(tmp_path / "next", data, DATASET)
    (tmp_path / "link").symlink_to(data)
    for form in (PARQUET, DATASET):
        with pytest.raises(UsageError, match=r"lies within .*data, the input of"):
            write_table(tmp_path / "next", tmp_path / "link" / "new", form)
    assert sorted(path.name for path in data.iterdir()) == before
    write_table(tmp_path / "next", data / "notes.csv", CSV)
    admitted(tmp_path / "third", data / "data-00000-of-00001.arrow", prompt_column="id").close()
    with pytest.raises(UsageError, match=r"data holds .*arrow, the input of"):
        write_table(tmp_path / "third", data, DATASET)


def test_an_input_is_known_by_what_the_last_run_called_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "begun.jsonl").write_text('{"prompt": "x"}\n')
    journal = admitted(tmp_path / "job", tmp_path / "begun.jsonl")
    (tmp_path / "begun.jsonl").rename(tmp_path / "moved.jsonl")
    describe(tmp_path / "job", journal, {"spec": {"input": str(tmp_path / "moved.jsonl")}})
    for name in ("begun.jsonl", "moved.jsonl"):
        with pytest.raises(UsageError, match=f"{name} is the input of"):
            write_table(tmp_path / "job", tmp_path / name, JSONL)
    # Of another working directory, perhaps.
    describe(tmp_path / "job", journal, {"spec": {"input": "out.jsonl"}})
    write_table(tmp_path / "job", Path("out.jsonl"), JSONL)
    # The journal of an older version does not say where the input lay.
    journal.set_meta("input", {})
    with pytest.raises(UsageError, match=r"out.jsonl is the input of"):
        write_table(tmp_path / "job", Path("out.jsonl"), JSONL)
    journal.close()


texts = st.text(st.characters(codec="utf-8"), max_size=5)
numbers = st.integers() | st.floats(allow_nan=False, allow_infinity=False)
json_values = st.recursive(
    st.none() | st.booleans() | numbers | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=5,
)
rows_of_json = st.lists(st.none() | st.dictionaries(st.sampled_from("abc"), json_values, max_size=3), max_size=9)


@settings(derandomize=True, max_examples=examples(40))
@given(rows_of_json)
def test_any_json_is_kept_as_it_is(rows: list[dict[str, Any] | None]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        journal = Journal(Path(folder) / "job.db")
        kept = CarriedRows()
        for row in rows:
            kept.add(row)
        journal.fill([], [], {}, lambda: journal.add_carried(kept.take(last=True)))
        reader = CarriedReader(journal)
        assert [reader.of(number) for number in range(len(rows))] == [row or {} for row in rows]
        journal.close()
