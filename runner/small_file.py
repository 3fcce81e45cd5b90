"""Files of a few lines that a user names. A device named by mistake may have no end, and would fill the memory."""

from __future__ import annotations

import errno
from pathlib import Path

MOST_BYTES = 1 << 20


def read_small(path: Path) -> bytes:
    """Also of a pipe, as a shell's ``<(command)`` is one."""
    with path.open("rb") as stream:
        content = stream.read(MOST_BYTES + 1)
    if len(content) > MOST_BYTES:
        raise OSError(errno.EFBIG, f"it is longer than {MOST_BYTES >> 20} MiB")
    return content
