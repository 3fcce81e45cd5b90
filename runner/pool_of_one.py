"""A pool of one process, for work that needs libraries which this process must not load (torch, transformers)."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor
from typing import Any, ParamSpec, TypeVar

from outrider.workers.errors import unwritable

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class _PoolOfOne(ProcessPoolExecutor):
    """The process starts with the first call, with SIGINT blocked (the signal mask is inherited) until ``_begin``."""

    def submit(
        self, function: Callable[Arguments, Result], /, *arguments: Arguments.args, **options: Arguments.kwargs
    ) -> Future[Result]:
        # Ctrl-C reaches the whole process group: a process that is still importing would print a traceback.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            return super().submit(function, *arguments, **options)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


def pool_of_one(initializer: Callable[..., None], *arguments: Any) -> ProcessPoolExecutor:
    """The process starts with the first task; the pool's semaphores, which are files in /dev/shm, are made here."""
    context = multiprocessing.get_context("spawn")
    try:
        return _PoolOfOne(max_workers=1, mp_context=context, initializer=_begin, initargs=(initializer, *arguments))
    except OSError as error:
        raise unwritable(
            error,
            f"the process that reads models cannot be started: {error.strerror}; it needs /dev/shm, writable and with room "
            "in it (outrider doctor looks at it)",
        ) from None


def _begin(initializer: Callable[..., None], *arguments: Any) -> None:
    """In the process: from now on Ctrl-C ends it without a traceback, also one that came while SIGINT was blocked."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    initializer(*arguments)
