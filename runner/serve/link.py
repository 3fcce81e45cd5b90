"""Between the server and a process of its own: messages as lines of JSON, both ways. A line's end is the other's end."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from outrider.workers.errors import JobError

# With this program's search path, so that the same packages are found there.
BEGIN = "import sys; sys.path[:] = {path!r}; from outrider.runner.serve.{module} import main; main(int(sys.argv[1]))"
LONGEST_COMPLAINT = 4096
Message = dict[str, Any]


class Line:
    """One end. ``send`` may be called from any thread."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._sending = threading.Lock()
        self._stream = end.makefile("rb")

    def send(self, message: Mapping[str, Any]) -> None:
        """Whoever is not there any more misses it; its end is told to the one who reads."""
        with self._sending, suppress(OSError):
            self._end.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> Message | None:
        """The next message; None at the other's end."""
        with suppress(OSError):
            line = self._stream.readline()
            # The last one may be cut off, where the other was killed.
            if line.endswith(b"\n"):
                message: Message = json.loads(line)
                return message
        return None

    def close(self) -> None:
        with suppress(OSError):
            self._end.shutdown(socket.SHUT_RDWR)
        self._end.close()


class Child:
    """A process of the server's, in a session of its own, so that a terminal's signals reach the server alone.

    ``hear`` gets its messages, and then ``ended`` what it complained of last, both in a thread of this one.
    """

    def __init__(
        self, module: str, asked: Mapping[str, Any], hear: Callable[[Message], None], ended: Callable[[str], None]
    ) -> None:
        begin = BEGIN.format(path=[str(Path(entry or ".").absolute()) for entry in sys.path], module=module)
        with ExitStack() as opened:
            try:
                ours, theirs = map(opened.enter_context, socket.socketpair())
                # No pipe: nobody waits for anybody to read.
                self._said = opened.enter_context(tempfile.TemporaryFile())
                self._process = subprocess.Popen(
                    [sys.executable, "-P", "-c", begin, str(theirs.fileno())],
                    stdin=subprocess.DEVNULL,
                    stdout=self._said,
                    stderr=self._said,
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,
                )
            except OSError as error:
                raise JobError(f"a process of the server's could not be started: {error.strerror}") from None
            theirs.close()
            opened.pop_all()
        self._line = Line(ours)
        # Other users see command lines.
        self._line.send(asked)
        self._thread = threading.Thread(target=self._read, args=(hear, ended), name=module, daemon=True)
        self._thread.start()

    def send(self, message: Mapping[str, Any]) -> None:
        self._line.send(message)

    def kill(self) -> None:
        self._process.kill()

    def wait(self) -> None:
        """Until it has ended, and all that it said was heard."""
        self._thread.join()

    def _read(self, hear: Callable[[Message], None], ended: Callable[[str], None]) -> None:
        while (message := self._line.receive()) is not None:
            hear(message)
        code = self._process.wait()
        self._line.close()
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        ended(f"its process {how}{self._complaint()}")

    def _complaint(self) -> str:
        size = os.fstat(self._said.fileno()).st_size
        said = os.pread(self._said.fileno(), LONGEST_COMPLAINT, max(0, size - LONGEST_COMPLAINT))
        lines = [line.strip() for line in said.decode(errors="replace").splitlines() if line.strip()]
        return f" ({lines[-1]})" if lines else ""


def server_line(descriptor: int) -> Line:
    """The child's end."""
    return Line(socket.socket(fileno=descriptor))
