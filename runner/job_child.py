"""The process of a job that a Python program has started (``job_process.py``); it drains when that program dies."""

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
from outrider.runner.exit_codes import INTERRUPTED
from outrider.runner.options.job import JobSpec
from outrider.runner.options.option import build_options
from outrider.runner.printable import printable
from outrider.runner.process_exit import end, repeat_lost_interrupts
from outrider.runner.report.counters import JobCounters
from outrider.runner.report.display import progress_line
from outrider.workers.errors import OutriderError

LOOK_SECONDS = 0.5
TELL_SECONDS = 0.5
# How long the last events wait for room on a full disk, and how often they are written again.
LAST_WRITE_SECONDS = 10.0
RETRY_WRITE_SECONDS = 0.2


class EventWriter:
    """Writes the job's events, one line of JSON each, to a file that the caller reads. It is the job's ``Watcher``."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._notes = 0
        self._last_progress = 0.0
        # What could not be written yet. It begins with a line end, since a job that began anew may have left half a line.
        self._unwritten = b"\n"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        pass

    def tell(self, **event: Any) -> None:
        """Write an event. A full disk does not end the job: the event is kept and written before the next one."""
        self._unwritten += json.dumps(event).encode() + b"\n"
        self._write()

    def _write(self) -> None:
        with suppress(OSError):
            while self._unwritten:
                self._unwritten = self._unwritten[os.write(self._descriptor, self._unwritten) :]

    def close(self) -> None:
        """Wait a while for room for the last events, which say how the job has ended."""
        deadline = time.monotonic() + LAST_WRITE_SECONDS
        while self._unwritten and time.monotonic() < deadline:
            time.sleep(RETRY_WRITE_SECONDS)
            self._write()

    def say(self, text: str) -> None:
        self.tell(note=printable(text))

    def show(self, totals: JobCounters) -> None:
        for note in totals.notes[self._notes :]:
            self.say(f"note: {note}")
        self._notes = len(totals.notes)
        if time.monotonic() - self._last_progress >= TELL_SECONDS:
            self._last_progress = time.monotonic()
            self._write()
            if not self._unwritten:  # stale progress lines would pile up on a full disk
                self.tell(progress=progress_line(totals))


def main() -> None:
    """The argument, a JSON object, names the descriptors and the length of the options at the start of the events file.

    It is an argument, not a message, because a job whose Ray is lost executes its own command line anew.
    """
    asked = json.loads(sys.argv[1])
    streams.prepare()
    events = EventWriter(asked["events"])
    signal.signal(signal.SIGTERM, _interrupt)
    repeat_lost_interrupts()
    # If the caller ignores SIGCHLD, the exit codes of the processes that the job starts would be lost.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    # The thread that started this process may have them blocked, and a blocked signal is inherited.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM, signal.SIGINT})
    threading.Thread(target=_drain_when_orphaned, args=(asked["caller"],), name="caller", daemon=True).start()
    code = _run(asked, events)
    events.tell(ended=code)
    events.close()
    end(code)
    sys.exit(code)


def _run(asked: dict[str, Any], events: EventWriter) -> int:
    from outrider.runner.job import piped_input
    from outrider.runner.run_job import run_job

    spec = build_options(JobSpec, json.loads(os.pread(asked["events"], asked["options"], 0)))
    if asked["rows"]:
        piped_input.NAMES[str(spec.input)] = "rows"
    try:
        return run_job(spec, events, asked.get("retry_failed", False)).exit_code
    except OutriderError as error:
        lines = [printable(line) for line in error.lines]
        events.tell(error={"kind": type(error).__name__, "sentence": printable(error), "lines": lines})
        return error.exit_code
    except KeyboardInterrupt:
        return INTERRUPTED


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _drain_when_orphaned(caller: int) -> None:
    """Ask this job to drain once the caller is dead; it can be resumed."""
    while os.getppid() == caller:
        time.sleep(LOOK_SECONDS)
    os.kill(os.getpid(), signal.SIGTERM)
