"""A model in several GGUF files, as llama-gguf-split writes them: ``model-00001-of-00003.gguf`` and so on.

The first file has the metadata, and the tensors lie in all of them. A model is named by its first file.
"""

from __future__ import annotations

import os
import re
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import NoReturn

from outrider.workers.errors import ModelError
from outrider.workers.models.files import state_of
from outrider.workers.models.formats.gguf.file import GgufFile, read_file
from outrider.workers.models.headers import Entry, quoted

COUNT, NUMBER, TENSORS = "split.count", "split.no", "split.tensors.count"
NAME = re.compile(r"(.+)-(\d{5})-of-(\d{5})(\.gguf)", re.IGNORECASE)
# The number in a name has five digits.
MOST = 99_999
State = tuple[int, int, int]


def read_gguf(path: Path) -> GgufFile:
    """A whole model: the metadata of the first file, and the tensors of all."""
    first = read_file(path)
    if (count := _count(first)) == 1:
        return first
    paths = _paths(first, count)
    return _read_all(tuple((path, _state(path)) for path in paths))


def files_of(path: Path) -> list[Path]:
    """The files of a model, the named one first."""
    first = read_file(path)
    return _paths(first, _count(first))


def _count(file: GgufFile) -> int:
    count = file.metadata.get(COUNT, 1)
    if type(count) is not int or not 0 <= count <= MOST:
        _refuse(file, f"has {quoted(COUNT)}: {quoted(count)}, which is not a number of files")
    return max(1, count)


def _paths(file: GgufFile, count: int) -> list[Path]:
    if count == 1:
        return [file.path]
    named = NAME.fullmatch(file.path.name)
    if named is None or int(named[3]) != count:
        _refuse(
            file,
            f"is one of {count} files of a model, whose names have to end in -00001-of-{count:05}.gguf and so on: "
            "restore the names that they were published with",
        )
    paths = [file.path.with_name(f"{named[1]}-{number:05}-of-{named[3]}{named[4]}") for number in range(1, count + 1)]
    if int(named[2]) != 1:
        _refuse(file, f"is file {int(named[2])} of the {count} of a model, which is named by its first: {paths[0].name}")
    missing = [each for each in paths if not os.path.lexists(each)]
    if missing:
        others = f" and {len(missing) - 1} others are" if len(missing) > 1 else " is"
        _refuse(file, f"is the first of {count} files of a model, of which {missing[0].name}{others} not there: fetch all")
    return paths


def _state(path: Path) -> State:
    """A value that changes with the file."""
    state = state_of(path)
    return state.st_size, state.st_mtime_ns, state.st_ino


@lru_cache(maxsize=4)
def _read_all(files: tuple[tuple[Path, State], ...]) -> GgufFile:
    parts = [read_file(path) for path, _ in files]
    first = parts[0]
    tensors: dict[str, Entry] = {}
    for number, part in enumerate(parts):
        stated = (part.metadata.get(COUNT), part.metadata.get(NUMBER))
        if stated != (len(parts), number):
            _refuse(
                part,
                f"says that it is file {quoted(stated[1])} (counted from 0) of {quoted(stated[0])} of a model, its name "
                f"says {number} of {len(parts)}: restore the names that the files were published with",
            )
        if twice := tensors.keys() & part.tensors.keys():
            _refuse(part, f"holds the tensor {quoted(min(twice))}, which another file of the model holds as well")
        tensors |= part.tensors
    stated_tensors = first.metadata.get(TENSORS, len(tensors))
    if stated_tensors != len(tensors):
        _refuse(first, f"has {quoted(TENSORS)}: {quoted(stated_tensors)}, but its {len(parts)} files hold {len(tensors)}")
    return replace(first, size=sum(part.size for part in parts), tensors=tensors)


def _refuse(file: GgufFile, what: str) -> NoReturn:
    raise ModelError(f"{file.path} {what}")
