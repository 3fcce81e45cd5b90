"""Limits for work on what a model's author wrote, in a process that may be ended for it.

A tokenizer is a program, too: its patterns may run without end, its tables ask for memory without end, and the library
behind it gives up in ways that no Python code can catch. So the kernel holds the limits, not this process.
"""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# Beyond what the process holds already. The largest tokenizers take a quarter of it.
MOST_BYTES = 3 << 30


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Within, memory beyond ``MOST_BYTES`` is refused, and more ``seconds`` of the processor end the process (SIGPROF).

    What is written to standard error meanwhile is dropped: a library that panics prints where in itself it did.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    most = _held() + MOST_BYTES
    if most < min(_finite(soft), _finite(hard)):
        resource.setrlimit(resource.RLIMIT_DATA, (most, hard))
    core = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, core[1]))
    kept = os.dup(2)
    nowhere = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
    os.dup2(nowhere, 2)
    os.close(nowhere)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        os.dup2(kept, 2)
        os.close(kept)
        resource.setrlimit(resource.RLIMIT_CORE, core)
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def _held() -> int:
    """What the kernel holds against RLIMIT_DATA (its sixth number counts the stack as well)."""
    return int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()


def _finite(limit: int) -> float:
    return float("inf") if limit == resource.RLIM_INFINITY else limit
