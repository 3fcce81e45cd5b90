"""A job's directory: its lock, its files (journal, job.json, outputs), and checks before a job begins or is opened."""

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
# How the lock file's text begins: the process that holds the lock, or held it last.
HOLDER = re.compile(rb"process \d+ on ")
# That beginning, cut off anywhere (before its first byte, too): the process was killed, or its disk was full.
CUT_OFF = re.compile(rb"(p(r(o(c(e(s(s( (\d+( (on?)?)?)?)?)?)?)?)?)?)?)?")
MOST_OF_HOLDER = 200
# A process that only asks whether the job runs (``is_held``) takes the lock for a moment: try again for this long.
ASKING_SECONDS, POLL_SECONDS = 0.2, 0.005
# The keys of job.json whose values are objects.
OBJECTS = ("spec", "identity", "target", "numeric_path", "summary", "layouts", "costs")


def default_directory(input_file: Path) -> Path:
    if has_no_name(input_file):
        return Path("stdin-job")
    named = input_file if input_file.name not in ("", "..") else input_file.resolve()
    name = Path(named.stem) if named.suffix in SUFFIXES else named
    return Path(f"{name.stem}-job")


def path_exists(path: Path) -> bool:
    """Whether the file exists; False if this user may not look."""
    return os.path.exists(path)  # noqa: PTH110  (Path.exists raises PermissionError)


def check_apart(option: str, path: Path, directory: Path) -> None:
    """Refuse an option that names a file of the job's own, which the job would overwrite.

    The kept copy of a piped input may be read again as INPUT.
    """
    kept = () if option == "INPUT" else (KEPT,)
    for own in (JOURNAL, f"{JOURNAL}-wal", f"{JOURNAL}-shm", DESCRIPTION, LOCK, *kept, RESULTS, ERRORS, REPORT):
        here = directory / own
        if here.absolute() == path.absolute() or (path_exists(here) and path_exists(path) and here.samefile(path)):
            raise UsageError(f"{option}: {path} is a file of the job's own in {directory}; copy it, or give another --out")


def check_free(directory: Path, piped: bool) -> None:
    """Refuse a directory that holds no job, but files that a new job would overwrite.

    ``piped``: the job will keep a copy of its input. Another run may start the same job meanwhile: it takes the lock,
    keeps its input, makes its journal and then writes the other files. So these are looked at in the opposite order.
    """
    found = [name for name in (DESCRIPTION, RESULTS, ERRORS, REPORT) if path_exists(directory / name)]
    kept = [KEPT] if piped and path_exists(directory / KEPT) else []
    holder = _holder(directory / LOCK)
    if not HOLDER.match(holder):
        found += kept
        if not CUT_OFF.fullmatch(holder):
            found.append(LOCK)
    _check_not_emptied(directory)
    _check_files_or_nothing(directory)
    if found and not _has_bytes(directory / JOURNAL):
        _check_not_gone(directory)
        raise UsageError(
            f"--out: {directory} holds a file {found[0]} that is not this job's and would be written over; name another"
        )


def _check_files_or_nothing(directory: Path) -> None:
    """Refuse directories and the like in place of output files now, not at the job's end.

    (``describe`` moves such a job.json aside.)
    """
    for name in (RESULTS, ERRORS, REPORT):
        check_file_or_nothing(directory / name)


def _check_not_emptied(directory: Path) -> None:
    """Refuse an empty journal beside a job.json. (A new journal is empty for a moment, but has no job.json yet.)"""
    if path_exists(directory / DESCRIPTION) and (directory / JOURNAL).is_file() and not _has_bytes(directory / JOURNAL):
        raise damaged(directory / JOURNAL, f"it is empty, and {DESCRIPTION} belongs to a job")


def _check_not_gone(directory: Path) -> None:
    """Refuse a directory whose journal is missing although job.json describes a job."""
    if path_exists(directory / JOURNAL) and not (directory / JOURNAL).is_file():
        raise JobError(f"{directory / JOURNAL} is no file, and so no job's journal; name another directory")
    try:
        content = json.loads(_read_regular_file(directory / DESCRIPTION))
    except (OSError, ValueError, RecursionError):
        return
    if isinstance(content, dict) and content.get("identity") and content.get("spec"):
        raise JobError(f"{directory / JOURNAL} is missing, and {DESCRIPTION} belongs to a job; {WHAT_TO_DO}")


def _read_regular_file(path: Path) -> bytes:
    """The content of a regular file; reading from a pipe may block for ever, and a device may have no end."""
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
    """The lock file's text; empty if it cannot be read (taking the lock then raises the error)."""
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
    """The holder of the job's lock, for messages."""
    return _said_holder(_holder(directory / LOCK))


def _said_holder(holder: bytes) -> str:
    return holder.decode(errors="replace").strip() or "another process"


def is_job(directory: Path) -> bool:
    """Whether the directory has a job whose input has been accepted."""
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
    """If another process holds the lock, say that the job is being started."""
    if is_held(directory):
        raise UsageError(
            f"{directory} is being started by {holder_of(directory)}: its input has not been accepted yet; wait until it is"
        )


def output_folder(directory: Path, out: Path | None, or_table: bool = False) -> Path:
    """The directory for outputs made from a job: the job's own, or ``out``, which is made if it is missing."""
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
            raise UsageError(f"--out: {out} is not a directory; name one") from None
        raise UsageError(f"--out: {out} is not a directory; name one, or for a table a file such as rows.csv") from None
    except OSError as error:
        raise UsageError(f"--out: {out} cannot be made: {error.strerror}") from None
    return out


@contextmanager
def job_lock(directory: Path) -> Iterator[None]:
    """Hold the job's lock (flock), which the kernel releases however this process ends.

    A directory that was made here is removed at the end if it is still empty, as when the input is refused.
    """
    made, handle = _lock(directory)
    try:
        try:
            holder = f"process {os.getpid()} on {socket.gethostname()}\n".encode()
            # Written before it is truncated: if this process is killed in between, the text still begins as HOLDER.
            written = 0
            while written < len(holder):
                written += os.write(handle, holder[written:])
            os.ftruncate(handle, len(holder))
        except OSError as error:
            raise unwritable(error, f"{directory / LOCK} cannot be written: {error.strerror}") from None
        yield
    finally:
        if made:
            _remove_unused(directory)
        os.close(handle)


def _lock(directory: Path) -> tuple[bool, int]:
    """Make the directory if need be, and take its lock: whether it was made, and the lock's descriptor."""
    while True:
        made = None
        check_file_or_nothing(directory / LOCK)
        try:
            made = _make_directory(directory)
            handle = os.open(directory / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            # The process that made the directory may have removed it in between (``_remove_unused``).
            if made is False and not path_exists(directory):
                continue
            if made is None and isinstance(error, FileExistsError):
                raise UsageError(f"--out: {directory} is not a directory, or is a broken link; name another") from None
            raise unwritable(error, _unwritable_job(directory, error), UsageError) from None
        try:
            _acquire(handle)
            # A lock file that was removed before we got its lock protects nothing: try again.
            if _is_at(handle, directory / LOCK):
                return made, handle
        except BlockingIOError:
            holder = _said_holder(os.read(handle, MOST_OF_HOLDER))
            os.close(handle)
            raise JobHeldError(f"{directory} is being run by {holder}; wait for it or stop it") from None
        os.close(handle)


def _unwritable_job(directory: Path, error: OSError) -> str:
    """The error sentence; it does not name --out for an existing job, which ``retry`` finds without that option."""
    if path_exists(directory / JOURNAL):
        return (
            f"{directory} holds a job and cannot be written: {error.strerror}; make it writable, or go on with a copy of it"
        )
    return f"--out: {directory} cannot be written: {error.strerror}"


def _acquire(handle: int) -> None:
    """Take the lock; ``BlockingIOError`` if another process holds it for longer than a moment."""
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


def _make_directory(directory: Path) -> bool:
    """Make the directory; whether it was made here."""
    while True:
        try:
            # For this user only, since it holds prompts and results; an existing directory keeps its mode.
            directory.mkdir(mode=0o700, parents=True)
        except FileExistsError:
            if directory.is_dir():
                return False
            # If it has been removed since, try again.
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
    """Remove a directory that holds only the lock, which we still have; a process that waits for it notices (``_lock``)."""
    with suppress(OSError):  # another process may have made a lock in it by now
        if [each.name for each in directory.iterdir()] == [LOCK]:
            (directory / LOCK).unlink()
            directory.rmdir()


def describe(directory: Path, journal: Journal, description: dict[str, Any]) -> None:
    """Update job.json and the journal's copy of it; keys that ``description`` lacks stay as an earlier run wrote them."""
    path = directory / DESCRIPTION
    whole = {**read_description(directory, journal)[0], **description}
    journal.set_meta(KEPT_DESCRIPTION, whole)
    if path_exists(path) and not path.is_file():
        path.rename(next(aside for number in count(1) if not (aside := directory / f"{DESCRIPTION}.{number}").exists()))
    write_atomically(path, [json.dumps(whole, indent=2)])


def read_description(directory: Path, journal: Journal) -> tuple[dict[str, Any], str | None]:
    """The content of job.json, or, if that is missing or damaged, the journal's copy, with a note if it is damaged."""
    path, note = directory / DESCRIPTION, None
    try:
        content = json.loads(_read_regular_file(path).decode())
        if isinstance(content, dict) and content.get("numeric_path", {}) is None:
            content["numeric_path"] = {}  # an older outrider wrote null if no target had come up
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
