"""Records in OpenAI's batch format, and files that are replaced whole."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from outrider.runner.job.journal import Journal, StoredRow
from outrider.runner.job.results import error_record, result_record, write_atomically, write_results
from outrider.workers.errors import JobError
from outrider.workers.messages import Logprobs, RowResult


def stored(kind: str = "completion", number: int = 3) -> StoredRow:
    return StoredRow(number, f"my-{number}", number + 1, kind, {"n": 2}, (1, 2, 3))


def result(text: str, tokens: tuple[int, ...] = (5, 6), seconds: float = 1.0) -> RowResult:
    return RowResult(
        key=1, tokens=tokens, text=text, finish_reason="stop", rounds=2, proposed=3, accepted=1, seconds=seconds
    )


def test_a_completion() -> None:
    line = json.loads(result_record(stored(), [result("first"), result("zwölf 🚀", (7,))], "the-model"))
    assert line.keys() == {"id", "custom_id", "response", "error"}
    assert line["custom_id"] == "my-3"
    assert line["error"] is None
    assert line["response"]["status_code"] == 200
    body = line["response"]["body"]
    assert body["object"] == "text_completion"
    assert body["model"] == "the-model"
    assert body["choices"] == [
        {"index": 0, "text": "first", "logprobs": None, "finish_reason": "stop"},
        {"index": 1, "text": "zwölf 🚀", "logprobs": None, "finish_reason": "stop"},
    ]
    assert body["usage"] == {"prompt_tokens": 3, "completion_tokens": 3, "total_tokens": 6}


def test_a_chat() -> None:
    body = json.loads(result_record(stored("chat"), [result("hello")], "m"))["response"]["body"]
    assert body["object"] == "chat.completion"
    assert body["id"].startswith("chatcmpl-")
    assert body["choices"][0]["message"] == {"role": "assistant", "content": "hello"}
    assert "text" not in body["choices"][0]


def test_an_error() -> None:
    line = json.loads(error_record(stored(), "invalid_request", "why"))
    assert line["response"] is None
    assert line["error"] == {"code": "invalid_request", "message": "why"}
    assert line["custom_id"] == "my-3"


def test_a_record_is_one_line_and_the_same_bytes_every_time() -> None:
    one = result_record(stored(), [result("a\nb\u2028c", seconds=1.0)], "m")
    two = result_record(stored(), [result("a\nb\u2028c", seconds=9.0)], "m")
    assert one == two
    assert "\n" not in one
    assert json.loads(one)["response"]["body"]["choices"][0]["text"] == "a\nb\u2028c"


def test_nothing_is_written_that_json_does_not_know() -> None:
    odd = replace(result("x", (5,)), logprobs=Logprobs((math.nan,), ((),), {5: b"x"}, (0,)))
    with pytest.raises(ValueError, match="not JSON compliant"):
        result_record(stored(), [odd], "m")


def test_ids_differ_between_rows() -> None:
    ids = {json.loads(result_record(stored(number=number), [result("")], "m"))["id"] for number in range(50)}
    assert len(ids) == 50


def test_both_files_in_input_order(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "job.db")
    journal.fill([stored(number=number) for number in range(6)], [], {})
    done = [(number, result_record(stored(number=number), [result("x")], "m")) for number in (5, 1)]
    failed = [(number, error_record(stored(number=number), "invalid_request", "why")) for number in (4, 0)]
    journal.record(done, failed)
    results, errors = write_results(journal, tmp_path)
    assert [json.loads(line)["custom_id"] for line in results.read_text().splitlines()] == ["my-1", "my-5"]
    assert [json.loads(line)["custom_id"] for line in errors.read_text().splitlines()] == ["my-0", "my-4"]
    journal.close()


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    write_atomically(path, ["old"])

    def breaks() -> Iterator[str]:
        yield "new"
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_atomically(path, breaks())
    assert path.read_text() == "old\n"
    assert [entry.name for entry in tmp_path.iterdir()] == ["results.jsonl"], "no scraps are left"


KILLED = """
import os, sys
from pathlib import Path
from outrider.runner.job.results import write_atomically

def lines():
    yield "x" * 100_000
    print("writing", flush=True)
    sys.stdin.read()

write_atomically(Path(sys.argv[1]), lines())
"""


def test_what_a_killed_writer_left_goes_with_the_next_one_and_a_living_writers_file_stays(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    others = {".results.jsonl.bak", ".errors.jsonl.1", "results.jsonl.1"}
    for name in (*others, ".results.jsonl.4194305", ".results.jsonl.1"):
        (tmp_path / name).write_text("{")
    command = [sys.executable, "-c", KILLED, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None and writer.stdout.readline() == "writing\n"
        write_atomically(path, ["new"])
        [living] = {each.name for each in tmp_path.iterdir()} - others - {"results.jsonl"}
        assert living.startswith(f".results.jsonl.{writer.pid}-")
        writer.kill()
    assert (tmp_path / living).stat().st_size > 0
    write_atomically(path, ["newer"])
    assert {each.name for each in tmp_path.iterdir()} == others | {"results.jsonl"}
    assert path.read_text() == "newer\n"


def test_a_reader_of_the_old_file_keeps_it(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    write_atomically(path, ["old"])
    with path.open() as reader:
        write_atomically(path, ["new", "er"])
        assert reader.read() == "old\n"
    assert path.read_text() == "new\ner\n"


def test_a_directory_that_cannot_be_written_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(JobError, match=r"none/results.jsonl cannot be written: No such file or directory"):
        write_atomically(tmp_path / "none" / "results.jsonl", [])
