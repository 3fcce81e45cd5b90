"""Admission by the server: inputs that fail as a whole, and errors of single rows."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, cast
from unittest import mock

import pytest
from fake_server import line
from small_job import FakeTokenizerProcess

from outrider.runner.job import prompts
from outrider.runner.job.directory import JOURNAL
from outrider.runner.job.journal import FAILED, Journal
from outrider.runner.job.prompts import BadRow
from outrider.runner.job.results import message_of
from outrider.runner.job.source import Source
from outrider.runner.job.tokenizer_process import TokenizerProcess
from outrider.runner.serve import admission_child
from outrider.runner.serve.admission_child import MOST_ERRORS, Notes, _admitted
from outrider.runner.serve.link import Link
from outrider.workers.errors import JobChangedError, NoSpaceError


def admitted(folder: Path, content: str, told: mock.Mock | None = None) -> dict[str, Any]:
    (folder / "input.jsonl").write_text(content)
    options = {"input": str(folder / "input.jsonl"), "out": str(folder), "skip_bad": True, "engine": "hf", "draft": "none"}
    asked = {"options": options, "endpoint": "/v1/completions", "model": "small"}
    return _admitted(asked, cast(Link, told or mock.Mock()), cast(TokenizerProcess, FakeTokenizerProcess()))


def test_a_row_that_cannot_be_had_is_its_own_error_and_the_others_run(tmp_path: Path) -> None:
    content = line("a") + line("b", temperature=-1) + line("c", prompt="x" * 200) + line("d", nonsense=1)
    assert admitted(tmp_path, content) == {"admitted": 4}
    with closing(Journal(tmp_path / JOURNAL)) as journal:
        assert (journal.counts().pending, journal.counts().failed) == (1, 3)
        said = [message_of(record) for record in journal.records(FAILED)]
    assert all(each in message for each, message in zip(("temperature", "200 tokens", "nonsense"), said, strict=True)), said
    assert admitted(tmp_path, content) == {"admitted": 4}, "by the next server, when it was killed before it was told"


def test_ids_that_repeat_refuse_all_of_it_whenever_that_is_found(tmp_path: Path) -> None:
    content = line("a") + line('the id "x" stands in line 1 already', temperature=-1) + line("b") + line("a")
    expected = {"code": "duplicate_custom_id", "param": None, "line": 4}
    for _ in range(2):
        [error] = admitted(tmp_path, content)["refused"]
        assert error == expected | {"message": 'the id "a" stands in line 1 already; ids must differ'}


@pytest.mark.parametrize("wrong", [0, 1])
def test_an_id_repeats_whichever_of_its_rows_is_wrong(tmp_path: Path, wrong: int) -> None:
    rows = [line("a"), line("a")]
    rows[wrong] = line("a", nonsense=1)
    [error] = admitted(tmp_path, "".join(rows))["refused"]
    assert (error["code"], error["line"]) == ("duplicate_custom_id", 2)
    assert error["message"] == 'the id "a" stands in line 1 already; ids must differ'


@pytest.mark.parametrize(
    "bad", ["{\n", "\n", '{"custom_id": "", "method": "POST", "url": "/v1/completions", "body": {}}\n']
)
def test_what_is_no_row_refuses_all_of_it_before_anything_is_written(tmp_path: Path, bad: str) -> None:
    refused = admitted(tmp_path, line("a") + bad + line("b", temperature=-1))["refused"]
    assert [each["line"] for each in refused] == [2]
    assert not (tmp_path / JOURNAL).exists()


def test_another_batch_may_take_the_same_file_and_the_client_delete_it_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both change the time of the input's last change, once as it is looked through and once as it is admitted."""
    read = admission_child.lines_of

    def lines_of(source: Source) -> Iterator[tuple[int, bytes | BadRow]]:
        for number, text in read(source):
            time.sleep(0.011)  # more than what file systems tell apart
            (tmp_path / "other").hardlink_to(source.path)
            (tmp_path / "other").unlink()
            yield number, text

    monkeypatch.setattr(admission_child, "lines_of", lines_of)
    monkeypatch.setattr(prompts, "lines_of", lines_of)
    assert admitted(tmp_path, line("a") + line("b")) == {"admitted": 2}


def test_the_first_errors_are_told(tmp_path: Path) -> None:
    refused = admitted(tmp_path, line("a") + "[]\n" * 200)["refused"]
    assert [each["line"] for each in refused] == list(range(2, 2 + MOST_ERRORS))


def test_a_disk_that_is_full_refuses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare = mock.Mock(side_effect=NoSpaceError("job.db cannot be used: database or disk is full"))
    with monkeypatch.context() as full:
        full.setattr(admission_child, "prepare", prepare)
        assert admitted(tmp_path, line("a")) == {"later": "job.db cannot be used: database or disk is full"}
    assert admitted(tmp_path, line("a")) == {"admitted": 1}
    prepare.side_effect = JobChangedError("its model is another one")
    monkeypatch.setattr(admission_child, "prepare", prepare)
    assert admitted(tmp_path, line("a")) == {"admitted": 1}, "whoever runs it says what is other than then"


def test_clients_read_nothing_of_where_files_lie(tmp_path: Path) -> None:
    assert admitted(tmp_path, line("a") + line("b", nonsense=1) + line("c", prompt="x" * 200)) == {"admitted": 3}
    with closing(Journal(tmp_path / JOURNAL)) as journal:
        unknown, long = (message_of(record) for record in journal.records(FAILED))
    assert unknown == 'input.jsonl:2: unknown parameter "nonsense"; remove it'
    assert long.startswith("input.jsonl:3: the prompt has 200 tokens, and small holds ")
    (tmp_path / JOURNAL).unlink()
    [refused] = admitted(tmp_path, "\n")["refused"]
    assert refused["message"] == "input.jsonl holds no prompts, only blank lines; give one prompt a line"


def test_rows_that_ask_for_the_model_by_the_name_it_is_served_by_are_nothing_to_note(tmp_path: Path) -> None:
    told = mock.Mock()
    assert admitted(tmp_path, line("a"), told) == {"admitted": 1}
    assert told.send.call_args_list == []


def test_what_preparing_says_goes_to_the_server() -> None:
    told = mock.Mock()
    with Notes(cast(Link, told)) as notes:
        notes.say("note: a\x1b")
    [[message]] = [each.args for each in told.send.call_args_list]
    assert json.dumps(message) == '{"note": "note: a\\\\x1b"}'
