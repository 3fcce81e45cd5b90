"""Reads and checks the headers of weight files, without reading a weight.

The rules for safetensors are those of its own library, which the hf engine uses: tensors are contiguous and fill the file.
A damaged file is so refused before a process is started that would fail on it.
"""

from __future__ import annotations

import json
import math
import os
import struct
import zipfile
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.workers.errors import ModelError
from outrider.workers.models.files import LONGEST_INDEX, check_written, open_ordinary, read_json, state_of

LONGEST_HEADER = 100 << 20
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
# Bits of an element, by safetensors' names; the size of a type that is not here is not checked.
BITS = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("I8", "U8", "BOOL", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 8),
}
# The types of plain weights. If tensors of other types take a larger part of the bytes, they may be weights, too (codes).
FLOATS = ("F64", "F32", "F16", "BF16")
MOST_BESIDE_FLOATS = 1 / 16
LONGEST_NAME_SHOWN = 80
ZIP = b"PK\x03\x04"
# The beginning of torch's format before 1.6: its pickled magic number, followed by more pickles.
PICKLED = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."


@dataclass(frozen=True, slots=True)
class Entry:
    """A stored tensor: ``offset`` is in bytes from the start of its file."""

    file: Path
    type: str
    shape: tuple[int, ...]
    offset: int


@dataclass(frozen=True, slots=True)
class Outline:
    """The number of tensors in a model's files (None: only torch could tell), the bytes of the files, and the number of
    weights where the headers tell."""

    tensors: int | None
    size: int
    numbers: int | None = None


def read_outline(path: Path, files: Sequence[Path]) -> Outline:
    """The outline of all files of a model; a ModelError where a file is damaged."""
    for file in files:
        check_written(file)
    size = sum(state_of(file).st_size for file in files)
    if files[0].suffix == ".safetensors":
        entries = read_entries(path, files)
        return Outline(len(entries), size, _numbers(entries.values(), size))
    counts = [_stored_in(file) for file in files]
    return Outline(None if None in counts else sum(filter(None, counts)), size)


def _numbers(entries: Collection[Entry], size: int) -> int | None:
    numbers = {of: sum(math.prod(entry.shape) for entry in entries if entry.type == of) for of in FLOATS}
    floats = sum(count * BITS[of] // 8 for of, count in numbers.items())
    return sum(numbers.values()) if size - floats <= size * MOST_BESIDE_FLOATS else None


def safetensors_of(path: Path) -> list[Path]:
    """The files of a model in safetensors, found as transformers finds them; others may lie beside them."""
    if os.path.lexists(path / SINGLE):
        return [path / SINGLE]
    files = sorted(path.glob("*.safetensors"))
    listed = _listed(path) if files else None
    if listed is None:
        return files
    names = sorted(set(listed.values()))
    for name in names:
        if path / name not in files:
            raise ModelError(f"{path} lacks {quoted(name)}, which {INDEX} names")
    return [path / name for name in names]


def read_entries(path: Path, files: Sequence[Path]) -> dict[str, Entry]:
    """Every tensor of a model in safetensors, by its name. ``files`` are those of ``safetensors_of``."""
    listed = None if path / SINGLE in files else _listed(path)
    if listed is None:
        entries: dict[str, Entry] = {}
        for file in files:
            for name, entry in read_header(file).items():
                if name in entries:
                    raise ModelError(f"{file} and {entries[name].file.name} both hold the weight {quoted(name)}")
                entries[name] = entry
        return entries
    shards = {file.name: read_header(file) for file in files}
    for tensor, name in listed.items():
        if tensor not in shards[name]:
            raise ModelError(f"{path / name} lacks the weight {quoted(tensor)}, which {INDEX} places there")
    return {tensor: shards[name][tensor] for tensor, name in listed.items()}


def _listed(path: Path) -> dict[str, str] | None:
    """The name of each tensor's file, by the index; None where there is no index."""
    index = path / INDEX
    if not os.path.lexists(index):
        return None
    listed = read_json(index, LONGEST_INDEX).get("weight_map")
    if not isinstance(listed, dict) or not listed:
        raise ModelError(f'{index} has no "weight_map" that names the file of each weight')
    for tensor, name in listed.items():
        if not isinstance(name, str):
            raise ModelError(f"{index} must name a file for the weight {quoted(tensor)}, got {quoted(name)}")
        # Names with a path are refused, so that no file elsewhere is opened.
        if Path(name).name != name or "\0" in name:
            raise ModelError(f"{index} must name a file beside it for the weight {quoted(tensor)}, got {quoted(name)}")
    return listed


def read_header(file: Path) -> dict[str, Entry]:
    """The entries of one safetensors file, checked against each other and the file's size."""
    with os.fdopen(open_ordinary(file), "rb") as stream:
        size = os.fstat(stream.fileno()).st_size
        try:
            first = stream.read(8)
            length = struct.unpack("<Q", first)[0] if len(first) == 8 else 0
            if not 2 <= length <= min(LONGEST_HEADER, size - 8):
                raise ModelError(f"{file} is not a whole safetensors file: it has {size:,} bytes and its header {length:,}")
            text = stream.read(length)
        except OSError as error:
            raise ModelError(f"{file} cannot be read: {error.strerror}") from None
    try:
        header = json.loads(text, object_pairs_hook=_without_doubles)
    except RecursionError:
        raise ModelError(f"{file} has a damaged header: it is nested too deeply") from None
    except ValueError as error:
        raise ModelError(f"{file} has a damaged header: {error}") from None
    if not isinstance(header, dict):
        raise ModelError(f"{file} has a damaged header: it is no JSON object")
    header.pop("__metadata__", None)
    spans = {name: _span(file, name, described) for name, described in header.items()}
    end = 0
    for name, (start, stop) in sorted(spans.items(), key=lambda item: item[1]):
        if start != end:
            said = "overlaps another" if start < end else f"leaves {start - end:,} bytes before it to nobody"
            raise ModelError(f"{file} has a damaged header: the weight {quoted(name)} {said}")
        end = stop
    if 8 + length + end > size:
        raise ModelError(f"{file} is truncated: it has {size:,} bytes, and its header says {8 + length + end:,}")
    if 8 + length + end < size:
        raise ModelError(f"{file} has {size:,} bytes, and its header says {8 + length + end:,}: it is damaged")
    return {
        name: Entry(file, described["dtype"], tuple(described["shape"]), 8 + length + spans[name][0])
        for name, described in header.items()
    }


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{quoted(next(name for name in found if names.count(name) > 1))} stands there twice")
    return found


def _span(file: Path, name: str, described: Any) -> tuple[int, int]:
    """The beginning and end of a tensor, in bytes after the header."""

    def damaged(what: str) -> ModelError:
        return ModelError(f"{file} has a damaged header: the weight {quoted(name)} {what}")

    if not isinstance(described, dict):
        raise damaged("is not described")
    type_, shape, offsets = (described.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not isinstance(type_, str):
        raise damaged("has no type")
    if not isinstance(shape, list) or not all(type(extent) is int and extent >= 0 for extent in shape):
        raise damaged(f"has no shape: {quoted(shape)}")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(type(offset) is int for offset in offsets):
        raise damaged(f"has no place: {quoted(offsets)}")
    start, stop = offsets
    if not 0 <= start <= stop:
        raise damaged(f"lies at {start} to {stop}")
    # Python's integers do not overflow.
    bits = math.prod(shape) * BITS.get(type_, 0)
    if type_ in BITS and bits != 8 * (stop - start):
        raise damaged(f"has {stop - start:,} bytes, its shape {quoted(shape)} needs others")
    return start, stop


def _stored_in(file: Path) -> int | None:
    """The number of storages in a pickled file; None for the format before torch 1.6, which only torch can read."""
    with os.fdopen(open_ordinary(file), "rb") as stream:
        size = os.fstat(stream.fileno()).st_size
        first = stream.read(len(PICKLED))
        if first == PICKLED:
            return None
        if not first.startswith(ZIP):
            raise ModelError(f"{file} is no checkpoint of torch: it begins with {quoted(first)}")
        try:
            members = zipfile.ZipFile(stream).infolist()
        except (zipfile.BadZipFile, OSError, ValueError, struct.error) as error:
            raise ModelError(f"{file} cannot be read, it may be truncated: {error}") from None
    # torch never compresses; a compressed member could expand to any size.
    for member in members:
        if member.compress_type != zipfile.ZIP_STORED or member.file_size != member.compress_size:
            raise ModelError(f"{file} has compressed members, which no checkpoint of torch has: {quoted(member.filename)}")
    if (told := sum(member.file_size for member in members)) > size:
        raise ModelError(f"{file} is damaged: it has {size:,} bytes, and its members need {told:,}")
    return sum("/data/" in member.filename for member in members)


def quoted(value: object) -> str:
    """The value for a sentence: shortened, and without control characters."""
    text = repr(value)
    # ascii() writes what cannot be shown as escapes.
    shown = text if text.isprintable() else ascii(value)
    return shown if len(shown) <= LONGEST_NAME_SHOWN else f"{shown[:LONGEST_NAME_SHOWN]}…"
