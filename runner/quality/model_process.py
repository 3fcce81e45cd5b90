"""A process for work with a model without Ray (score, quantize): pinned to free cores, ended with its parent."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable
from concurrent.futures import Future, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from multiprocessing.connection import Connection
from threading import Thread
from types import TracebackType
from typing import Any, Generic, ParamSpec, Self, TypeVar

from outrider.runner.job.tokenizer_process import end_with_the_driver
from outrider.runner.planning.free_cores import plan_on_free_cores
from outrider.runner.planning.placement import PlannedActor
from outrider.runner.planning.placement_request import ModelSizes, PlacementRequest
from outrider.runner.pool_of_one import pool_of_one
from outrider.workers.errors import JobError, LeaseError

DIED = "the process that held the model died; is there enough memory?"
MESSAGES_SECONDS = 0.2
Arguments = ParamSpec("Arguments")
Answer = TypeVar("Answer")
# In the process itself: the pipe for its messages, and the leases of its cores.
_messages: Connection
_held: Any


class ModelProcess:
    """The parent's side: calls functions in the process, one after the other."""

    def __init__(self, actor: PlannedActor) -> None:
        self._messages, messages = multiprocessing.get_context("spawn").Pipe(duplex=False)
        self._pool = pool_of_one(_bind_and_watch, messages, actor.cores)
        self.actor = actor
        self._pid = self.begin(os.getpid)()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is not None:
            # After an error or interrupt the call in progress is not waited for.
            with suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)
        self._pool.shutdown(wait=True, cancel_futures=True)

    def begin(
        self, function: Callable[Arguments, Answer], *arguments: Arguments.args, **options: Arguments.kwargs
    ) -> PendingResult[Answer]:
        try:
            return PendingResult(self._pool.submit(function, *arguments, **options), self._messages)
        except BrokenProcessPool as error:
            raise JobError(DIED) from error


class PendingResult(Generic[Answer]):
    """A call in the process; calling this object waits for its result."""

    def __init__(self, future: Future[Answer], messages: Connection) -> None:
        self._future = future
        self._messages = messages

    def __call__(self, on_message: Callable[[Any], None] = lambda messages: None) -> Answer:
        """``on_message`` is called with messages of the process meanwhile."""
        while True:
            done = bool(wait([self._future], timeout=MESSAGES_SECONDS).done)
            while self._messages.poll():
                on_message(self._messages.recv())
            if done:
                break
        try:
            return self._future.result()
        except BrokenProcessPool as error:
            raise JobError(DIED) from error


def send_message(messages: Any) -> None:
    """In the process: send a message to the parent."""
    _messages.send(messages)


def placed_process(
    sizes: ModelSizes, request: PlacementRequest, seconds: float, say: Callable[[str], None]
) -> ModelProcess:
    """A process on free cores, which it leases; waits for cores that other runs hold."""
    while True:
        planned = plan_on_free_cores(sizes, request, seconds, say).actors[0]
        process = ModelProcess(planned)
        try:
            process.begin(_claim, planned.leases)()
        except LeaseError as error:  # another run has leased the same cores first
            process.__exit__(LeaseError, error, None)
            say(f"waiting for cores: {error}")
            continue
        return process


def _bind_and_watch(messages: Connection, cores: tuple[int, ...]) -> None:
    global _messages
    _messages = messages
    # Before torch is imported, which counts the cores.
    os.sched_setaffinity(0, cores)
    Thread(target=end_with_the_driver, daemon=True).start()


def _claim(leases: tuple[str, ...]) -> None:
    from outrider.workers.machine.core_leases import claim

    global _held
    _held = claim(leases)
