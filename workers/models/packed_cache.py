"""Packed weights on disk, so that a model is packed once a machine.

A file is one page-aligned image of the packed memory behind a header with its key and a checksum of every piece. It is
written beside its place and moved there, and whatever is wrong with one found is a reason to pack again, never an error.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import struct
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

MAGIC = b"outrider packed\n"
PAGE = 4096
PIECE_BYTES = 16 << 20
LONGEST_HEADER = 16 << 20
WRITE_MARGIN = 1 << 30

Progress = Callable[[int, int], None]


class CacheUnusable(Exception):
    """A cache file that cannot be used, and why."""


def cache_directory() -> Path:
    """OUTRIDER_CACHE, or ``outrider`` in the user's cache directory."""
    chosen = os.environ.get("OUTRIDER_CACHE")
    if chosen:
        return Path(chosen).expanduser()
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root and Path(root).is_absolute() else Path.home() / ".cache") / "outrider"


def load(file: Path, key: dict[str, Any], memory: memoryview, threads: int, progress: Progress) -> None:
    """Fill the memory from the file. CacheUnusable where it is damaged, or another model's; the memory is then spoilt."""
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
    """Write the file, whole or not at all; an OSError where that is not possible."""
    file.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(file.parent).free
    if free < len(memory) + WRITE_MARGIN:
        raise OSError(f"{file.parent} has {free / 1e9:.1f} GB free, {len(memory) / 1e9:.1f} GB are needed")
    pieces = [memory[start : start + PIECE_BYTES] for start in range(0, len(memory), PIECE_BYTES)]
    with ThreadPoolExecutor(max(1, threads)) as pool:
        sums = list(pool.map(zlib.crc32, pieces))
    text = json.dumps({"key": key, "bytes": len(memory), "checksums": sums}).encode()
    header = MAGIC + struct.pack("<Q", len(text)) + text + hashlib.sha256(text).digest()
    partial = file.with_name(f".{file.name}.{os.getpid()}.partial")
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
