"""A job that a program has started, in a process of its own: it drains when that program dies."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from types import FrameType, TracebackType
from typing import Any, Self

from outrider.runner import streams
from outrider.runner.options.job import JobSpec
from outrider.runner.options.option import build_options
from outrider.runner.printable import printable
from outrider.runner.process_exit import end, repeat_lost_interrupts
from outrider.runner.report.counters import JobCounters
from outrider.runner.report.display import progress_line
from outrider.workers.errors import OutriderError

LOOK_SECONDS = 0.5
TELL_SECONDS = 0.5
# How long the last events wait for room on a full disk, and how often they are tried.
LAST_SECONDS = 10.0
AGAIN_SECONDS = 0.2
INTERRUPTED = 130


class Told:
    """Where a job says what it does: a line of JSON each, in a file that the caller reads."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._notes = 0
        self._told = 0.0
        # What could not be written yet. A life of the job before this one may have left half a line, which ends here.
        self._untold = b"\n"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        pass

    def tell(self, **event: Any) -> None:
        """A full disk is no reason to end a job: what finds no room goes ahead of what is told next."""
        self._untold += json.dumps(event).encode() + b"\n"
        self._write()

    def _write(self) -> None:
        with suppress(OSError):
            while self._untold:
                self._untold = self._untold[os.write(self._descriptor, self._untold) :]

    def close(self) -> None:
        """What the job has come to is worth waiting for some room."""
        deadline = time.monotonic() + LAST_SECONDS
        while self._untold and time.monotonic() < deadline:
            time.sleep(AGAIN_SECONDS)
            self._write()

    def say(self, text: str) -> None:
        self.tell(note=printable(text))

    def show(self, totals: JobCounters) -> None:
        for note in totals.notes[self._notes :]:
            self.say(f"note: {note}")
        self._notes = len(totals.notes)
        if time.monotonic() - self._told >= TELL_SECONDS:
            self._told = time.monotonic()
            self._write()
            if not self._untold:  # progress is soon old, and would pile up
                self.tell(progress=progress_line(totals))


def main() -> None:
    """What is to be done stands on the command line, since a job whose Ray is lost begins its command line anew.

    The options stand in front of what is told, so many bytes of them.
    """
    asked = json.loads(sys.argv[1])
    streams.prepare()
    told = Told(asked["told"])
    signal.signal(signal.SIGTERM, _interrupt)
    repeat_lost_interrupts()
    # Or the exit codes of what the job starts would be lost, where the caller ignores this signal.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    # The caller's thread may have kept them from itself.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM, signal.SIGINT})
    threading.Thread(target=_outlive_by_little, args=(asked["caller"],), name="caller", daemon=True).start()
    code = _run(asked, told)
    told.tell(ended=code)
    told.close()
    end(code)
    sys.exit(code)


def _run(asked: dict[str, Any], told: Told) -> int:
    from outrider.runner.job import piped_input
    from outrider.runner.run_job import run_job

    spec = build_options(JobSpec, json.loads(os.pread(asked["told"], asked["options"], 0)))
    if asked["rows"]:
        piped_input.NAMES[str(spec.input)] = "rows"
    try:
        return run_job(spec, told, asked.get("again", False)).exit_code
    except OutriderError as error:
        lines = [printable(line) for line in error.lines]
        told.tell(error={"kind": type(error).__name__, "sentence": printable(error), "lines": lines})
        return error.exit_code
    except KeyboardInterrupt:
        return INTERRUPTED


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _outlive_by_little(caller: int) -> None:
    """Once the caller is dead, whatever it died of, nobody waits for this job: it drains, and can be resumed."""
    while os.getppid() == caller:
        time.sleep(LOOK_SECONDS)
    os.kill(os.getpid(), signal.SIGTERM)
