"""How often this process has been continued after a stop (Ctrl-Z, SIGSTOP): the time in between is no time of work."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_times = 0


def times() -> int:
    """How many SIGCONT have come within ``counted``. The kernel sends one to whatever it lets go on."""
    return _times


@contextmanager
def counted() -> Iterator[None]:
    """Count within the block, which runs in the main thread. Children get no handler by it."""

    def count(number: int, frame: Any) -> None:
        global _times
        _times += 1

    before = signal.signal(signal.SIGCONT, count)
    try:
        yield
    finally:
        signal.signal(signal.SIGCONT, before)
