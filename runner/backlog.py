"""Standard error, written by a thread, so that printing does not block at a held terminal (Ctrl-S) or a pipe that is not
read.
"""

from __future__ import annotations

import io
import os
import select
import threading
from collections.abc import Callable

# A write waits this long until its text is out, so that standard output and error keep their order; once one has waited in
# vain, later ones do not wait.
PATIENCE_SECONDS = 0.5
# A line of progress every ten seconds fills this in a day.
MOST_BYTES = 1 << 20
PIECE_BYTES = 4096


class Backlog(io.RawIOBase):
    """Keeps text until it can be written. After an error (a closed pipe, say) all further text is dropped."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._left = bytearray()
        self._left_out = 0
        # Its lock is held for each access to ``_left``, but not while a piece is written.
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._direct = self._stuck = self._broken = False
        os.register_at_fork(after_in_child=self._begin_in_child)

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)

    def write(self, data: memoryview) -> int:  # type: ignore[override]
        with self._changed:
            if self._thread is None and not self._direct:
                self._start()
            if self._broken:
                pass
            elif self._direct:
                self._write_directly(bytes(data))
            elif len(self._left) + len(data) > MOST_BYTES:
                self._left_out += len(data)
            else:
                self._left += data
                self._changed.notify_all()
                if not self._stuck:
                    self._stuck = not self._changed.wait_for(self._is_empty, PATIENCE_SECONDS)
        return len(data)

    def finish(self, before_waiting: Callable[[], None], seconds: float | None = None) -> None:
        """Wait until all is written (at most ``seconds``); later writes block until they are read."""
        with self._changed:
            if not self._is_empty():
                before_waiting()
            self._changed.wait_for(self._is_empty, seconds)
            self._direct = True

    def _is_empty(self) -> bool:
        return not self._left

    def _start(self) -> None:
        self._thread = threading.Thread(target=self._write_all, name="messages", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:  # this user may start no further thread
            self._direct = True

    def _write_all(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._left)
                some = bytes(self._left[:PIECE_BYTES])
            count = self._write_some(some)
            with self._changed:
                del self._left[: count or len(self._left)]
                if self._is_empty():
                    self._all_is_written()

    def _all_is_written(self) -> None:
        self._stuck = False
        if self._left_out:
            self._left += f"({self._left_out:,} bytes of messages were left out: nobody read them)\n".encode()
            self._left_out = 0
        self._changed.notify_all()

    def _write_directly(self, data: bytes) -> None:
        while data and not self._broken:
            data = data[self._write_some(data) :]

    def _write_some(self, data: bytes) -> int:
        """The bytes that were written; 0 after an error."""
        try:
            return write_once(self._descriptor, data)
        except OSError:
            self._broken = True
            return 0

    def _begin_in_child(self) -> None:
        """A fork has no thread, and its parent writes what is left."""
        self._changed, self._left, self._direct = threading.Condition(), bytearray(), True


def write_once(descriptor: int, data: bytes | memoryview) -> int:
    """As ``os.write``, also where another program has made the terminal non-blocking."""
    while True:
        try:
            return os.write(descriptor, data)
        except BlockingIOError:
            select.select([], [descriptor], [])
