"""Files without a name, which a program hands to the process of its job."""

from __future__ import annotations

import fcntl
import os
import tempfile
from typing import IO

from outrider.workers.errors import JobError

# Of standard input, output and errors.
LAST_STANDARD = 2


def temporary_file() -> IO[bytes]:
    """Without a buffer: what is written is there for another process, or an error, at once."""
    try:
        with tempfile.TemporaryFile(prefix="outrider-", buffering=0) as file:
            # Where this program has no standard input, as services have none, the file got that one's number, under which
            # the job's process has its own.
            return os.fdopen(fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, LAST_STANDARD + 1), "w+b", buffering=0)
    except OSError as error:
        raise JobError(
            f"a temporary file cannot be made: {error.strerror}; name a directory with room with TMPDIR"
        ) from None


def keep(what: str, data: bytes, file: IO[bytes]) -> None:
    """All of it, which one call may not write."""
    rest = memoryview(data)
    try:
        while rest:
            rest = rest[file.write(rest) :]
    except OSError as error:
        said = f"{what} cannot be kept in a temporary file: {error.strerror}; name a directory with room with TMPDIR"
        raise JobError(said) from None
