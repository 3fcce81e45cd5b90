"""How a command ends when it is interrupted, by Ctrl-C or by a request to end."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from types import FrameType

from outrider.runner.process_exit import end_signals, forget_requests, is_told_twice, repeat_lost_interrupts

INTERRUPTED = 130


def ending(run: Callable[[], int]) -> int:
    """The exit code of a job's run."""
    try:
        return run()
    except KeyboardInterrupt:  # typer would end here too, without a word
        _be_left_alone()
        print("stopped; the same command resumes the job", file=sys.stderr)
        return INTERRUPTED


def until_interrupted(work: Callable[[], None], said: str) -> None:
    """The same for what is no job: ``said`` is the last word."""
    interrupt_on_signals()
    try:
        work()
    except KeyboardInterrupt:
        _be_left_alone()
        print(said, file=sys.stderr)
        raise SystemExit(INTERRUPTED) from None


def interrupt_on_signals() -> None:
    """From now on a request to end is a Ctrl-C, and each counts once, however often it is told."""
    forget_requests()
    repeat_lost_interrupts()
    for number in end_signals():
        signal.signal(number, interrupt)
    # What a shell begins in the background ignores it.
    if signal.getsignal(signal.SIGINT) == signal.default_int_handler:
        signal.signal(signal.SIGINT, interrupt)


def interrupt(number: int, frame: FrameType | None) -> None:
    if is_told_twice():
        return
    if number == signal.SIGHUP:
        # The kernel and the shell may both tell that a terminal closes: the second is not to disturb how the first ends it.
        signal.signal(number, _nothing)
    raise KeyboardInterrupt


def _be_left_alone() -> None:
    """Nothing is left but to go, and an interrupt would only disturb Python's own end, which may then wait for ever."""
    for number in (signal.SIGINT, *end_signals()):
        signal.signal(number, _nothing)


def _nothing(number: int, frame: FrameType | None) -> None:
    """Not SIG_IGN, which what is started meanwhile (``--on-end``) would inherit."""
