"""A job's directory: who holds it, what it is, and whether what is asked now is the same job."""

from __future__ import annotations

import fcntl
import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from outrider.runner.config import JobSpec
from outrider.runner.journal import Journal
from outrider.runner.results import write_atomically
from outrider.workers.errors import JobChangedError, JobError, JobHeldError, UsageError
from outrider.workers.models.cards import ModelCard

JOURNAL = "job.db"
DESCRIPTION = "job.json"
LOCK = "lock"


def default_directory(input_file: Path) -> Path:
    return Path(f"{input_file.stem}-job")


def open_job(directory: Path) -> Journal:
    """The journal of a job that exists, for reading."""
    if not (directory / JOURNAL).is_file():
        raise UsageError(f"{directory} is not a job directory: it has no {JOURNAL}")
    journal = Journal(directory / JOURNAL, read_only=True)
    if not journal.filled:
        raise UsageError(f"{directory} holds no job yet: its input has not been accepted")
    return journal


@contextmanager
def held(directory: Path) -> Iterator[None]:
    """Keep every other process off the job. The kernel lets go when this process ends, however it ends."""
    try:
        # Prompts and results are for their user alone; whoever made the directory before may share it with others.
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle = os.open(directory / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise UsageError(f"--out: {directory} cannot be written: {error.strerror}") from None
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(handle, 200).decode(errors="replace").strip() or "another process"
            raise JobHeldError(f"{directory} is being run by {holder}; wait for it or stop it") from None
        os.ftruncate(handle, 0)
        os.write(handle, f"process {os.getpid()} on {socket.gethostname()}\n".encode())
        yield
    finally:
        os.close(handle)


def identity(spec: JobSpec, card: ModelCard, input_digest: str, engine: str, precision: str) -> dict[str, Any]:
    """Everything that decides the texts. The draft, the batch and the replicas do not, so they may change."""
    return {
        "input": input_digest,
        "format": spec.format,
        "skip_bad": spec.skip_bad,
        "model": card.digest,
        "engine": engine,
        "precision": precision,
        "max_tokens": spec.max_tokens,
        "min_tokens": spec.min_tokens,
        "ignore_eos": spec.ignore_eos,
        "temperature": spec.temperature,
        "top_p": spec.top_p,
        "top_k": spec.top_k,
        "min_p": spec.min_p,
        "seed": spec.seed,
    }


def check_same(kept: dict[str, Any], asked: dict[str, Any], what: str, directory: Path) -> None:
    """Refuse to go on with a job that would have two kinds of rows in it."""
    different = [key for key in sorted(kept.keys() | asked.keys()) if kept.get(key) != asked.get(key)]
    if different:
        shown = "; ".join(f"{key}: {_short(kept.get(key))} then, {_short(asked.get(key))} now" for key in different)
        raise JobChangedError(
            f"{directory} holds a job with {what} other than now ({shown}); "
            "run it as it was begun, or give another directory with --out"
        )


def _short(value: Any) -> str:
    text = str(value)
    return f"{text[:12]}…" if len(text) == 64 else text


def describe(directory: Path, description: dict[str, Any]) -> None:
    """Write job.json, keeping what an earlier run of the same job put there."""
    path = directory / DESCRIPTION
    write_atomically(path, [json.dumps({**read_description(directory), **description}, indent=2)])


def read_description(directory: Path) -> dict[str, Any]:
    try:
        content = json.loads((directory / DESCRIPTION).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise JobError(f"{directory / DESCRIPTION} cannot be read: {error}") from None
    return content if isinstance(content, dict) else {}


def is_held(directory: Path) -> bool:
    """Whether some process runs the job at this moment."""
    try:
        handle = os.open(directory / LOCK, os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    else:
        return False
    finally:
        os.close(handle)
