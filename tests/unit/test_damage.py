"""A journal that was damaged, or edited by hand: one sentence, or mended so that no row is lost."""

from __future__ import annotations

import json
import random
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from outrider.runner.job.damage import translated
from outrider.runner.job.directory import open_job
from outrider.runner.job.journal import DONE, FAILED, META, Counts, Journal, StoredRow
from outrider.runner.job.resolved_request import samples_of
from outrider.runner.job.results import error_record, result_record, write_results
from outrider.runner.report.report import drop_damaged_statistics, write_report
from outrider.runner.report.statistics import JobStatistics
from outrider.workers.errors import JobError, NoSpaceError, OutriderError
from outrider.workers.messages import RowResult

REQUEST: dict[str, Any] = {
    "max_tokens": 5, "min_tokens": 0, "n": 1, "stop": ["x"], "end_tokens": [0], "logprobs": None,
    "temperature": 0.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "seed": 1, "repetition_penalty": 1.0,
    "presence_penalty": 0.0, "frequency_penalty": 0.0, "logit_bias": [[3, -1.0]],
}  # fmt: skip
RESULT = RowResult(key=0, tokens=(5,), text="t\n", finish_reason="stop", rounds=1, proposed=0, accepted=0, seconds=1.0)


def stored(number: int) -> StoredRow:
    # A NUL in an id: SQLite's own functions end a text there.
    return StoredRow(number, f"id-\0{number}", number + 1, "completion", REQUEST, (1, 2, 3))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows 0 to 3 are done, 4 and 5 failed, 6 to 9 to do."""
    directory = tmp_path_factory.mktemp("made")
    journal = Journal(directory / "job.db")
    journal.fill(map(stored, range(10)), [], {"identity": {"seed": 1}, "totals": {"tokens": 3}})
    done = [(number, result_record(stored(number), [RESULT], "m")) for number in range(4)]
    journal.record(done, [(number, error_record(stored(number), "invalid_request", "why")) for number in (4, 5)])
    journal.close()
    return directory


@pytest.fixture
def job(made: Path, tmp_path: Path) -> Path:
    shutil.copyfile(made / "job.db", tmp_path / "job.db")
    return tmp_path


def edit(job: Path, *statements: str) -> None:
    with sqlite3.connect(job / "job.db") as db:
        for statement in statements:
            db.execute(statement)
    db.close()


def use(job: Path) -> None:
    """What a resumed job, and every command, reads of it."""
    journal = Journal(job / "job.db")
    try:
        if not journal.filled:
            return
        journal.check()
        for key in META:
            journal.meta(key)
        rows = [row for row, _ in journal.pending(-1, 100)]
        for row in journal.load(rows):
            samples_of(row)
        write_results(journal, job)
        write_report(journal, job, running=False)
        counts = journal.counts()
        assert counts.rows == counts.done + counts.failed + len(rows), "a row is neither ended nor to be done"
    finally:
        journal.close()


def test_a_whole_journal_is_used_as_it_is(job: Path) -> None:
    use(job)
    journal = Journal(job / "job.db")
    assert journal.check() == []
    assert journal.counts() == Counts(10, 4, 2)
    journal.close()


@pytest.mark.parametrize(
    ("statements", "what"),
    [
        (["UPDATE rows SET state = 7 WHERE row = 3"], "row 3 has the state 7, which does not exist"),
        (["UPDATE rows SET state = -1 WHERE row = 3"], "row 3 has the state -1, which does not exist"),
        (["UPDATE rows SET state = 'done' WHERE row = 3"], "row 3 has the state 'done', which does not exist"),
        (["UPDATE rows SET state = 1.5 WHERE row = 3"], "row 3 has the state 1.5, which does not exist"),
        (["UPDATE rows SET row = -3 WHERE row = 8"], "row -3 has the state 0, which does not exist"),
        (["UPDATE rows SET attempts = 'x' WHERE row = 8"], "row 8 has a number of attempts that is none"),
        (["UPDATE rows SET prompt = x'010203' WHERE row = 8"], "the prompt of row 8 is cut off or no list of tokens"),
        (["UPDATE rows SET prompt = 'text' WHERE row = 8"], "the prompt of row 8 is cut off or no list of tokens"),
        (["UPDATE rows SET prompt = x'ffffffff' WHERE row = 8"], "the prompt of row 8 holds -1, which is no token id"),
        (["UPDATE rows SET request = '{' WHERE row = 8"], "the request of row 8 is no JSON"),
        (["UPDATE rows SET request = '[]' WHERE row = 8"], "the request of row 8 is of the wrong kind"),
        (["UPDATE rows SET request = x'00' WHERE row = 8"], "the request of row 8 is no JSON"),
        (["UPDATE rows SET request = '{}' WHERE row = 8"], 'row 8 (line 9): "max_tokens" must be there, got {}'),
        (["UPDATE rows SET custom_id = x'00' WHERE row = 8"], "row 8 has an id, a line or a kind that cannot be"),
        (["UPDATE rows SET line = 'x' WHERE row = 8"], "row 8 has an id, a line or a kind that cannot be"),
        (["UPDATE rows SET kind = 'poem' WHERE row = 8"], "row 8 has an id, a line or a kind that cannot be"),
        (["UPDATE meta SET value = '{' WHERE key = 'identity'"], '"identity" is no JSON'),
        (["UPDATE meta SET value = '[]' WHERE key = 'identity'"], '"identity" is of the wrong kind'),
        (["INSERT INTO meta VALUES ('model_name', '5')"], '"model_name" is of the wrong kind'),
        (["UPDATE meta SET value = '{\"tokens\": \"x\"}' WHERE key = 'totals'"], '"totals" holds what is no number'),
        (["UPDATE meta SET value = '7' WHERE key = 'format'"], "has format 7, this outrider reads 1"),
        (["DELETE FROM meta WHERE key = 'format'"], "has format None, this outrider reads 1"),
        (["DROP TABLE rows"], "no such table: rows"),
        (["DROP TABLE records"], "no such table: records"),
        (["ALTER TABLE rows RENAME COLUMN prompt TO words"], "no such column: prompt"),
    ],
)  # fmt: skip
def test_what_somebody_wrote_into_it_is_one_sentence(job: Path, statements: list[str], what: str) -> None:
    edit(job, *statements)
    with pytest.raises(JobError) as caught:
        use(job)
    assert what in str(caught.value)
    assert "\n" not in str(caught.value)


WRONG = [("max_tokens", "5"), ("n", 0), ("n", 10**9), ("stop", "x"), ("seed", -1), ("temperature", None)]


@pytest.mark.parametrize(("field", "value"), [*WRONG, ("logit_bias", [["3", 1]]), ("end_tokens", 4)])
def test_a_request_of_the_wrong_types_names_its_row(job: Path, field: str, value: Any) -> None:
    changed = json.dumps({**REQUEST, field: value})
    edit(job, f"UPDATE rows SET request = '{changed}' WHERE row = 8")
    with pytest.raises(JobError, match=rf'row 8 \(line 9\): "{field}".* must .*; put back a copy of it'):
        use(job)


@pytest.mark.parametrize(
    ("statement", "again", "said"),
    [
        ("DELETE FROM records WHERE row = 2", [2], "1 row was marked as ended without a whole record"),
        ("DELETE FROM records WHERE row IN (2, 5)", [2, 5], "2 rows were marked as ended without a whole record"),
        ("UPDATE records SET record = '' WHERE row = 2", [2], "1 row was marked as ended without a whole record"),
        ("UPDATE records SET record = '5' WHERE row = 2", [2], "1 row was marked as ended without a whole record"),
        ("UPDATE records SET record = x'7b7d' WHERE row = 2", [2], "1 row was marked as ended without a whole record"),
        ("UPDATE records SET record = substr(record, 1, 80) WHERE row = 2", [2], "without a whole record"),
        ("UPDATE records SET record = record || char(10) WHERE row = 2", [2], "without a whole record"),
        ("UPDATE records SET record = (SELECT record FROM records WHERE row = 1) WHERE row = 2", [2], "without a whole"),
        ("UPDATE rows SET state = 2 WHERE row = 2", [2], "1 row was marked as ended without a whole record"),
        ("UPDATE rows SET state = 1 WHERE row = 5", [5], "1 row was marked as ended without a whole record"),
        ("UPDATE rows SET state = 0 WHERE row = 2", [2], "1 row was not marked as ended but had a record"),
        ("INSERT INTO records VALUES (9, 'x')", [], "1 row was not marked as ended but had a record"),
        ("INSERT INTO records VALUES (77, 'x')", [], "1 row was not marked as ended but had a record"),
    ],
)
def test_rows_that_contradict_their_records_are_done_again(job: Path, statement: str, again: list[int], said: str) -> None:
    edit(job, statement)
    journal = Journal(job / "job.db")
    (note,) = journal.check()
    assert said in note
    assert [row for row, _ in journal.pending(-1, 100)] == sorted([*again, 6, 7, 8, 9])
    assert journal.check() == [], "once"
    journal.record([(row, result_record(stored(row), [RESULT], "m")) for row in again], [])
    assert {json.loads(record)["custom_id"] for record in journal.records(DONE)} >= {stored(row).custom_id for row in again}
    journal.close()
    use(job)


@pytest.mark.parametrize(
    "statement",
    ["DELETE FROM records WHERE row = 4", "UPDATE records SET record = substr(record, 1, 20) WHERE row = 4"],
)
def test_a_row_that_was_wrong_in_the_input_stays_failed(job: Path, statement: str) -> None:
    """Without a request: nobody could do it."""
    edit(job, "UPDATE rows SET request = '{}' WHERE row = 4", statement)
    journal = Journal(job / "job.db")
    assert journal.check() == ["1 row was wrong in the input without a whole record of why, and cannot be done again"]
    assert journal.check() == [], "once"
    assert journal.counts() == Counts(10, 4, 2)
    record = json.loads(next(journal.records(FAILED)))
    assert record["custom_id"] == stored(4).custom_id
    said = "line 5 was wrong in the input; what was said of it is damaged"
    assert record["error"] == {"code": "invalid_request", "message": said}
    assert journal.put_back_failed() == 1, "the other one"
    journal.close()
    use(job)


def test_a_row_without_a_record_is_not_done_for_those_who_only_look(job: Path) -> None:
    edit(job, "DELETE FROM records WHERE row = 2", "UPDATE records SET record = '{}' WHERE row = 3")
    journal = open_job(job)
    assert journal.counts() == Counts(10, 3, 2)
    with pytest.raises(JobError, match="the record of row 3 is damaged; outrider run does that row again"):
        write_results(journal, job)
    assert not (job / "results.jsonl").exists()
    journal.close()


def _cut(data: bytearray, dice: random.Random) -> None:
    del data[dice.randrange(1, len(data)) :]


def _garbage(data: bytearray, dice: random.Random) -> None:
    place = dice.randrange(len(data))
    data[place : place + 600] = dice.randbytes(600)


def _zeros(data: bytearray, dice: random.Random) -> None:
    page = dice.randrange(len(data) // 4096) * 4096
    data[page : page + 4096] = bytes(4096)


@pytest.mark.parametrize("damage", [_cut, _garbage, _zeros])
def test_damaged_bytes_are_one_sentence_or_harmless(
    job: Path, made: Path, damage: Callable[[bytearray, random.Random], None]
) -> None:
    refusals = 0
    for seed in range(40):
        data = bytearray((made / "job.db").read_bytes())
        damage(data, random.Random(seed))
        for entry in job.iterdir():
            entry.unlink()
        (job / "job.db").write_bytes(data)
        try:
            use(job)
        except OutriderError as error:
            assert "\n" not in str(error), seed
            refusals += 1
    assert refusals > 10


@pytest.mark.parametrize("content", [b"", b"no database at all, but long enough to be taken for one" * 20])
def test_what_is_no_journal(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "job.db").write_bytes(content)
    with pytest.raises(OutriderError):
        open_job(tmp_path)


@pytest.mark.parametrize("key", ["account", "pinning", "layouts"])
@pytest.mark.parametrize(
    "value", ['{"replicas": {"x": 5}}', "[5]", '{"0": 5}', '{"latencies": "x", "replicas": {"0": {}}}']
)
def test_edited_statistics_are_one_sentence_in_a_report(job: Path, key: str, value: str) -> None:
    edit(job, f"INSERT OR REPLACE INTO meta VALUES ('{key}', '{value}')")
    journal = open_job(job)
    try:
        write_report(journal, job, running=False)
    except JobError as error:
        assert "\n" not in str(error)
    journal.close()
    # A job goes on without them.
    journal = Journal(job / "job.db")
    drop_damaged_statistics(journal, job)
    write_report(journal, job, running=False)
    JobStatistics(journal.meta("account"), 1)
    journal.close()


def test_one_that_is_a_link_to_itself(job: Path) -> None:
    (job / "job.db").unlink()
    (job / "job.db").symlink_to("job.db")
    with pytest.raises(OutriderError):
        open_job(job)


@pytest.mark.parametrize(
    ("code", "kind", "said"),
    [
        (sqlite3.SQLITE_FULL, NoSpaceError, "; free some space, then the job can go on"),
        (sqlite3.SQLITE_IOERR_FSYNC, NoSpaceError, "; see that its disk works and has space, then the job can go on"),
        (
            sqlite3.SQLITE_CANTOPEN,
            NoSpaceError,
            "; see that its folder can be written and has room for another file (df -i)",
        ),
        (sqlite3.SQLITE_BUSY, JobError, ""),
        (None, JobError, ""),
    ],
)
def test_a_full_or_failing_disk_is_no_damage(tmp_path: Path, code: int | None, kind: type[JobError], said: str) -> None:
    error = sqlite3.OperationalError("so says SQLite")
    if code is not None:
        error.sqlite_errorcode = code
    with pytest.raises(JobError) as told, translated(tmp_path / "job.db"):
        raise error
    assert str(told.value) == f"{tmp_path / 'job.db'} cannot be used: so says SQLite{said}"
    assert type(told.value) is kind, "which says whether another try may succeed"
