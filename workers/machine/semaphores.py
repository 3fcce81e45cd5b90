"""The semaphores of Ray's mutable objects: files under /dev/shm that Ray leaves behind where a process is killed.

Ray names them after the raylet and the nanosecond in which it made the object: ``sem.hdr<pid>-<time>`` and ``sem.obj...``.
Once both ends of a channel have opened them the names are not needed any more, so they are unlinked at once. Until then a
note in the opening process's private folder has the raylet's pid, by which ``sweep`` finds them if the process is killed.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
NAME = re.compile(r"sem\.(?:hdr|obj)(?P<pid>\d+)-(?P<nanoseconds>\d+)")
NOTE = "semaphores"
# Longer than opening a channel may take.
OPENING_NANOSECONDS = 120 * 10**9


def note_opening(folder: Path) -> None:
    """Write the note. Called before the first semaphore is made, by a process that a raylet has started."""
    (folder / NOTE).write_text(json.dumps({"pid": os.getppid(), "since": time.time_ns()}), encoding="ascii")


def remove_names() -> int:
    """Unlink all semaphores of Ray that this process has open; returns how many there were."""
    mine = _mapped()
    found = [path for path in SHARED_MEMORY.glob("sem.*") if NAME.fullmatch(path.name) and _file_at(path) in mine]
    for path in found:
        path.unlink(missing_ok=True)
    return len(found)


def _mapped() -> set[tuple[int, int]]:
    """(device, inode) of all files that this process has mapped. (A semaphore is created under a temporary name, so names
    in /proc/self/maps are of no use.)"""
    found = set()
    for line in Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines():
        _, _, _, device, inode, *_ = line.split(maxsplit=5)
        major, _, minor = device.partition(":")
        found.add((os.makedev(int(major, 16), int(minor, 16)), int(inode)))
    return found


def _file_at(path: Path) -> tuple[int, int] | None:
    try:
        status = path.lstat()
    except OSError:  # its owner has removed it meanwhile
        return None
    return status.st_dev, status.st_ino


def removed_those_of(folder: Path, living: Iterable[Path]) -> bool:
    """Remove the semaphores of the dead process that had this folder. False while a living process opens a channel at the
    same raylet, whose semaphores have the same prefix."""
    note = _noted(folder)
    if note is None:
        return True
    pid, since = note
    if any(other is not None and other[0] == pid for other in map(_noted, living)):
        return False
    for path in SHARED_MEMORY.glob(f"sem.*{pid}-*"):
        match = NAME.fullmatch(path.name)
        if match and int(match["pid"]) == pid and 0 <= int(match["nanoseconds"]) - since <= OPENING_NANOSECONDS:
            with suppress(OSError):  # another user's, and not ours to remove
                path.unlink()
    return True


def _noted(folder: Path) -> tuple[int, int] | None:
    try:
        note = json.loads((folder / NOTE).read_text(encoding="ascii"))
        return int(note["pid"]), int(note["since"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
