"""Runs batches (the ``Runner`` of ``running.py``): admission processes, and one model's process at a time, by turns.

A model's process that dies is restarted and continues from the journals. If it dies again and again without a row ending in
between, its batches fail.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from outrider.runner.options.job import JobSpec
from outrider.runner.serve.admissions import Admissions, options_of
from outrider.runner.serve.link import Child, Message
from outrider.runner.serve.names import shown_to_clients
from outrider.runner.serve.own_files import CHANGED
from outrider.runner.serve.running import Answer, BatchJob, Broken, Failure, Left, OnEvent, Progress
from outrider.workers.errors import JobError

LOOK_SECONDS = 0.5
# Deaths of a model's process without an ended row in between after which its batches fail.
MOST_DEATHS = 10
# The pause before a restart, doubled with each further death.
PAUSE_SECONDS, LONGEST_PAUSE = 2.0, 60.0
GONE = Failure(503, "the model was taken away before the answer was whole; ask again")
CLOSING = Failure(503, "the server is being stopped")
UPDATED = Failure(503, "the server's files have changed, and whoever runs it has to start it again; ask again then")
AWAY, LOADING, LOADED, LEAVING = "waiting", "loading", "loaded", "leaving"


@dataclass(slots=True)
class _Asked:
    """A single request; ``begun``: its client has been sent a part of the answer."""

    entry: Mapping[str, Any]
    streamed: bool
    on_answer: Callable[[Answer], None]
    begun: bool = False


@dataclass(slots=True)
class _Model:
    name: str
    spec: JobSpec
    state: str = AWAY
    child: Child | None = None
    since: float = 0.0
    batches: dict[str, BatchJob] = field(default_factory=dict)
    # Batches with other options than now, or an unreadable journal: they wait until the server is restarted or they stop.
    suspended: dict[str, BatchJob] = field(default_factory=dict)
    stopping: set[str] = field(default_factory=set)
    asked: dict[str, _Asked] = field(default_factory=dict)
    deaths: int = 0
    not_before: float = 0.0
    ended_rows: dict[str, int] = field(default_factory=dict)
    # The error that its process reported before it ended.
    error: str | None = None
    # The error would be the same on another try.
    hopeless: bool = False

    @property
    def wanted(self) -> bool:
        return bool(self.batches or self.asked)


class ModelHosts:
    """``turn``: the seconds that a model stays loaded while batches wait for other models.

    If outrider's own files have ``changed``, deaths are not counted, and batches wait until the server is restarted.
    """

    def __init__(
        self,
        specs: Mapping[str, JobSpec],
        on_event: OnEvent,
        say: Callable[[str], None],
        turn: float,
        child: Callable[..., Child] = Child,
        changed: Callable[[], bool] = lambda: False,
    ) -> None:
        self._models = {name: _Model(name, spec) for name, spec in specs.items()}
        self._on_event = on_event
        self._say = say
        self._turn = turn
        self._child = child
        self._lock = threading.RLock()
        self._closing = threading.Event()
        self._answering = True
        self._requests = itertools.count()
        self._changed = changed
        self._admissions = Admissions(specs, on_event, say, child, changed)
        # Index of the model that was loaded last; the next turn begins after it.
        self._last = -1
        threading.Thread(target=self._run, name="turns", daemon=True).start()

    # Requests of the service

    def admit(self, job: BatchJob) -> None:
        self._admissions.add(job)

    def run(self, job: BatchJob) -> None:
        with self._lock:
            model = self._models[job.model]
            model.batches[job.batch] = job
            if model.child is not None and model.state != LEAVING:
                _give(model.child, job)

    def stop(self, batch: str) -> None:
        with self._lock:
            self._admissions.stop(batch)
            for model in self._models.values():
                suspended = model.suspended.pop(batch, None) is not None
                if model.batches.pop(batch, None) is None and not suspended:
                    continue
                if suspended or model.child is None:
                    self._on_event(Left(batch, whole=False))
                else:
                    model.stopping.add(batch)
                    model.child.send({"stop": batch})

    def ask(
        self, model: str, entry: Mapping[str, Any], streamed: bool, on_answer: Callable[[Answer], None]
    ) -> Callable[[], None]:
        request = f"request-{next(self._requests)}"
        with self._lock:
            asked = self._models[model]
            if not self._answering:
                on_answer(Answer(error=CLOSING))
                return lambda: None
            asked.asked[request] = _Asked(entry, streamed, on_answer)
            if asked.child is not None and asked.state != LEAVING:
                asked.child.send({"ask": request, "entry": entry, "streamed": streamed})

        def take_back() -> None:
            with self._lock:
                if asked.asked.pop(request, None) is not None and asked.child is not None:
                    asked.child.send({"take_back": request})

        return take_back

    def refuse_requests(self) -> None:
        with self._lock:
            self._answering = False
            for model in self._models.values():
                if model.child is not None:
                    for request in model.asked:
                        model.child.send({"take_back": request})
                self._refuse_all(model, CLOSING)

    def state(self) -> Mapping[str, str]:
        with self._lock:
            return {name: model.state for name, model in self._models.items()}

    def close(self, at_once: bool) -> None:
        with self._lock:
            self._closing.set()
            self._answering = False
            children = [model.child for model in self._models.values() if model.child is not None]
            children += self._admissions.close()
            for model in self._models.values():
                if model.child is not None:
                    model.child.send({"close": "at once" if at_once else "drain"})
        for child in children:
            child.wait()
        with self._lock:
            for model in self._models.values():
                self._refuse_all(model, CLOSING)

    # Turns

    def _run(self) -> None:
        while not self._closing.wait(LOOK_SECONDS):
            self._admissions.look()
            with self._lock:
                self._change_turns(time.monotonic())

    def _change_turns(self, now: float) -> None:
        if self._closing.is_set():
            return
        present = next((model for model in self._models.values() if model.child is not None), None)
        if present is None:
            if (following := self._following(now)) is not None:
                self._load(following, now)
            return
        others = any(each.wanted for each in self._models.values() if each is not present)
        # A turn counts from when the model is loaded; a model without work gives way even while it is loading.
        over = not present.wanted or (present.state == LOADED and now - present.since > self._turn)
        if present.state != LEAVING and others and over and present.child is not None:
            present.state = LEAVING
            present.child.send({"close": "at once"})

    def _following(self, now: float) -> _Model | None:
        """The model whose turn is next: one with work, else any. A model with work that pauses after a death is waited for,
        since loading another one would take longer than the pause.
        """
        models = list(self._models.values())
        first = self._last + 1
        order = [*models[first:], *models[:first]]
        candidates = [each for each in order if each.wanted] or order
        return next((each for each in candidates if now >= each.not_before), None)

    def _load(self, model: _Model, now: float) -> None:
        self._last = list(self._models).index(model.name)
        model.state, model.since, model.error, model.hopeless = LOADING, now, None, False
        model.ended_rows.clear()
        asked = {"options": options_of(model.spec), "name": model.name}
        on_message: Callable[[Message], None] = lambda said: self._handle_message(model, said)  # noqa: E731
        try:
            model.child = self._child("host_child", asked, on_message, lambda complaint: self._host_ended(model, complaint))
        except JobError as error:
            self._say(f"{model.name}: {error}; this is tried again")
            model.state, model.not_before = AWAY, now + PAUSE_SECONDS
            return
        for job in model.batches.values():
            _give(model.child, job)
        for request, each in model.asked.items():
            model.child.send({"ask": request, "entry": each.entry, "streamed": each.streamed})

    def _handle_message(self, model: _Model, said: Message) -> None:
        with self._lock:
            match said:
                case {"note": note}:
                    self._say(f"{model.name}: {note}")
                case {"up": count}:
                    if model.state == LOADING and count:
                        model.state, model.since = LOADED, time.monotonic()
                case {"progress": batch, "figures": figures}:
                    progress = Progress(batch, *figures)
                    if progress.done + progress.failed > model.ended_rows.get(batch, 1 << 62):
                        model.deaths = 0
                    model.ended_rows[batch] = progress.done + progress.failed
                    self._on_event(progress)
                case {"left": batch, "whole": whole}:
                    model.batches.pop(batch, None)
                    model.stopping.discard(batch)
                    self._on_event(Left(batch, whole))
                case {"waits": batch, "sentence": sentence}:
                    self._say(f"{model.name}: {sentence}")
                    if (job := model.batches.pop(batch, None)) is not None:
                        model.suspended[batch] = job
                    elif batch in model.stopping:
                        model.stopping.discard(batch)
                        self._on_event(Left(batch, whole=False))
                case {"broken": batch, "sentence": sentence}:
                    model.batches.pop(batch, None)
                    model.stopping.discard(batch)
                    self._on_event(Broken(batch, sentence))
                case {"answer": request}:
                    self._answer(model, request, said)
                case {"error": sentence, "hopeless": hopeless}:
                    model.error, model.hopeless = sentence, hopeless

    def _answer(self, model: _Model, request: str, said: Message) -> None:
        if (asked := model.asked.get(request)) is None:
            return
        error = said.get("error")
        answer = Answer(said.get("pieces", ()), said.get("record"), None if error is None else Failure(*error))
        asked.begun = True
        if answer.last:
            # A refusal shows nothing of the model.
            if error is None:
                model.deaths = 0
            del model.asked[request]
        asked.on_answer(answer)

    def _host_ended(self, model: _Model, complaint: str) -> None:
        with self._lock:
            expected, why = model.state == LEAVING or self._closing.is_set(), model.error or complaint
            model.state, model.child = AWAY, None
            for batch in model.stopping:
                self._on_event(Left(batch, whole=False))
            model.stopping.clear()
            for request in [request for request, asked in model.asked.items() if asked.begun]:
                model.asked.pop(request).on_answer(Answer(error=GONE))
            if expected:
                return
            if self._changed():
                model.not_before = time.monotonic() + LONGEST_PAUSE
                self._say(f"{model.name}: {why}; {CHANGED}")
                self._refuse_all(model, UPDATED)
                return
            model.deaths = MOST_DEATHS if model.hopeless else model.deaths + 1
            # The exponent is bounded, since a model that cannot be loaded is tried for as long as the server runs.
            doublings = min(model.deaths, MOST_DEATHS) - 1
            model.not_before = time.monotonic() + min(LONGEST_PAUSE, PAUSE_SECONDS * 2**doublings)
            self._say(f"{model.name}: {why}; it is started again")
            if model.deaths >= MOST_DEATHS:
                told = shown_to_clients(why, model.spec.model, model.name)
                for batch in model.batches:
                    self._on_event(Broken(batch, told))
                model.batches.clear()
                self._refuse_all(model, Failure(500, told))

    def _refuse_all(self, model: _Model, error: Failure) -> None:
        for asked in model.asked.values():
            asked.on_answer(Answer(error=error))
        model.asked.clear()


def _give(child: Child, job: BatchJob) -> None:
    child.send({"run": job.batch, "directory": str(job.directory)})
