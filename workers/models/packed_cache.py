"""Packed weights on disk, so that a model is packed once a machine.

A file is a header, with its key and a checksum of every piece, and a page-aligned image of the packed memory. It is written
under another name and renamed. A file that is damaged or does not match is never an error: the model is packed again.

All files together are bounded (OUTRIDER_CACHE_GB), and the least recently used are removed. A file's mtime is set whenever
it is used, since file systems seldom record reads.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
import struct
import time
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from outrider.workers.errors import UsageError

MAGIC = b"outrider packed\n"
PAGE = 4096
PIECE_BYTES = 16 << 20
LONGEST_HEADER = 16 << 20
WRITE_MARGIN = 1 << 30
# The share of the file system that the cache may take without OUTRIDER_CACHE_GB.
DEFAULT_SHARE = 0.1
# A partial file of this age was left by a killed process.
STALE_SECONDS = 24 * 3600

# A folder that cannot exist, for users without a home directory.
NOWHERE = Path(os.devnull) / "outrider"

Progress = Callable[[int, int], None]


class CacheUnusable(Exception):
    """A cache file that cannot be used, and why."""


def cache_directory() -> Path:
    """OUTRIDER_CACHE, or ``outrider`` in the user's cache directory."""
    chosen = os.environ.get("OUTRIDER_CACHE")
    root = os.environ.get("XDG_CACHE_HOME")
    try:
        if chosen:
            return Path(chosen).expanduser()
        return (Path(root) if root and Path(root).is_absolute() else Path.home() / ".cache") / "outrider"
    except RuntimeError as error:  # no home directory
        if chosen:
            raise UsageError(f'OUTRIDER_CACHE="{chosen}" names no folder: {error}') from None
        return NOWHERE


def make_directory(directory: Path) -> None:
    """Make a directory of the cache: private in the user's own cache, with the umask under OUTRIDER_CACHE, which may be
    shared."""
    if os.environ.get("OUTRIDER_CACHE"):
        directory.mkdir(parents=True, exist_ok=True)
        return
    top = cache_directory()
    top.mkdir(mode=0o700, parents=True, exist_ok=True)
    if top.stat().st_mode & 0o077:
        top.chmod(0o700)
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)


def chosen_limit() -> int | None:
    """OUTRIDER_CACHE_GB in bytes; None where it is not set."""
    chosen = os.environ.get("OUTRIDER_CACHE_GB")
    if not chosen:
        return None
    try:
        limit = float(chosen) * 1e9
    except ValueError:
        limit = -1.0
    if not 0 <= limit < float("inf"):
        raise UsageError(
            f'OUTRIDER_CACHE_GB="{chosen}" is not a number of gigabytes; 0 keeps nothing, 50 keeps up to 50 GB'
        )
    return int(limit)


def cache_limit(directory: Path) -> int:
    """Bytes that all packed files together may take: OUTRIDER_CACHE_GB, or a tenth of the file system."""
    chosen = chosen_limit()
    return int(shutil.disk_usage(directory).total * DEFAULT_SHARE) if chosen is None else chosen


def _size(size: int) -> str:
    return f"{size / 1e9:.1f} GB" if size >= 1e8 else f"{size / 1e6:.3g} MB"


def make_room(directory: Path, needed: int) -> None:
    """Remove the least recently used files until ``needed`` bytes fit the limit and the disk; OSError if they cannot.

    A process that is reading a removed file can go on.
    """
    limit = cache_limit(directory)
    if needed > limit:
        raise OSError(f"they take {_size(needed)}, the cache may hold {_size(limit)} (OUTRIDER_CACHE_GB)")
    for partial in directory.glob(".*.partial"):
        if time.time() - _last_use(partial)[0] > STALE_SECONDS:
            partial.unlink(missing_ok=True)
    files = sorted((*_last_use(file), file) for file in directory.glob("*.packed"))
    held = sum(size for _, size, _ in files)
    reclaimable = shutil.disk_usage(directory).free + held
    if reclaimable < needed + WRITE_MARGIN:
        free, least = _size(reclaimable - held), _size(needed + WRITE_MARGIN)
        raise OSError(f"{directory} has {free} free, {least} are needed")
    for _, size, file in files:
        if held + needed <= limit and reclaimable - held >= needed + WRITE_MARGIN:
            return
        file.unlink(missing_ok=True)
        held -= size


def _last_use(file: Path) -> tuple[float, int]:
    """(time of last use, bytes); of a file that has just been removed, (now, 0)."""
    try:
        state = file.stat()
    except FileNotFoundError:
        return time.time(), 0
    return state.st_mtime, state.st_size


def load(file: Path, key: dict[str, Any], memory: memoryview, threads: int, progress: Progress) -> None:
    """Fill the memory from the file. CacheUnusable where it is damaged or has another key; the memory is then undefined."""
    with file.open("rb") as stream:
        header, start = _read_header(stream.read(PAGE + LONGEST_HEADER), file)
        if header.get("key") != key:
            raise CacheUnusable(f"{file} belongs to another model or another version of outrider")
        if header.get("bytes") != len(memory) or file.stat().st_size != start + len(memory):
            raise CacheUnusable(f"{file} has {file.stat().st_size:,} bytes, {start + len(memory):,} are needed")
        sums, done = header["checksums"], 0

        def read(index: int) -> int:
            piece = memory[index * PIECE_BYTES : (index + 1) * PIECE_BYTES]
            taken = 0
            while taken < len(piece):
                count = os.preadv(stream.fileno(), [piece[taken:]], start + index * PIECE_BYTES + taken)
                if count == 0:
                    raise CacheUnusable(f"{file} ends early")
                taken += count
            if zlib.crc32(piece) != sums[index]:
                raise CacheUnusable(f"{file} is damaged: piece {index} has another checksum")
            return len(piece)

        with ThreadPoolExecutor(max(1, threads)) as pool:
            for count in pool.map(read, range(len(sums))):
                done += count
                progress(done, len(memory))
    try:
        os.utime(file)
    except OSError:
        # A read-only cache is used without marking the file.
        return


def _read_header(beginning: bytes, file: Path) -> tuple[dict[str, Any], int]:
    """The header and the offset of the data."""
    fixed = len(MAGIC) + 8
    if beginning[: len(MAGIC)] != MAGIC or len(beginning) < fixed:
        raise CacheUnusable(f"{file} is not one of outrider's files")
    length = struct.unpack("<Q", beginning[len(MAGIC) : fixed])[0]
    text, digest = beginning[fixed : fixed + length], beginning[fixed + length : fixed + length + 32]
    if hashlib.sha256(text).digest() != digest:
        raise CacheUnusable(f"{file} has a damaged header")
    header: dict[str, Any] = json.loads(text)
    return header, _round_up(fixed + length + 32)


def store(file: Path, key: dict[str, Any], memory: memoryview, threads: int) -> None:
    """Write the file atomically; an OSError where that fails."""
    make_directory(file.parent)
    make_room(file.parent, len(memory))
    pieces = [memory[start : start + PIECE_BYTES] for start in range(0, len(memory), PIECE_BYTES)]
    with ThreadPoolExecutor(max(1, threads)) as pool:
        sums = list(pool.map(zlib.crc32, pieces))
    text = json.dumps({"key": key, "bytes": len(memory), "checksums": sums}).encode()
    header = MAGIC + struct.pack("<Q", len(text)) + text + hashlib.sha256(text).digest()
    # Containers that share a cache may have processes with equal pids.
    partial = file.with_name(f".{file.name}.{os.getpid()}-{secrets.token_hex(4)}.partial")
    try:
        with partial.open("wb") as stream:
            stream.write(header.ljust(_round_up(len(header)), b"\0"))
            for piece in pieces:
                stream.write(piece)
            stream.flush()
            os.fsync(stream.fileno())
        partial.replace(file)
    finally:
        partial.unlink(missing_ok=True)


def _round_up(size: int) -> int:
    return -(-size // PAGE) * PAGE
