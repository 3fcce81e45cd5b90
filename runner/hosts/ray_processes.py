"""The processes of a Ray of our own: what comes of this one, so that none of it is left when that Ray is lost."""

from __future__ import annotations

import ctypes
import os
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Self

import psutil

from outrider.runner.process_exit import end_at_once
from outrider.workers import ray_compat

PR_SET_CHILD_SUBREAPER = 36
END_SECONDS = 10.0


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
