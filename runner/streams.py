"""Standard input, output and error: always open, and never the end of a job where nobody takes what is said."""

from __future__ import annotations

import errno
import io
import os
import select
import sys
from contextlib import suppress
from typing import TextIO


def prepare() -> None:
    """Once, before anything is opened or said."""
    for number in (0, 1, 2):
        _fill(number)
    if sys.stdin is None:
        sys.stdin = open(0, closefd=False)  # noqa: SIM115  (a descriptor; for the life of the process)
    # Somebody who calls this within his own process may have put others in their place.
    if sys.stdout is sys.__stdout__:
        sys.stdout = _tolerant(1, sys.stdout)
    if sys.stderr is sys.__stderr__:
        sys.stderr = _tolerant(2, sys.stderr)


def lost_output() -> OSError | None:
    """Why what was printed on standard output did not all get out, told once. Who closes a pipe has read enough."""
    with suppress(ValueError):  # closed already
        sys.stdout.flush()
    raw = getattr(getattr(sys.stdout, "buffer", None), "raw", None)
    if not isinstance(raw, _Tolerant):
        return None
    error, raw.error = raw.error, None
    return None if error is None or error.errno == errno.EPIPE else error


def is_taken() -> bool:
    """Whether what is printed on standard output still gets somewhere."""
    raw = getattr(getattr(sys.stdout, "buffer", None), "raw", None)
    return not isinstance(raw, _Tolerant) or raw.error is None


def _fill(number: int) -> None:
    """A closed descriptor would be given to the next file that is opened, which then got what others print."""
    try:
        os.fstat(number)
    except OSError:
        opened = os.open(os.devnull, os.O_RDWR)
        if opened != number:  # one before it is closed, and filled already
            os.dup2(opened, number)
            os.close(opened)
        os.set_inheritable(number, True)


class _Tolerant(io.RawIOBase):
    """Writes as long as somebody takes it; what comes then is dropped, and the reason kept."""

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
                return os.write(self._descriptor, data)
            except BlockingIOError:  # a terminal that another program has left so
                select.select([], [self._descriptor], [])
            except OSError as error:
                self.error = error
        return len(data)


def _tolerant(descriptor: int, before: TextIO | None) -> TextIO:
    # The text that stands in it goes first.
    if before is not None:
        with suppress(OSError):
            before.flush()
    raw = _Tolerant(descriptor)
    return io.TextIOWrapper(
        io.BufferedWriter(raw),  # type: ignore[type-var]
        encoding=getattr(before, "encoding", None) or "utf-8",
        # A name that this terminal cannot show is shown escaped.
        errors="backslashreplace",
        line_buffering=descriptor == 2 or raw.isatty(),
    )
