"""How a process of ours ends: the signals that end it, and ``os._exit`` where unloading Ray's libraries would crash."""

from __future__ import annotations

import logging
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from outrider.runner import streams

# `timeout` signals its process and then the whole group, and a wrapper forwards a signal that the terminal has sent to all:
# a second signal within this time is the same request.
REPEATED_SECONDS = 0.3
# A lost interrupt is sent again after this time, when other code runs that it can interrupt.
AGAIN_SECONDS = 0.05

_at_once = False
_last_signal = -math.inf


def end_signals() -> list[signal.Signals]:
    """The signals that ask the process to end, besides SIGINT. SIGHUP is one unless nohup has it ignored."""
    ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return [signal.SIGTERM] if ignored else [signal.SIGTERM, signal.SIGHUP]


def take_back_signals() -> None:
    """Install this process's handlers once more: Ray puts one before that of SIGTERM, which prints Ray's stack."""
    if threading.current_thread() is threading.main_thread():
        for number in end_signals():
            if callable(handler := signal.getsignal(number)):
                signal.signal(number, handler)


def is_repeated_signal() -> bool:
    """Whether this signal comes so soon after the last one that it is the same request, delivered twice."""
    global _last_signal
    before, _last_signal = _last_signal, time.monotonic()
    return _last_signal - before < REPEATED_SECONDS


def forget_signals() -> None:
    """A signal that came before now is not the first half of one that comes next."""
    global _last_signal
    _last_signal = -math.inf


def repeat_lost_interrupts() -> None:
    """Send an interrupt again that Python has swallowed.

    A KeyboardInterrupt that is raised in a finalizer or in a fork hook is only reported as unraisable. Starting Ray forks,
    so a job that was asked to end just then would go on.
    """
    before = sys.unraisablehook
    if getattr(before, "func", None) is not _unraisable:
        sys.unraisablehook = partial(_unraisable, before)


def _unraisable(before: Callable[[sys.UnraisableHookArgs], object], found: sys.UnraisableHookArgs) -> None:
    if not issubclass(found.exc_type, KeyboardInterrupt):
        before(found)
        return
    # logging holds its lock around a fork. If its hook was interrupted, the lock may still be held: release it.
    if found.object is getattr(logging, "_releaseLock", logging):
        with suppress(RuntimeError):
            logging._releaseLock()  # type: ignore[attr-defined]
    timer = threading.Timer(AGAIN_SECONDS, _ask_again)
    timer.daemon = True
    timer.start()


def _ask_again() -> None:
    forget_signals()
    # SIGTERM, since SIGINT and SIGHUP may be ignored; to the main thread, so that it wakes from a blocking call.
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)


def end_at_once() -> None:
    """From now on this process ends by ``os._exit``: Ray's libraries crash when they are unloaded after their servers."""
    global _at_once
    _at_once = True


def end(code: str | int | None) -> None:
    """End by ``os._exit`` if ``end_at_once`` was called; otherwise return."""
    if _at_once:
        if isinstance(code, str):
            print(code, file=sys.stderr)
        sys.stdout.flush()
        streams.finish()
        os._exit(code if isinstance(code, int) else 0 if code is None else 1)
