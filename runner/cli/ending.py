"""How a command ends when it is interrupted, by Ctrl-C, SIGTERM or SIGHUP."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from types import FrameType

from outrider.runner.exit_codes import INTERRUPTED
from outrider.runner.process_exit import end_signals, forget_signals, is_repeated_signal, repeat_lost_interrupts


def exit_code_of(run: Callable[[], int]) -> int:
    """The exit code of a job's run, also when it is interrupted."""
    try:
        return run()
    except KeyboardInterrupt:  # typer would end too, but print nothing
        _ignore_further_signals()
        print("stopped; the same command resumes the job", file=sys.stderr)
        return INTERRUPTED


def until_interrupted(work: Callable[[], None], said: str) -> None:
    """Run a command that is not a job; if it is interrupted, print ``said`` and exit."""
    interrupt_on_signals()
    try:
        work()
    except KeyboardInterrupt:
        _ignore_further_signals()
        print(said, file=sys.stderr)
        raise SystemExit(INTERRUPTED) from None


def interrupt_on_signals() -> None:
    """From now on SIGTERM and SIGHUP raise KeyboardInterrupt as Ctrl-C does; one that is delivered twice counts once."""
    forget_signals()
    repeat_lost_interrupts()
    for number in end_signals():
        signal.signal(number, interrupt)
    # A shell starts background commands with SIGINT ignored: leave that.
    if signal.getsignal(signal.SIGINT) == signal.default_int_handler:
        signal.signal(signal.SIGINT, interrupt)


def interrupt(number: int, frame: FrameType | None) -> None:
    if is_repeated_signal():
        return
    if number == signal.SIGHUP:
        # The kernel and the shell may both send it: the second must not interrupt the exit that the first has begun.
        signal.signal(number, _nothing)
    raise KeyboardInterrupt


def _ignore_further_signals() -> None:
    """An interrupt during Python's own shutdown may make it wait for ever."""
    for number in (signal.SIGINT, *end_signals()):
        signal.signal(number, _nothing)


def _nothing(number: int, frame: FrameType | None) -> None:
    """A handler that does nothing. Not SIG_IGN, which the command of ``--on-end`` would inherit."""
