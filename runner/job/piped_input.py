"""Inputs that can be read only once, standard input and pipes: kept in the job's directory, so that the job can go on."""

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
# How messages call inputs whose path says nothing.
NAMES = {STANDARD_INPUT: "standard input"}
READ_AT_ONCE = 1 << 20
# Where nobody is awaited, a writer who comes at the same moment is still seen.
LOOK_MILLISECONDS = 200
NULL = os.makedev(1, 3)


def is_piped(path: Path) -> bool:
    """Whether the input is standard input or a pipe. Descriptors are counted in, whatever lies behind them."""
    if str(path) == STANDARD_INPUT or path.parent in (Path("/dev/fd"), Path("/proc/self/fd")) or path == Path("/dev/stdin"):
        return True
    try:
        found = path.stat()
    except OSError:
        return False
    return stat.S_ISFIFO(found.st_mode) or _is_terminal_or_null(found)


def has_no_name(path: Path) -> bool:
    """Whether the path says nothing of what is in it."""
    if path.is_relative_to("/dev/shm"):  # ordinary files, in memory
        return False
    return str(path) == STANDARD_INPUT or path.is_relative_to("/dev") or path.is_relative_to("/proc")


def called(path: Path) -> str:
    """How messages call it."""
    return NAMES.get(str(path), str(path))


def take(path: Path, directory: Path, awaited: bool, keep: bool, say: Callable[[str], None]) -> str | None:
    """Read all there is; the digest of it, or None where there is nothing.

    With ``keep`` the bytes are then the job's kept input, all of them or none. Where the job can go on without, nothing is
    ``awaited``: neither somebody at a terminal nor somebody who opens a named pipe.
    """
    with _opened(path) as descriptor:
        if os.isatty(descriptor):
            if not awaited:
                return None  # nobody is asked to type them again
            say("reading prompts from the terminal, one a line; Ctrl-D ends them")
        try:
            return _copied(_pieces(descriptor, awaited), directory, keep)
        except _ReadError as error:
            raise UsageError(f"{called(path)} cannot be read: {error}") from None
        except OSError as error:
            raise JobError(f"{directory / KEPT}, for {called(path)}, cannot be written: {error.strerror}") from None


class _ReadError(Exception):
    pass


def _is_terminal_or_null(found: os.stat_result) -> bool:
    # Major numbers 4, 5 and 136 to 143 are terminals.
    major = os.major(found.st_rdev)
    return stat.S_ISCHR(found.st_mode) and (found.st_rdev == NULL or major in (4, 5) or 136 <= major <= 143)


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    try:
        # Without waiting: whether anybody will ever write into a pipe is not known.
        descriptor = os.dup(0) if str(path) == STANDARD_INPUT else os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise UsageError(f"{called(path)} cannot be read: {error.strerror}") from None
    try:
        found = os.fstat(descriptor)
        if stat.S_ISDIR(found.st_mode):
            raise UsageError(f"{called(path)} is a directory; give a file of prompts")
        if stat.S_ISBLK(found.st_mode) or (stat.S_ISCHR(found.st_mode) and not _is_terminal_or_null(found)):
            raise UsageError(f"{called(path)} is a device; give a file or a pipe of prompts")
        yield descriptor
    finally:
        os.close(descriptor)


def _copied(pieces: Iterator[bytes], directory: Path, keep: bool) -> str | None:
    for left in directory.glob(f".{KEPT}.[0-9]*"):  # of a run that was killed here
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
    # A named pipe is at its end as long as nobody has opened it for writing.
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
