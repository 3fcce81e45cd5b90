"""The files of a model's directory, opened with care: one may be a pipe, a device, a loop of links, or without end."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from outrider.workers.errors import ModelError

# Bounds far above the files of any model; reading more would take minutes, and gigabytes of memory.
LONGEST_CONFIGURATION = 16 << 20
LONGEST_INDEX = 64 << 20
LONGEST_TOKENIZER = 256 << 20
LONGEST_BLANK = 1 << 12
# Files that transformers' tokenizers read whole.
SETTINGS = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "processor_config.json")
FAST = "tokenizer.json"
TOKENIZERS = (FAST, "vocab.json", "vocab.txt", "merges.txt")
TOKENIZER_SUFFIXES = (".model", ".tiktoken", ".bpe")
TEMPLATE_SUFFIX = ".jinja"
# A file is incomplete if holes are larger than this, and most of it.
MOST_MISSING = 4 << 30
MOST_EXTENTS = 10_000
KINDS = (
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


def open_ordinary(path: Path) -> int:
    """A descriptor for reading. A ModelError where this is no ordinary file: a pipe would be waited for without end."""
    try:
        # Checked before opening, since some devices act when they are opened, and again on the descriptor.
        _check_ordinary(path, path.stat().st_mode)
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from None
    try:
        _check_ordinary(path, os.fstat(descriptor).st_mode)
    except ModelError:
        os.close(descriptor)
        raise
    return descriptor


def state_of(path: Path) -> os.stat_result:
    """The stat of the file, links resolved."""
    try:
        state = path.stat()
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from None
    _check_ordinary(path, state.st_mode)
    return state


def _check_ordinary(path: Path, mode: int) -> None:
    if not stat.S_ISREG(mode):
        kind = next((name for is_kind, name in KINDS if is_kind(mode)), "something else")
        raise ModelError(f"{path} is {kind}, where a regular file is needed")


def check_written(path: Path) -> None:
    """Refuse a file that is mostly holes: what a download leaves that has only reserved its space."""
    descriptor = open_ordinary(path)
    try:
        size, there, end = os.fstat(descriptor).st_size, 0, 0
        if size <= MOST_MISSING:
            return
        for _ in range(MOST_EXTENTS):
            try:
                start = os.lseek(descriptor, end, os.SEEK_DATA)
            except OSError:  # no data from here to the end
                break
            end = os.lseek(descriptor, start, os.SEEK_HOLE)
            there += end - start
            if end >= size:
                break
        else:
            return
    except OSError:  # a file system that cannot tell
        return
    finally:
        os.close(descriptor)
    if size - there > max(MOST_MISSING, size * 3 // 4):
        raise ModelError(f"{path} has {size:,} bytes, of which only {there:,} were ever written: is its download complete?")


def check_describing(files: Sequence[Path]) -> None:
    """Refuse files beside the weights that are incomplete, too large, or no JSON where that is expected."""
    for file in files:
        check_written(file)
        if holds_tokenizer(file):
            _check_length(file, state_of(file).st_size, LONGEST_TOKENIZER)
            if file.name == FAST:
                _check_object(file)
        elif file.name in SETTINGS:
            read_json(file)
        elif file.suffix == TEMPLATE_SUFFIX:
            _check_length(file, state_of(file).st_size, LONGEST_CONFIGURATION)


def holds_tokenizer(file: Path) -> bool:
    return file.name in TOKENIZERS or file.suffix in TOKENIZER_SUFFIXES


def _check_object(file: Path) -> None:
    """Checks the first character only: the file may be large, and its library reports other errors."""
    with os.fdopen(open_ordinary(file), "rb") as stream:
        if not stream.read(LONGEST_BLANK).lstrip().startswith(b"{"):
            raise ModelError(f"{file} does not hold a JSON object")


def _check_length(file: Path, size: int, longest: int) -> None:
    if size > longest:
        raise ModelError(f"{file} is larger than {longest >> 20} MB, the most that this file of a model may have")


def sync(path: Path) -> None:
    """fsync of a file, or of a folder's entries."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_json(path: Path, longest: int = LONGEST_CONFIGURATION) -> dict[str, Any]:
    """The JSON object in a file."""
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        raise ModelError(f"{path.parent} has no {path.name}: is this a language model's directory?") from None
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from None
    descriptor = open_ordinary(path)
    with os.fdopen(descriptor, "rb") as stream:
        try:
            text = stream.read(longest + 1)
        except OSError as error:
            raise ModelError(f"{path} cannot be read: {error.strerror}") from None
    _check_length(path, len(text), longest)
    try:
        content = json.loads(text.decode("utf-8"))
    except RecursionError:
        raise ModelError(f"{path} cannot be read: it is nested too deeply") from None
    except ValueError as error:
        # For a number with too many digits Python's message names a setting after the semicolon.
        raise ModelError(f"{path} cannot be read: {str(error).partition(';')[0]}") from None
    if not isinstance(content, dict):
        raise ModelError(f"{path} does not hold a JSON object")
    return content
