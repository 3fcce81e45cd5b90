"""A job's input when it begins and when it is resumed: a file, a directory, or a pipe whose content is kept."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from outrider.runner.job import piped_input as piped
from outrider.runner.job.arrow_input import ArrowSource, digest_of_directory, kind_of
from outrider.runner.job.directory import path_exists
from outrider.runner.job.journal import Journal
from outrider.runner.job.prompts import check_input
from outrider.runner.job.source import Source, file_digest
from outrider.workers.errors import UsageError

KEY = "input"


def open_input(
    path: Path,
    directory: Path,
    say: Callable[[str], None],
    form: str = "auto",
    split: str | None = None,
    shown_name: str | None = None,
) -> Source | ArrowSource:
    """The input of a new job. A pipe's content is copied to the directory first; if it is empty, an earlier copy is used.

    ``shown_name``: its name in messages if it is a server's upload; None otherwise.
    """
    if not piped.is_piped(path):
        check_input(path, split)
        return _source(path, shown_name, form, split, linked=shown_name is not None)
    if split is not None:
        raise UsageError(f"--split: {piped.input_name(path)} has no splits; leave it out")
    kept = directory / piped.KEPT
    if piped.read_piped(path, directory, awaited=not kept.exists(), keep=True, say=say) is None:
        if not kept.exists():
            raise UsageError(f"{piped.input_name(path)} is empty; give one prompt a line")
        say(f"note: {piped.input_name(path)} is empty; the job begins with what it has kept of an earlier run, {kept}")
    return _source(kept, piped.input_name(path), form, None)


def _source(path: Path, name: str | None, form: str, split: str | None, linked: bool = False) -> Source | ArrowSource:
    lines = None if path.is_dir() else Source(path, name, linked)
    kind = kind_of(path, lines, form)
    if kind is not None:
        return ArrowSource(path, kind, name, split)
    if lines is None:
        raise UsageError(f"--format: {path} is a directory, which holds Parquet or Arrow; leave it out")
    return lines


def describe_input(path: Path, source: Source | ArrowSource) -> dict[str, Any]:
    """What the journal's meta table keeps of the input."""
    return {"path": _location(path), "name": source.name, "piped": piped.is_piped(path)}


def digest_of_resumed_input(
    path: Path, directory: Path, journal: Journal, say: Callable[[str], None], split: str | None = None
) -> str | None:
    """The digest of the input that a resumed job is given; None if it is not given again and need not be."""
    kept = journal.meta(KEY) or {}
    if piped.is_piped(path):
        was_piped = bool(kept.get("piped"))
        digest = piped.read_piped(path, directory, awaited=not was_piped, keep=False, say=say)
        if digest is None and not was_piped:
            name = kept.get("name", "a file")
            raise UsageError(f"{piped.input_name(path)} is empty, and {directory} was begun with {name}")
        return digest
    if kept.get("path") == _location(path) and not path_exists(path):
        say(f"note: {path} is not there any more; the job goes on with the rows that its journal holds")
        return None
    if "path" in kept and not kept.get("piped") and not path_exists(path):
        raise UsageError(
            f"{path} is not there, and {directory} was begun with {kept['path']}; name the input where it lies now, or go "
            "on without it by outrider retry"
        )
    check_input(path, split)
    try:
        return digest_of_directory(path, split) if path.is_dir() else file_digest(path)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from None


def _location(path: Path) -> str:
    return str(path) if piped.has_no_name(path) else str(path.absolute())
