"""How often this process has been continued after a stop (Ctrl-Z, SIGSTOP): the time in between is no time of work."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_times = 0


def times() -> int:
    """How many SIGCONTs have come within ``counted``: the kernel sends one to each process that is continued."""
    return _times


@contextmanager
def counted() -> Iterator[None]:
    """Count SIGCONTs in this block, which must run in the main thread; programs that it starts get no handler."""

    def count(number: int, frame: Any) -> None:
        global _times
        _times += 1

    before = signal.signal(signal.SIGCONT, count)
    try:
        yield
    finally:
        signal.signal(signal.SIGCONT, before)
