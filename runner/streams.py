"""Standard input, output and error: always open. An error of writing to them never ends a job, and no job waits until its
messages are read."""

from __future__ import annotations

import atexit
import errno
import io
import os
import signal
import sys
from contextlib import suppress
from typing import TextIO

from outrider.runner.backlog import Backlog, write_once


def prepare() -> None:
    """Call once, before any file is opened or anything is printed."""
    for number in (0, 1, 2):
        _fill(number)
    if sys.stdin is None:
        sys.stdin = open(0, closefd=False)  # noqa: SIM115  (a descriptor; for the life of the process)
    # A caller within the same process (a test) may have replaced sys.stdout and sys.stderr: leave those.
    if sys.stdout is sys.__stdout__:
        sys.stdout = _stream(_Tolerant(1), sys.stdout)
    if sys.stderr is sys.__stderr__:
        sys.stderr = _stream(Backlog(2), sys.stderr)
        atexit.register(finish)


def finish(seconds: float | None = None) -> None:
    """Call before this process ends: wait (at most ``seconds``) until the messages on standard error are read. A signal
    ends the wait, and the process."""
    sys.stderr.flush()
    raw = getattr(getattr(sys.stderr, "buffer", None), "raw", None)
    if isinstance(raw, Backlog):
        raw.finish(_let_signals_end, seconds)


def _let_signals_end() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)


def lost_output() -> OSError | None:
    """The error that kept standard output from being written, returned once; a pipe that its reader closed is none."""
    with suppress(ValueError):  # closed already
        sys.stdout.flush()
    raw = getattr(getattr(sys.stdout, "buffer", None), "raw", None)
    if not isinstance(raw, _Tolerant):
        return None
    error, raw.error = raw.error, None
    return None if error is None or error.errno == errno.EPIPE else error


def is_taken() -> bool:
    """Whether standard output can still be written."""
    raw = getattr(getattr(sys.stdout, "buffer", None), "raw", None)
    return not isinstance(raw, _Tolerant) or raw.error is None


def _fill(number: int) -> None:
    """Open /dev/null in place of a closed descriptor; else the next file that is opened gets its number and our output."""
    try:
        os.fstat(number)
    except OSError:
        opened = os.open(os.devnull, os.O_RDWR)
        if opened != number:  # a lower descriptor was free
            os.dup2(opened, number)
            os.close(opened)
        os.set_inheritable(number, True)


class _Tolerant(io.RawIOBase):
    """Writes until the first error, which is kept; later writes are dropped."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self.error: OSError | None = None

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)

    def write(self, data: memoryview) -> int:  # type: ignore[override]
        while self.error is None:
            try:
                return write_once(self._descriptor, data)
            except OSError as error:
                self.error = error
        return len(data)


def _stream(raw: _Tolerant | Backlog, before: TextIO | None) -> TextIO:
    # Buffered text goes first.
    if before is not None:
        with suppress(OSError):
            before.flush()
    return io.TextIOWrapper(
        io.BufferedWriter(raw),  # type: ignore[type-var]
        encoding=getattr(before, "encoding", None) or "utf-8",
        # Characters that the terminal's encoding lacks are escaped.
        errors="backslashreplace",
        line_buffering=raw.fileno() == 2 or raw.isatty(),
    )
