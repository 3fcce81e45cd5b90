"""Reads and checks a GGUF file's metadata and the types, shapes and offsets of its tensors, without reading a weight.

The file is not trusted: every count and length is compared with the bytes that are left before it is used. (Python's
integers do not overflow.)
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any, NoReturn

from outrider.workers.errors import ModelError
from outrider.workers.models.files import check_written, open_ordinary, state_of
from outrider.workers.models.formats.gguf.blocks import BY_NAME, TYPES, UNREAD
from outrider.workers.models.headers import Entry, quoted

SUFFIX = ".gguf"
MAGIC = b"GGUF"
VERSIONS = (2, 3)
# The largest vocabularies take some 20 MB.
LONGEST_METADATA = 256 << 20
FIRST_READ = 1 << 20
MOST_DIMENSIONS = 4
LEAST_TENSOR, LEAST_KEY = 8 + 4 + 4 + 8, 8 + 4 + 1
# The format of ``struct`` for each metadata type.
SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
STRING, ARRAY = 8, 9
EMBEDDING, HEAD = "token_embd.weight", "output.weight"


@dataclass(frozen=True, slots=True)
class GgufFile:
    """The shapes of ``tensors`` are in NumPy's order: the last dimension is that of a row."""

    path: Path
    size: int
    metadata: dict[str, Any] = field(repr=False)
    tensors: dict[str, Entry] = field(repr=False)


@dataclass(frozen=True, slots=True)
class GgufQuantisation:
    """The precision of a GGUF file: activations in 8 bits, as in llama.cpp; bf16 where the kernels lack the codes of a
    matrix."""

    made_for: str
    name: str = "gguf"

    def matrix(self, raw: object, module: str, shape: tuple[int, int]) -> None:
        """None: ``GgufCheckpoint`` (checkpoint.py) reads the matrices itself."""


def gguf_quantisation(file: GgufFile) -> GgufQuantisation | None:
    """None where all tensors are floats."""
    values: dict[int, int] = {}
    for entry in file.tensors.values():
        if (scheme := BY_NAME[entry.type].scheme) is not None:
            values[scheme.bits] = values.get(scheme.bits, 0) + prod(entry.shape)
    if not values:
        return None
    return GgufQuantisation("w4a8" if max(values, key=lambda bits: values[bits]) == 4 else "w8a8")


def is_gguf(path: Path) -> bool:
    return path.suffix.lower() == SUFFIX and not path.is_dir()


def read_file(path: Path) -> GgufFile:
    """The content of one file; split.py reads all files of a model."""
    state = state_of(path)
    return _read(path, state.st_size, state.st_mtime_ns, state.st_ino)


# A model in parts has many files.
@lru_cache(maxsize=64)
def _read(path: Path, size: int, changed: int, inode: int) -> GgufFile:
    check_written(path)
    reader = _Reader(path, size)
    try:
        return _parse(reader)
    finally:
        reader.close()


def _parse(reader: _Reader) -> GgufFile:
    magic = reader.take(4)
    if magic != MAGIC:
        raise ModelError(f"{reader.path} is no GGUF file: it begins with {quoted(magic)}")
    version = reader.number("<I")
    if version not in VERSIONS:
        reader.refuse(f"is GGUF of version {version}; versions 2 and 3 are read, in the byte order of x86")
    tensor_count, key_count = reader.number("<Q"), reader.number("<Q")
    reader.check_count(tensor_count, LEAST_TENSOR, "tensors")
    reader.check_count(key_count, LEAST_KEY, "keys of metadata")
    metadata: dict[str, Any] = {}
    for _ in range(key_count):
        key = reader.text("a key")
        if key in metadata:
            reader.refuse(f"has the key {quoted(key)} twice")
        metadata[key] = reader.value(key)
    described = [_describe(reader) for _ in range(tensor_count)]
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or alignment < 8 or alignment % 8:
        reader.refuse(f'has a "general.alignment" of {quoted(alignment)}, where a multiple of 8 is needed')
    start = reader.at + -reader.at % alignment
    return GgufFile(reader.path, reader.size, metadata, _placed(reader, described, start, alignment))


Described = tuple[str, str, tuple[int, ...], int, int]


def _describe(reader: _Reader) -> Described:
    """Name, type, shape, offset and bytes of a tensor."""
    name = reader.text("the name of a tensor")
    dimensions = reader.number("<I")
    if not 1 <= dimensions <= MOST_DIMENSIONS:
        reader.refuse(f"gives the tensor {quoted(name)} {dimensions} dimensions")
    shape = tuple(reader.number("<Q") for _ in range(dimensions))[::-1]
    number, offset = reader.number("<I"), reader.number("<Q")
    if number not in TYPES:
        type_ = UNREAD.get(number, number)
        reader.refuse(
            f"holds the tensor {quoted(name)} in GGUF's type {type_}, which is not read; take a file in Q4_K_M, Q5_K_M, "
            "Q6_K or Q8_0"
        )
    kind = TYPES[number]
    if 0 in shape or shape[-1] % kind.values:
        reader.refuse(f"gives the tensor {quoted(name)} ({kind.name}) the shape {shape}: {kind.values} values make a block")
    return name, kind.name, shape, offset, prod(shape) // kind.values * kind.bytes


def _placed(reader: _Reader, described: list[Described], start: int, alignment: int) -> dict[str, Entry]:
    entries: dict[str, Entry] = {}
    end = 0
    for name, kind, shape, offset, size in sorted(described, key=lambda each: each[3]):
        if name in entries:
            reader.refuse(f"holds the tensor {quoted(name)} twice")
        if offset % alignment:
            reader.refuse(f"places the tensor {quoted(name)} at {offset}, which is no multiple of {alignment}")
        if offset < end:
            reader.refuse(f"places the tensor {quoted(name)} over another")
        end = offset + size
        if start + end > reader.size:
            reader.refuse(f"has {reader.size:,} bytes, the tensor {quoted(name)} ends at {start + end:,}: it is truncated")
        entries[name] = Entry(reader.path, kind, shape, start + offset)
    return entries


class _Reader:
    """Reads a file from its beginning, in growing pieces as far as is needed."""

    def __init__(self, path: Path, size: int) -> None:
        self.path = path
        self.size = size
        self.at = 0
        self._descriptor = open_ordinary(path)
        self._buffer = b""

    def close(self) -> None:
        os.close(self._descriptor)

    def refuse(self, what: str) -> NoReturn:
        raise ModelError(f"{self.path} {what}")

    def take(self, count: int) -> bytes:
        end = self.at + count
        if end > self.size:
            self.refuse(f"is truncated: it has {self.size:,} bytes, its metadata needs {end:,}")
        if end > LONGEST_METADATA:
            self.refuse(f"has more than {LONGEST_METADATA >> 20} MB of metadata, which no model has")
        while len(self._buffer) < end:
            wanted = max(end - len(self._buffer), FIRST_READ, len(self._buffer))
            part = os.pread(self._descriptor, min(wanted, LONGEST_METADATA), len(self._buffer))
            if not part:
                self.refuse("is truncated inside its metadata")
            self._buffer += part
        taken = self._buffer[self.at : end]
        self.at = end
        return taken

    def check_count(self, count: int, least: int, what: str) -> None:
        if count * least > min(self.size, LONGEST_METADATA) - self.at:
            self.refuse(f"names {count:,} {what}, for which it has too few bytes")

    def number(self, form: str) -> Any:
        return struct.unpack(form, self.take(struct.calcsize(form)))[0]

    def text(self, what: str) -> str:
        length = self.number("<Q")
        if length > min(self.size, LONGEST_METADATA) - self.at:
            self.refuse(f"gives {what} {length:,} bytes, more than it has")
        try:
            return self.take(length).decode()
        except UnicodeDecodeError:
            return self.refuse(f"has {what} that is no UTF-8")

    def value(self, key: str) -> Any:
        return self._value(key, self.number("<I"))

    def _value(self, key: str, kind: int) -> Any:
        if kind in SCALARS:
            return self.number(SCALARS[kind])
        if kind == STRING:
            return self.text(f"the value of {quoted(key)}")
        if kind != ARRAY:
            return self.refuse(f"has the key {quoted(key)} with a value of the type {kind}, which GGUF does not know")
        inner, count = self.number("<I"), self.number("<Q")
        if inner == STRING:
            self.check_count(count, 8, f"texts in {quoted(key)}")
            return [self.text(f"a text in {quoted(key)}") for _ in range(count)]
        if inner not in SCALARS:
            return self.refuse(f"has the key {quoted(key)} with lists of the type {inner}, which are not read")
        size = struct.calcsize(SCALARS[inner])
        self.check_count(count, size, f"values in {quoted(key)}")
        return list(struct.unpack(f"<{count}{SCALARS[inner][1]}", self.take(count * size)))
