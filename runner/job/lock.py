"""Whether a process runs a job: asks for the job's lock (flock), which the kernel releases when its holder ends."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

LOCK = "lock"


def is_held(directory: Path) -> bool | None:
    """Whether a process runs the job now; None if this user may not read the lock file."""
    try:
        # O_NONBLOCK: opening a pipe of that name would block.
        handle = os.open(directory / LOCK, os.O_RDONLY | os.O_NONBLOCK)
    except FileNotFoundError:
        return False
    except OSError:
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    else:
        return False
    finally:
        os.close(handle)
