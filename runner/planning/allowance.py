"""The limits of this process: affinity, cgroup cpuset, memory nodes, memory limit and CPU quota."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from outrider.runner.planning import sysfs
from outrider.workers.machine.pin_check import memory_policy

# cgroup v1 writes "no limit" as the largest page-aligned number; larger than any real limit.
NO_LIMIT = 1 << 60


@dataclass(frozen=True, slots=True)
class Allowance:
    """None: not limited. ``cpu_quota`` is a number of CPUs, possibly a fraction."""

    cpus: frozenset[int] | None = None
    memory_nodes: frozenset[int] | None = None
    memory_limit_bytes: int | None = None
    cpu_quota: float | None = None
    warnings: tuple[str, ...] = ()


def read_allowance(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> Allowance:
    """The allowance of the calling process."""
    warnings = []
    cpus = frozenset(os.sched_getaffinity(0))
    folders = list(cgroup_folders(proc, cgroup))
    for folder in folders:
        cpuset = sysfs.parse_list(
            sysfs.read_text(folder / "cpuset.cpus.effective") or sysfs.read_text(folder / "cpuset.effective_cpus")
        )
        if not cpuset:
            continue
        if cpus & cpuset:
            cpus &= cpuset
        else:
            warnings.append(
                f"{folder} allows CPUs {sysfs.format_list(cpuset)}, but this process runs on "
                f"{sysfs.format_list(cpus)}: the cgroup's list is not used"
            )
    return Allowance(
        cpus=cpus,
        memory_nodes=_bound(_memory_nodes(proc)),
        memory_limit_bytes=min(filter(None, map(_memory_limit, folders)), default=None),
        cpu_quota=min(filter(None, map(_cpu_quota, folders)), default=None),
        warnings=tuple(warnings),
    )


def available_bytes(proc: Path = Path("/proc")) -> int | None:
    """The memory that is available now (MemAvailable); None if unknown."""
    for line in (sysfs.read_text(proc / "meminfo") or "").splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable" and (words := value.split()) and words[0].isdecimal():
            return int(words[0]) * 1024
    return None


def _bound(nodes: frozenset[int] | None) -> frozenset[int] | None:
    """The nodes restricted to the memory policy of this process (``numactl -m``), which holds for its actors too."""
    policy, chosen = memory_policy()
    if policy != "bind" or not chosen:
        return nodes
    return frozenset(chosen) if nodes is None else nodes & frozenset(chosen) or nodes


def _memory_nodes(proc: Path) -> frozenset[int] | None:
    for line in (sysfs.read_text(proc / "self/status") or "").splitlines():
        name, _, value = line.partition(":")
        if name == "Mems_allowed_list":
            return sysfs.parse_list(value.strip()) or None
    return None


def cgroup_folders(proc: Path, cgroup: Path) -> Iterator[Path]:
    """The cgroup folders whose limits apply to this process: its own and all parents, in cgroup v2 and v1 hierarchies."""
    for line in (sysfs.read_text(proc / "self/cgroup") or "").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        roots = [cgroup / name for name in controllers.split(",") if name] if controllers else [cgroup, cgroup / "unified"]
        if controllers:
            roots.append(cgroup / controllers)
        relative = Path(path.lstrip("/"))
        if ".." in relative.parts:  # a container sees only a part of the hierarchy
            relative = Path()
        for root in dict.fromkeys(roots):
            yield from (root / part for part in (relative, *relative.parents) if (root / part).is_dir())


def _memory_limit(folder: Path) -> int | None:
    for name in ("memory.max", "memory.limit_in_bytes"):
        limit = sysfs.read_int(folder / name)
        if limit is not None and 0 < limit < NO_LIMIT:
            return limit
    return None


def _cpu_quota(folder: Path) -> float | None:
    words = (sysfs.read_text(folder / "cpu.max") or "").split()
    if len(words) == 2 and all(word.isdecimal() for word in words) and int(words[1]):
        return int(words[0]) / int(words[1])
    quota, period = sysfs.read_int(folder / "cpu.cfs_quota_us"), sysfs.read_int(folder / "cpu.cfs_period_us")
    return quota / period if quota and period and quota > 0 < period else None
