"""Inputs that can be read only once (standard input, pipes), copied to the job's directory so that the job can resume."""

from __future__ import annotations

import hashlib
import os
import select
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from outrider.runner.job.results import sync_folder
from outrider.workers.errors import JobError, UsageError

KEPT = "input"
STANDARD_INPUT = "-"
# Names in messages of inputs whose path says nothing.
NAMES = {STANDARD_INPUT: "standard input"}
READ_AT_ONCE = 1 << 20
# How long a pipe is polled for a writer if the job can go on without its content.
LOOK_MILLISECONDS = 200
NULL = os.makedev(1, 3)


def is_piped(path: Path) -> bool:
    """Whether the input is standard input, a pipe, a terminal, or any path of an open descriptor (/dev/fd/N)."""
    if str(path) == STANDARD_INPUT or path.parent in (Path("/dev/fd"), Path("/proc/self/fd")) or path == Path("/dev/stdin"):
        return True
    try:
        found = path.stat()
    except OSError:
        return False
    return stat.S_ISFIFO(found.st_mode) or _is_terminal_or_null(found)


def has_no_name(path: Path) -> bool:
    """Whether the path is no name for the content: standard input, and paths in /dev and /proc."""
    if path.is_relative_to("/dev/shm"):  # ordinary files
        return False
    return str(path) == STANDARD_INPUT or path.is_relative_to("/dev") or path.is_relative_to("/proc")


def input_name(path: Path) -> str:
    """The input's name in messages."""
    return NAMES.get(str(path), str(path))


def read_piped(path: Path, directory: Path, awaited: bool, keep: bool, say: Callable[[str], None]) -> str | None:
    """Read the input to its end; its digest, or None if it is empty.

    ``keep``: write it to the directory as the job's kept input, atomically. ``awaited``: wait for input at a terminal and
    for a writer of a named pipe; False if the job can go on without it.
    """
    with _opened(path) as descriptor:
        if os.isatty(descriptor):
            if not awaited:
                return None  # do not ask the user to type the prompts again
            say("reading prompts from the terminal, one a line; Ctrl-D ends them")
        try:
            return _copied(_pieces(descriptor, awaited), directory, keep)
        except _ReadError as error:
            raise UsageError(f"{input_name(path)} cannot be read: {error}") from None
        except OSError as error:
            raise JobError(f"{directory / KEPT}, for {input_name(path)}, cannot be written: {error.strerror}") from None


class _ReadError(Exception):
    pass


def _is_terminal_or_null(found: os.stat_result) -> bool:
    # Major numbers 4, 5 and 136 to 143 are terminals.
    major = os.major(found.st_rdev)
    return stat.S_ISCHR(found.st_mode) and (found.st_rdev == NULL or major in (4, 5) or 136 <= major <= 143)


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    try:
        # O_NONBLOCK: a pipe may never get a writer.
        descriptor = os.dup(0) if str(path) == STANDARD_INPUT else os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise UsageError(f"{input_name(path)} cannot be read: {error.strerror}") from None
    try:
        found = os.fstat(descriptor)
        if stat.S_ISDIR(found.st_mode):
            raise UsageError(f"{input_name(path)} is a directory; give a file of prompts")
        if stat.S_ISBLK(found.st_mode) or (stat.S_ISCHR(found.st_mode) and not _is_terminal_or_null(found)):
            raise UsageError(f"{input_name(path)} is a device; give a file or a pipe of prompts")
        yield descriptor
    finally:
        os.close(descriptor)


def _copied(pieces: Iterator[bytes], directory: Path, keep: bool) -> str | None:
    for left in directory.glob(f".{KEPT}.[0-9]*"):  # left by a run that was killed
        left.unlink()
    digest, count = hashlib.sha256(), 0
    temporary = directory / f".{KEPT}.{os.getpid()}"
    target = temporary if keep else Path(os.devnull)
    try:
        with target.open("wb") as stream:
            for some in pieces:
                digest.update(some)
                count += len(some)
                stream.write(some)
            stream.flush()
            if keep:
                os.fsync(stream.fileno())
        if not count:
            return None
        if keep:
            temporary.replace(directory / KEPT)
            sync_folder(directory)
        return digest.hexdigest()
    finally:
        with suppress(FileNotFoundError):
            temporary.unlink()


def _pieces(descriptor: int, awaited: bool) -> Iterator[bytes]:
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    # Reading a named pipe without a writer returns end of file, so wait for one first.
    poll.poll(None if awaited else LOOK_MILLISECONDS)
    while True:
        try:
            some = os.read(descriptor, READ_AT_ONCE)
        except BlockingIOError:
            poll.poll()
            continue
        except OSError as error:
            raise _ReadError(error.strerror) from None
        if not some:
            return
        yield some
