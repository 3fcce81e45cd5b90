"""Whether the Ray under a job is still there. Ray itself notices after a minute, and then ends the process that uses it."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn, Self

import psutil

from outrider.runner.job.journal import Journal
from outrider.runner.process_exit import end_at_once
from outrider.workers import ray_compat
from outrider.workers.errors import JobError, RayLostError

# What says why a Ray can no longer be used; None while it can.
Lost = Callable[[], str | None]

PR_SET_CHILD_SUBREAPER = 36
END_SECONDS = 10.0
POLL_SECONDS = 2.0
ANSWER_SECONDS = 5.0
# Ray gives its head a minute to come back, and then ends the process with words of its own.
SILENCE_SECONDS = 30.0
# To look at all sockets of all processes takes longer than to knock at two.
POLLS_A_LOOK = 15
# So many Rays may be lost without a row ending in between; more of them would fare no better.
MOST_IDLE_LOSSES = 3
# How a gRPC connection begins: HTTP/2's preface, and no settings. The other end answers with its own at once.
GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
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


class Descendants:
    """What comes of this process from now on: Ray's servers, and what they start."""

    def __enter__(self) -> Self:
        self._others = set(psutil.Process().children())
        self._open = _open_files()
        # What the raylet has started becomes ours if the raylet is killed, so that none of it outlives the job unseen.
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        return self

    def __exit__(self, *_: object) -> None:
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)

    def end(self) -> None:
        """The memory and the cores that a lost Ray had are free afterwards."""
        deadline = time.monotonic() + END_SECONDS
        # Those that a dying one leaves behind are found the next time.
        while (left := self.left()) and time.monotonic() < deadline:
            for process in left:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            psutil.wait_procs(left, timeout=1.0)
        # Ray's log files would stay open in a command that begins anew.
        for descriptor in _open_files() - self._open:
            with suppress(OSError):
                os.set_inheritable(descriptor, False)

    def left(self) -> list[psutil.Process]:
        found = [child for child in psutil.Process().children() if child not in self._others]
        for child in tuple(found):
            with suppress(psutil.NoSuchProcess):
                found += child.children(recursive=True)
        return found


def _open_files() -> set[int]:
    found = set()
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # the listing's own
            os.fstat(int(entry.name))
            found.add(int(entry.name))
    return found


def abandon() -> None:
    """Let go of a Ray whose servers are gone, which it would wait for, for up to a minute, when this process ends."""
    ray_compat.forget_at_exit()
    # Ray's own asks its servers for something first.
    sys.excepthook = sys.__excepthook__
    end_at_once()


def check_worth_another(journal: Journal, lost: RayLostError, ours: bool) -> None:
    """Whether a job whose Ray is lost goes on by itself with another one of ours; an error where it does not."""
    kept = "the rows already done are kept, and the same command goes on with them"
    if not ours:
        raise JobError(f"{lost}; {kept} once it is there again") from lost
    counts = journal.counts()
    rows = counts.done + counts.failed
    idle = [*(earlier for earlier in journal.meta("ray_losses") or [] if earlier == rows), rows]
    hopeless = len(idle) >= MOST_IDLE_LOSSES
    journal.set_meta("ray_losses", [] if hopeless else idle)
    if hopeless:
        raise JobError(f"{lost}, {MOST_IDLE_LOSSES} times without a row ending in between; {kept}") from lost


def start_anew() -> NoReturn:
    """This very command from its beginning, in this very process, without what Ray's libraries remember of the lost Ray."""
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def knock(where: tuple[str, int]) -> None:
    """An OSError if no server answers there. The kernel takes connections for a stopped one too, so a word is awaited."""
    with socket.create_connection(where, timeout=ANSWER_SECONDS) as line:
        line.sendall(GREETING)
        # One that hangs up, since it wants another protocol, is there as well.
        line.recv(1)


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
        # Since when one has not answered those that knocked: time in which this process stood still says nothing.
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
                knock(where)
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


class Head:
    """The head of a cluster: lost when nobody has answered at its port for a while, or when it has given us up.

    Once the driver's own raylet (at ``own``) is dead, the head ends what that driver has started, on all hosts.
    """

    def __init__(
        self,
        address: str,
        own: tuple[str, int],
        patience: float = SILENCE_SECONDS,
        poll: float = POLL_SECONDS,
    ) -> None:
        host, _, port = address.rpartition(":")
        self.address, self._where = address, (host.strip("[]"), int(port))
        self._own = own
        self._patience, self._poll = patience, poll
        # Since when it has not answered those that knocked: time in which this process stood still says nothing.
        self._silent_since: float | None = None
        self._cut_off: str | None = None
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="head", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        self._thread.join()

    def answers(self) -> bool:
        """Whether it does at this moment. What Ray is asked while its head is silent, it answers in a minute or never."""
        with suppress(OSError):
            knock(self._where)
            self._silent_since = None
            return True
        if self._silent_since is None:
            self._silent_since = time.monotonic()
        return False

    @property
    def silent(self) -> bool:
        """Whether it was so the last time that somebody knocked."""
        return self._silent_since is not None

    def cut_off(self) -> None:
        """It answers, but no longer counts this host in."""
        self._cut_off = "Ray on this host has died, and with it this job's part in the cluster"

    def lost(self) -> str | None:
        since = self._silent_since
        if self._cut_off is None and since is not None and (seconds := time.monotonic() - since) >= self._patience:
            return f"the head of the cluster at {self.address} has not answered for {seconds:.0f} s"
        return self._cut_off

    def _watch(self) -> None:
        refused = 0
        while not self._closed.wait(self._poll):
            refused = refused + 1 if self._own_is_dead() else 0
            # Without a head nobody ends anything. Where both die together, one is seen before the other.
            if self.answers() and refused > 1:
                self.cut_off()

    def _own_is_dead(self) -> bool:
        """One that is merely slow is for the head to judge."""
        try:
            knock(self._own)
        except OSError as error:
            return isinstance(error, ConnectionRefusedError)
        return False
