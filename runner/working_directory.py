"""The working directory, which may have been removed meanwhile."""

from __future__ import annotations

from pathlib import Path

from outrider.workers.errors import UsageError


def working_directory() -> Path:
    try:
        return Path.cwd()
    except FileNotFoundError:
        raise UsageError("the working directory no longer exists: cd to one that does") from None
