"""How a command ends when it is interrupted, by Ctrl-C or by a request to end."""

from __future__ import annotations

import signal
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


def until_interrupted(work: Callable[[], None], said: str) -> None:
    """The same for what is no job: ``said`` is the last word."""
    signal.signal(signal.SIGTERM, interrupt)
    try:
        work()
    except KeyboardInterrupt:
        print(said, file=sys.stderr)
        raise SystemExit(INTERRUPTED) from None


def interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
