"""Breaks a small job at each of its writes and syncs in turn; the resumed job must be whole every time.

``faults.c`` counts and logs the job's operations on files. In each run one operation fails, is cut short, or is the last of
the process. The log also gives the states in which a power cut may leave the disk after each operation: any combination of
unsynced changes may be missing, and the last writes may be torn.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import random
import re
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from small_job import EXIT_CODE, INPUT, digest

from outrider.runner.job.journal import DONE, FAILED, Journal

HERE = Path(__file__).parent
SECTOR = 512
WRITE, TRUNCATE, SYNC, CREATE, MAKE_FOLDER, RENAME, REMOVE, MARK = range(1, 9)
NO_FAULT, DIE_BEFORE, DIE_AFTER, DIE_AMID, FAIL, FAIL_FROM_NOW_ON, SHORT, SHORT_THEN_FAIL = range(8)
# name -> (fault, errno or 0, whether the fault applies to writes only).
FAULTS = {
    "killed before": (DIE_BEFORE, 0, False),
    "killed after": (DIE_AFTER, 0, False),
    "killed amid": (DIE_AMID, 0, True),
    "EIO once": (FAIL, errno.EIO, False),
    "EIO from now on": (FAIL_FROM_NOW_ON, errno.EIO, False),
    "ENOSPC once": (FAIL, errno.ENOSPC, False),
    "ENOSPC from now on": (FAIL_FROM_NOW_ON, errno.ENOSPC, False),
    "short": (SHORT, 0, True),
    "short, then ENOSPC": (SHORT_THEN_FAIL, errno.ENOSPC, True),
}
RECORD = struct.Struct("<BBHHIq")
Image = dict[str, bytes | None]


def compiler() -> str | None:
    return shutil.which("gcc") or shutil.which("cc")


@dataclass(frozen=True, slots=True)
class Operation:
    what: int
    succeeded: bool
    path: str
    other: str
    data: bytes
    offset: int


def read_log(path: Path) -> list[Operation]:
    content, at, found = path.read_bytes(), 0, []
    while at < len(content):
        what, succeeded, first, second, size, offset = RECORD.unpack_from(content, at)
        at += RECORD.size
        names = content[at : at + first].decode(), content[at + first : at + first + second].decode()
        at += first + second
        found.append(Operation(what, bool(succeeded), *names, content[at : at + size], offset))
        at += size
    return found


# The disk


@dataclass(slots=True)
class _File:
    """The durable content of a file, and the operations on it since."""

    durable: bytearray = field(default_factory=bytearray)
    since: list[Operation] = field(default_factory=list)


class Disk:
    """The files after a number of operations. A folder is a name with None for a file; names are durable once their folder
    is synced."""

    def __init__(self) -> None:
        self._names: dict[str, _File | None] = {}
        self._durable_names: dict[str, _File | None] = {}
        self._renamings: list[tuple[str, dict[str, _File | None]]] = []

    def do(self, operation: Operation) -> None:
        path = operation.path
        if operation.what == MARK:
            return
        if not operation.succeeded:
            if operation.what == SYNC and isinstance(file := self._names.get(path), _File):
                file.since.clear()
            return
        match operation.what:
            case 1 | 2:
                file = self._names[path]
                assert file is not None
                file.since.append(operation)
            case 3:
                self._sync(path)
            case 4 | 5:
                self._rename(path, {path: _File() if operation.what == CREATE else None})
            case 6:
                moved = self._names.pop(path)
                self._rename(folder_of(operation.other), {operation.other: moved}, without=path)
            case 7:
                del self._names[path]
                self._rename(path, {}, without=path)

    def _rename(self, path: str, new: dict[str, _File | None], without: str = "") -> None:
        self._names |= new
        self._renamings.append((without, new))

    def _sync(self, path: str) -> None:
        file = self._names.get(path)
        if isinstance(file, _File):
            for operation in file.since:
                apply(file.durable, operation)
            file.since.clear()
            return
        # File systems that are fit for a job journal names in order: a sync of this folder also makes names in other
        # folders durable, up to the last change in this folder.
        mine = [n for n, (without, new) in enumerate(self._renamings) if path in map(folder_of, (without, *new))]
        for without, new in self._renamings[: mine[-1] + 1 if mine else 0]:
            self._durable_names.pop(without, None)
            self._durable_names |= new
        del self._renamings[: mine[-1] + 1 if mine else 0]

    def after_a_power_cut(self, dice: random.Random | None, names_last: bool = False) -> Image:
        """The files after a power cut. Without dice all unsynced changes are lost, except names if ``names_last``."""
        names = dict(self._durable_names)
        count = dice.randint(0, len(self._renamings)) if dice else len(self._renamings) if names_last else 0
        for without, new in self._renamings[:count]:
            names.pop(without, None)
            names |= new
        return {name: None if file is None else bytes(_content(file, dice)) for name, file in names.items()}


def folder_of(name: str) -> str:
    return name.rpartition("/")[0]


def apply(content: bytearray, operation: Operation) -> None:
    if operation.what == TRUNCATE:
        del content[operation.offset :]
        content.extend(bytes(operation.offset - len(content)))
        return
    end = operation.offset + len(operation.data)
    content.extend(bytes(max(0, operation.offset - len(content))))
    content[operation.offset : end] = operation.data


def _content(file: _File, dice: random.Random | None) -> bytearray:
    """The durable content with a random choice of the writes since, some of which are torn."""
    content = bytearray(file.durable)
    if dice is None:
        return content
    for operation in file.since:
        fate = dice.random()
        if fate < 0.4:
            apply(content, operation)
        elif fate < 0.7 and operation.what == WRITE:
            _tear(content, operation, dice)
    return content


def _tear(content: bytearray, operation: Operation, dice: random.Random) -> None:
    """Applies a random part of the write's sectors; sectors beyond the old end may be garbage."""
    for start in range(0, len(operation.data), SECTOR):
        piece = operation.data[start : start + SECTOR]
        fate = dice.random()
        if fate < 0.45:
            apply(content, Operation(WRITE, True, "", "", piece, operation.offset + start))
        elif fate < 0.55:
            # Existing sectors are old or new as a whole; only new sectors may be garbage.
            where = operation.offset + start
            if where >= len(content):
                apply(content, Operation(WRITE, True, "", "", dice.randbytes(len(piece)), where))


# The job


class Violation(AssertionError):
    """A fault led to a result that no fault may lead to."""


@dataclass(slots=True)
class Promised:
    """What must be durable, by the job's marks: rows with digests of their records, and versions of files."""

    filled: bool = False
    rows: dict[int, str] = field(default_factory=dict)
    # For each file the digests of the contents that it may have: the last written version, and versions begun since.
    files: dict[str, list[str]] = field(default_factory=dict)
    # The digests of files before the first mark about them.
    before: dict[str, str] = field(default_factory=dict)

    def hear(self, mark: str) -> None:
        match mark.split():
            case ["filled"]:
                self.filled = True
            case ["row", row, record]:
                self.rows.setdefault(int(row), record)
            case ["begins", name, version]:
                self.files.setdefault(name, [self.before.get(name, "")]).append(version)
            case ["file", name]:
                del self.files[name][:-1]


class SmallJob:
    """Runs the job of ``small_job.py`` under faults. ``folder`` should be in memory, since every write is synced."""

    # Whether the broken run is one that runs the failed rows again.
    again = False
    # The rows that had failed before that run.
    failed: frozenset[int] = frozenset()

    def __init__(self, folder: Path, network: bool) -> None:
        self.folder, self.network = folder, network
        # The content of the folder before the broken run.
        self.image: Image = {}
        folder.mkdir(parents=True, exist_ok=True)
        self.root = folder / "root"
        self.log = folder / "log"
        self.runs = 0
        (folder / "input.jsonl").write_text("".join(json.dumps(row) + "\n" for row in INPUT))

    def __enter__(self) -> Self:
        library = self.folder / "faults.so"
        source = str(HERE / "faults.c")
        command = [compiler() or "cc", "-shared", "-fPIC", "-O1", "-Wall", "-Werror", "-o", str(library), source, "-ldl"]
        subprocess.run(command, check=True)
        self._server = subprocess.Popen(
            [sys.executable, str(HERE / "small_job.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "LD_PRELOAD": str(library)},
        )
        self.begin_anew({})
        self.run("nothing")
        self.operations = read_log(self.log)
        self.expected = self._results()
        self.tokens = self._tokens()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.close()
        self._server.wait()
        self._server.stdout.close()

    def begin_anew(self, image: Image) -> None:
        """Replaces the content of the folder by this image."""
        shutil.rmtree(self.root, ignore_errors=True)
        self.root.mkdir()
        for name in sorted(image):
            content = image[name]
            if content is None:
                (self.root / name).mkdir()
            else:
                (self.root / name).write_bytes(content)

    def run(self, when: str, at: int = -1, fault: int = NO_FAULT, error: int = 0, again: bool = False) -> int:
        """Runs the command until it or its process ends: the exit code. Errors must be sentences, not tracebacks."""
        self.runs += 1
        asked = {"folder": str(self.root), "log": str(self.log), "network": self.network, "again": again}
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.write(json.dumps({**asked, "at": at, "fault": fault, "error": error}) + "\n")
        self._server.stdin.flush()
        answer = json.loads(self._server.stdout.readline())
        code, said = int(answer["code"]), str(answer["said"])
        if "Traceback" in said:
            raise Violation(f"{when}: a traceback\n{said}")
        if code in (1, 2) and not re.search(r"^outrider: \S", said, re.MULTILINE):
            raise Violation(f"{when}: it ends with {code} and without a sentence\n{said}")
        if code not in (EXIT_CODE, 1, 2, -9) or (code == -9 and fault not in (DIE_BEFORE, DIE_AFTER, DIE_AMID)):
            raise Violation(f"{when}: it ends with {code}\n{said}")
        if error == 0 and fault in (NO_FAULT, SHORT) and code != EXIT_CODE:
            raise Violation(f"{when}: it ends with {code} though nothing is wrong\n{said}")
        return code

    @property
    def job(self) -> Path:
        return self.root / "job"

    def _results(self) -> tuple[str, str]:
        return (self.job / "results.jsonl").read_text(), (self.job / "errors.jsonl").read_text()

    def _tokens(self) -> int:
        journal = Journal(self.job / "job.db", read_only=True)
        try:
            return int(journal.meta("totals")["tokens"])
        finally:
            journal.close()

    # Invariants

    def check(self, promised: Promised, when: str) -> None:
        """Asserts that the job has everything promised, and that the same command, run again, finishes it."""
        self._check_journal(promised, when)
        self._check_files(promised, when)
        self.run(f"{when}, resumed")
        if self._results() != self.expected:
            raise Violation(f"{when}: the results are not those of an undisturbed run\n{self._results()}")
        if (tokens := self._tokens()) != self.tokens:
            raise Violation(f"{when}: {tokens} tokens are counted in all, and {self.tokens} written")
        everything = Promised(filled=True)
        self._check_journal(everything, f"{when}, resumed")

    def _check_journal(self, promised: Promised, when: str) -> None:
        path = self.job / "job.db"
        if not path.exists():
            if promised.filled:
                raise Violation(f"{when}: the job is gone")
            return
        journal = Journal(path)
        try:
            if (whole := journal._query("PRAGMA integrity_check")) != [("ok",)]:
                raise Violation(f"{when}: the journal is broken: {whole}")
            if not journal.filled:
                if promised.filled:
                    raise Violation(f"{when}: the job was accepted, and is empty")
                return
            self._check_rows(journal, promised, when)
        finally:
            journal.close()

    def _check_rows(self, journal: Journal, promised: Promised, when: str) -> None:
        records = dict(journal._query("SELECT row, record FROM records"))
        states = dict(journal._query("SELECT row, state FROM rows"))
        if len(states) != len(INPUT):
            raise Violation(f"{when}: {len(states)} rows of {len(INPUT)}")
        earlier = dict(journal._query("SELECT row, record FROM earlier_errors"))
        if self.again and not self.failed <= records.keys() | earlier.keys():
            raise Violation(f"{when}: an error is lost before the row has ended again")
        if {row for row, state in states.items() if state in (DONE, FAILED)} != records.keys():
            raise Violation(f"{when}: a row has ended without a record, or the other way round")
        for row, record in promised.rows.items():
            if digest(records.get(row, "")) != record:
                raise Violation(f"{when}: row {row} had been recorded, and is not there")
        done = [json.loads(records[row]) for row, state in states.items() if state == DONE]
        tokens = sum(record["response"]["body"]["usage"]["completion_tokens"] for record in done)
        if (counted := (journal.meta("totals") or {"tokens": 0})["tokens"]) != tokens:
            raise Violation(f"{when}: {counted} tokens are counted, and {tokens} written")

    def _check_files(self, promised: Promised, when: str) -> None:
        for name, versions in promised.files.items():
            path = self.job / name
            there = digest(path.read_text()) if path.exists() else ""
            if there not in versions:
                raise Violation(f"{when}: {name} is not what was written")


class RetriedJob(SmallJob):
    """The same job after its end: its failed rows are run again, and fail again."""

    again = True

    def __enter__(self) -> Self:
        super().__enter__()
        journal = Journal(self.job / "job.db")
        self.failed = frozenset(row for (row,) in journal._query("SELECT row FROM rows WHERE state = 2"))
        journal.close()
        self.image = {
            str(path.relative_to(self.root)): None if path.is_dir() else path.read_bytes() for path in self.root.rglob("*")
        }
        self.run("nothing", again=True)
        if self._results() != self.expected:
            raise Violation("a retry that changes nothing changes the results")
        self.operations = read_log(self.log)
        return self


def promised_by(operations: Sequence[Operation], image: Image) -> Promised:
    texts = {
        name: content
        for name, content in image.items()
        if content is not None and name.endswith((".json", ".jsonl", ".html"))
    }
    promised = Promised(before={Path(name).name: digest(content.decode()) for name, content in texts.items()})
    for operation in operations:
        if operation.what == MARK:
            promised.hear(operation.path)
    return promised


def places(job: SmallJob, fault: str) -> list[int]:
    """The numbers of the operations of an undisturbed run at which this fault can happen."""
    counted = [operation for operation in job.operations if operation.what != MARK]
    writes_only = FAULTS[fault][2]
    return [n for n, operation in enumerate(counted) if operation.what == WRITE or not writes_only]


def in_turn(job: SmallJob) -> dict[str, list[int]]:
    """For each fault some numbers of operations, so that each kind of operation on each file has one of the faults."""
    counted = [operation for operation in job.operations if operation.what != MARK]
    kinds: dict[tuple[int, str], list[int]] = {}
    for number, operation in enumerate(counted):
        # A file that takes another's place has the number of its process and a random one behind its name.
        kinds.setdefault((operation.what, re.sub(r"\.\d+-[0-9a-f]+$", "", operation.path)), []).append(number)
    found: dict[str, list[int]] = {fault: [] for fault in FAULTS}
    for turn, ((what, _), numbers) in enumerate(kinds.items()):
        can = [fault for fault, (_, _, writes_only) in FAULTS.items() if what == WRITE or not writes_only]
        found[can[turn % len(can)]].append(numbers[len(numbers) // 2])
    return found


def break_at(job: SmallJob, fault: str, at: int) -> None:
    """Runs the job with one fault, and checks the invariants after it."""
    which, error, _ = FAULTS[fault]
    when = f"{fault} at operation {at}"
    job.begin_anew(job.image)
    code = job.run(when, at, which, error, again=job.again)
    if code == EXIT_CODE and job._results() != job.expected:
        raise Violation(f"{when}: it says that all is well, and the results are others")
    job.check(promised_by(read_log(job.log), job.image), when)


@dataclass(frozen=True, slots=True)
class PowerCut:
    """A state of the disk, the last moment at which a power cut can leave it, and the number of marks until then."""

    image: Image
    when: str
    marks: int


def power_cuts(operations: Sequence[Operation], variants: int, seed: int = 0) -> Iterator[PowerCut]:
    """The distinct states in which a power cut after any operation may leave the disk (``variants`` random ones each)."""
    disk = Disk()
    found: dict[str, PowerCut] = {}
    marks = counted = 0
    for operation in operations:
        disk.do(operation)
        marks += operation.what == MARK
        counted += operation.what != MARK
        images = [disk.after_a_power_cut(None), disk.after_a_power_cut(None, names_last=True)]
        images += [disk.after_a_power_cut(random.Random(f"{seed} {counted} {n}")) for n in range(variants)]
        for n, image in enumerate(images):
            # A later cut may leave the same state when more has been promised, so the later one replaces it.
            found[_name(image)] = PowerCut(image, f"power cut {n} after operation {counted}", marks)
    yield from found.values()


def _name(image: Image) -> str:
    hashed = hashlib.sha256()
    for name in sorted(image):
        content = image[name]
        hashed.update(f"{name} {-1 if content is None else len(content)} ".encode() + (content or b""))
    return hashed.hexdigest()


def cut_power(job: SmallJob, operations: Sequence[Operation], cut: PowerCut) -> None:
    """Checks the job in the state after a power cut against the promises until then."""
    heard = [operation for operation in operations if operation.what == MARK][: cut.marks]
    job.begin_anew(cut.image)
    job.check(promised_by(heard, job.image), cut.when)


def after_failed_sync(job: SmallJob, at: int) -> list[Operation]:
    """The log of a run in which one sync failed, so that the writes before it may be lost or not."""
    job.begin_anew({})
    job.run(f"EIO at sync {at}", at, FAIL, errno.EIO)
    return read_log(job.log)


def syncs(job: SmallJob) -> list[int]:
    counted = [operation for operation in job.operations if operation.what != MARK]
    return [n for n, operation in enumerate(counted) if operation.what == SYNC]


def describe(operations: Sequence[Operation]) -> dict[str, Any]:
    names = ("", "write", "truncate", "sync", "create", "make folder", "rename", "remove", "mark")
    counted: dict[str, int] = {}
    for operation in operations:
        counted[names[operation.what]] = counted.get(names[operation.what], 0) + 1
    return counted
