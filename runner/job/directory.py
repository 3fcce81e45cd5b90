"""A job's directory: who holds it, what it is, and whether what is asked now is the same job."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import socket
import stat
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any

from outrider.runner.job.damage import WHAT_TO_DO, damaged
from outrider.runner.job.journal import Journal
from outrider.runner.job.lock import LOCK, is_held
from outrider.runner.job.piped_input import KEPT, has_no_name
from outrider.runner.job.results import ERRORS, RESULTS, check_file_or_nothing, write_atomically
from outrider.runner.job.source import SUFFIXES
from outrider.workers.errors import JobError, JobHeldError, UsageError, unwritable

JOURNAL = "job.db"
DESCRIPTION = "job.json"
REPORT = "report.html"
KEPT_DESCRIPTION = "description"
# What a lock says of who holds it, or held it last.
HOLDER = re.compile(rb"process \d+ on ")
MOST_OF_HOLDER = 200
# Whoever asks whether a job is held holds its lock for a moment.
ASKING_SECONDS, POLL_SECONDS = 0.2, 0.005
# What in job.json has entries of its own.
OBJECTS = ("spec", "identity", "target", "numeric_path", "summary", "layouts", "costs")


def default_directory(input_file: Path) -> Path:
    if has_no_name(input_file):
        return Path("stdin-job")
    named = input_file if input_file.name not in ("", "..") else input_file.resolve()
    name = Path(named.stem) if named.suffix in SUFFIXES else named
    return Path(f"{name.stem}-job")


def path_exists(path: Path) -> bool:
    """Whether there is such a file, as far as this user can see."""
    return os.path.exists(path)  # noqa: PTH110  (Path.exists raises where a directory may not be looked into)


def check_apart(option: str, path: Path, directory: Path) -> None:
    """Refuse a file of the job's own, which the job would write over. The input that it keeps can be read again."""
    kept = () if option == "INPUT" else (KEPT,)
    for own in (JOURNAL, f"{JOURNAL}-wal", f"{JOURNAL}-shm", DESCRIPTION, LOCK, *kept, RESULTS, ERRORS, REPORT):
        here = directory / own
        if here.absolute() == path.absolute() or (path_exists(here) and path_exists(path) and here.samefile(path)):
            raise UsageError(f"{option}: {path} is a file of the job's own in {directory}; copy it, or give another --out")


def check_free(directory: Path, piped: bool) -> None:
    """Refuse a directory without a job in which a new one would write over files that are not its own.

    ``piped``: the input is kept there. A run beside this one takes the lock, keeps its input and makes its journal before
    it writes anything else; so these are looked at last, and in the opposite order.
    """
    found = [name for name in (DESCRIPTION, RESULTS, ERRORS, REPORT) if path_exists(directory / name)]
    kept = [KEPT] if piped and path_exists(directory / KEPT) else []
    holder = _holder(directory / LOCK)
    if not HOLDER.match(holder):
        found += kept
        if holder:
            found.append(LOCK)
    _check_not_emptied(directory)
    _check_files_or_nothing(directory)
    if found and not _has_bytes(directory / JOURNAL):
        _check_not_gone(directory)
        raise UsageError(
            f"--out: {directory} holds a file {found[0]} that is not this job's and would be written over; name another"
        )


def _check_files_or_nothing(directory: Path) -> None:
    """A job would find out at its end. (A job.json that is none is put aside: ``describe``.)"""
    for name in (RESULTS, ERRORS, REPORT):
        check_file_or_nothing(directory / name)


def _check_not_emptied(directory: Path) -> None:
    """A journal is empty for a moment when it is made, but then nothing else of the job has been written."""
    if path_exists(directory / DESCRIPTION) and (directory / JOURNAL).is_file() and not _has_bytes(directory / JOURNAL):
        raise damaged(directory / JOURNAL, f"it is empty, and {DESCRIPTION} tells of a job")


def _check_not_gone(directory: Path) -> None:
    """Where there is no journal: whether there was one once."""
    if path_exists(directory / JOURNAL) and not (directory / JOURNAL).is_file():
        raise JobError(f"{directory / JOURNAL} is no file, and so no job's journal; name another directory")
    try:
        content = json.loads(_content(directory / DESCRIPTION))
    except (OSError, ValueError, RecursionError):
        return
    if isinstance(content, dict) and content.get("identity") and content.get("spec"):
        raise JobError(f"{directory / JOURNAL} is not there, and {DESCRIPTION} tells of a job; {WHAT_TO_DO}")


def _content(path: Path) -> bytes:
    """Of a file: whoever reads from a pipe may wait for ever, and a device may have no end."""
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as stream:
        if not stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
            raise OSError(errno.EINVAL, "it is no file")
        return stream.read()


def _has_bytes(path: Path) -> bool:
    try:
        return path.stat().st_size > 0
    except OSError:
        return False


def _holder(lock: Path) -> bytes:
    """What a lock says; nothing where it cannot be read, which whoever takes it says in a sentence."""
    try:
        handle = os.open(lock, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return b""
    try:
        return os.read(handle, MOST_OF_HOLDER)
    except OSError:
        return b""
    finally:
        os.close(handle)


def holder_of(directory: Path) -> str:
    """Who holds the job, as sentences say it."""
    return _said_holder(_holder(directory / LOCK))


def _said_holder(holder: bytes) -> str:
    return holder.decode(errors="replace").strip() or "another process"


def is_job(directory: Path) -> bool:
    """Whether there is a job whose input has been accepted."""
    if not path_exists(directory / JOURNAL):
        return False
    with closing(Journal(directory / JOURNAL, read_only=True)) as journal:
        return journal.filled


def open_job(directory: Path) -> Journal:
    """The journal of a job that exists, for reading."""
    try:
        if not (directory / JOURNAL).is_file():
            _check_not_starting(directory)
            _check_not_gone(directory)
            raise UsageError(f"{directory} is not a job directory: it has no {JOURNAL}")
    except OSError as error:
        raise UsageError(f"{directory} cannot be read: {error.strerror}") from None
    _check_not_emptied(directory)
    journal = Journal(directory / JOURNAL, read_only=True)
    if not journal.filled:
        journal.close()
        _check_not_starting(directory)
        raise UsageError(f"{directory} holds no job yet: its input has not been accepted")
    return journal


def _check_not_starting(directory: Path) -> None:
    """A directory without a job may have one in a moment."""
    if is_held(directory):
        raise UsageError(
            f"{directory} is being started by {holder_of(directory)}: its input has not been accepted yet; wait until it is"
        )


def output_folder(directory: Path, out: Path | None, or_table: bool = False) -> Path:
    """The directory into which what is made of a job is written: its own, or another that is named, and made if need be."""
    if out is None:
        if not os.access(directory, os.W_OK | os.X_OK):
            raise UsageError(f"{directory} cannot be written; name another directory with --out")
        return directory
    if path_exists(out / JOURNAL) and not (out / JOURNAL).samefile(directory / JOURNAL):
        raise UsageError(f"--out: {out} holds another job, whose own files are called the same; name another directory")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        if not or_table:
            raise UsageError(f"--out: {out} is no directory; name one") from None
        raise UsageError(
            f"--out: {out} is no directory; name one, or for a table a file whose name ends as tables' do, such as .csv"
        ) from None
    except OSError as error:
        raise UsageError(f"--out: {out} cannot be made: {error.strerror}") from None
    return out


@contextmanager
def held(directory: Path) -> Iterator[None]:
    """Keep every other process off the job. The kernel lets go when this process ends, however it ends.

    A directory that was made here is removed where nothing came into it, as when the input is refused.
    """
    made, handle = _lock(directory)
    try:
        try:
            holder = f"process {os.getpid()} on {socket.gethostname()}\n".encode()
            # In this order: wherever this process is killed, the lock says that it is outrider's.
            os.write(handle, holder)
            os.ftruncate(handle, len(holder))
        except OSError as error:
            raise unwritable(error, f"{directory / LOCK} cannot be written: {error.strerror}") from None
        yield
    finally:
        if made:
            _remove_unused(directory)
        os.close(handle)


def _lock(directory: Path) -> tuple[bool, int]:
    """Whether the directory was made for it, and its lock, held."""
    while True:
        made = None
        check_file_or_nothing(directory / LOCK)
        try:
            made = _make(directory)
            handle = os.open(directory / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            # Its maker may have removed it between the two steps.
            if made is False and not path_exists(directory):
                continue
            if made is None and isinstance(error, FileExistsError):
                raise UsageError(
                    f"--out: {directory} is no directory, or a link that leads to none; name another"
                ) from None
            raise unwritable(error, _unwritable_job(directory, error), UsageError) from None
        try:
            _take(handle)
            # Its maker may have removed it before it was held here: then it keeps nobody off.
            if _is_at(handle, directory / LOCK):
                return made, handle
        except BlockingIOError:
            holder = _said_holder(os.read(handle, MOST_OF_HOLDER))
            os.close(handle)
            raise JobHeldError(f"{directory} is being run by {holder}; wait for it or stop it") from None
        os.close(handle)


def _unwritable_job(directory: Path, error: OSError) -> str:
    """A job that is there may be one that no --out has named, as with ``retry``."""
    if path_exists(directory / JOURNAL):
        return (
            f"{directory} holds a job and cannot be written: {error.strerror}; make it writable, or go on with a copy of it"
        )
    return f"--out: {directory} cannot be written: {error.strerror}"


def _take(handle: int) -> None:
    """Hold the lock, or raise ``BlockingIOError`` where another process does and stays."""
    until = time.monotonic() + ASKING_SECONDS
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= until:
                raise
            time.sleep(POLL_SECONDS)
        else:
            return


def _make(directory: Path) -> bool:
    """Whether it was not there before."""
    while True:
        try:
            # Prompts and results are for their user alone; whoever made the directory before may share it with others.
            directory.mkdir(mode=0o700, parents=True)
        except FileExistsError:
            if directory.is_dir():
                return False
            # Its maker may have removed it since.
            if os.path.lexists(directory) and not directory.is_dir():
                raise
        else:
            return True


def _is_at(handle: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except FileNotFoundError:
        return False


def _remove_unused(directory: Path) -> None:
    """While its lock is held: whoever has opened that one meanwhile sees that it is gone, and makes both anew."""
    with suppress(OSError):  # somebody else's lock may be in it by now
        if [each.name for each in directory.iterdir()] == [LOCK]:
            (directory / LOCK).unlink()
            directory.rmdir()


def describe(directory: Path, journal: Journal, description: dict[str, Any]) -> None:
    """Write job.json, keeping what an earlier run of the same job put there. The journal keeps a copy."""
    path = directory / DESCRIPTION
    whole = {**read_description(directory, journal)[0], **description}
    journal.set_meta(KEPT_DESCRIPTION, whole)
    if path_exists(path) and not path.is_file():
        path.rename(next(aside for number in count(1) if not (aside := directory / f"{DESCRIPTION}.{number}").exists()))
    write_atomically(path, [json.dumps(whole, indent=2)])


def read_description(directory: Path, journal: Journal) -> tuple[dict[str, Any], str | None]:
    """What job.json says; where it is missing or damaged, what the journal has kept of it, with what to tell of that."""
    path, note = directory / DESCRIPTION, None
    try:
        content = json.loads(_content(path).decode())
        if isinstance(content, dict) and content.get("numeric_path", {}) is None:
            content["numeric_path"] = {}  # as versions before this one wrote it where no target was up
        if isinstance(content, dict) and all(isinstance(content.get(key, {}), dict) for key in OBJECTS):
            return content, None
        note = "it does not hold what a job is"
    except FileNotFoundError:
        pass
    except (ValueError, RecursionError):
        note = "it is no JSON"
    except OSError as error:
        note = str(error.strerror)
    kept: dict[str, Any] = journal.meta(KEPT_DESCRIPTION) or {}
    return kept, None if note is None else f"{path} cannot be used ({note}): what it said is taken from {JOURNAL}"
