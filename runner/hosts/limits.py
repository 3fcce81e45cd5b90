"""Checks of limits (ulimit, a container's) under which Ray cannot run, before it is started.

Ray itself does not name them: it waits half a minute for a server that could not start, or aborts this process.
"""

from __future__ import annotations

import resource
import shutil
import threading
from pathlib import Path
from typing import NamedTuple

from outrider.workers.errors import JobError

# Ray's object store is a file of this size.
OBJECT_STORE_BYTES = 256 << 20
# As counted on two cores (113 and 29); there are more on larger machines.
SERVERS_AND_DRIVER_THREADS, ACTOR_THREADS = 110, 28
STACK_BYTES = 256 << 10
SHARED_MEMORY = Path("/dev/shm")
# Room for the semaphores of the processes that a job starts.
LEAST_SHARED_BYTES = 1 << 20


class Least(NamedTuple):
    """The least value of a limit; ``unit``: bytes (or files) of ulimit's unit."""

    limit: int
    flag: str
    least: int
    unit: int
    what: str


LEAST = (
    Least(resource.RLIMIT_NOFILE, "-n", 128, 1, "open files"),
    Least(resource.RLIMIT_AS, "-v", 2 << 20, 1024, "KiB of address space"),
    Least(resource.RLIMIT_FSIZE, "-f", OBJECT_STORE_BYTES >> 10, 1024, "KiB a file"),
)


class TooLow(NamedTuple):
    """A limit that no job can run under: a sentence with a remedy after its semicolon, and the remedy as a command."""

    sentence: str
    command: str


def check_limits(actors: int = 1) -> None:
    """Refuse limits that are too small for a job with this many ``actors``.

    With too few threads actors die as they start, without a message.
    """
    if (low := too_low(actors)) is not None:
        raise JobError(low.sentence)


def too_low(actors: int) -> TooLow | None:
    """The first limit that is too small for a job with this many actors."""
    for limit, flag, least, unit, what in LEAST:
        allowed, _ = resource.getrlimit(limit)
        if allowed != resource.RLIM_INFINITY and allowed < least * unit:
            return TooLow(
                f"ulimit {flag} allows {allowed // unit:,} {what}, and a job here needs {least:,} at least; raise it",
                f"ulimit {flag} {least}",
            )
    needed = SERVERS_AND_DRIVER_THREADS + actors * ACTOR_THREADS
    if (found := _startable(needed)) < needed:
        allowed, _ = resource.getrlimit(resource.RLIMIT_NPROC)
        of_user = "no limit" if allowed == resource.RLIM_INFINITY else f"{allowed:,}"
        # Whether a job with one actor gets a draft is mostly not known yet.
        asked = f"{needed:,}, or {needed + ACTOR_THREADS:,} with a draft model," if actors == 1 else f"{needed:,}"
        return TooLow(
            f"only {found:,} more threads can be started here, and a job needs {asked} at least; raise the "
            f"limit of this user's processes (ulimit -u: {of_user}) or the container's (docker run --pids-limit), or end "
            "others",
            "ulimit -u unlimited, docker run --pids-limit=-1, or end other processes",
        )
    return None


def full_shared_memory(folder: Path = SHARED_MEMORY) -> str | None:
    """If /dev/shm is full: a sentence about it, since a process that finds no room there dies by a signal."""
    try:
        free = shutil.disk_usage(folder).free
    except OSError:
        return None
    if free >= LEAST_SHARED_BYTES:
        return None
    return (
        f"{folder} has only {free >> 10:,} KiB free, and processes die when it is full: remove files from it, or make "
        "it larger (docker run --shm-size=4g)"
    )


def _startable(count: int) -> int:
    """The number of threads that can be started, at most ``count``. Found by trying, since containers have limits too."""
    release, threads = threading.Event(), list[threading.Thread]()
    before = threading.stack_size(STACK_BYTES)
    try:
        for _ in range(count):
            thread = threading.Thread(target=release.wait, daemon=True)
            thread.start()
            threads.append(thread)
    except RuntimeError:  # no more threads can be started
        pass
    finally:
        threading.stack_size(before)
        release.set()
        for thread in threads:
            thread.join()
    return len(threads)
