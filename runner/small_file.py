"""Reads small files that a user names, with a bound: a device named by mistake (/dev/zero) would fill the memory."""

from __future__ import annotations

import errno
from pathlib import Path

MOST_BYTES = 1 << 20


def read_small(path: Path) -> bytes:
    """Also reads pipes, such as a shell's ``<(command)``, whose size is not known beforehand."""
    with path.open("rb") as stream:
        content = stream.read(MOST_BYTES + 1)
    if len(content) > MOST_BYTES:
        raise OSError(errno.EFBIG, f"it is longer than {MOST_BYTES >> 20} MiB")
    return content
