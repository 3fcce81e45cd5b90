"""Processes in which the inputs of batches are checked. One stays for the next batch, since to start one takes seconds.

Small inputs have a process of their own, so that none waits for a large one.
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
from outrider.runner.serve.running import FREED_SECONDS, Admitted, BatchJob, Broken, Hear, Left, Refused
from outrider.workers.errors import JobError

# A few thousand rows, which take a second or two.
SMALL_BYTES = 1 << 20
# A machine that is short of memory may have killed the process for another's sake; a batch over which it dies so often is
# given up. Behind a death, and as long again behind each further one.
MOST_DEATHS, PAUSE_SECONDS = 3, 5.0


@dataclass(slots=True)
class _Lane:
    """Inputs that are checked one after the other. A process that ``stays`` is kept when there are no more."""

    stays: bool
    waiting: deque[BatchJob] = field(default_factory=deque)
    child: Child | None = None
    # What its process is at.
    job: BatchJob | None = None
    # It was killed: until it has ended, nothing more is asked of it, and no other is started.
    leaving: bool = False

    def kill(self) -> None:
        if self.child is not None:
            self.leaving = True
            self.child.kill()


class Admissions:
    """``hear`` gets ``Admitted``, ``Refused`` or ``Broken`` of each batch, ``Left`` if it is stopped before.

    One whose journal could not be written for want of space, or whose process died, is checked again in a while; where
    this program's files have ``changed``, which no batch is to blame for, until the server is started again.
    """

    def __init__(
        self,
        specs: Mapping[str, JobSpec],
        hear: Hear,
        say: Callable[[str], None],
        child: Callable[..., Child] = Child,
        changed: Callable[[], bool] = lambda: False,
    ) -> None:
        self._specs = specs
        self._hear = hear
        self._say = say
        self._child = child
        self._changed = changed
        self._lock = threading.RLock()
        self._small, self._large = _Lane(stays=True), _Lane(stays=False)
        # When they are checked again.
        self._later: dict[str, tuple[float, BatchJob]] = {}
        # Of the process, over a batch that is not checked yet.
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
                self._hear(Left(batch, whole=False))
            for lane in (self._small, self._large):
                if lane.job is not None and lane.job.batch == batch:
                    lane.kill()
                elif any(job.batch == batch for job in lane.waiting):
                    lane.waiting = deque(job for job in lane.waiting if job.batch != batch)
                    self._deaths.pop(batch, None)
                    self._hear(Left(batch, whole=False))

    def look(self) -> None:
        """Now and then: the process that stays is there before anybody asks; what could not be started is tried again."""
        with self._lock:
            if not self._closing and self._small.child is None:
                self._start(self._small)
            now = time.monotonic()
            for batch in [batch for batch, (due, _) in self._later.items() if now >= due]:
                self.add(self._later.pop(batch)[1])
            for lane in (self._small, self._large):
                self._next(lane)

    def close(self) -> list[Child]:
        """Those that are to be waited for. An admission has written all or nothing, and is begun anew."""
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
                    self._hear(Admitted(job.batch, rows))
                case {"refused": errors}:
                    self._hear(Refused(job.batch, errors))
                case {"later": sentence}:
                    self._say(f"{job.batch}: {sentence}; this is tried again")
                    self._later[job.batch] = time.monotonic() + FREED_SECONDS, job
                case {"broken": sentence} if self._changed():
                    self._blame_own_files(job, sentence)
                case {"broken": sentence}:
                    self._hear(Broken(job.batch, sentence))
            lane.job = None
            self._deaths.pop(job.batch, None)
            # One that has stumbled may do so again.
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
                    # The service knows whether it was asked to stop: what it wanted then comes before this.
                    self._hear(Broken(job.batch, f"its rows could not be checked: {complaint}"))
                else:
                    self._say(f"{job.batch}: {complaint}; its rows are checked again")
                    self._deaths[job.batch] = deaths
                    self._later[job.batch] = time.monotonic() + deaths * PAUSE_SECONDS, job
            self._next(lane)

    def _blame_own_files(self, job: BatchJob, sentence: str) -> None:
        self._say(f"{job.batch}: {sentence}; {CHANGED}")
        self._later[job.batch] = time.monotonic() + FREED_SECONDS, job


def _size(job: BatchJob) -> int:
    """0 where it is not there: the journal is filled already, which is all there is to find."""
    try:
        return (job.directory / INPUT).stat().st_size
    except FileNotFoundError:
        return 0


def options_of(spec: JobSpec) -> dict[str, Any]:
    """As a process of the server's is told of them."""
    return spec.model_dump(mode="json", exclude_defaults=True)
