"""The kernel's counts of processes that it ended for want of memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from outrider.runner.hosts.memory_kills import MemoryKills, read_kills

EVENTS = "low 0\nhigh 0\nmax 71\noom 3\noom_kill 2\noom_group_kill 0\n"
CONTROL = "oom_kill_disable 0\nunder_oom 0\noom_kill 5\n"


def machine(folder: Path, groups: str, files: dict[str, str]) -> int | None:
    for name, text in {"proc/self/cgroup": groups, "proc/vmstat": "pgfault 9\noom_kill 7\n", **files}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return read_kills(folder / "proc", folder / "cgroup")


@pytest.mark.parametrize(
    ("groups", "files", "count"),
    [
        ("0::/user/mine\n", {"cgroup/user/mine/memory.events": EVENTS, "cgroup/user/memory.events": CONTROL}, 2),
        ("4:memory:/mine\n0::/\n", {"cgroup/memory/mine/memory.oom_control": CONTROL}, 5),
        ("0::/\n", {"cgroup/memory.pressure": ""}, 7),
        ("0::/\n", {"proc/vmstat": "pgfault 9\n"}, None),
        ("0::/\n", {"proc/vmstat": "oom_kill many\n"}, None),
    ],
)
def test_those_of_its_own_cgroup_are_read_or_else_of_the_machine(
    tmp_path: Path, groups: str, files: dict[str, str], count: int | None
) -> None:
    assert machine(tmp_path, groups, files) == count


def test_only_a_rise_is_told_and_once() -> None:
    readings = iter([3, 3, 4, 4, None, 9, 11])
    kills = MemoryKills(lambda: next(readings))
    assert [kills.rose() for _ in range(6)] == [False, True, False, False, False, True]
