"""The journal: committed rows are there, whole, however the writer ends."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from outrider.runner.job.journal import DONE, FAILED, LONGEST_LOG, Counts, Journal, StoredRow, on_network_file_system
from outrider.workers.errors import JobDamagedError, JobError


def row(number: int) -> StoredRow:
    return StoredRow(number, f"id-{number}", number + 1, "completion", {"max_tokens": 5, "n": 1}, (number, 70000, 0))


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    made = Journal(tmp_path / "job.db")
    yield made
    made.close()


@pytest.fixture
def full(journal: Journal) -> Journal:
    journal.fill((row(number) for number in range(5)), [(row(5), "bad")], {"identity": {"seed": 1}})
    return journal


def test_what_goes_in_comes_out(full: Journal) -> None:
    assert full.filled
    assert full.meta("identity") == {"seed": 1}
    assert full.meta("nothing") is None
    assert full.counts() == Counts(rows=6, done=0, failed=1)
    assert full.counts().pending == 5
    assert full.load([3, 1]) == [row(1), row(3)]
    assert list(full.records(FAILED)) == ["bad"]


def test_a_fill_that_fails_leaves_nothing(journal: Journal) -> None:
    def broken() -> Iterator[StoredRow]:
        yield row(0)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        journal.fill(broken(), [], {})
    assert not journal.filled
    journal.fill([row(0)], [], {})
    assert journal.counts().rows == 1


def test_failures_are_read_after_the_rows(journal: Journal) -> None:
    """The caller knows its bad rows only when it has read the file."""
    seen: list[str] = []

    def good() -> Iterator[StoredRow]:
        seen.append("rows")
        yield row(0)

    def bad() -> Iterator[tuple[StoredRow, str]]:
        seen.append("failures")
        yield row(1), "record"

    journal.fill(good(), bad(), {})
    assert seen == ["rows", "failures"]


def test_a_row_keeps_its_first_record(full: Journal) -> None:
    full.record([(0, "first")], [(1, "failed")])
    full.record([(0, "second"), (1, "too late")], [(0, "no")])
    assert list(full.records(DONE)) == ["first"]
    assert list(full.records(FAILED)) == ["failed", "bad"]
    assert full.counts() == Counts(6, 1, 2)


def test_records_come_in_input_order(full: Journal) -> None:
    full.record([(4, "four"), (0, "zero")], [])
    full.record([(2, "two")], [])
    assert list(full.records(DONE)) == ["zero", "two", "four"]


def test_the_pending_cursor(full: Journal) -> None:
    assert full.pending(-1, 3) == [(0, 0), (1, 0), (2, 0)]
    full.record([(1, "done")], [])
    full.count_attempt([2, 4])
    full.count_attempt([4])
    assert full.pending(-1, 3) == [(0, 0), (2, 1), (3, 0)]
    assert full.pending(3, 3) == [(4, 2)]
    assert full.pending(4, 3) == []


def test_the_longest_rows_still_to_do_with_their_longest_answers_and_samples(journal: Journal) -> None:
    lengths = [(3, 40, 2), (20, 9, 1), (5, 5, 3)]
    rows = [
        replace(row(number), prompt=(1,) * prompt, request={"max_tokens": most, "n": samples})
        for number, (prompt, most, samples) in enumerate(lengths)
    ]
    journal.fill(rows, [(replace(row(9), prompt=(1,) * 900), "bad")], {})
    assert journal.longest(2) == lengths[:1], "which has two samples"
    assert journal.longest(3) == lengths[:2]
    assert journal.pending_answers() == (6, 2 * 40 + 9 + 3 * 5)
    journal.record([(0, "done")], [])
    assert journal.longest(9) == lengths[1:]
    assert journal.pending_answers() == (4, 9 + 3 * 5)


def test_another_connection_sees_what_was_committed(full: Journal) -> None:
    full.record([(0, "done")], [])
    reader = Journal(full.path, read_only=True)
    assert reader.counts() == Counts(6, 1, 1)
    with pytest.raises(JobError, match="readonly"):
        reader.set_meta("a", 1)
    reader.close()


def test_settings_are_durable_ones(full: Journal) -> None:
    assert full._query("PRAGMA journal_mode") == [("wal",)]
    assert full._query("PRAGMA synchronous") == [(2,)]


def test_a_network_file_system_gets_no_write_ahead_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.runner.job.journal.on_network_file_system", lambda path, mounts: True)
    journal = Journal(tmp_path / "job.db")
    assert journal._query("PRAGMA journal_mode") == [("delete",)]
    # FULL would not sync the removal of the old journal, which is what makes a transaction last.
    assert journal._query("PRAGMA synchronous") == [(3,)]
    journal.close()


def moved(path: Path) -> None:
    path.rename(path.with_name("moved.db"))


def replaced(path: Path) -> None:
    path.with_name("other.db").write_bytes(path.read_bytes())
    path.with_name("other.db").replace(path)


@pytest.mark.parametrize("remote", [False, True])
@pytest.mark.parametrize("change", [moved, replaced])
def test_nothing_is_written_into_a_file_that_nobody_will_find(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, remote: bool, change: Callable[[Path], None]
) -> None:
    monkeypatch.setattr("outrider.runner.job.journal.on_network_file_system", lambda path, mounts: remote)
    with closing(Journal(tmp_path / "job.db")) as journal:
        journal.fill((row(number) for number in range(5)), [], {})
        journal.record([(1, "one")], [])
        change(journal.path)
        for write in (lambda: journal.record([(2, "two")], []), lambda: journal.set_meta("a", 1), journal.check_in_place):
            with pytest.raises(JobDamagedError, match=r"job\.db was moved, removed or replaced while the job ran; put it"):
                write()
        assert list(journal.records(DONE)) == ["one"]


MOUNTS = """\
/dev/sda1 / ext4 rw 0 0
server:/home /home nfs4 rw 0 0
/dev/sdb1 /home/local\\040disk xfs rw 0 0
tmpfs /dev/shm tmpfs rw 0 0
me@host:/ /mnt/far fuse.sshfs rw 0 0
server:/tabs /mnt/a\\011tab\\134 nfs rw 0 0
"""


@pytest.mark.parametrize(
    ("path", "remote"),
    [
        ("/tmp/job.db", False),
        ("/home/me/job.db", True),
        ("/homeless/job.db", False),
        ("/mnt/a\ttab\\/job.db", True),
        ("/home/local disk/job.db", False),
        ("/dev/shm/job.db", False),
        ("/mnt/far/job.db", True),
    ],
)
def test_network_file_systems_are_told_apart(path: str, remote: bool) -> None:
    assert on_network_file_system(Path(path), MOUNTS) == remote


def test_a_file_that_is_no_journal(tmp_path: Path) -> None:
    path = tmp_path / "job.db"
    path.write_bytes(b"this is not a database, whatever its name says" * 100)
    with pytest.raises(JobError, match=r"job.db cannot be used: file is not a database"):
        Journal(path)
    with pytest.raises(JobError, match=r"job.db cannot be used: file is not a database"):
        _ = Journal(path, read_only=True).filled


@pytest.mark.parametrize("table", ["notes", "meta", "rows"])
def test_another_programs_database_is_left_as_it_is(tmp_path: Path, table: str) -> None:
    path = tmp_path / "job.db"
    with closing(sqlite3.connect(path)) as db, db:
        db.execute(f"CREATE TABLE {table} (x)")
    before = path.read_bytes()
    for read_only in (True, False):
        with pytest.raises(JobError, match=r"job\.db is another program's database, and no job's journal; name another"):
            Journal(path, read_only)
    assert path.read_bytes() == before


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo])
def test_a_journal_that_is_no_file(tmp_path: Path, make: Callable[[Path], None]) -> None:
    make(tmp_path / "job.db")
    with pytest.raises(JobError, match=r"job\.db is no file, and so no job's journal; name another directory"):
        Journal(tmp_path / "job.db")


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo])
@pytest.mark.parametrize("name", ["job.db-wal", "job.db-shm"])
def test_what_is_in_the_way_of_a_journal_is_named(tmp_path: Path, make: Callable[[Path], None], name: str) -> None:
    make(tmp_path / name)
    with pytest.raises(JobError, match=rf"/{name} is no file, and one of that name is to be written: move it away$"):
        Journal(tmp_path / "job.db")
    assert not (tmp_path / "job.db").exists()


def test_a_journal_of_another_format_is_refused(full: Journal) -> None:
    full.set_meta("format", 99)
    with pytest.raises(JobError, match="has format 99, this outrider reads 1"):
        _ = full.filled


def test_a_full_disk_is_a_sentence_and_loses_nothing(full: Journal) -> None:
    pages = full._query("PRAGMA page_count")[0][0]
    full._query(f"PRAGMA max_page_count = {pages}")
    with pytest.raises(
        JobError, match=r"job.db cannot be used: database or disk is full; free some space, then the job can go on$"
    ):
        full.record([(0, "x" * 1_000_000)], [])
    full._query("PRAGMA max_page_count = 100000")
    full.record([(0, "small")], [])
    assert list(full.records(DONE)) == ["small"]


WRITER = """
import sys
from pathlib import Path
from outrider.runner.job.journal import Journal, StoredRow
journal = Journal(Path(sys.argv[1]))
def rows():
    for n in range(20_000):
        if n == 10_000:
            print("filling", flush=True)
            if sys.argv[2] == "0":
                sys.stdin.read()
        yield StoredRow(n, str(n), n, "completion", {}, (n,))
journal.fill(rows(), [], {})
print("filled", flush=True)
for n in range(20_000):
    journal.record([(n, f"record {n}")], [])
    print(n, flush=True)
"""


@pytest.mark.parametrize("after", [1, *(pytest.param(after, marks=pytest.mark.slow) for after in (0, 17))])
def test_a_writer_killed_at_any_moment_leaves_a_whole_journal(tmp_path: Path, after: int) -> None:
    """What it said was recorded is there; with ``after`` 0 it is killed amid the filling."""
    path = tmp_path / "job.db"
    command = [sys.executable, "-c", WRITER, str(path), str(after)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stdout.readline() == "filling\n"
    said = 0
    if after:
        assert process.stdout.readline() == "filled\n"
        for said in range(1, after + 1):
            assert process.stdout.readline() == f"{said - 1}\n"
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    process.stdin.close()
    process.stdout.close()
    journal = Journal(path)
    assert journal._query("PRAGMA integrity_check") == [("ok",)]
    assert journal.filled == bool(after)
    if after:
        counts = journal.counts()
        assert counts.rows == 20_000
        assert counts.done >= said
        assert list(journal.records(DONE)) == [f"record {number}" for number in range(counts.done)]
    journal.close()


def test_closing_leaves_no_lock_behind(full: Journal) -> None:
    full.close()
    other = sqlite3.connect(full.path)
    other.execute("DELETE FROM rows")
    other.close()


@pytest.mark.slow
def test_the_log_becomes_short_again_though_somebody_was_reading(tmp_path: Path) -> None:
    """A reader who stays while a large job is filled keeps the log from being emptied then."""
    journal = Journal(tmp_path / "job.db")
    reader = sqlite3.connect(tmp_path / "job.db", isolation_level=None)
    many = (StoredRow(number, str(number), number + 1, "completion", {}, tuple(range(500))) for number in range(12_000))

    def look() -> None:
        reader.execute("BEGIN")
        reader.execute("SELECT * FROM sqlite_master").fetchall()

    journal._db.execute("PRAGMA busy_timeout = 1")
    journal.fill(many, [], {}, look)
    log = tmp_path / "job.db-wal"
    assert log.stat().st_size > LONGEST_LOG, "nothing to be made shorter"
    reader.execute("COMMIT")
    for row in range(3):
        journal.record([(row, "x")], [])
    assert log.stat().st_size <= LONGEST_LOG
    reader.close()
    journal.close()
    assert not log.exists()
