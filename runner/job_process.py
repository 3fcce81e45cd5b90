"""A job in a process of its own, seen from the program that starts it: start, follow, drain, and raise its errors."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from outrider.runner.exit_codes import ALL_DONE, INTERRUPTED, SOME_FAILED
from outrider.runner.options.job import JobSpec
from outrider.runner.temporary_file import last_line, temporary_file, write_all
from outrider.workers import errors
from outrider.workers.errors import JobError, JobStoppedError, OutriderError

POLL_SECONDS = 0.1
# Set by Ray in its worker processes. The caller may be one; the job is not, so its environment lacks them.
OF_A_RAY_WORKER = frozenset({"RAY_JOB_ID", "RAY_RAYLET_PID"})
READ_AT_ONCE = 1 << 20
# The job's process searches the caller's sys.path, so it finds the same packages; it does not import the caller's __main__.
BEGIN = "import sys; sys.path[:] = {path!r}; from outrider.runner.job_child import main; main()"


class JobProcess:
    """The job's process. It has a session of its own, so that a terminal's signals reach only the calling program."""

    def __init__(self, spec: JobSpec, rows: IO[bytes] | None = None, retry_failed: bool = False) -> None:
        if not sys.executable:
            raise JobError("a job runs in a process of its own, and this Python does not know its program (sys.executable)")
        # Files, not pipes: a pipe would block or kill one process when the other dies or does not read.
        self._events, self._output = temporary_file(), temporary_file()
        # The options stand before the events in this file, since they may be longer than a command-line argument can be.
        options = json.dumps(spec.model_dump(mode="json", exclude_defaults=True)).encode()
        write_all("the options", options, self._events)
        self._read, self._rest = len(options), b""
        # The last line of the process's output, once it has ended.
        self._complaint = ""
        self._reading = threading.Lock()
        self._error: OutriderError | None = None
        self._ended: int | None = None
        self._drained = False
        handed = [self._events.fileno(), *([] if rows is None else [rows.fileno()])]
        asked = {
            "caller": os.getpid(),
            "events": self._events.fileno(),
            "rows": rows is not None,
            "retry_failed": retry_failed,
            "options": len(options),
        }
        begin = BEGIN.format(path=[str(Path(entry or ".").absolute()) for entry in sys.path])
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", begin, json.dumps(asked)],
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=self._output,
                pass_fds=handed,
                start_new_session=True,
                env={name: value for name, value in os.environ.items() if name not in OF_A_RAY_WORKER},
            )
        except OSError as error:
            raise JobError(f"the process of the job could not be started: {error.strerror}") from None
        self._parent = os.getpid()
        self._started = _start_of(self._process.pid)

    @property
    def running(self) -> bool:
        if os.getpid() == self._parent:
            return self._process.poll() is None
        # This is a fork of the process that started the job: the job is not its child and cannot be polled.
        return self._started is not None and _start_of(self._process.pid) == self._started

    def drain(self) -> None:
        """Let the rows in progress end, then stop the job; called a second time, stop it at once."""
        self._drained = True
        if self.running:
            with suppress(ProcessLookupError):
                os.kill(self._process.pid, signal.SIGTERM)

    def follow(self, tell: Callable[[dict[str, Any]], None], seconds: float | None = None) -> bool:
        """Hand the job's events to ``tell`` until it has ended (True) or the seconds have passed (False)."""
        deadline = None if seconds is None else time.monotonic() + seconds
        while True:
            # Asked before the events are read: if it has ended, the file holds all of them.
            running = self.running
            for event in self._new_events():
                tell(event)
            if not running:
                self._close_files()
                return True
            if deadline is not None and time.monotonic() >= deadline:
                return False
            time.sleep(POLL_SECONDS)

    def check(self) -> None:
        """Once the process has ended: raise the error that ended the job before its end, if any."""
        if self._error is not None:
            raise self._error
        code = self._process.returncode if self._ended is None else self._ended
        # Without an "ended" event the exit code is not trusted: Popen says 0 if another thread has waited for the process
        # or SIGCHLD is ignored, and None in a fork of its parent.
        unknown = self._ended is None and code in (None, ALL_DONE, SOME_FAILED)
        stopped = unknown or code in (INTERRUPTED, -signal.SIGTERM)
        if (self._drained and stopped) or (code in (ALL_DONE, SOME_FAILED) and not unknown):
            return
        if unknown:
            how = "ended without saying how"
        elif stopped:
            raise JobStoppedError("the job was stopped from outside; the same call goes on with it")
        else:
            how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        raise JobError(f"the process of the job {how}{self._complaint}; the same call goes on with it")

    def _new_events(self) -> list[dict[str, Any]]:
        """The events that no call has returned yet; several threads may wait for one job."""
        with self._reading:
            return [] if self._events.closed else self._read_events()

    def _read_events(self) -> list[dict[str, Any]]:
        while some := os.pread(self._events.fileno(), READ_AT_ONCE, self._read):
            self._read += len(some)
            self._rest += some
        *lines, self._rest = self._rest.split(b"\n")
        found = [event for line in lines if (event := _event(line)) is not None]
        for event in found:
            if "error" in event:
                error = event["error"]
                kind: type[OutriderError] = getattr(errors, error["kind"], JobError)
                self._error = kind(error["sentence"], error["lines"]) if error["lines"] else kind(error["sentence"])
            self._ended = event.get("ended", self._ended)
        return found

    def _close_files(self) -> None:
        """After the last event: a program may keep many ended jobs, and descriptors are limited."""
        with self._reading:
            if not self._events.closed:
                self._complaint = last_line(self._output)
                self._events.close()
                self._output.close()


def _start_of(process: int) -> bytes | None:
    """When a process was started, which tells it from a later process with the same id; None if it is not alive."""
    try:
        state, *fields = Path(f"/proc/{process}/stat").read_bytes().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if state in (b"Z", b"X") else fields[18]


def _event(line: bytes) -> dict[str, Any] | None:
    """None for an empty line, or one that was cut off when the job began anew."""
    try:
        event: dict[str, Any] = json.loads(line)
    except ValueError:
        return None
    return event
