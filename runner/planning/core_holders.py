"""Who holds which cores and devices, in words."""

from __future__ import annotations

from collections.abc import Mapping

from outrider.runner.planning import sysfs
from outrider.workers.machine.core_leases import Holder


def describe(held: Mapping[str, Holder]) -> str:
    """``cores 0-55 and cuda:0 are held by process 4711; ...``, one part for each process."""
    by_process: dict[int, list[str]] = {}
    for name, holder in held.items():
        by_process.setdefault(holder.pid, []).append(name)
    return "; ".join(f"{_things(names)} held by {_who(pid)}" for pid, names in sorted(by_process.items()))


def _things(names: list[str]) -> str:
    cores = [int(name) for name in names if name.isdecimal()]
    things = [f"core{'s' if len(cores) > 1 else ''} {sysfs.format_list(cores)}"] if cores else []
    things += [name.replace("-", ":") for name in sorted(names) if not name.isdecimal()]
    return f"{' and '.join(things)} {'are' if len(names) > 1 else 'is'}"


def _who(pid: int) -> str:
    return f"process {pid}" if pid else "another process"
