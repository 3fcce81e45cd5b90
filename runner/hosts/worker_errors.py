"""What went wrong in a process that Ray runs, as a sentence."""

from __future__ import annotations

from ray.exceptions import RayError, RayTaskError

from outrider.workers.errors import OutriderError


def explain(error: Exception) -> str:
    """What went wrong in a worker, in one sentence."""
    cause = error.cause if isinstance(error, RayTaskError) else error
    if isinstance(cause, OutriderError):
        return str(cause)
    if isinstance(error, RayTaskError):
        return f"{type(cause).__name__}: {str(cause).strip().splitlines()[-1] if str(cause).strip() else ''}"
    if isinstance(error, RayError):
        return "its process died"
    return str(error)
