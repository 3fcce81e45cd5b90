"""Limits of memory and time for tokenizers and templates, which are written by a model's author.

A tokenizer's patterns may run for ever, its tables may take any memory, and its library may abort in ways that Python
cannot catch. So the kernel enforces the limits, and may end the process.
"""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# The memory that may be added. The largest tokenizers take a quarter of it.
MOST_BYTES = 3 << 30


class TooManyTokens(str):
    """The sentence about a prompt that the model's context cannot hold, and that was therefore not encoded."""


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """In this context allocations beyond ``MOST_BYTES`` fail, and more ``seconds`` of CPU time end the process (SIGPROF).

    Standard error is discarded meanwhile, since a library that panics prints its backtrace.
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
    """The memory that counts for RLIMIT_DATA (the sixth field of statm, which includes the stack)."""
    return int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()


def _finite(limit: int) -> float:
    return float("inf") if limit == resource.RLIM_INFINITY else limit
