"""Unnamed temporary files, whose descriptors a program passes to its job's process."""

from __future__ import annotations

import fcntl
import os
import tempfile
from typing import IO

from outrider.workers.errors import JobError

LAST_STANDARD = 2  # the descriptor of standard error
LONGEST_COMPLAINT = 4096


def temporary_file() -> IO[bytes]:
    """Unbuffered: another process sees at once what is written, and an error is raised by the write that failed."""
    try:
        with tempfile.TemporaryFile(prefix="outrider-", buffering=0) as file:
            # In a program without standard input (a service) the file may get descriptor 0 to 2, which the job's process
            # uses for its own streams: duplicate it to a higher one.
            return os.fdopen(fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, LAST_STANDARD + 1), "w+b", buffering=0)
    except OSError as error:
        raise JobError(
            f"a temporary file cannot be made: {error.strerror}; set TMPDIR to a directory with free space"
        ) from None


def write_all(what: str, data: bytes, file: IO[bytes]) -> None:
    """Write all bytes; a single ``write`` of an unbuffered file may write fewer."""
    rest = memoryview(data)
    try:
        while rest:
            rest = rest[file.write(rest) :]
    except OSError as error:
        said = f"{what} cannot be kept in a temporary file: {error.strerror}; set TMPDIR to a directory with free space"
        raise JobError(said) from None


def last_line(output: IO[bytes]) -> str:
    """The last line of a process's output, as " (the line)" for a sentence about its end; "" if there is none."""
    size = os.fstat(output.fileno()).st_size
    end = os.pread(output.fileno(), LONGEST_COMPLAINT, max(0, size - LONGEST_COMPLAINT))
    lines = [line.strip() for line in end.decode(errors="replace").splitlines() if line.strip()]
    return f" ({lines[-1]})" if lines else ""
