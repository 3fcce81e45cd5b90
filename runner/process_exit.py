"""How the command ends: by which signals, and as any program does, unless Ray's libraries have to be left as they are."""

from __future__ import annotations

import os
import signal
import sys

_at_once = False


def end_signals() -> list[signal.Signals]:
    """Those that ask it to end, Ctrl-C aside. A terminal that closes is one of them where nohup does not keep that off."""
    ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return [signal.SIGTERM] if ignored else [signal.SIGTERM, signal.SIGHUP]


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
