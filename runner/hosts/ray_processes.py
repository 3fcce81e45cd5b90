"""The processes of a Ray of our own: all descendants of this process, ended when that Ray ends or is lost."""

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
    """The processes that descend from this one from now on: Ray's servers, and what they start."""

    def __enter__(self) -> Self:
        self._others = set(psutil.Process().children())
        self._open = _open_files()
        # As subreaper this process becomes the parent of the raylet's children if the raylet is killed.
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        return self

    def __exit__(self, *_: object) -> None:
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)

    def end(self) -> None:
        """Kill all of them, so that the memory and cores of a lost Ray are free."""
        deadline = time.monotonic() + END_SECONDS
        # Again and again, since children of a killed process appear only afterwards.
        while (left := self.left()) and time.monotonic() < deadline:
            for process in left:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            psutil.wait_procs(left, timeout=1.0)
        # Ray's log files must not stay open when this process executes its command anew.
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
        with suppress(OSError):  # the descriptor of the listing itself
            os.fstat(int(entry.name))
            found.add(int(entry.name))
    return found


def abandon() -> None:
    """Drop a Ray whose servers are gone; else this process would wait for them for up to a minute when it ends."""
    ray_compat.forget_at_exit()
    # Ray's excepthook calls its servers.
    sys.excepthook = sys.__excepthook__
    end_at_once()
