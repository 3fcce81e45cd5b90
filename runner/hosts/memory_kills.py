"""Whether the kernel has killed processes for want of memory, by its counters (oom_kill)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from outrider.runner.planning import sysfs
from outrider.runner.planning.allowance import cgroup_folders

COUNT = "oom_kill"


class MemoryKills:
    """Counts kills on this machine from the time that this object is made."""

    def __init__(self, read: Callable[[], int | None] | None = None) -> None:
        self._read = read_kills if read is None else read
        self._last = self._read()

    def rose(self) -> bool:
        """Whether there was a kill since the last call."""
        before, self._last = self._last, self._read()
        return before is not None and self._last is not None and self._last > before


def read_kills(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> int | None:
    """The number of kills in this process's cgroup, which its workers share; without one, on the whole machine."""
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
