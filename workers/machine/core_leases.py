"""Host-wide leases of cores and accelerators, across all Rays and all users of a host.

A lease is a lock (flock) on a file under /dev/shm, held by the process that uses the core. The kernel releases it when that
process ends, however it ends. Shared claims (``--share-cores``) exclude the others, and the other way round. The files
stay: if one were removed that another process is about to lock, two processes could hold "the" lease. Containers with a
/dev/shm of their own do not see each other.

Each user has a folder, ``outrider-cores-<uid>``, where nobody else can remove or replace it: others can open its files for
reading and lock them, and change nothing. A claim first locks its own user's files and then looks whether another user's
file of the same name is locked, so of two users' claims in the same moment only one gets the lease, that of the smaller
uid.
"""

from __future__ import annotations

import fcntl
import os
import random
import re
import stat
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from outrider.workers.errors import LeaseError, WorkerError
from outrider.workers.machine.core_lists import format_list
from outrider.workers.machine.private_folder import Unfit, check_ancestors

FOLDER = "outrider-cores"
FOLDER_MODE, FILE_MODE = 0o755, 0o644
# Not where TMPDIR points: all users must look in the same place.
ROOTS = (Path("/dev/shm"), Path("/tmp"), Path("/var/tmp"))
POLL_SECONDS = 0.05
# ``holders`` locks a file for an instant to see whether it is free, so a claim that is refused tries again.
INSTANT_TRIES = 3
INSTANT_SECONDS = 0.002


@dataclass(frozen=True, slots=True)
class Holder:
    """Who holds a lease; ``pid`` is 0 where the file does not say (another user's, or not yet written)."""

    lease: str
    pid: int


def describe(held: Iterable[Holder]) -> str:
    """``cores 0-55 and cuda:0 are held by process 4711; ...``, one part for each process."""
    by_process: dict[int, list[str]] = {}
    for holder in held:
        by_process.setdefault(holder.pid, []).append(holder.lease)
    return "; ".join(f"{_things(names)} held by {_who(pid)}" for pid, names in sorted(by_process.items()))


def _things(names: list[str]) -> str:
    cores = [int(name) for name in names if name.isdecimal()]
    things = [f"core{'s' if len(cores) > 1 else ''} {format_list(cores)}"] if cores else []
    things += [name.replace("-", ":") for name in sorted(names) if not name.isdecimal()]
    return f"{' and '.join(things)} {'are' if len(names) > 1 else 'is'}"


def _who(pid: int) -> str:
    return f"process {pid}" if pid else "another process"


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
    """Where each user's folder of leases lies: the first place where other users can neither remove nor rename it."""
    refusals = []
    for root in ROOTS:
        try:
            check_ancestors(root)
        except Unfit as refusal:
            refusals.append(str(refusal))
            continue
        if os.access(root, os.W_OK):
            return root
        refusals.append(f"{root} cannot be written to")
    raise WorkerError(
        f"no folder keeps other users from removing the leases of cores: {'; '.join(refusals)} "
        f"(as root: chmod 1777 {ROOTS[0]})"
    )


def try_claim(names: Iterable[str], folder: Path | None = None, shared: bool = False) -> Leases | list[Holder]:
    """All of the leases; or none of them, and the holders of those that are not free."""
    root = folder or default_folder()
    own = _own_folder(root)
    kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    files: dict[str, int] = {}
    refused: dict[str, Holder] = {}
    try:
        # All claims lock in one order, so two that overlap cannot each get a part and fail for ever.
        for name in sorted(set(names)):
            files[name] = _open_own(own / _checked(name))
            if not _lock(files[name], kind):
                refused[name] = Holder(name, _read_pid(files[name]))
        # Other users' files are checked only while this user's are locked, so that a later claim finds these.
        for other in _user_folders(root):
            if refused or other == own:
                continue
            # Of two users that claim in the same moment, the one with the larger id gives way at once and the other
            # retries.
            tries = INSTANT_TRIES if os.getuid() < other.lstat().st_uid else 1
            with _entered(other) as descriptor:
                for name in files:
                    with _opened(name, descriptor) as file:
                        if file is not None and not _lock(file, kind, tries):
                            refused[name] = Holder(name, _read_pid(file))
        if not refused:
            for file in files.values():
                _write_pid(file)
            held = Leases(files)
            files = {}
            return held
    finally:
        for file in files.values():
            os.close(file)
    return list(refused.values())


def claim(names: Iterable[str], seconds: float = 0.0, folder: Path | None = None, shared: bool = False) -> Leases:
    """All of the leases within ``seconds``, or an error that names the processes that hold them."""
    wanted = tuple(names)
    deadline = time.monotonic() + seconds
    while True:
        answer = try_claim(wanted, folder, shared)
        if isinstance(answer, Leases):
            return answer
        if time.monotonic() >= deadline:
            waited = f" (waited {seconds:g} s)" if seconds else ""
            raise LeaseError(f"{describe(answer)}{waited}")
        # A random pause, so that two claims that refused each other do not collide again.
        time.sleep(min(POLL_SECONDS * random.uniform(0.5, 1.0), max(0.0, deadline - time.monotonic())))


def holders(names: Iterable[str] | None = None, folder: Path | None = None, shared: bool = False) -> dict[str, Holder]:
    """The holders of these leases (None: of all).

    With ``shared``, only exclusive holders count: they alone would refuse a shared claim.
    """
    held: dict[str, Holder] = {}
    asked = None if names is None else [_checked(name) for name in names]
    for each in _user_folders(folder or default_folder()):
        with _entered(each) as descriptor:
            for name in _names_in(descriptor) if asked is None else asked:
                with _opened(name, descriptor) as file:
                    if file is not None and _is_held(file, shared):
                        held[name] = Holder(name, _read_pid(file))
    return held


NAME = r"\d{1,5}|(cuda|xpu)-\d{1,4}"


def _checked(name: str) -> str:
    if not re.fullmatch(NAME, name):
        raise WorkerError(f'a lease is named by a core number or a device such as cuda-0, got "{name}"')
    return name


def _own_folder(root: Path) -> Path:
    """This user's folder, made if need be. Where another user has taken its name, one with a longer name."""
    usual = root / f"{FOLDER}-{os.getuid()}"
    try:
        with suppress(FileExistsError):
            usual.mkdir(FOLDER_MODE)
        own = next((each for each in (usual, *_user_folders(root)) if _is_own(each)), None)
        own = own or Path(tempfile.mkdtemp(prefix=f"{usual.name}-", dir=root))
        if stat.S_IMODE(own.stat().st_mode) != FOLDER_MODE:
            own.chmod(FOLDER_MODE)
    except OSError as error:
        raise WorkerError(f"{usual} cannot be made: {error.strerror}") from None
    return own


def _is_own(folder: Path) -> bool:
    status = folder.lstat()
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()


def _user_folders(root: Path) -> list[Path]:
    try:
        return sorted(each for each in root.iterdir() if each.name.startswith(f"{FOLDER}-"))
    except OSError:
        return []


@contextmanager
def _entered(folder: Path) -> Iterator[int]:
    """A descriptor of a user's folder; -1 where it is a link or unreadable: such a folder holds no lease."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        yield -1
        return
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _names_in(folder: int) -> list[str]:
    return [] if folder < 0 else sorted(name for name in os.listdir(folder) if re.fullmatch(NAME, name))


@contextmanager
def _opened(name: str, folder: int) -> Iterator[int | None]:
    """A lease's file in some user's folder, if it is there. Anything may lie there under that name, such as a FIFO."""
    if folder < 0:
        yield None
        return
    try:
        file = os.open(name, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
    except OSError:
        yield None
        return
    try:
        yield file if stat.S_ISREG(os.fstat(file).st_mode) else None
    finally:
        os.close(file)


def _open_own(path: Path) -> int:
    """The lease's file in this user's folder, made if need be, which others may read and lock."""
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC, FILE_MODE)
    except OSError as error:
        raise WorkerError(f"{path} cannot be opened ({error.strerror}): remove what is there") from None
    status = os.fstat(file)
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.getuid():
        os.close(file)
        raise WorkerError(f"{path} must be a regular file of yours: remove what is there")
    if stat.S_IMODE(status.st_mode) != FILE_MODE:
        os.fchmod(file, FILE_MODE)
    return file


def _is_held(file: int, shared: bool) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    return not shared and not _lock(file, fcntl.LOCK_EX)


def _lock(descriptor: int, kind: int, tries: int = INSTANT_TRIES) -> bool:
    for attempt in range(tries):
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
