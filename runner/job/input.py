"""A job's input, on its first run and again: a file that stays where it is, or what came once through a pipe."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from outrider.runner.job import piped_input as piped
from outrider.runner.job.directory import there
from outrider.runner.job.journal import Journal
from outrider.runner.job.prompts import check_input
from outrider.runner.job.source import Source, file_digest
from outrider.workers.errors import UsageError

KEY = "input"


def open_input(path: Path, directory: Path, say: Callable[[str], None]) -> Source:
    """The input of a new job. What can be read only once is kept first; what a run that was killed has kept is used."""
    if not piped.is_piped(path):
        check_input(path)
        return Source(path)
    kept = directory / piped.KEPT
    if piped.take(path, directory, awaited=not kept.exists(), keep=True, say=say) is None:
        if not kept.exists():
            raise UsageError(f"{piped.called(path)} is empty; give one prompt a line")
        say(f"note: {piped.called(path)} is empty; the job begins with what it has kept of an earlier run, {kept}")
    return Source(kept, piped.called(path))


def told_of(path: Path, source: Source) -> dict[str, Any]:
    """What the journal keeps of it."""
    return {"path": _place(path), "name": source.name, "piped": piped.is_piped(path)}


def digest_again(path: Path, directory: Path, journal: Journal, say: Callable[[str], None]) -> str | None:
    """The digest of what is given now to a job that has its rows; None where nothing is given, and nothing is needed."""
    told = journal.meta(KEY) or {}
    if piped.is_piped(path):
        needless = bool(told.get("piped"))
        digest = piped.take(path, directory, awaited=not needless, keep=False, say=say)
        if digest is None and not needless:
            raise UsageError(f"{piped.called(path)} is empty, and {directory} was begun with {told.get('name', 'a file')}")
        return digest
    if told.get("path") == _place(path) and not there(path):
        say(f"note: {path} is not there any more; the job goes on with the rows that its journal holds")
        return None
    check_input(path)
    try:
        return file_digest(path)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from None


def _place(path: Path) -> str:
    return str(path) if piped.has_no_name(path) else str(path.absolute())
