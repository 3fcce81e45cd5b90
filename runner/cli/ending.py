"""How a command that runs a job ends when it is interrupted."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType

INTERRUPTED = 130


def ending(run: Callable[[], int]) -> int:
    """The exit code of a job's run."""
    try:
        return run()
    except KeyboardInterrupt:  # typer would end here too, without a word
        print("stopped; the same command resumes the job", file=sys.stderr)
        return INTERRUPTED


def interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
