"""How the command ends: by which signals, and as any program does, unless Ray's libraries have to be left as they are."""

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

# `timeout` tells its process and then its whole group, and a wrapper hands on what the terminal has told already.
TWICE_SECONDS = 0.3
# Where an interrupt was lost, so much later there is other code to be interrupted.
AGAIN_SECONDS = 0.05

_at_once = False
_last_told = -math.inf


def end_signals() -> list[signal.Signals]:
    """Those that ask it to end, Ctrl-C aside. A terminal that closes is one of them where nohup does not keep that off."""
    ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return [signal.SIGTERM] if ignored else [signal.SIGTERM, signal.SIGHUP]


def is_told_twice() -> bool:
    """Whether this request to end is the last one, told a second time: nobody asks again as quickly."""
    global _last_told
    before, _last_told = _last_told, time.monotonic()
    return _last_told - before < TWICE_SECONDS


def forget_requests() -> None:
    """What this process was told before is no part of what is begun now."""
    global _last_told
    _last_told = -math.inf


def repeat_lost_interrupts() -> None:
    """An interrupt that falls into a finalizer, or into what Python does around a fork, is only reported and forgotten.

    Ray is started by forks, so that a job which was asked to end just then went on. Such an interrupt comes once more.
    """
    before = sys.unraisablehook
    if getattr(before, "func", None) is not _unraisable:
        sys.unraisablehook = partial(_unraisable, before)


def _unraisable(before: Callable[[sys.UnraisableHookArgs], object], found: sys.UnraisableHookArgs) -> None:
    if not issubclass(found.exc_type, KeyboardInterrupt):
        before(found)
        return
    # logging holds its lock around a fork. This may be the hook that gives it back, interrupted before it did so, or after.
    if found.object is getattr(logging, "_releaseLock", logging):
        with suppress(RuntimeError):
            logging._releaseLock()  # type: ignore[attr-defined]
    timer = threading.Timer(AGAIN_SECONDS, _ask_again)
    timer.daemon = True
    timer.start()


def _ask_again() -> None:
    forget_requests()
    # Which is never ignored, as SIGINT and SIGHUP may be. The main thread, so that it wakes from what it waits for.
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)


def end_at_once() -> None:
    """From now on this process ends without unloading anything: Ray's libraries crash where their servers are gone."""
    global _at_once
    _at_once = True


def end(code: str | int | None) -> None:
    """Does not return if the process has to end at once."""
    if _at_once:
        if isinstance(code, str):
            print(code, file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else 0 if code is None else 1)
