"""A pool of one process, which does what this one is not to load for."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from outrider.workers.errors import unwritable


def pool_of_one(initializer: Callable[..., None], *arguments: Any) -> ProcessPoolExecutor:
    """Its process starts with the first task; its semaphores, which are files in shared memory, are made here."""
    context = multiprocessing.get_context("spawn")
    try:
        return ProcessPoolExecutor(max_workers=1, mp_context=context, initializer=initializer, initargs=arguments)
    except OSError as error:
        raise unwritable(
            error,
            f"the process that reads models cannot be started: {error.strerror}; it needs /dev/shm, writable and with room "
            "in it (outrider doctor looks at it)",
        ) from None
