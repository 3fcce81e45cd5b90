"""Whether the Ray under a job is still there. Ray itself notices after a minute, and then ends the process that uses it."""

from __future__ import annotations

import atexit
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
from typing import Any, NoReturn, Self

import psutil

from outrider.runner.ending import end_at_once
from outrider.runner.journal import Journal
from outrider.workers.errors import JobError, RayLostError

# What says why a Ray can no longer be used; None while it can.
Lost = Callable[[], str | None]

PR_SET_CHILD_SUBREAPER = 36
END_SECONDS = 10.0
POLL_SECONDS = 2.0
ANSWER_SECONDS = 5.0
# Ray gives its head a minute to come back, and then ends the process with words of its own.
SILENCE_SECONDS = 30.0
# So many Rays may be lost without a row ending in between; more of them would fare no better.
MOST_IDLE_LOSSES = 3
WHAT = {"gcs_server": "control server", "raylet": "raylet"}


def own_servers(ray: Any) -> dict[str, list[subprocess.Popen[bytes]]]:
    """The servers that ``ray.init`` has started here; none where this Ray keeps them otherwise."""
    node = getattr(ray._private.worker, "_global_node", None)
    processes: Mapping[str, Sequence[Any]] = getattr(node, "all_processes", {})
    return {name: [each.process for each in processes.get(name, ())] for name in WHAT}


def ended(servers: Mapping[str, Sequence[subprocess.Popen[bytes]]]) -> str | None:
    """They are children of this process, so the kernel says at once when one has ended."""
    for name, processes in servers.items():
        for process in processes:
            if (code := process.poll()) is not None:
                how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
                return f"Ray's {WHAT[name]} on this machine {how}"
    return None


def adopt_orphans() -> None:
    """What the raylet has started becomes ours if the raylet is killed, so that none of it outlives the job unseen."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end_all_children() -> None:
    """Servers that are left and processes that hold models: the memory and the cores of a lost Ray are free afterwards."""
    deadline = time.monotonic() + END_SECONDS
    # Those that a dying one leaves behind are found the next time.
    while (children := psutil.Process().children(recursive=True)) and time.monotonic() < deadline:
        for child in children:
            with suppress(psutil.NoSuchProcess):
                child.kill()
        psutil.wait_procs(children, timeout=1.0)


def forget(ray: Any) -> None:
    """Nobody is left to say goodbye to: Ray would try for up to a minute when the process ends."""
    atexit.unregister(ray._private.worker.shutdown)
    end_at_once()


def check_worth_another(journal: Journal, lost: RayLostError, ours: bool) -> None:
    """Whether a job whose Ray is lost goes on by itself with another one of ours; an error where it does not."""
    kept = "the rows already done are kept, and the same command goes on with them"
    if not ours:
        raise JobError(f"{lost}; {kept} once it is there again") from lost
    counts = journal.counts()
    ended = counts.done + counts.failed
    idle = [*(earlier for earlier in journal.meta("ray_losses") or [] if earlier == ended), ended]
    hopeless = len(idle) >= MOST_IDLE_LOSSES
    journal.set_meta("ray_losses", [] if hopeless else idle)
    if hopeless:
        raise JobError(f"{lost}, {MOST_IDLE_LOSSES} times without a row ending in between; {kept}") from lost


def start_anew() -> NoReturn:
    """This very command from its beginning, in this very process, without what Ray's libraries remember of the lost Ray."""
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


class Head:
    """The head of a cluster: lost when nobody has answered at its port for a while."""

    def __init__(self, address: str, patience: float = SILENCE_SECONDS, poll: float = POLL_SECONDS) -> None:
        host, _, port = address.rpartition(":")
        self.address, self._where = address, (host.strip("[]"), int(port))
        self._patience, self._poll = patience, poll
        self._answered = time.monotonic()
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
        with suppress(OSError), socket.create_connection(self._where, timeout=ANSWER_SECONDS):
            self._answered = time.monotonic()
            return True
        return False

    def lost(self) -> str | None:
        silent = time.monotonic() - self._answered
        if silent < self._patience:
            return None
        return f"the head of the cluster at {self.address} has not answered for {silent:.0f} s"

    def _watch(self) -> None:
        while not self._closed.wait(self._poll):
            self.answers()
