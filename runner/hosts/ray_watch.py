"""Watches a job's own Ray. Ray's libraries would notice its death after a minute, and then end this process."""

from __future__ import annotations

import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Self

from outrider.runner.hosts.head_watch import SILENCE_SECONDS
from outrider.runner.hosts.port_check import POLL_SECONDS, check_port
from outrider.workers import ray_compat

# A function that returns why a Ray can no longer be used; None while it can.
Lost = Callable[[], str | None]
# ``look`` is called with every n-th check of the ports, since it reads the sockets of all processes.
POLLS_A_LOOK = 15
WHAT = {"gcs_server": "control server", "raylet": "raylet"}


def server_end(servers: Mapping[str, Sequence[subprocess.Popen[bytes]]]) -> str | None:
    """A sentence about a server that has ended, if any. Servers are children of this process, so it is known at once."""
    for name, processes in servers.items():
        for process in processes:
            if (code := process.poll()) is not None:
                how = f"was killed by {_signal_name(-code)}" if code < 0 else f"ended with exit code {code}"
                return f"Ray's {WHAT[name]} on this machine {how}"
    return None


def _signal_name(number: int) -> str:
    return signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"


class OwnRay:
    """A Ray of our own: lost when a server has ended or does not answer, a socket is gone, or ``look`` returns a reason.

    If it is lost while its servers live, they are killed: a call inside Ray's library would wait for them for ever.
    """

    def __init__(
        self,
        node: ray_compat.Node,
        ports: Mapping[str, tuple[str, int]],
        look: Callable[[], str | None],
        patience: float = SILENCE_SECONDS,
        poll: float = POLL_SECONDS,
    ) -> None:
        self._servers = node.processes
        self._sockets = {path: _file_at(path) for path in node.sockets}
        self._ports = ports
        self._look = look
        self._patience, self._poll = patience, poll
        # When a check of a port first failed. (Not the time of the last answer: this process may have been suspended.)
        self._silent_since: dict[str, float] = {}
        self._why: str | None = None
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="own ray", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        self._thread.join()

    def lost(self) -> str | None:
        return self._why or server_end(self._servers)

    def _watch(self) -> None:
        polls = 0
        while not self._closed.wait(self._poll):
            polls += 1
            self._why = self._socket_gone() or self._silent() or (self._look() if polls % POLLS_A_LOOK == 0 else None)
            if self._why is not None:
                for process in (each for processes in self._servers.values() for each in processes):
                    process.kill()
                return

    def _socket_gone(self) -> str | None:
        """A socket file that was removed or replaced: new processes could not connect, though connected ones go on."""
        for path, before in self._sockets.items():
            if _file_at(path) != before:
                return f"a socket of Ray's on this machine, {path}, has been removed or replaced"
        return None

    def _silent(self) -> str | None:
        for name, where in self._ports.items():
            if self._closed.is_set():
                return None
            try:
                check_port(where)
                self._silent_since.pop(name, None)
            except OSError:
                silent = time.monotonic() - self._silent_since.setdefault(name, time.monotonic())
                # A server that has ended is reported by ``server_end``, with the reason.
                if silent >= self._patience and server_end(self._servers) is None:
                    return f"Ray's {WHAT[name]} on this machine has not answered for {silent:.0f} s"
        return None


def _file_at(path: Path) -> tuple[int, int] | None:
    try:
        status = path.lstat()
    except OSError:
        return None
    return (status.st_dev, status.st_ino)
