"""A pool of one process, which does what this one is not to load for."""

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
    """Its process is started by the first call, and inherits which signals the caller keeps from itself."""

    def submit(
        self, function: Callable[Arguments, Result], /, *arguments: Arguments.args, **options: Arguments.kwargs
    ) -> Future[Result]:
        # Ctrl-C reaches the whole group: a process that is only importing what it needs would tell of it with a traceback.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            return super().submit(function, *arguments, **options)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


def pool_of_one(initializer: Callable[..., None], *arguments: Any) -> ProcessPoolExecutor:
    """Its process starts with the first task; its semaphores, which are files in shared memory, are made here."""
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
    """In the process: Ctrl-C ends it without a word from now on, also one that has come before."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    initializer(*arguments)
