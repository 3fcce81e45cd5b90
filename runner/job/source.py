"""The lines of an input file, compressed or not, each of bounded length, and the digest of the bytes that were read."""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

from outrider.runner.printable import printable
from outrider.workers.errors import UsageError

# More than any prompt has; a few kilobytes of compressed data may hold a line of many gigabytes.
MOST_LINE_BYTES = 64 << 20
READ_AT_ONCE = 1 << 20
# Small, since a zstandard block of four bytes may decompress to 128 KiB.
COMPRESSED_AT_ONCE = 2048

GZIP, ZSTANDARD = "gzip", "zstandard"
SUFFIXES = {".gz": GZIP, ".zst": ZSTANDARD, ".zstd": ZSTANDARD}
MAGIC = {GZIP: b"\x1f\x8b", ZSTANDARD: b"\x28\xb5\x2f\xfd"}
SKIPPABLE = b"\x2a\x4d\x18"
OTHER_COMPRESSIONS = {
    "xz": b"\xfd7zXZ\x00",
    "bzip2": b"BZh",
    "zip": b"PK\x03\x04",
    "lz4": b"\x04\x22\x4d\x18",
    "7z": b"7z\xbc\xaf\x27\x1c",
    "lzma": b"\x5d\x00\x00",
    "compress": b"\x1f\x9d",
}
# After "BZh" and the level's digit: the mark of a block, or of the end of an empty stream.
AFTER_BZIP2 = (b"1AY&SY", b"\x17\x72\x45\x38\x50\x90")
# The mark of a tar archive and its offset in the first header.
TAR, TAR_AT = b"ustar", 257
TABLES = {"Parquet": b"PAR1", "Arrow": b"ARROW1"}
BEGINNING = 16
# UTF-32 first: its little-endian mark begins with that of UTF-16.
WIDE_ENCODINGS = {
    "UTF-32": (b"\xff\xfe\x00\x00", b"\x00\x00\xfe\xff"),
    "UTF-16": (b"\xff\xfe", b"\xfe\xff"),
}

Stream: TypeAlias = "io.BufferedReader[Any]"


class Source:
    """An input file. ``name``: its name in messages, whose suffixes tell its form and compression.

    ``linked``: links to it may be made and removed while it is read, as with a server's uploads, which nobody else writes.
    """

    def __init__(self, path: Path, name: str | None = None, linked: bool = False) -> None:
        self.path = path
        self._linked = linked
        self.name = printable(path if name is None else name)
        named = Path(name or path.name)
        self._expected = SUFFIXES.get(named.suffix)
        # The suffix without that of the compression.
        self.suffix = Path(named.stem).suffix if self._expected else named.suffix
        self._digest: str | None = None

    @property
    def digest(self) -> str:
        """The digest of the bytes that ``lines`` has read, before decompression."""
        assert self._digest is not None, "the lines have not been read to their end"
        return self._digest

    def location(self, line: int) -> str:
        return f"{self.name}:{line}"

    def lines(self) -> Iterator[bytes | None]:
        """Each line with its line end; None for a line that is too long. An error if the file changes meanwhile."""
        try:
            with self._opened() as (raw, stream):
                while line := stream.readline(MOST_LINE_BYTES + 1):
                    if len(line) <= MOST_LINE_BYTES:
                        yield line
                        continue
                    while not line.endswith(b"\n") and (line := stream.readline(READ_AT_ONCE)):
                        pass
                    yield None
                self._digest = raw.finished(self.path, self.name, self._linked)
        except EOFError:
            raise UsageError(f"{self.name}: the compressed data end in the middle; make the file anew") from None
        except (gzip.BadGzipFile, zlib.error, _DamagedError) as error:
            raise UsageError(f"{self.name}: the compressed data are damaged ({error}); make the file anew") from None
        except OSError as error:
            raise UsageError(f"{self.name} cannot be read: {error.strerror}") from None

    @contextmanager
    def _opened(self) -> Iterator[tuple[_Counted, Stream]]:
        with _Counted(self.path) as raw:
            stream: Stream = io.BufferedReader(raw, READ_AT_ONCE)
            kind = _compression(stream)
            if kind != self._expected and self._expected is not None and stream.peek(1):
                raise UsageError(f"{self.name} holds no {self._expected} data, though its name says so; rename it")
            if kind == GZIP:
                stream = io.BufferedReader(gzip.GzipFile(fileobj=stream), READ_AT_ONCE)
            elif kind == ZSTANDARD:
                stream = io.BufferedReader(_Zstandard(stream), READ_AT_ONCE)
            beginning = stream.peek(BEGINNING)
            if kind is not None and (inner := _compression(stream)):
                raise UsageError(f"{self.name} is compressed twice ({inner} within {kind}); decompress it once")
            _refuse_foreign(self.name, beginning, kind)
            yield raw, stream


class _Counted(io.RawIOBase):
    """A file that is read once in order, hashed on the way, and checked for changes at the end."""

    def __init__(self, path: Path) -> None:
        # O_NONBLOCK: opening a pipe without a writer would block.
        self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        self._before = os.fstat(self._file)
        self._hash = hashlib.sha256()
        self._count = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        count = os.readv(self._file, [buffer])
        self._hash.update(buffer[:count])
        self._count += count
        return count

    def close(self) -> None:
        if not self.closed:
            os.close(self._file)
        super().close()

    def finished(self, path: Path, name: str, linked: bool) -> str:
        """The digest of the whole file, including bytes that a decompressor did not read."""
        while self.read(READ_AT_ONCE):
            pass
        try:
            same = os.path.samestat(self._before, path.stat())
        except FileNotFoundError:
            same = False
        before, after = (_state(found, linked) for found in (self._before, os.fstat(self._file)))
        if not same or before != after or self._count != self._before.st_size:
            raise UsageError(
                f"{name} changed while it was read, so its rows may be of two files; run it again once it is finished"
            )
        return self._hash.hexdigest()


def _state(found: os.stat_result, linked: bool) -> tuple[int, int, int]:
    # A program can set mtime back, but not ctime, which a new or removed link changes as well.
    return found.st_size, found.st_mtime_ns, 0 if linked else found.st_ctime_ns


class _DamagedError(Exception):
    pass


class _Zstandard(io.RawIOBase):
    """Decompresses all frames of a file. (zstandard's own reader does not notice a truncated file.)"""

    def __init__(self, compressed: Stream) -> None:
        import zstandard  # rarely needed

        self._compressed = compressed
        self._error = zstandard.ZstdError
        self._new = zstandard.ZstdDecompressor().decompressobj
        self._frame = self._new()
        # Whether a frame has begun and not ended.
        self._within = False
        self._left = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        while not self._left:
            some = self._compressed.read(COMPRESSED_AT_ONCE)
            if not some:
                if self._within:
                    raise EOFError
                return 0
            self._left = memoryview(self._decompressed(some))
        count = min(len(buffer), len(self._left))
        buffer[:count] = self._left[:count]
        self._left = self._left[count:]
        return count

    def _decompressed(self, some: bytes) -> bytes:
        pieces = []
        try:
            while some:
                self._within = True
                pieces.append(self._frame.decompress(some))
                some = b""
                if self._frame.eof:
                    some = self._frame.unused_data
                    self._frame, self._within = self._new(), False
        except self._error as error:
            raise _DamagedError(str(error)) from None
        return b"".join(pieces)


def _compression(stream: Stream) -> str | None:
    beginning = stream.peek(BEGINNING)
    # pzstd's files begin with a skippable frame.
    if beginning[1:4] == SKIPPABLE and 0x50 <= beginning[0] <= 0x5F:
        return ZSTANDARD
    return next((kind for kind, magic in MAGIC.items() if beginning.startswith(magic)), None)


def _refuse_foreign(name: str, beginning: bytes, within: str | None) -> None:
    """Refuse other compressions, archives, tables and encodings in one sentence instead of an error for each line."""
    for kind, magic in OTHER_COMPRESSIONS.items():
        if beginning.startswith(magic) and (kind != "bzip2" or beginning[4:10] in AFTER_BZIP2):
            raise UsageError(f"{name} is compressed by {kind}; outrider reads gzip and zstandard: decompress it")
    if beginning[TAR_AT : TAR_AT + len(TAR)] == TAR and b"\0" in beginning[:TAR_AT]:
        raise UsageError(f"{name} is an archive of files (tar); unpack it, and give a file of it")
    for kind, magic in TABLES.items():
        if beginning.startswith(magic) and within is not None:
            raise UsageError(f"{name} holds {kind} within {within}; decompress it")
        if beginning.startswith(magic):
            raise UsageError(f"{name} is {kind}, which has no lines; outrider run reads it with --format {kind.lower()}")
    for encoding, marks in WIDE_ENCODINGS.items():
        if beginning.startswith(marks):
            raise UsageError(f"{name} is {encoding}; convert it to UTF-8: iconv -f {encoding} -t UTF-8")


def file_digest(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
