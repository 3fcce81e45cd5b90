"""The batches' state machine, over requests of clients and events of the runner. Each change is durable before it is shown.

    validating ──> in_progress ──> finalizing ──> completed
        │               │
        │               ├──(its window is over)────────────> expired
        ├───────────────┴──> cancelling ──────────────────> cancelled
        └──> failed

``ending`` is the status that a batch will have once its files are written. It is stored before they are, so the next server
writes them again if this one is killed in between.
"""

from __future__ import annotations

import logging
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from outrider.runner.job.damage import gone, without_advice
from outrider.runner.job.directory import JOURNAL, REPORT, job_lock
from outrider.runner.job.journal import Counts
from outrider.runner.job.lock import LOCK
from outrider.runner.job.results import ERRORS, RESULTS, sync_folder
from outrider.runner.serve import batch_requests, uploads
from outrider.runner.serve.api_errors import ApiError, no_such
from outrider.runner.serve.batch_requests import error_entry
from outrider.runner.serve.finalizing import counts_of, draw_report, has_done_rows, usage_of, write_ended_rows, write_files
from outrider.runner.serve.names import BATCH, FILE, INPUT, Folders, new_batch_id, new_file_id, shown_to_clients
from outrider.runner.serve.reserve import Reserve
from outrider.runner.serve.running import (
    FREED_SECONDS,
    Admitted,
    BatchJob,
    Broken,
    Event,
    Left,
    OnEvent,
    Progress,
    Refused,
    Runner,
)
from outrider.runner.serve.store import ENDED, OUTPUT, Batch, File, Store
from outrider.runner.serve.store import ERRORS as ERROR_FILE
from outrider.runner.serve.unwritten_files import leave_unwritten, size_of
from outrider.runner.validation_errors import short
from outrider.workers.errors import JobDamagedError, JobError, NoSpaceError, OutriderError, unwritable

logger = logging.getLogger("outrider.serve")

TICK_SECONDS = 0.5
# The counts that the API shows are stored this often; right after a start they may be this old.
SECONDS_BETWEEN_COUNTS = 30.0
# A batch's speed is measured over this time.
SPEED_SECONDS = 60.0
MOST_DELETED = 10_000
# The keys of a batch's files in the API.
FILE_IDS = {OUTPUT: "output_file_id", ERROR_FILE: "error_file_id"}
NO_SPACE = "no_space"
FULL = "the server's disk is full, or it can open no more files: the batch's files are written once that is over"
WAS_FULL = "the server's disk was full, or it could open no more files: rows that were not executed stand in no file"


@dataclass(slots=True)
class BatchPace:
    """A batch's progress, and its recent speed."""

    progress: Progress
    seen: deque[tuple[float, Progress]] = field(default_factory=deque)

    def add(self, progress: Progress, now: float) -> None:
        if progress.tokens < self.progress.tokens:
            # Another process has the batch now, and counts tokens from 0.
            self.seen.clear()
        self.progress = progress
        self.seen.append((now, progress))
        while len(self.seen) > 2 and now - self.seen[0][0] > SPEED_SECONDS:
            self.seen.popleft()

    def speed(self) -> tuple[float, float]:
        """Rows and tokens a second."""
        if len(self.seen) < 2 or (seconds := self.seen[-1][0] - self.seen[0][0]) <= 0:
            return 0.0, 0.0
        first, last = self.seen[0][1], self.seen[-1][1]
        rows = last.done + last.failed - first.done - first.failed
        return rows / seconds, (last.tokens - first.tokens) / seconds


def _boot_seconds() -> float:
    """Seconds since boot: not changed by setting the clock, and counting time in suspend."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Service:
    """``start`` resumes the batches of an earlier server. Events are handled one after the other, in one thread."""

    def __init__(
        self,
        store: Store,
        folders: Folders,
        models: Sequence[str],
        runner: Callable[[OnEvent], Runner],
        now: Callable[[], float] = time.time,
        boot_seconds: Callable[[], float] = _boot_seconds,
    ) -> None:
        self._store = store
        self._folders = folders
        self._reserve = Reserve(folders.data)
        self.models = list(models)
        self._now = now
        self._boot_seconds = boot_seconds
        # When the completion windows of unfinished batches end, in ``boot_seconds``.
        self._window_ends: dict[str, float] = {}
        # None only wakes the thread.
        self._events: SimpleQueue[Event | None] = SimpleQueue()
        self.runner = runner(self._events.put)
        self._paces: dict[str, BatchPace] = {}
        # Counted since the server's start, for the metrics.
        self._done = {"done": 0, "failed": 0, "tokens": 0, "proposed": 0, "accepted": 0}
        self._lock = threading.RLock()
        self._closed = threading.Event()
        # Set when the server stops: open requests are refused, even while they are being sent.
        self.stopping = threading.Event()
        self._finalizer = ThreadPoolExecutor(1, "finalize")
        self._finalizing: set[str] = set()
        # The numbers of the last deleted files, for paging.
        self._deleted: dict[str, int] = {}
        # When the files of a batch are written again, after an error.
        self._retry: dict[str, float] = {}
        # Batches that wait until a file is put back, with the reason.
        self._waiting: dict[str, str] = {}
        # Batches whose files found no space on the disk.
        self._no_space: set[str] = set()
        # Events whose changes could not be stored yet.
        self._unhandled: list[Event] = []
        self._counted = 0.0
        self._thread = threading.Thread(target=self._run, name="batches", daemon=True)

    def start(self) -> None:
        with self._lock:
            self._remove_unknown_batches()
            self._reserve.fill()
            for batch in self._store.unended():
                self._resume(batch)
        self._thread.start()

    def refuse_requests(self) -> None:
        """The server is being stopped: refuse open requests."""
        self.stopping.set()
        self.runner.refuse_requests()

    def close(self, at_once: bool = False) -> None:
        """Let rows in progress end (not with ``at_once``) and be recorded; the next server continues with the rest."""
        self._closed.set()
        self.runner.close(at_once)
        self._events.put(None)
        if self._thread.is_alive():
            self._thread.join()
        self.handle_events()
        self._finalizer.shutdown(wait=True)
        self._store.close()

    # Files

    def list_files(self, purpose: str | None, after: str | None, limit: int, newest_first: bool) -> dict[str, Any]:
        # A client that deletes the files of one page asks for the next page after a deleted file.
        number = None if after is None else self._deleted.get(after) or self.file(after).number
        found = self._store.files(purpose, number, limit + 1, newest_first)
        return _page([file.shown() for file in found], limit)

    def file(self, name: str) -> File:
        found = self._store.file(name) if FILE.fullmatch(name) else None
        if found is None:
            raise no_such("File", name)
        return found

    def path_of(self, file: File) -> Path:
        if file.batch is None:
            return self._folders.file(file.id)
        return self._folders.batch(file.batch) / (ERRORS if file.purpose == ERROR_FILE else RESULTS)

    def delete_file(self, name: str) -> dict[str, Any]:
        """Delete a file; with a batch's last file also its job directory, since the journal holds the same rows."""
        with self._lock:
            file = self.file(name)
            self._reserve.even_if_full(lambda: self._forget(file))
            if file.batch is not None:
                self.path_of(file).unlink(missing_ok=True)
            self._deleted[name] = file.number
            if len(self._deleted) > MOST_DELETED:
                del self._deleted[next(iter(self._deleted))]
            if file.batch is not None and not self._store.files_of(file.batch):
                _remove(self._folders.batch(file.batch))
        return {"id": name, "object": "file", "deleted": True}

    def _forget(self, file: File) -> None:
        if file.batch is not None:
            self._store.remove_file(file.id)
            return
        try:
            uploads.delete(file.id, self._store, self._folders)
        except OSError as error:
            raise unwritable(error, f"{self.path_of(file)} cannot be deleted: {error.strerror}") from None

    # Batches

    def create(self, body: object) -> dict[str, Any]:
        asked = batch_requests.parse(body)
        file = self._store.file(asked.input_file_id) if FILE.fullmatch(asked.input_file_id) else None
        if file is None or file.batch is not None:
            raise ApiError(400, f"No such File object: {short(asked.input_file_id)}", "input_file_id", "not_found")
        name, now = new_batch_id(), int(self._now())
        batch = Batch(name, None, "validating", None, _shown(name, asked, now))
        directory = self._folders.batch(name)
        with self._lock:
            self._take_input(file, directory)
        # Without the lock: reading a compressed line may take minutes.
        batch.model, problem = batch_requests.model_of(directory / INPUT, self.models)
        batch.shown["model"] = batch.model
        with self._lock:
            try:
                self._store.add_batch(batch)
            except JobError:
                _remove(directory)
                raise
            if problem is not None:
                return self._fail(name, [dict(problem)]).shown
            self.runner.admit(self._job(batch))
        return batch.shown

    def _take_input(self, file: File, directory: Path) -> None:
        """Hard-link the input into the batch's directory, so that the client may delete the file."""
        try:
            directory.mkdir(mode=0o700)
            (directory / INPUT).hardlink_to(self._folders.file(file.id))
            sync_folder(directory)
            sync_folder(directory.parent)
        except FileNotFoundError:
            raise ApiError(400, f"No such File object: {file.id}", "input_file_id", "not_found") from None
        except OSError as error:
            raise ApiError(507, f"the batch cannot be kept: {error.strerror}", None, "no_space", "server_error") from None

    def retrieve(self, name: str) -> dict[str, Any]:
        return self._with_counts(self.batch(name))

    def batch(self, name: str) -> Batch:
        found = self._store.batch(name)
        if found is None:
            raise no_such("Batch", name)
        return found

    def list_batches(self, after: str | None, limit: int) -> dict[str, Any]:
        number = None if after is None else self.batch(after).number
        return _page([self._with_counts(each) for each in self._store.batches(number, limit + 1)], limit)

    def cancel(self, name: str) -> dict[str, Any]:
        with self._lock:
            batch = self.batch(name)
            if batch.status == "cancelling":
                return self._with_counts(batch)
            runs = batch.status in ("validating", "in_progress") and batch.ending is None
            if not runs and name not in self._waiting:
                said = f"Cannot cancel a batch with status '{batch.status}'."
                raise ApiError(409, said, "status", "batch_not_cancellable")
            ends = self._sets_ending("cancelled", "cancelling")
            batch = self._reserve.even_if_full(lambda: self._store.change(name, ends))
            self._stop(batch)
            return self._with_counts(batch)

    def has_report(self, name: str) -> bool:
        directory = self._folders.batch(name)
        return any((directory / file).exists() for file in (REPORT, JOURNAL))

    def report_of(self, name: str) -> Path:
        """The report's path; the report of an unfinished batch is written now."""
        directory = self._folders.batch(name)
        if self.batch(name).status not in ENDED and (directory / JOURNAL).exists():
            draw_report(directory)
        return directory / REPORT

    def pace(self, name: str) -> BatchPace | None:
        return self._paces.get(name)

    def _with_counts(self, batch: Batch) -> dict[str, Any]:
        if batch.status in ENDED:
            return batch.shown
        shown = dict(batch.shown)
        if batch.id in self._no_space and shown["errors"] is None:
            shown["errors"] = {"object": "list", "data": [error_entry(NO_SPACE, FULL)]}
        if (pace := self._paces.get(batch.id)) is not None:
            counted = {"completed": pace.progress.done, "failed": pace.progress.failed}
            shown["request_counts"] = {**shown["request_counts"], **counted}
        return shown

    def totals(self) -> dict[str, Any]:
        """For the metrics: batches by status, and what was done since the server's start."""
        with self._lock:
            rows = {"completed": self._done["done"], "failed": self._done["failed"]}
            return {"batches": self._store.counts(), "rows": rows, **self._done}

    # Events of the runner

    def handle_events(self) -> None:
        """Handle all events that have come so far."""
        self._retry_unhandled()
        while True:
            try:
                event = self._events.get_nowait()
            except Empty:
                return
            if event is not None:
                self._try_to_handle(event)

    def _run(self) -> None:
        while not self._closed.is_set():
            try:
                event = self._events.get(timeout=TICK_SECONDS)
            except Empty:
                event = None
            self._retry_unhandled()
            if event is not None:
                self._try_to_handle(event)
            try:
                self.tick()
            except OutriderError as error:
                logger.error("%s", error)
                self._closed.wait(TICK_SECONDS)

    def _try_to_handle(self, event: Event, is_retry: bool = False) -> None:
        """Handle an event; if its change cannot be stored, keep the event for another try."""
        try:
            with self._lock:
                self._handle(event)
        except (OutriderError, OSError) as error:
            if not is_retry:
                logger.error("%s: %s; this is tried again", event.batch, error)
            self._unhandled.append(event)

    def _retry_unhandled(self) -> None:
        """Try the kept events again, in their order."""
        unhandled, self._unhandled = self._unhandled, []
        for event in unhandled:
            self._try_to_handle(event, is_retry=True)

    def _handle(self, event: Event) -> None:
        """Change the batch's state. Idempotent: a second try does what the first one could not."""
        batch = self._store.batch(event.batch)
        if batch is None or batch.status in ENDED:
            return
        match event:
            case Admitted(name, rows):
                if batch.ending is None:
                    batch = self._store.change(name, self._sets_in_progress(rows))
                    if self._is_over(batch):
                        self._store.change(name, self._sets_ending("expired"))
                        self._finalize(name)
                    else:
                        self._run_batch(batch)
                else:
                    self._finalize(name)  # its directory is not locked any more
            case Refused(name, errors):
                if batch.ending is None:
                    self._fail(name, [dict(each) for each in errors])
                else:
                    self._finalize(name)
            case Progress(name):
                counts = batch.shown["request_counts"]
                begun = Progress(name, counts["completed"], counts["failed"], 0, 0, 0, 0.0)
                pace = self._paces.setdefault(name, BatchPace(begun))
                self._count_for_metrics(pace.progress, event)
                pace.add(event, time.monotonic())
            case Left(name, whole):
                if batch.ending is not None:
                    self._finalize(name)
                elif whole:
                    self._store.change(name, self._sets_ending("completed", "finalizing"))
                    self._finalize(name)
            case Broken(name, sentence):
                if batch.ending is None:
                    told = {"object": "list", "data": [error_entry("job_error", sentence)]}

                    def breaks(batch: Batch) -> None:
                        batch.ending = "failed"
                        batch.shown["errors"] = told

                    self._store.change(name, breaks)
                    logger.error("%s: %s", name, sentence)
                self._finalize(name)

    def _count_for_metrics(self, before: Progress, now: Progress) -> None:
        """Add to the totals. Rows are counted over all processes that had the batch, the rest over the present one."""
        for name in self._done:
            known = getattr(before, name) if name in ("done", "failed") or now.tokens >= before.tokens else 0
            self._done[name] += max(0, getattr(now, name) - known)

    def tick(self) -> None:
        """Called regularly: expire batches, write files again that could not be written, and store counts."""
        with self._lock:
            for batch in self._store.unended():
                over = self._is_over(batch)
                # A batch in admission expires when that is done, so that each of its rows gets an error.
                checked = batch.status != "validating" or batch.model not in self.models
                if batch.ending is None and checked and over:
                    self._stop(self._store.change(batch.id, self._sets_ending("expired")))
                if (due := self._retry.get(batch.id)) is not None and time.monotonic() >= due:
                    del self._retry[batch.id]
                    self._finalize(batch.id)
            if time.monotonic() - self._counted > SECONDS_BETWEEN_COUNTS:
                self._counted = time.monotonic()
                self._reserve.fill()
                for name, pace in self._paces.items():
                    self._store.change(name, _counted(pace.progress.done, pace.progress.failed))

    def _resume(self, batch: Batch) -> None:
        if batch.ending is not None:
            self._finalize(batch.id)
        elif batch.model is None:
            self._fail(batch.id, [error_entry("model_not_found", "its rows ask for no model that is served here")])
        elif batch.model not in self.models:
            said = '%s waits: the model "%s" is not served any more; start outrider serve with it, or cancel the batch'
            logger.warning(said, batch.id, batch.model)
        elif batch.status == "validating":
            directory = self._folders.batch(batch.id)
            if any((directory / file).exists() for file in (INPUT, JOURNAL)):
                self.runner.admit(self._job(batch))
            else:
                said = "put back a copy of it and start outrider serve again"
                self._tell_waiting(batch.id, f"{directory / INPUT} is not there; {said}")
        else:
            counts = counts_of(self._folders.batch(batch.id))
            if counts is not None:
                self._store.change(batch.id, _counted(counts.done, counts.failed))
            self._run_batch(batch)

    def _is_over(self, batch: Batch) -> bool:
        """Whether the batch's window is over. Setting the system's clock while it runs does not change the window."""
        now = self._boot_seconds()
        return now >= self._window_ends.setdefault(batch.id, now + batch.shown["expires_at"] - self._now())

    def _tell_waiting(self, name: str, why: str) -> None:
        """Log why a batch waits, once for each reason."""
        if self._waiting.get(name) != why:
            logger.error("%s waits: %s, or cancel the batch", name, why)
        self._waiting[name] = why

    def _stop(self, batch: Batch) -> None:
        if batch.model in self.models and batch.id not in self._waiting:
            self.runner.stop(batch.id)
        else:
            self._finalize(batch.id)  # no process has it

    def _run_batch(self, batch: Batch) -> None:
        # The rows are in the journal.
        (self._folders.batch(batch.id) / INPUT).unlink(missing_ok=True)
        self.runner.run(self._job(batch))

    def _job(self, batch: Batch) -> BatchJob:
        assert batch.model is not None
        return BatchJob(batch.id, batch.model, batch.shown["endpoint"], self._folders.batch(batch.id))

    def _remove_unknown_batches(self) -> None:
        """Remove directories that a killed server left: of batches that it had not stored yet, or was deleting."""
        for directory in list(self._folders.batches.iterdir()):
            if not BATCH.fullmatch(directory.name) or directory.is_symlink() or not directory.is_dir():
                continue  # not a batch of ours
            batch = self._store.batch(directory.name)
            if batch is None:
                if {each.name for each in directory.iterdir()} <= {INPUT, LOCK}:
                    _remove(directory)
            elif batch.status in ENDED and not self._store.files_of(batch.id):
                if any(batch.shown[key] for key in FILE_IDS.values()):
                    _remove(directory)  # its client has deleted them
                else:
                    _discard(directory)

    # How batches end

    def _sets_in_progress(self, rows: int) -> Callable[[Batch], None]:
        def change(batch: Batch) -> None:
            batch.status = "in_progress"
            batch.shown["in_progress_at"] = int(self._now())
            batch.shown["request_counts"]["total"] = rows

        return change

    def _sets_ending(self, ending: str, status: str | None = None) -> Callable[[Batch], None]:
        def change(batch: Batch) -> None:
            batch.ending = ending
            if status is not None:
                batch.status = status
                batch.shown[f"{status}_at"] = int(self._now())

        return change

    def _fail(self, name: str, errors: list[dict[str, Any]]) -> Batch:
        def change(batch: Batch) -> None:
            batch.status = batch.ending = "failed"
            batch.shown["failed_at"] = int(self._now())
            batch.shown["errors"] = {"object": "list", "data": errors}

        failed = self._store.change(name, change)
        self._window_ends.pop(name, None)
        _discard(self._folders.batch(name))
        return failed

    def _finalize(self, name: str) -> None:
        if name not in self._finalizing:
            self._finalizing.add(name)
            self._finalizer.submit(self._write, name)

    def _write(self, name: str) -> None:
        """Write a batch's files, in the finalizer's thread: a million rows take a while."""
        try:
            self._write_files(name)
            self._no_space.discard(name)
        except JobDamagedError as error:
            self._tell_waiting(name, f"{without_advice(error)}; put back a copy of {JOURNAL}")
            self._retry[name] = time.monotonic() + FREED_SECONDS
        except OutriderError as error:
            if isinstance(error, NoSpaceError):
                self._no_space.add(name)
            logger.error("%s: %s; this is tried again", name, error)
            self._retry[name] = time.monotonic() + FREED_SECONDS
        except Exception:
            logger.exception("%s could not be written", name)
            self._retry[name] = time.monotonic() + FREED_SECONDS
        finally:
            self._finalizing.discard(name)

    def _write_files(self, name: str) -> None:
        batch = self._store.batch(name)
        assert batch is not None and batch.ending is not None
        directory, ending = self._folders.batch(name), batch.ending
        written, lost = self._write_to_directory(batch, directory, ending)
        now = int(self._now())
        files: list[File] = []
        counts, usage = batch.shown["request_counts"], None
        if written is not None:
            usage = usage_of(directory)
            counts = {"total": written.rows, "completed": written.done, "failed": written.failed}
            for path, rows, purpose in ((RESULTS, written.done, OUTPUT), (ERRORS, written.failed, ERROR_FILE)):
                if rows:
                    size = size_of(directory / path)
                    called = f"{name}_{'output' if purpose == OUTPUT else 'error'}.jsonl"
                    files.append(File(new_file_id(), now, size, called, purpose, name))

        def change(batch: Batch) -> None:
            batch.status = ending
            batch.shown[f"{ending}_at"] = now
            batch.shown["request_counts"] = counts
            batch.shown["usage"] = usage
            if lost is not None and _has_begun(batch):
                batch.shown["errors"] = {"object": "list", "data": [lost]}
            for file in files:
                batch.shown[FILE_IDS[file.purpose]] = file.id

        def end() -> Batch:
            return self._store.change(name, change, files)

        with self._lock:
            if ending == "cancelled":
                self._reserve.even_if_full(end)
            else:
                end()
            if not files:
                _discard(directory, written)
            self._paces.pop(name, None)
            self._waiting.pop(name, None)
            self._window_ends.pop(name, None)

    def _write_to_directory(
        self, batch: Batch, directory: Path, ending: str
    ) -> tuple[Counts | None, dict[str, Any] | None]:
        """Write results, errors and report: the numbers of rows in them, and an error entry about rows in no file."""
        try:
            try:
                return self._with_job_lock(batch, lambda: write_files(directory, ending)), None
            except NoSpaceError as error:
                # Batches are cancelled to free space, too, so from the second try on as little as possible is written.
                if ending != "cancelled" or batch.id not in self._no_space:
                    raise
                written = self._write_on_full_disk(batch)
                if written is not None and written.pending:
                    logger.error("%s: %s; rows that were not executed stand in no file", batch.id, error)
                    return written, error_entry(NO_SPACE, WAS_FULL)
                return written, None
        except JobDamagedError as error:
            if ending != "cancelled" and _has_begun(batch):
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
        if written is None and _has_begun(batch):
            raise gone(directory / JOURNAL)
        return written


def _has_begun(batch: Batch) -> bool:
    """Whether rows of the batch may be done."""
    return batch.shown["in_progress_at"] is not None


def _remove(directory: Path) -> None:
    shutil.rmtree(directory, ignore_errors=True)


def _discard(directory: Path, counted: Counts | None = None) -> None:
    """Remove the directory of a batch that ended without files, unless it may hold finished rows."""
    if has_done_rows(directory) if counted is None else counted.done:
        said = "%s ended without files, and %s holds rows that are done, or is damaged: outrider results %s writes them"
        logger.warning(said, directory.name, directory / JOURNAL, directory)
    else:
        _remove(directory)


def _counted(done: int, failed: int) -> Callable[[Batch], None]:
    def change(batch: Batch) -> None:
        batch.shown["request_counts"] |= {"completed": done, "failed": failed}

    return change


def _page(shown: list[dict[str, Any]], limit: int) -> dict[str, Any]:
    """A page of a list; ``shown`` has one entry beyond ``limit`` if there are more."""
    data = shown[:limit]
    ids = [each["id"] for each in data] or [None]
    return {"object": "list", "data": data, "first_id": ids[0], "last_id": ids[-1], "has_more": len(shown) > limit}


def _shown(name: str, asked: batch_requests.BatchRequest, now: int) -> dict[str, Any]:
    never = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")
    return {
        "id": name,
        "object": "batch",
        "endpoint": asked.endpoint,
        "model": None,
        "errors": None,
        "input_file_id": asked.input_file_id,
        "completion_window": asked.completion_window,
        "status": "validating",
        "output_file_id": None,
        "error_file_id": None,
        "created_at": now,
        "expires_at": now + asked.seconds,
        **{f"{status}_at": None for status in never},
        "request_counts": {"total": 0, "completed": 0, "failed": 0},
        "usage": None,
        "metadata": asked.metadata,
    }
