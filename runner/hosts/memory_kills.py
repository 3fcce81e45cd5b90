"""Whether the kernel ends processes for want of memory: by its own counts, of which only a rise says something."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from outrider.runner.planning import sysfs
from outrider.runner.planning.allowance import cgroup_folders

COUNT = "oom_kill"


class MemoryKills:
    """Of processes on this machine, from when this is made."""

    def __init__(self, read: Callable[[], int | None] | None = None) -> None:
        self._read = read_kills if read is None else read
        self._last = self._read()

    def rose(self) -> bool:
        """Whether there were any since this was last asked: each is one process's death, and not that of the next."""
        before, self._last = self._last, self._read()
        return before is not None and self._last is not None and self._last > before


def read_kills(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> int | None:
    """How many so far in this process's cgroup, in which its workers are, too; else on the whole machine."""
    for folder in cgroup_folders(proc, cgroup):
        for name in ("memory.events", "memory.oom_control"):
            if (count := _count(folder / name)) is not None:
                return count
    return _count(proc / "vmstat")


def _count(path: Path) -> int | None:
    for line in (sysfs.read_text(path) or "").splitlines():
        name, _, value = line.partition(" ")
        if name == COUNT and value.isdecimal():
            return int(value)
    return None
