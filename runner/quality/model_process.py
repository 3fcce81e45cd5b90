"""A process of its own for work with a model that needs no Ray: pinned to free cores, and gone with its driver."""

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

DIED = "the process that held the model died; is there memory enough?"
NEWS_SECONDS = 0.2
Arguments = ParamSpec("Arguments")
Answer = TypeVar("Answer")
# In the process itself: where it says how far it is, and the cores that it holds.
_news: Connection
_held: Any


class ModelProcess:
    """Does one thing after the other; leaves nothing behind when closed."""

    def __init__(self, actor: PlannedActor) -> None:
        self._news, news = multiprocessing.get_context("spawn").Pipe(duplex=False)
        self._pool = pool_of_one(_bind_and_watch, news, actor.cores)
        self.actor = actor
        self._pid = self.begin(os.getpid)()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is not None:
            # Whoever is interrupted does not wait for what is under way.
            with suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)
        self._pool.shutdown(wait=True, cancel_futures=True)

    def begin(
        self, function: Callable[Arguments, Answer], *arguments: Arguments.args, **options: Arguments.kwargs
    ) -> Doing[Answer]:
        try:
            return Doing(self._pool.submit(function, *arguments, **options), self._news)
        except BrokenProcessPool as error:
            raise JobError(DIED) from error


class Doing(Generic[Answer]):
    """Something that is being done. To call it is to wait for what comes of it."""

    def __init__(self, future: Future[Answer], news: Connection) -> None:
        self._future = future
        self._news = news

    def __call__(self, hear: Callable[[Any], None] = lambda news: None) -> Answer:
        """``hear`` gets what is told meanwhile."""
        while True:
            done = bool(wait([self._future], timeout=NEWS_SECONDS).done)
            while self._news.poll():
                hear(self._news.recv())
            if done:
                break
        try:
            return self._future.result()
        except BrokenProcessPool as error:
            raise JobError(DIED) from error


def tell(news: Any) -> None:
    """In the process: to whoever waits for it."""
    _news.send(news)


def placed_process(
    sizes: ModelSizes, request: PlacementRequest, seconds: float, say: Callable[[str], None]
) -> ModelProcess:
    """A process on cores that are free, waited for where others hold them, and that it holds from now on."""
    while True:
        planned = plan_on_free_cores(sizes, request, seconds, say).actors[0]
        process = ModelProcess(planned)
        try:
            process.begin(_claim, planned.leases)()
        except LeaseError as error:  # another run was quicker to the same cores
            process.__exit__(LeaseError, error, None)
            say(f"waiting for cores: {error}")
            continue
        return process


def _bind_and_watch(news: Connection, cores: tuple[int, ...]) -> None:
    global _news
    _news = news
    # Before torch counts them.
    os.sched_setaffinity(0, cores)
    Thread(target=end_with_the_driver, daemon=True).start()


def _claim(leases: tuple[str, ...]) -> None:
    from outrider.workers.machine.core_leases import claim

    global _held
    _held = claim(leases)
