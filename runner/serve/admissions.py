"""The server's side of admission processes. Small inputs have one of their own, so that they do not wait for a large one.

The process for small inputs is kept between batches, since starting one takes seconds.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from outrider.runner.options.job import JobSpec
from outrider.runner.serve.link import Child, Message
from outrider.runner.serve.names import INPUT
from outrider.runner.serve.own_files import CHANGED
from outrider.runner.serve.running import FREED_SECONDS, Admitted, BatchJob, Broken, Left, OnEvent, Refused
from outrider.workers.errors import JobError

# A few thousand rows, which take a second or two.
SMALL_BYTES = 1 << 20
# A batch fails when the process has died on it this often (the kernel may kill it for want of memory). After the n-th death
# the batch waits n times the pause.
MOST_DEATHS, PAUSE_SECONDS = 3, 5.0


@dataclass(slots=True)
class _Lane:
    """A queue of inputs and their process; with ``stays`` the process is kept when the queue is empty."""

    stays: bool
    waiting: deque[BatchJob] = field(default_factory=deque)
    child: Child | None = None
    # The batch that its process checks now.
    job: BatchJob | None = None
    # The process was killed and has not ended yet: no batch is sent to it, and no other process is started.
    leaving: bool = False

    def kill(self) -> None:
        if self.child is not None:
            self.leaving = True
            self.child.kill()


class Admissions:
    """Checks the rows of batches. Events: ``Admitted``, ``Refused`` or ``Broken`` for each, or ``Left`` if it is stopped.

    A batch is checked again later if the disk was full or the process died. If outrider's own files have ``changed``, no
    batch is blamed, and batches are tried again until the server is restarted.
    """

    def __init__(
        self,
        specs: Mapping[str, JobSpec],
        on_event: OnEvent,
        say: Callable[[str], None],
        child: Callable[..., Child] = Child,
        changed: Callable[[], bool] = lambda: False,
    ) -> None:
        self._specs = specs
        self._on_event = on_event
        self._say = say
        self._child = child
        self._changed = changed
        self._lock = threading.RLock()
        self._small, self._large = _Lane(stays=True), _Lane(stays=False)
        # Batches that are checked again, and when.
        self._later: dict[str, tuple[float, BatchJob]] = {}
        # How often the process has died on a batch.
        self._deaths: dict[str, int] = {}
        self._closing = False

    def add(self, job: BatchJob) -> None:
        with self._lock:
            lane = self._small if _size(job) <= SMALL_BYTES else self._large
            lane.waiting.append(job)
            self._next(lane)

    def stop(self, batch: str) -> None:
        with self._lock:
            if self._later.pop(batch, None) is not None:
                self._deaths.pop(batch, None)
                self._on_event(Left(batch, whole=False))
            for lane in (self._small, self._large):
                if lane.job is not None and lane.job.batch == batch:
                    lane.kill()
                elif any(job.batch == batch for job in lane.waiting):
                    lane.waiting = deque(job for job in lane.waiting if job.batch != batch)
                    self._deaths.pop(batch, None)
                    self._on_event(Left(batch, whole=False))

    def look(self) -> None:
        """Called regularly: start the process for small inputs beforehand, and try again what is due."""
        with self._lock:
            if not self._closing and self._small.child is None:
                self._start(self._small)
            now = time.monotonic()
            for batch in [batch for batch, (due, _) in self._later.items() if now >= due]:
                self.add(self._later.pop(batch)[1])
            for lane in (self._small, self._large):
                self._next(lane)

    def close(self) -> list[Child]:
        """Kill the processes and return them, to be waited for. An interrupted admission has written nothing."""
        with self._lock:
            self._closing = True
            children = [lane.child for lane in (self._small, self._large) if lane.child is not None]
            for child in children:
                child.kill()
            return children

    def _next(self, lane: _Lane) -> None:
        if self._closing or lane.leaving or lane.job is not None or not lane.waiting:
            return
        if lane.child is None and not self._start(lane):
            return
        assert lane.child is not None
        job = lane.job = lane.waiting.popleft()
        spec = self._specs[job.model].model_copy(update={"input": job.directory / INPUT, "out": job.directory})
        asked = {"admit": job.batch, "options": options_of(spec), "endpoint": job.endpoint, "model": job.model}
        lane.child.send(asked)

    def _start(self, lane: _Lane) -> bool:
        models = [options_of(spec) for spec in self._specs.values()] if lane.stays else []
        ended = lambda complaint: self._ended(lane, complaint)  # noqa: E731
        try:
            lane.child = self._child("admission_child", {"models": models}, lambda said: self._told(lane, said), ended)
        except JobError as error:
            self._say(f"{error}; this is tried again")
        return lane.child is not None

    def _told(self, lane: _Lane, said: Message) -> None:
        with self._lock:
            job = lane.job
            if job is None:
                return
            match said:
                case {"note": note}:
                    self._say(f"{job.batch}: {note}")
                    return
                case {"admitted": rows}:
                    self._on_event(Admitted(job.batch, rows))
                case {"refused": errors}:
                    self._on_event(Refused(job.batch, errors))
                case {"later": sentence}:
                    self._say(f"{job.batch}: {sentence}; this is tried again")
                    self._later[job.batch] = time.monotonic() + FREED_SECONDS, job
                case {"broken": sentence} if self._changed():
                    self._blame_own_files(job, sentence)
                case {"broken": sentence}:
                    self._on_event(Broken(job.batch, sentence))
            lane.job = None
            self._deaths.pop(job.batch, None)
            # After an unexpected error the process is replaced.
            if "broken" in said or not (lane.stays or lane.waiting):
                lane.kill()
            else:
                self._next(lane)

    def _ended(self, lane: _Lane, complaint: str) -> None:
        with self._lock:
            job, killed = lane.job, lane.leaving
            lane.job, lane.child, lane.leaving = None, None, False
            if self._closing:
                return
            if job is not None and not killed and self._changed():
                self._blame_own_files(job, complaint)
            elif job is not None:
                deaths = self._deaths.pop(job.batch, 0) + 1
                if killed or deaths >= MOST_DEATHS:
                    # If the service has asked to stop the batch, it ignores this.
                    self._on_event(Broken(job.batch, f"its rows could not be checked: {complaint}"))
                else:
                    self._say(f"{job.batch}: {complaint}; its rows are checked again")
                    self._deaths[job.batch] = deaths
                    self._later[job.batch] = time.monotonic() + deaths * PAUSE_SECONDS, job
            self._next(lane)

    def _blame_own_files(self, job: BatchJob, sentence: str) -> None:
        self._say(f"{job.batch}: {sentence}; {CHANGED}")
        self._later[job.batch] = time.monotonic() + FREED_SECONDS, job


def _size(job: BatchJob) -> int:
    """The input's size; 0 if it is missing, since the journal is filled then."""
    try:
        return (job.directory / INPUT).stat().st_size
    except FileNotFoundError:
        return 0


def options_of(spec: JobSpec) -> dict[str, Any]:
    """A job's options as sent to a process of the server."""
    return spec.model_dump(mode="json", exclude_defaults=True)
