"""A digest of every byte of a model's files, computed once and then remembered.

A file is divided into pieces that threads hash in parallel; its digest is the hash of the pieces' digests. Digests are kept
in the user's cache by path, device, inode, size, mtime and ctime. No program can set a file's ctime, so a file that was
altered is read again even if its mtime was restored.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from outrider.workers.errors import ModelError
from outrider.workers.models.cache_files import make_own, own_folder, read_own, write_own
from outrider.workers.models.files import open_ordinary, state_of

# The prefix of a digest: digests of different kinds cannot be compared.
KIND = "sha256-pieces"
CHUNK_BYTES = 8 << 20
# Read and hashed in blocks that fit into the processor's caches.
BLOCK_BYTES = 1 << 20
MOST_THREADS = 32
# A file may change again within one tick of its file system's clock, and its times then show nothing of it.
TICK_SECONDS = 3.0
# After this time ``tell`` is called.
PATIENCE_SECONDS = 2.0
MOST_REMEMBERED = 4096
LONGEST_RECORD = 1 << 16

logger = logging.getLogger(__name__)
Tell = Callable[[int], None]
_buffers = threading.local()
_here: dict[FileState, str] = {}


@dataclass(frozen=True, slots=True)
class FileState:
    """A file's stat. As long as all of it is the same, so is the content."""

    path: str
    device: int
    inode: int
    size: int
    mtime_ns: int
    ctime_ns: int

    @classmethod
    def of(cls, path: Path) -> FileState:
        state = state_of(path)
        where = str(path.resolve())
        return cls(where, state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns, state.st_ctime_ns)

    def stable(self) -> bool:
        """Whether a change from now on would show in its times."""
        return self.ctime_ns < time.time_ns() - int(TICK_SECONDS * 1e9)


def is_of_this_kind(digest: str) -> bool:
    return digest.startswith(f"{KIND}:")


def digest_of(files: Sequence[Path], tell: Tell = lambda size: None) -> str:
    """One digest of these files' names and contents, whatever their folder. ``tell`` is called with the number of bytes if
    hashing takes longer than PATIENCE_SECONDS."""
    states = [FileState.of(file) for file in files]
    known = {state: found for state in states if (found := _recall(state)) is not None}
    unknown = [(file, state) for file, state in zip(files, states, strict=True) if state not in known]
    known |= _read(unknown, tell)
    total = hashlib.sha256()
    for file, state in zip(files, states, strict=True):
        # The zero byte separates name and size: no name contains one.
        total.update(f"{file.name}\0{state.size}\0{known[state]}\n".encode(errors="surrogateescape"))
    return f"{KIND}:{total.hexdigest()}"


def _read(files: Sequence[tuple[Path, FileState]], tell: Tell) -> dict[FileState, str]:
    """Hash these files, all pieces of all of them in the same threads."""
    found = {}
    size = sum(state.size for _, state in files)
    started, told = time.monotonic(), False
    threads = min(MOST_THREADS, 2 * len(os.sched_getaffinity(0)), 1 + size // CHUNK_BYTES)
    with ThreadPoolExecutor(threads, thread_name_prefix="digest") as pool:
        for file, state in files:
            stable = state.stable()
            descriptor = open_ordinary(file)
            try:
                total = hashlib.sha256()
                for chunk in pool.map(partial(_chunk, descriptor, file), range(0, state.size, CHUNK_BYTES)):
                    total.update(chunk)
                    if not told and time.monotonic() - started > PATIENCE_SECONDS:
                        told = True
                        tell(size)
            finally:
                os.close(descriptor)
            if FileState.of(file) != state:
                raise ModelError(f"{file} changed while it was read: wait until it is whole, then run this again")
            found[state] = total.hexdigest()
            if stable:
                _remember(state, found[state])
    return found


def _chunk(descriptor: int, file: Path, start: int) -> bytes:
    if not hasattr(_buffers, "block"):
        _buffers.block = memoryview(bytearray(BLOCK_BYTES))
    digest = hashlib.sha256()
    end = start + CHUNK_BYTES
    while start < end:
        try:
            count = os.preadv(descriptor, [_buffers.block[: end - start]], start)
        except OSError as error:
            raise ModelError(f"{file} cannot be read: {error.strerror}") from None
        if count == 0:
            break
        digest.update(_buffers.block[:count])
        start += count
    return digest.digest()


def _record(state: FileState) -> Path:
    name = hashlib.sha256(f"{os.geteuid()}:{state.path}".encode(errors="surrogateescape")).hexdigest()[:40]
    return own_folder("digests") / f"{name}.json"


def _recall(state: FileState) -> str | None:
    if not state.stable():
        return None
    if (found := _here.get(state)) is not None:
        return found
    written = read_own(_record(state), LONGEST_RECORD)
    if written is None:
        return None
    try:
        content = json.loads(written)
        digest = content.pop("digest")
        whole = content == {"kind": KIND, **asdict(state)} and isinstance(digest, str) and len(digest) == 64
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    if whole:
        _here[state] = digest
    return digest if whole else None


def remembers() -> bool:
    """Whether digests can be kept for later processes."""
    folder = own_folder("digests")
    with suppress(OSError, ValueError):
        make_own(folder)
    return os.access(folder, os.W_OK | os.X_OK)


def _remember(state: FileState, digest: str) -> None:
    """Best effort: where nothing can be written, the next process reads the file again."""
    _here[state] = digest
    try:
        write_own(_record(state), json.dumps({"kind": KIND, **asdict(state), "digest": digest}).encode(), MOST_REMEMBERED)
    except (OSError, ValueError) as error:
        logger.info("the digest of %s is not remembered: %s", state.path, error)
