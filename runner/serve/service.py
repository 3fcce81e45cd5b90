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
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from outrider.runner.job.directory import JOURNAL, REPORT
from outrider.runner.job.lock import LOCK
from outrider.runner.job.results import sync_folder
from outrider.runner.serve import batch_changes, batch_requests
from outrider.runner.serve.api_errors import ApiError, no_such
from outrider.runner.serve.batch_files import counts_of, discard_directory, draw_report, remove_directory
from outrider.runner.serve.batch_requests import error_entry
from outrider.runner.serve.files import Files
from outrider.runner.serve.finalizing import FULL, NO_SPACE, Finalizer
from outrider.runner.serve.listing import page_of
from outrider.runner.serve.names import BATCH, FILE, INPUT, Folders, new_batch_id
from outrider.runner.serve.paces import Pace, Paces
from outrider.runner.serve.reserve import Reserve
from outrider.runner.serve.running import Admitted, BatchJob, Broken, Event, Left, OnEvent, Progress, Refused, Runner
from outrider.runner.serve.store import ENDED, Batch, File, Store
from outrider.runner.validation_errors import short
from outrider.workers.errors import JobError, OutriderError

logger = logging.getLogger("outrider.serve")

TICK_SECONDS = 0.5
# The counts that the API shows are stored this often; right after a start they may be this old.
SECONDS_BETWEEN_COUNTS = 30.0


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
        self._paces = Paces()
        self._lock = threading.RLock()
        self.files = Files(store, folders, self._reserve, self._lock)
        self._finalizer = Finalizer(store, folders, self._reserve, self._lock, now, self._forget)
        self._closed = threading.Event()
        # Set when the server stops: open requests are refused, even while they are being sent.
        self.stopping = threading.Event()
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
        self._finalizer.close()
        self._store.close()

    # Batches

    def create(self, body: object) -> dict[str, Any]:
        asked = batch_requests.parse(body)
        file = self._store.file(asked.input_file_id) if FILE.fullmatch(asked.input_file_id) else None
        if file is None or file.batch is not None:
            raise ApiError(400, f"No such File object: {short(asked.input_file_id)}", "input_file_id", "not_found")
        name, now = new_batch_id(), int(self._now())
        batch = Batch(name, None, "validating", None, batch_changes.begun(name, asked, now))
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
                remove_directory(directory)
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
        return page_of([self._with_counts(each) for each in self._store.batches(number, limit + 1)], limit)

    def cancel(self, name: str) -> dict[str, Any]:
        with self._lock:
            batch = self.batch(name)
            if batch.status == "cancelling":
                return self._with_counts(batch)
            runs = batch.status in ("validating", "in_progress") and batch.ending is None
            if not runs and name not in self._finalizer.waiting:
                said = f"Cannot cancel a batch with status '{batch.status}'."
                raise ApiError(409, said, "status", "batch_not_cancellable")
            ends = batch_changes.ending("cancelled", self._now(), "cancelling")
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

    def pace(self, name: str) -> Pace | None:
        return self._paces.get(name)

    def _with_counts(self, batch: Batch) -> dict[str, Any]:
        if batch.status in ENDED:
            return batch.shown
        shown = dict(batch.shown)
        if batch.id in self._finalizer.no_space and shown["errors"] is None:
            shown["errors"] = batch_changes.error_list([error_entry(NO_SPACE, FULL)])
        if (pace := self._paces.get(batch.id)) is not None:
            counted = {"completed": pace.progress.done, "failed": pace.progress.failed}
            shown["request_counts"] = {**shown["request_counts"], **counted}
        return shown

    def totals(self) -> dict[str, Any]:
        """For the metrics: batches by status, and what was done since the server's start."""
        with self._lock:
            done = self._paces.totals
            rows = {"completed": done["done"], "failed": done["failed"]}
            return {"batches": self._store.counts(), "rows": rows, **done}

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
                    batch = self._store.change(name, batch_changes.in_progress(rows, self._now()))
                    if self._is_over(batch):
                        self._store.change(name, batch_changes.ending("expired", self._now()))
                        self._finalizer.begin(name)
                    else:
                        self._run_batch(batch)
                else:
                    self._finalizer.begin(name)  # its directory is not locked any more
            case Refused(name, errors):
                if batch.ending is None:
                    self._fail(name, [dict(each) for each in errors])
                else:
                    self._finalizer.begin(name)
            case Progress():
                self._paces.add(event, batch.shown["request_counts"])
            case Left(name, whole):
                if batch.ending is not None:
                    self._finalizer.begin(name)
                elif whole:
                    self._store.change(name, batch_changes.ending("completed", self._now(), "finalizing"))
                    self._finalizer.begin(name)
            case Broken(name, sentence):
                if batch.ending is None:
                    self._store.change(name, batch_changes.broken(error_entry("job_error", sentence)))
                    logger.error("%s: %s", name, sentence)
                self._finalizer.begin(name)

    def tick(self) -> None:
        """Called regularly: expire batches, write files again that could not be written, and store counts."""
        with self._lock:
            for batch in self._store.unended():
                over = self._is_over(batch)
                # A batch in admission expires when that is done, so that each of its rows gets an error.
                checked = batch.status != "validating" or batch.model not in self.models
                if batch.ending is None and checked and over:
                    self._stop(self._store.change(batch.id, batch_changes.ending("expired", self._now())))
                self._finalizer.retry_if_due(batch.id)
            if time.monotonic() - self._counted > SECONDS_BETWEEN_COUNTS:
                self._counted = time.monotonic()
                self._reserve.fill()
                for progress in self._paces.progresses():
                    self._store.change(progress.batch, batch_changes.counted(progress.done, progress.failed))

    def _resume(self, batch: Batch) -> None:
        if batch.ending is not None:
            self._finalizer.begin(batch.id)
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
                self._finalizer.tell_waiting(batch.id, f"{directory / INPUT} is not there; {said}")
        else:
            counts = counts_of(self._folders.batch(batch.id))
            if counts is not None:
                self._store.change(batch.id, batch_changes.counted(counts.done, counts.failed))
            self._run_batch(batch)

    def _is_over(self, batch: Batch) -> bool:
        """Whether the batch's window is over. Setting the system's clock while it runs does not change the window."""
        now = self._boot_seconds()
        return now >= self._window_ends.setdefault(batch.id, now + batch.shown["expires_at"] - self._now())

    def _stop(self, batch: Batch) -> None:
        if batch.model in self.models and batch.id not in self._finalizer.waiting:
            self.runner.stop(batch.id)
        else:
            self._finalizer.begin(batch.id)  # no process has it

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
                    remove_directory(directory)
            elif batch.status in ENDED and not self._store.files_of(batch.id):
                if any(batch.shown[key] for key in batch_changes.FILE_IDS.values()):
                    remove_directory(directory)  # its client has deleted them
                else:
                    discard_directory(directory)

    # How batches end

    def _fail(self, name: str, errors: list[dict[str, Any]]) -> Batch:
        failed = self._store.change(name, batch_changes.failed(errors, self._now()))
        self._forget(name)
        discard_directory(self._folders.batch(name))
        return failed

    def _forget(self, name: str) -> None:
        self._paces.forget(name)
        self._window_ends.pop(name, None)
