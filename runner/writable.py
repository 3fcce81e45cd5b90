"""Whether a file or a folder can be written: found out before the work that it is for, which may take hours."""

from __future__ import annotations

import os
import tempfile
from contextlib import suppress
from pathlib import Path

from outrider.workers.errors import UsageError


def check_file(option: str, path: Path) -> None:
    """One that is there keeps its content."""
    was_there = os.path.lexists(path)
    try:
        path.open("ab").close()
        if not was_there:
            path.unlink()
    except OSError as error:
        raise UsageError(f"{option}: {path} cannot be written: {error.strerror}") from None


def check_new_folder(option: str, path: Path) -> None:
    """Nothing is made: what is written about later may yet be refused."""
    parent = path.absolute().parent
    while not os.path.lexists(parent):
        parent = parent.parent
    try:
        with suppress(FileNotFoundError, NotADirectoryError):
            path.lstat()  # a name may be too long
        with tempfile.TemporaryFile(dir=parent):
            pass
    except OSError as error:
        raise UsageError(f"{option}: {path} cannot be made in {parent}: {error.strerror}") from None
