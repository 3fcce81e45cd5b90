"""Whether a job's own Ray is still there. Ray itself notices after a minute, and then ends the process that uses it."""

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

# What says why a Ray can no longer be used; None while it can.
Lost = Callable[[], str | None]
# To look at all sockets of all processes takes longer than to ask at two ports.
POLLS_A_LOOK = 15
WHAT = {"gcs_server": "control server", "raylet": "raylet"}


def ended(servers: Mapping[str, Sequence[subprocess.Popen[bytes]]]) -> str | None:
    """They are children of this process, so the kernel says at once when one has ended."""
    for name, processes in servers.items():
        for process in processes:
            if (code := process.poll()) is not None:
                how = f"was killed by {_signal_name(-code)}" if code < 0 else f"ended with exit code {code}"
                return f"Ray's {WHAT[name]} on this machine {how}"
    return None


def _signal_name(number: int) -> str:
    return signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"


class OwnRay:
    """A Ray of our own: lost when one of its servers has ended, gives no answer for a while, or has no socket any more.

    One that is lost but there still is killed: who waits for it inside of Ray would else wait for ever. ``look`` is asked
    now and then, and says why the Ray can no longer be used, too.
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
        # Since when one has not answered at its port: time in which this process stood still says nothing.
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
        return self._why or ended(self._servers)

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
        """Whoever comes next finds none there, or another's; those that are connected would go on for a while."""
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
                # One that has ended is found by itself, with the reason.
                if silent >= self._patience and ended(self._servers) is None:
                    return f"Ray's {WHAT[name]} on this machine has not answered for {silent:.0f} s"
        return None


def _file_at(path: Path) -> tuple[int, int] | None:
    try:
        status = path.lstat()
    except OSError:
        return None
    return (status.st_dev, status.st_ino)
