"""Ids of files and batches, and their paths. Only an id of our own form becomes a path."""

from __future__ import annotations

import re
import secrets
from pathlib import Path

from outrider.runner.printable import printable
from outrider.runner.serve.api_errors import no_such
from outrider.workers.errors import UsageError

FILE, BATCH = re.compile(r"file-[0-9a-f]{24}"), re.compile(r"batch_[0-9a-f]{24}")
INPUT = "input.jsonl"


def new_file_id() -> str:
    return f"file-{secrets.token_hex(12)}"


def new_batch_id() -> str:
    return f"batch_{secrets.token_hex(12)}"


def shown_to_clients(said: object, path: object, name: str) -> str:
    """A message for clients, with a name in place of a path on the server."""
    place = printable(path)
    return printable(said).replace(place, name) if "/" in place else printable(said)


class Folders:
    """The paths below the server's data directory."""

    def __init__(self, data: Path) -> None:
        self.data = data
        self.files, self.batches = data / "files", data / "batches"

    def make(self) -> None:
        for folder in (self.files, self.batches):
            try:
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            except OSError as error:
                raise UsageError(f"--data: {folder} cannot be written: {error.strerror}") from None

    def file(self, name: str) -> Path:
        """The path of an uploaded file."""
        if not FILE.fullmatch(name):
            raise no_such("File", name)
        return self.files / name

    def batch(self, name: str) -> Path:
        """A batch's job directory."""
        if not BATCH.fullmatch(name):
            raise no_such("Batch", name)
        return self.batches / name
