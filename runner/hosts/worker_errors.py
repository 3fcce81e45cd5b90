"""Errors of actors and tasks as sentences."""

from __future__ import annotations

from ray.exceptions import OutOfMemoryError, RayError, RayTaskError

from outrider.workers.errors import OutriderError
from outrider.workers.messages import ModelSpec

DIED = "its process died"
ENDED_BY_RAY = "Ray ended its process because the machine ran short of memory"
ENDED_BY_KERNEL = "its process died while the kernel was killing processes to free memory"
SHORT_OF_MEMORY = (ENDED_BY_RAY, ENDED_BY_KERNEL)


def explain(error: Exception, killed_for_memory: bool = False, full: str | None = None) -> str:
    """An error of an actor or task in one sentence. ``killed_for_memory``: the kernel has just killed a process.

    ``full``: a sentence about /dev/shm, if it is full.
    """
    cause = error.cause if isinstance(error, RayTaskError) else error
    if isinstance(cause, OutriderError):
        return str(cause)
    if isinstance(error, RayTaskError):
        return f"{type(cause).__name__}: {str(cause).strip().splitlines()[-1] if str(cause).strip() else ''}"
    if isinstance(error, OutOfMemoryError):
        return ENDED_BY_RAY
    if isinstance(error, RayError):
        return ENDED_BY_KERNEL if killed_for_memory else DIED if full is None else f"{DIED}; {full}"
    return str(error)


def with_remedy(reason: str, target: ModelSpec) -> str:
    """The reason for a job's end, with advice if want of memory is, or may be, the cause."""
    if reason.endswith(SHORT_OF_MEMORY):
        return f"{reason}; {_less_memory(target)}"
    if not reason.endswith(DIED):
        return reason
    return f"{reason}; if memory was short, {_less_memory(target)}"


def _less_memory(target: ModelSpec) -> str:
    # Options that decide texts can only be changed in a new job.
    cache = ", --cache-precision int8" if target.engine == "native" and target.cache_precision != "int8" else ""
    return (
        "a smaller --batch, fewer --replicas or a smaller --draft needs less, and in a new job a smaller --precision"
        f"{cache} or a smaller --max-tokens"
    )
