"""Writes the files of batches that have ended, in a thread of its own: a million rows take a while.

What cannot be written, since the disk is full or the journal is damaged, is tried again.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from outrider.runner.job.damage import gone, without_advice
from outrider.runner.job.directory import JOURNAL, job_lock
from outrider.runner.job.journal import Counts
from outrider.runner.job.results import ERRORS, RESULTS
from outrider.runner.serve import batch_changes
from outrider.runner.serve.batch_changes import has_rows
from outrider.runner.serve.batch_files import discard_directory, usage_of, write_ended_rows, write_files
from outrider.runner.serve.batch_requests import error_entry
from outrider.runner.serve.names import Folders, new_file_id, shown_to_clients
from outrider.runner.serve.reserve import Reserve
from outrider.runner.serve.running import FREED_SECONDS
from outrider.runner.serve.store import ERRORS as ERROR_FILE
from outrider.runner.serve.store import OUTPUT, Batch, File, Store
from outrider.runner.serve.unwritten_files import leave_unwritten, size_of
from outrider.workers.errors import JobDamagedError, NoSpaceError, OutriderError

logger = logging.getLogger("outrider.serve")

NO_SPACE = "no_space"
FULL = "the server's disk is full, or it can open no more files: the batch's files are written once that is over"
WAS_FULL = "the server's disk was full, or it could open no more files: rows that were not executed stand in no file"


class Finalizer:
    """``lock`` is the service's, and ``has_ended`` is called under it, with the batch's name, once its files are stored."""

    def __init__(
        self,
        store: Store,
        folders: Folders,
        reserve: Reserve,
        lock: threading.RLock,
        now: Callable[[], float],
        has_ended: Callable[[str], None],
    ) -> None:
        self._store = store
        self._folders = folders
        self._reserve = reserve
        self._lock = lock
        self._now = now
        self._has_ended = has_ended
        self._thread = ThreadPoolExecutor(1, "finalize")
        self._begun: set[str] = set()
        # When a batch that could not be written is tried again.
        self._retries: dict[str, float] = {}
        # Batches that wait until a file is put back, with the reason.
        self.waiting: dict[str, str] = {}
        # Batches whose files found no space on the disk.
        self.no_space: set[str] = set()

    def begin(self, name: str) -> None:
        if name not in self._begun:
            self._begun.add(name)
            self._thread.submit(self._write, name)

    def retry_if_due(self, name: str) -> None:
        if (due := self._retries.get(name)) is not None and time.monotonic() >= due:
            del self._retries[name]
            self.begin(name)

    def tell_waiting(self, name: str, why: str) -> None:
        """Log why a batch waits, once for each reason."""
        if self.waiting.get(name) != why:
            logger.error("%s waits: %s, or cancel the batch", name, why)
        self.waiting[name] = why

    def close(self) -> None:
        """Wait until everything that was begun is written."""
        self._thread.shutdown(wait=True)

    def _write(self, name: str) -> None:
        try:
            self._write_files(name)
            self.no_space.discard(name)
        except JobDamagedError as error:
            self.tell_waiting(name, f"{without_advice(error)}; put back a copy of {JOURNAL}")
            self._retry_later(name)
        except OutriderError as error:
            if isinstance(error, NoSpaceError):
                self.no_space.add(name)
            logger.error("%s: %s; this is tried again", name, error)
            self._retry_later(name)
        except Exception:
            logger.exception("%s could not be written", name)
            self._retry_later(name)
        finally:
            self._begun.discard(name)

    def _retry_later(self, name: str) -> None:
        self._retries[name] = time.monotonic() + FREED_SECONDS

    def _write_files(self, name: str) -> None:
        batch = self._store.batch(name)
        assert batch is not None and batch.ending is not None
        directory, now = self._folders.batch(name), int(self._now())
        written, lost = self._write_to_directory(batch, directory, batch.ending)
        files: list[File] = []
        counts, usage = None, None
        if written is not None:
            usage = usage_of(directory)
            counts = {"total": written.rows, "completed": written.done, "failed": written.failed}
            for path, rows, purpose in ((RESULTS, written.done, OUTPUT), (ERRORS, written.failed, ERROR_FILE)):
                if rows:
                    size = size_of(directory / path)
                    called = f"{name}_{'output' if purpose == OUTPUT else 'error'}.jsonl"
                    files.append(File(new_file_id(), now, size, called, purpose, name))
        ended = batch_changes.ended(batch.ending, now, counts, usage, files, lost)
        with self._lock:
            if batch.ending == "cancelled":
                self._reserve.even_if_full(lambda: self._store.change(name, ended, files))
            else:
                self._store.change(name, ended, files)
            if not files:
                discard_directory(directory, written)
            self.waiting.pop(name, None)
            self._has_ended(name)

    def _write_to_directory(
        self, batch: Batch, directory: Path, ending: str
    ) -> tuple[Counts | None, dict[str, Any] | None]:
        """Write results, errors and report: the numbers of rows in them, and an error entry about rows in no file."""
        try:
            try:
                return self._with_job_lock(batch, lambda: write_files(directory, ending)), None
            except NoSpaceError as error:
                # Batches are cancelled to free space, too, so from the second try on as little as possible is written.
                if ending != "cancelled" or batch.id not in self.no_space:
                    raise
                written = self._write_on_full_disk(batch)
                if written is not None and written.pending:
                    logger.error("%s: %s; rows that were not executed stand in no file", batch.id, error)
                    return written, error_entry(NO_SPACE, WAS_FULL)
                return written, None
        except JobDamagedError as error:
            if ending != "cancelled" and has_rows(batch):
                raise
            return None, error_entry("job_error", shown_to_clients(without_advice(error), directory, batch.id))

    def _write_on_full_disk(self, batch: Batch) -> Counts | None:
        """Write the rows that have ended; if there is no room even for them, no file: they are read from the journal."""
        directory = self._folders.batch(batch.id)
        try:
            return self._reserve.even_if_full(lambda: self._with_job_lock(batch, lambda: write_ended_rows(directory)))
        except NoSpaceError:
            return self._reserve.even_if_full(lambda: self._with_job_lock(batch, lambda: leave_unwritten(directory)))

    def _with_job_lock(self, batch: Batch, write: Callable[[], Counts | None]) -> Counts | None:
        """Write files under the job's lock; None if no row was ever admitted."""
        directory, written = self._folders.batch(batch.id), None
        if (directory / JOURNAL).exists():
            with job_lock(directory):
                written = write()
        if written is None and has_rows(batch):
            raise gone(directory / JOURNAL)
        return written
