"""Small files in the user's cache: written atomically, and read only where no other user can have written them."""

from __future__ import annotations

import logging
import os
import threading
from contextlib import suppress
from pathlib import Path

from outrider.workers.models.packed_cache import cache_directory, make_directory

logger = logging.getLogger(__name__)


def own_folder(name: str) -> Path:
    """A folder of the cache for this user alone. (The folder of OUTRIDER_CACHE may be shared with others.)"""
    return cache_directory() / (f"{name}-{os.geteuid()}" if os.environ.get("OUTRIDER_CACHE") else name)


def make_own(folder: Path) -> None:
    """Make an ``own_folder`` where there is none, or an OSError."""
    make_directory(folder.parent)
    folder.mkdir(mode=0o700, exist_ok=True)


def read_own(file: Path, longest: int) -> bytes | None:
    """What the file holds; None where there is none, or none that may be trusted."""
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return None
    with os.fdopen(descriptor, "rb") as stream:
        owner = os.fstat(descriptor)
        # Another writer could give another model the digest of this one.
        if owner.st_uid != os.geteuid() or owner.st_mode & 0o022:
            logger.warning("%s may be written by others: it is not used", file)
            return None
        try:
            content = stream.read(longest + 1)
        except OSError:
            return None
    return content if len(content) <= longest else None


def write_own(file: Path, content: bytes, most_beside: int) -> None:
    """Write a file in an ``own_folder``, or raise OSError. Beyond ``most_beside`` files the oldest quarter is removed."""
    temporary = file.with_suffix(f".{os.getpid()}.{threading.get_ident()}.tmp")
    try:
        make_own(file.parent)
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(content)
        temporary.replace(file)
        _make_room(file.parent, most_beside)
    except BaseException:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def _make_room(directory: Path, most: int) -> None:
    """Remove the oldest files, temporary ones of killed processes included."""
    with os.scandir(directory) as entries:
        files = [Path(entry.path) for entry in entries]
    if len(files) <= most:
        return
    by_age = sorted((file.lstat().st_mtime, file) for file in files if os.path.lexists(file))
    for _, file in by_age[: len(by_age) - most * 3 // 4]:
        file.unlink(missing_ok=True)
