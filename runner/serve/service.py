"""The batches: what clients ask, what the runner tells, and what becomes of each batch, durable before anybody hears of it.

    validating ──> in_progress ──> finalizing ──> completed
        │               │
        │               ├──(its window is over)────────────> expired
        ├───────────────┴──> cancelling ──────────────────> cancelled
        └──> failed

``ending`` is what a batch is going to be. It is written before its files are, so a server that was killed in between writes
them again.
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
    Hear,
    Left,
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
# How far a batch is stands in its journal; what the API shows right after a start may be so old.
SECONDS_BETWEEN_COUNTS = 30.0
# Speed is that of the last while.
SPEED_SECONDS = 60.0
MOST_DELETED = 10_000
# Where the API shows a batch's files.
FILE_IDS = {OUTPUT: "output_file_id", ERROR_FILE: "error_file_id"}
NO_SPACE = "no_space"
FULL = "the server's disk is full, or it can open no more files: the batch's files are written once that is over"
WAS_FULL = "the server's disk was full, or it could open no more files: rows that were not executed stand in no file"


@dataclass(slots=True)
class Pace:
    """How far a batch is, and how fast it has been lately."""

    progress: Progress
    seen: deque[tuple[float, Progress]] = field(default_factory=deque)

    def add(self, progress: Progress, now: float) -> None:
        if progress.tokens < self.progress.tokens:
            # Another process has taken the batch up, and counts anew what it writes.
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


def _passed() -> float:
    """Seconds that no setting of the clock changes, those that the machine slept included."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Service:
    """``start`` takes up what an earlier server has left. Events are handled in one thread, after each other."""

    def __init__(
        self,
        store: Store,
        folders: Folders,
        models: Sequence[str],
        runner: Callable[[Hear], Runner],
        now: Callable[[], float] = time.time,
        passed: Callable[[], float] = _passed,
    ) -> None:
        self._store = store
        self._folders = folders
        self._reserve = Reserve(folders.data)
        self.models = list(models)
        self._now = now
        self._passed = passed
        # When the windows are over that this server has seen, as ``passed`` counts.
        self._over: dict[str, float] = {}
        # None wakes whoever waits.
        self._events: SimpleQueue[Event | None] = SimpleQueue()
        self.runner = runner(self._events.put)
        self._paces: dict[str, Pace] = {}
        # What was done since the start, for the metrics.
        self._done = {"done": 0, "failed": 0, "tokens": 0, "proposed": 0, "accepted": 0}
        self._lock = threading.RLock()
        self._closed = threading.Event()
        # Open requests are refused: those that are being sent, too.
        self.stopping = threading.Event()
        self._finalizer = ThreadPoolExecutor(1, "finalize")
        self._finalizing: set[str] = set()
        # Where files stood in the list, the latest that were deleted.
        self._deleted: dict[str, int] = {}
        self._retry: dict[str, float] = {}
        # Those that nobody can go on with until something is put back, and for what.
        self._waiting: dict[str, str] = {}
        # Those whose files found no space.
        self._no_space: set[str] = set()
        # What was told and could not be written.
        self._unhandled: list[Event] = []
        self._counted = 0.0
        self._thread = threading.Thread(target=self._run, name="batches", daemon=True)

    def start(self) -> None:
        with self._lock:
            self._sweep()
            self._reserve.fill()
            for batch in self._store.unended():
                self._resume(batch)
        self._thread.start()

    def refuse_requests(self) -> None:
        """The server is being stopped: whoever is still sending or waiting is told so."""
        self.stopping.set()
        self.runner.refuse_requests()

    def close(self, at_once: bool = False) -> None:
        """Rows under way may end, and are recorded; what is left is for the next start."""
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
        # Whoever deletes what a page has listed asks for the next one by the last of them.
        behind = None if after is None else self._deleted.get(after) or self.file(after).number
        found = self._store.files(purpose, behind, limit + 1, newest_first)
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
        """Of what a batch wrote, its journal holds a copy: that goes with the last of its files."""
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
        # Nobody waits for it: a compressed line may take minutes to read.
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
        """By a second name, so that the client may delete his."""
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
        behind = None if after is None else self.batch(after).number
        return _page([self._with_counts(each) for each in self._store.batches(behind, limit + 1)], limit)

    def cancel(self, name: str) -> dict[str, Any]:
        with self._lock:
            batch = self.batch(name)
            if batch.status == "cancelling":
                return self._with_counts(batch)
            runs = batch.status in ("validating", "in_progress") and batch.ending is None
            if not runs and name not in self._waiting:
                said = f"Cannot cancel a batch with status '{batch.status}'."
                raise ApiError(409, said, "status", "batch_not_cancellable")
            batch = self._reserve.even_if_full(lambda: self._store.change(name, self._ends("cancelled", "cancelling")))
            self._stop(batch)
            return self._with_counts(batch)

    def has_report(self, name: str) -> bool:
        directory = self._folders.batch(name)
        return any((directory / file).exists() for file in (REPORT, JOURNAL))

    def report_of(self, name: str) -> Path:
        """Of a batch that runs it is drawn now."""
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
        if batch.id in self._no_space and shown["errors"] is None:
            shown["errors"] = {"object": "list", "data": [error_entry(NO_SPACE, FULL)]}
        if (pace := self._paces.get(batch.id)) is not None:
            counted = {"completed": pace.progress.done, "failed": pace.progress.failed}
            shown["request_counts"] = {**shown["request_counts"], **counted}
        return shown

    def totals(self) -> dict[str, Any]:
        """For the metrics: batches by status, and what was done since the start."""
        with self._lock:
            rows = {"completed": self._done["done"], "failed": self._done["failed"]}
            return {"batches": self._store.counts(), "rows": rows, **self._done}

    # What the runner tells

    def handle_events(self) -> None:
        """All that have come so far."""
        self._handle_again()
        while True:
            try:
                event = self._events.get_nowait()
            except Empty:
                return
            if event is not None:
                self._try(event)

    def _run(self) -> None:
        while not self._closed.is_set():
            try:
                event = self._events.get(timeout=TICK_SECONDS)
            except Empty:
                event = None
            self._handle_again()
            if event is not None:
                self._try(event)
            try:
                self.tick()
            except OutriderError as error:
                logger.error("%s", error)
                self._closed.wait(TICK_SECONDS)

    def _try(self, event: Event, again: bool = False) -> None:
        """What cannot be written now is kept, since nobody tells it twice; the next start would find it out by itself."""
        try:
            with self._lock:
                self._handle(event)
        except (OutriderError, OSError) as error:
            if not again:
                logger.error("%s: %s; this is tried again", event.batch, error)
            self._unhandled.append(event)

    def _handle_again(self) -> None:
        """In the order in which they came."""
        unhandled, self._unhandled = self._unhandled, []
        for event in unhandled:
            self._try(event, again=True)

    def _handle(self, event: Event) -> None:
        """Done once more, it does what was left undone."""
        batch = self._store.batch(event.batch)
        if batch is None or batch.status in ENDED:
            return
        match event:
            case Admitted(name, rows):
                if batch.ending is None:
                    batch = self._store.change(name, self._begins(rows))
                    if self._is_over(batch):
                        self._store.change(name, self._ends("expired"))
                        self._finalize(name)
                    else:
                        self._run_batch(batch)
                else:
                    self._finalize(name)  # nobody holds its directory any more
            case Refused(name, errors):
                if batch.ending is None:
                    self._fail(name, [dict(each) for each in errors])
                else:
                    self._finalize(name)
            case Progress(name):
                counts = batch.shown["request_counts"]
                begun = Progress(name, counts["completed"], counts["failed"], 0, 0, 0, 0.0)
                pace = self._paces.setdefault(name, Pace(begun))
                self._count(pace.progress, event)
                pace.add(event, time.monotonic())
            case Left(name, whole):
                if batch.ending is not None:
                    self._finalize(name)
                elif whole:
                    self._store.change(name, self._ends("completed", "finalizing"))
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

    def _count(self, before: Progress, now: Progress) -> None:
        """Rows are the batch's, over all processes that have had it; the rest is what this one has done."""
        for name in self._done:
            known = getattr(before, name) if name in ("done", "failed") or now.tokens >= before.tokens else 0
            self._done[name] += max(0, getattr(now, name) - known)

    def tick(self) -> None:
        """What time brings: windows that are over, files that could not be written, counts that are kept."""
        with self._lock:
            for batch in self._store.unended():
                over = self._is_over(batch)
                # One that is being checked expires when its rows are known, each of which then has its error.
                checked = batch.status != "validating" or batch.model not in self.models
                if batch.ending is None and checked and over:
                    self._stop(self._store.change(batch.id, self._ends("expired")))
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
        """A clock that is set while a batch runs makes its window neither shorter nor longer."""
        passed = self._passed()
        over = self._over.setdefault(batch.id, passed + batch.shown["expires_at"] - self._now())
        return passed >= over

    def _tell_waiting(self, name: str, why: str) -> None:
        """Once, however often it is tried again."""
        if self._waiting.get(name) != why:
            logger.error("%s waits: %s, or cancel the batch", name, why)
        self._waiting[name] = why

    def _stop(self, batch: Batch) -> None:
        if batch.model in self.models and batch.id not in self._waiting:
            self.runner.stop(batch.id)
        else:
            self._finalize(batch.id)  # nobody has it

    def _run_batch(self, batch: Batch) -> None:
        # The rows stand in the journal by now.
        (self._folders.batch(batch.id) / INPUT).unlink(missing_ok=True)
        self.runner.run(self._job(batch))

    def _job(self, batch: Batch) -> BatchJob:
        assert batch.model is not None
        return BatchJob(batch.id, batch.model, batch.shown["endpoint"], self._folders.batch(batch.id))

    def _sweep(self) -> None:
        """What a server has left that was killed before it had told anybody of a batch, or amid its removal."""
        for directory in list(self._folders.batches.iterdir()):
            if not BATCH.fullmatch(directory.name) or directory.is_symlink() or not directory.is_dir():
                continue  # whatever else somebody keeps there
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

    def _begins(self, rows: int) -> Callable[[Batch], None]:
        def change(batch: Batch) -> None:
            batch.status = "in_progress"
            batch.shown["in_progress_at"] = int(self._now())
            batch.shown["request_counts"]["total"] = rows

        return change

    def _ends(self, ending: str, status: str | None = None) -> Callable[[Batch], None]:
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
        self._over.pop(name, None)
        _discard(self._folders.batch(name))
        return failed

    def _finalize(self, name: str) -> None:
        if name not in self._finalizing:
            self._finalizing.add(name)
            self._finalizer.submit(self._write, name)

    def _write(self, name: str) -> None:
        """In a thread of its own: a million rows take a while."""
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
        written, lost = None, None
        try:
            try:
                written = self._written(batch, lambda: write_files(directory, ending))
            except NoSpaceError as error:
                # Batches are cancelled to free space, too: from the second try on it takes as little as can be.
                if ending != "cancelled" or name not in self._no_space:
                    raise
                written = self._written_on_full_disk(batch)
                if written is not None and written.pending:
                    logger.error("%s: %s; rows that were not executed stand in no file", name, error)
                    lost = error_entry(NO_SPACE, WAS_FULL)
        except JobDamagedError as error:
            if ending != "cancelled" and _has_begun(batch):
                raise
            lost = error_entry("job_error", shown_to_clients(without_advice(error), directory, name))
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
            self._over.pop(name, None)

    def _written_on_full_disk(self, batch: Batch) -> Counts | None:
        """Rows that have ended, or where even they find no room, none: then they are read from the journal."""
        directory = self._folders.batch(batch.id)
        try:
            return self._reserve.even_if_full(lambda: self._written(batch, lambda: write_ended_rows(directory)))
        except NoSpaceError:
            return self._reserve.even_if_full(lambda: self._written(batch, lambda: leave_unwritten(directory)))

    def _written(self, batch: Batch, write: Callable[[], Counts | None]) -> Counts | None:
        """None where no row was ever admitted."""
        directory, written = self._folders.batch(batch.id), None
        if (directory / JOURNAL).exists():
            with job_lock(directory):
                written = write()
        if written is None and _has_begun(batch):
            raise gone(directory / JOURNAL)
        return written


def _has_begun(batch: Batch) -> bool:
    """Rows of it may be done."""
    return batch.shown["in_progress_at"] is not None


def _remove(directory: Path) -> None:
    shutil.rmtree(directory, ignore_errors=True)


def _discard(directory: Path, counted: Counts | None = None) -> None:
    """Of a batch that has ended without files. Rows that are done are never deleted unless a client says so."""
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
    """One was asked for too many, to know whether there are more."""
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
