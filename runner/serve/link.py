"""The link between the server and one of its processes: lines of JSON over a socket pair; its end shows a process's end."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from outrider.runner.temporary_file import last_line
from outrider.workers.errors import JobError

# The process searches the server's sys.path, so it finds the same packages.
BEGIN = "import sys; sys.path[:] = {path!r}; from outrider.runner.serve.{module} import main; main(int(sys.argv[1]))"
Message = dict[str, Any]


class Link:
    """One end of the socket pair. ``send`` may be called from any thread."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._sending = threading.Lock()
        self._stream = end.makefile("rb")

    def send(self, message: Mapping[str, Any]) -> None:
        """Send a message. An error is ignored: if the other side has ended, ``receive`` returns None."""
        with self._sending, suppress(OSError):
            self._end.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> Message | None:
        """The next message; None once the other side has ended."""
        with suppress(OSError):
            line = self._stream.readline()
            # The last line is incomplete if the other side was killed while it was sent.
            if line.endswith(b"\n"):
                message: Message = json.loads(line)
                return message
        return None

    def close(self) -> None:
        with suppress(OSError):
            self._end.shutdown(socket.SHUT_RDWR)
        self._end.close()


class Child:
    """A process of the server, in a session of its own, so that a terminal's signals reach only the server.

    ``on_message`` is called with each message, and at the end ``on_end`` with a sentence about how the process ended;
    both in a thread of the server.
    """

    def __init__(
        self, module: str, asked: Mapping[str, Any], on_message: Callable[[Message], None], on_end: Callable[[str], None]
    ) -> None:
        begin = BEGIN.format(path=[str(Path(entry or ".").absolute()) for entry in sys.path], module=module)
        with ExitStack() as opened:
            try:
                ours, theirs = map(opened.enter_context, socket.socketpair())
                # A file, not a pipe, which would block the process when it is full.
                self._output = opened.enter_context(tempfile.TemporaryFile())
                self._process = subprocess.Popen(
                    [sys.executable, "-P", "-c", begin, str(theirs.fileno())],
                    stdin=subprocess.DEVNULL,
                    stdout=self._output,
                    stderr=self._output,
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,
                )
            except OSError as error:
                raise JobError(f"a process of the server's could not be started: {error.strerror}") from None
            theirs.close()
            opened.pop_all()
        self._line = Link(ours)
        # Sent as a message, since other users can see command lines.
        self._line.send(asked)
        self._thread = threading.Thread(target=self._read, args=(on_message, on_end), name=module, daemon=True)
        self._thread.start()

    def send(self, message: Mapping[str, Any]) -> None:
        self._line.send(message)

    def kill(self) -> None:
        self._process.kill()

    def wait(self) -> None:
        """Wait until the process has ended and all of its messages were handled."""
        self._thread.join()

    def _read(self, on_message: Callable[[Message], None], on_end: Callable[[str], None]) -> None:
        while (message := self._line.receive()) is not None:
            on_message(message)
        code = self._process.wait()
        self._line.close()
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        on_end(f"its process {how}{last_line(self._output)}")


def server_link(descriptor: int) -> Link:
    """The process's end of its link to the server."""
    return Link(socket.socket(fileno=descriptor))
