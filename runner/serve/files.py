"""The files that clients see: their uploads, and the results and errors of batches."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

from outrider.runner.job.results import ERRORS, RESULTS
from outrider.runner.serve import uploads
from outrider.runner.serve.api_errors import no_such
from outrider.runner.serve.batch_files import remove_directory
from outrider.runner.serve.listing import page_of
from outrider.runner.serve.names import FILE, Folders
from outrider.runner.serve.reserve import Reserve
from outrider.runner.serve.store import ERRORS as ERROR_FILE
from outrider.runner.serve.store import File, Store
from outrider.workers.errors import unwritable

MOST_DELETED = 10_000


class Files:
    """``lock`` is the service's: a batch's files and its directory are changed by one thread at a time."""

    def __init__(self, store: Store, folders: Folders, reserve: Reserve, lock: threading.RLock) -> None:
        self._store = store
        self._folders = folders
        self._reserve = reserve
        self._lock = lock
        # The numbers of the last deleted files, for paging.
        self._deleted: dict[str, int] = {}

    def list(self, purpose: str | None, after: str | None, limit: int, newest_first: bool) -> dict[str, Any]:
        # A client that deletes the files of one page asks for the next page after a deleted file.
        number = None if after is None else self._deleted.get(after) or self.get(after).number
        found = self._store.files(purpose, number, limit + 1, newest_first)
        return page_of([file.shown() for file in found], limit)

    def get(self, name: str) -> File:
        found = self._store.file(name) if FILE.fullmatch(name) else None
        if found is None:
            raise no_such("File", name)
        return found

    def path_of(self, file: File) -> Path:
        if file.batch is None:
            return self._folders.file(file.id)
        return self._folders.batch(file.batch) / (ERRORS if file.purpose == ERROR_FILE else RESULTS)

    def delete(self, name: str) -> dict[str, Any]:
        """Delete a file; with a batch's last file also its job directory, since the journal holds the same rows."""
        with self._lock:
            file = self.get(name)
            self._reserve.even_if_full(lambda: self._remove(file))
            if file.batch is not None:
                self.path_of(file).unlink(missing_ok=True)
            self._deleted[name] = file.number
            if len(self._deleted) > MOST_DELETED:
                del self._deleted[next(iter(self._deleted))]
            if file.batch is not None and not self._store.files_of(file.batch):
                remove_directory(self._folders.batch(file.batch))
        return {"id": name, "object": "file", "deleted": True}

    def _remove(self, file: File) -> None:
        if file.batch is not None:
            self._store.remove_file(file.id)
            return
        try:
            uploads.delete(file.id, self._store, self._folders)
        except OSError as error:
            raise unwritable(error, f"{self.path_of(file)} cannot be deleted: {error.strerror}") from None
