"""Whether somebody runs a job: a lock that the kernel frees whatever becomes of the holder."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

LOCK = "lock"


def is_held(directory: Path) -> bool | None:
    """Whether some process runs the job at this moment; None where this user may not look."""
    try:
        # A pipe of that name would wait for somebody who writes into it.
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
