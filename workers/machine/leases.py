"""Host-wide leases: who holds which core (and which accelerator), across all Rays and all users of a host.

A lease is a lock (flock) on a file under /dev/shm, held by the process that uses the core. The kernel lets go of it when
that process ends, however it ends, so nothing is ever left behind. Claims that agree to share (``--share-cores``) keep
out those that do not, and the other way round. The files themselves stay: removing one that another
process is about to lock would let two hold "the" lease. Containers with a /dev/shm of their own do not see each other.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import stat
import tempfile
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from outrider.workers.errors import LeaseError, WorkerError

FOLDER = "outrider-cores"
POLL_SECONDS = 0.05
# Whoever asks "is it free?" takes the lock for an instant; a claim must not fail for that.
INSTANT_TRIES = 3
INSTANT_SECONDS = 0.002


@dataclass(frozen=True, slots=True)
class Holder:
    """Who holds a lease; ``pid`` is 0 where the file does not say (another user's, or not yet written)."""

    lease: str
    pid: int

    @property
    def sentence(self) -> str:
        what = f"core {self.lease}" if self.lease.isdecimal() else self.lease.replace("-", ":")
        return f"{what} is held by process {self.pid}" if self.pid else f"{what} is held by another process"


class Leases:
    """Leases held by this process until ``release`` or its end."""

    def __init__(self, files: dict[str, int]) -> None:
        self._files = files
        _HELD.append(self)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._files)

    def release(self) -> None:
        for descriptor in self._files.values():
            os.close(descriptor)
        self._files = {}
        if self in _HELD:
            _HELD.remove(self)

    def __enter__(self) -> Leases:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


_HELD: list[Leases] = []


def _forget_in_child() -> None:
    """A forked child shares its parent's locks, and would keep them beyond the parent's death."""
    for leases in list(_HELD):
        leases.release()


os.register_at_fork(after_in_child=_forget_in_child)


def default_folder() -> Path:
    shared = Path("/dev/shm")
    return (shared if os.access(shared, os.W_OK) else Path(tempfile.gettempdir())) / FOLDER


def try_claim(names: Iterable[str], folder: Path | None = None, shared: bool = False) -> Leases | list[Holder]:
    """All of them, or none and who holds those that were not to be had."""
    where = _prepared(folder)
    files: dict[str, int] = {}
    refused = []
    # One order for everyone: two claims that overlap can then not each get a half and both fail for ever.
    for name in sorted(set(names)):
        descriptor = _open(where / _checked(name))
        if _lock(descriptor, fcntl.LOCK_SH if shared else fcntl.LOCK_EX):
            files[name] = descriptor
        else:
            refused.append(Holder(name, _read_pid(descriptor)))
            os.close(descriptor)
    if refused:
        for descriptor in files.values():
            os.close(descriptor)
        return refused
    for descriptor in files.values():
        _write_pid(descriptor)
    return Leases(files)


def claim(names: Iterable[str], seconds: float = 0.0, folder: Path | None = None, shared: bool = False) -> Leases:
    """All of them within ``seconds``, or an error that says who holds them."""
    wanted = tuple(names)
    deadline = time.monotonic() + seconds
    while True:
        answer = try_claim(wanted, folder, shared)
        if isinstance(answer, Leases):
            return answer
        if time.monotonic() >= deadline:
            waited = f" after {seconds:g} s" if seconds else ""
            raise LeaseError(f"{'; '.join(holder.sentence for holder in answer)}{waited}")
        time.sleep(min(POLL_SECONDS, max(0.0, deadline - time.monotonic())))


def holders(names: Iterable[str] | None = None, folder: Path | None = None, shared: bool = False) -> dict[str, Holder]:
    """Which of these leases (or of all that there are) are held at this moment, and by whom.

    Who is himself willing to share (``shared``) is kept out only by those who are not.
    """
    where = folder or default_folder()
    if names is None:
        try:
            names = [path.name for path in where.iterdir() if re.fullmatch(NAME, path.name)]
        except OSError:
            return {}
    held = {}
    for name in names:
        try:
            descriptor = os.open(where / _checked(name), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            free = shared or _lock(descriptor, fcntl.LOCK_EX)
        except OSError:
            free = False
        if not free:
            held[name] = Holder(name, _read_pid(descriptor))
        os.close(descriptor)
    return held


NAME = r"\d{1,5}|(cuda|xpu)-\d{1,4}"


def _checked(name: str) -> str:
    if not re.fullmatch(NAME, name):
        raise WorkerError(f'a lease is named by a core number or a device such as cuda-0, got "{name}"')
    return name


def _prepared(folder: Path | None) -> Path:
    """The folder, open to all users as /tmp is, and never a link that someone laid out for us."""
    where = folder or default_folder()
    with suppress(FileExistsError):
        where.mkdir()
        where.chmod(0o1777)
    if not stat.S_ISDIR(where.lstat().st_mode):
        raise WorkerError(f"{where} must be a folder: remove what is there")
    return where


def _open(path: Path) -> int:
    """The lease's file, made if need be.

    Opening and making are separate: in a folder that all may write to, kernels refuse O_CREAT on another user's file.
    """
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
    for _ in range(INSTANT_TRIES):
        try:
            descriptor = os.open(path, flags)
        except FileNotFoundError:
            with suppress(FileExistsError):
                descriptor = os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o666)
                os.fchmod(descriptor, 0o666)
                return descriptor
            continue
        except OSError as failure:
            raise WorkerError(f"{path} cannot be opened ({os.strerror(failure.errno or errno.EIO)})") from failure
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            return descriptor
        os.close(descriptor)
        raise WorkerError(f"{path} must be an ordinary file: remove what is there")
    raise WorkerError(f"{path} vanishes as soon as it is made")


def _lock(descriptor: int, kind: int) -> bool:
    for attempt in range(INSTANT_TRIES):
        if attempt:
            time.sleep(INSTANT_SECONDS)
        try:
            fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            continue
        return True
    return False


def _write_pid(descriptor: int) -> None:
    text = f"{os.getpid()}\n".encode()
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, text, 0)


def _read_pid(descriptor: int) -> int:
    text = os.pread(descriptor, 20, 0).strip()
    return int(text) if re.fullmatch(rb"\d{1,9}", text) else 0
