"""Checks that an output file or folder can be written, before work that may take hours."""

from __future__ import annotations

import os
import tempfile
from contextlib import suppress
from pathlib import Path

from outrider.workers.errors import UsageError


def check_file(option: str, path: Path) -> None:
    """Refuse a file that cannot be opened for writing, and "-"; an existing file keeps its content."""
    if str(path) == "-":
        raise UsageError(
            f"{option}: give the name of a file; - is not standard output here (a file called - is named by its whole path)"
        )
    was_there = os.path.lexists(path)
    try:
        path.open("ab").close()
        if not was_there:
            path.unlink()
    except OSError as error:
        raise UsageError(f"{option}: {path} cannot be written: {error.strerror}") from None


def check_new_folder(option: str, path: Path) -> None:
    """Refuse a folder that could not be made. It is not made yet, since a later check may refuse the command."""
    parent = path.absolute().parent
    while not os.path.lexists(parent):
        parent = parent.parent
    try:
        with suppress(FileNotFoundError, NotADirectoryError):
            path.lstat()  # raises if the name is too long
        with tempfile.TemporaryFile(dir=parent):
            pass
    except OSError as error:
        raise UsageError(f"{option}: {path} cannot be made in {parent}: {error.strerror}") from None
