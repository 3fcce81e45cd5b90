"""Folders that only this user can enter, for the sockets and files of processes at work; gone when those processes are.

Each user has one folder for them, ``outrider-<uid>``, under the first suitable root. The process that makes a private
folder holds a lock on it (flock on the folder itself, which also keeps systemd-tmpfiles away), so a folder that can be
locked was left by a dead process, and ``sweep`` removes it. A network file system cannot lock a folder, so it is never a
root.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import socket
import stat
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from outrider.workers.errors import JobError
from outrider.workers.machine import semaphores

# Of a Unix socket's path, without the zero that ends it.
SOCKET_PATH_BYTES = 107
OTHERS = 0o077
# The names that tempfile makes: ``sweep`` touches no others.
HELD_NAME_BYTES = 8
HELD_NAME = re.compile(rf"[a-z0-9_]{{{HELD_NAME_BYTES}}}")
# Ray's servers start others by command lines that they take apart as a shell does, and read paths as UTF-8.
MISREAD = re.compile(r"['\\\ud800-\udfff]")
# Room for Ray's first logs, without which its processes die as they start.
LEAST_FREE_BYTES = 2 << 20
# ``sweep`` in another process may lock a new folder for an instant.
TRIES = 5


class Unfit(Exception):
    """A folder that is not used; the message says why."""


def roots() -> list[Path]:
    """Where private folders may lie, best first. What the environment asks for comes before what every Linux has."""
    asked = (os.environ.get(name, "") for name in ("RAY_TMPDIR", "TMPDIR"))
    named = [*(path for path in asked if path.startswith("/")), "/tmp", "/var/tmp", "/dev/shm"]
    return list(dict.fromkeys(Path(os.path.realpath(path)) for path in named))


def base_folder(root: Path) -> Path:
    """This user's folder under a root, made if it is missing and checked at every call; Unfit where it is not safe."""
    check_ancestors(root)
    folder = root / f"outrider-{os.getuid()}"
    try:
        with suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        check_private(folder)
    except OSError as error:
        raise Unfit(f"{folder} cannot be made or read: {error.strerror}") from None
    return folder


def check_private(folder: Path) -> None:
    """Unfit where this is a link, no folder, another user's, or open to others."""
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode):
        raise Unfit(f"{folder} is not a folder")
    if status.st_uid != os.getuid():
        raise Unfit(f"{folder} belongs to user {status.st_uid}")
    if status.st_mode & OTHERS:
        raise Unfit(f"{folder} is open to other users (chmod 700 makes it private)")


def check_ancestors(root: Path) -> None:
    """Unfit where another user could rename a folder above ours, and so put another one in its place."""
    try:
        # The owner of / is root, although a container may show another number for it.
        trusted = {0, os.getuid(), Path("/").stat().st_uid}
        for each in (root, *root.parents):
            status = each.lstat()
            if not stat.S_ISDIR(status.st_mode):
                raise Unfit(f"{each} is not a folder")
            if status.st_uid not in trusted:
                raise Unfit(f"{each} belongs to user {status.st_uid}")
            if status.st_mode & 0o022 and not status.st_mode & stat.S_ISVTX:
                raise Unfit(f"{each} is a folder in which other users can rename what is yours (it has no sticky bit)")
    except OSError as error:
        raise Unfit(f"{error.filename} cannot be read: {error.strerror}") from None


def open_to_others(folder: Path) -> bool:
    """Whether other users can get into a folder: no folder on the way there is for its owner alone."""
    return all(each.stat().st_mode & OTHERS for each in (folder, *folder.parents))


def lasting_folder(name: str, beneath: int) -> Path:
    """A private folder that stays, for a Ray that is started by hand."""
    folder = _first_fit(len(name), beneath) / name
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    return folder


def is_held_folder(folder: Path) -> bool:
    """Whether this is a ``held_folder``, by its name; not a ``lasting_folder``."""
    return folder.parent.name.startswith("outrider-") and HELD_NAME.fullmatch(folder.name) is not None


@contextmanager
def held_folder(beneath: int) -> Iterator[Path]:
    """A private folder for the duration of the context, in which sockets' paths may have ``beneath`` bytes below it."""
    base = _first_fit(HELD_NAME_BYTES, beneath)
    folder, lock = _made_and_locked(base)
    try:
        yield folder
    finally:
        remove(folder)
        os.close(lock)


def _first_fit(name_bytes: int, beneath: int) -> Path:
    """This user's folder under the first root that is safe and short enough for a socket ``beneath`` bytes below a
    folder."""
    refusals = []
    own = f"outrider-{os.getuid()}"
    longest = SOCKET_PATH_BYTES - len(f"/{own}//") - name_bytes - beneath
    for root in roots():
        if len(os.fsencode(root)) > longest:
            refusals.append(f"{root} is longer than {longest} bytes, and a socket's path may have {SOCKET_PATH_BYTES}")
            continue
        if MISREAD.search(str(root)):
            refusals.append(
                f"{root} has an apostrophe, a backslash or bytes that are no UTF-8 in its path, which Ray misreads"
            )
            continue
        try:
            base = base_folder(root)
            _check_tools(base, name_bytes + 1 + beneath)
        except Unfit as refusal:
            refusals.append(str(refusal))
        else:
            return base
    raise JobError(
        f"there is no folder for sockets that only you can enter: {'; '.join(refusals)}; set TMPDIR to a folder of your "
        f"own whose path has {longest} bytes at most"
    )


def _check_tools(base: Path, beneath: int) -> None:
    """Unfit where the file system is full, or supports no sockets (of such a path) or no locks on folders."""
    name = f"try-{os.getpid()}-{threading.get_native_id()}-".ljust(beneath, "x")[:beneath]
    try:
        with socket.socket(socket.AF_UNIX) as one:
            one.bind(str(base / name))
    except OSError as error:
        raise Unfit(f"{base} cannot hold a socket: {error.strerror}") from None
    finally:
        # On a read-only file system there is nothing to remove, and trying is an error.
        with suppress(OSError):
            (base / name).unlink()
    space = shutil.disk_usage(base)
    # Some file systems (ramfs) do not tell: a size of 0.
    if space.total and space.free < LEAST_FREE_BYTES:
        raise Unfit(f"{base} has only {space.free >> 10:,} KiB free")
    lock = os.open(base, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        raise Unfit(f"{base} cannot be locked: {error.strerror}") from None
    finally:
        os.close(lock)


def _made_and_locked(base: Path) -> tuple[Path, int]:
    for _ in range(TRIES):
        try:
            folder = Path(tempfile.mkdtemp(dir=base, prefix=""))
        except OSError as error:
            raise JobError(
                f"no folder can be made in {base}: {error.strerror}; set TMPDIR to a folder of your own"
            ) from None
        lock = _locked(folder)
        if lock is not None:
            return folder, lock
    raise JobError(f"{base}: new folders in it vanish or are locked as soon as they are made")


def _locked(folder: Path) -> int | None:
    """The folder's lock (a descriptor); None where another process holds it, or the folder is gone."""
    try:
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(lock), folder.lstat()):
            return lock
    except OSError:
        pass
    os.close(lock)
    return None


def sweep() -> None:
    """Remove the folders that dead processes of this user have left."""
    for root in roots():
        base = root / f"outrider-{os.getuid()}"
        try:
            check_private(base)
            folders = [each for each in base.iterdir() if HELD_NAME.fullmatch(each.name)]
        except (Unfit, OSError):
            continue
        dead = [(folder, lock) for folder in folders if (lock := _locked(folder)) is not None]
        living = [each for each in folders if each not in {folder for folder, _ in dead}]
        for folder, lock in dead:
            if semaphores.removed_those_of(folder, living):
                remove(folder)
            os.close(lock)


def remove(folder: Path) -> None:
    # Files may still come while the last processes end.
    for _ in range(TRIES):
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            break
