"""A job in a process of its own, as a program sees it: started, followed, told to drain, and its errors raised here."""

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

from outrider.runner.options.job import JobSpec
from outrider.runner.temporary_file import keep, temporary_file
from outrider.workers import errors
from outrider.workers.errors import JobError, JobStoppedError, OutriderError

POLL_SECONDS = 0.1
# What Ray sets in the processes of its own workers, of which the job is none.
OF_A_RAY_WORKER = frozenset({"RAY_JOB_ID", "RAY_RAYLET_PID"})
SOME_FAILED, INTERRUPTED = 3, 130
READ_AT_ONCE = 1 << 20
LONGEST_COMPLAINT = 4096
# With this program's search path, so that the same packages are found there; nothing of its __main__ is imported.
BEGIN = "import sys; sys.path[:] = {path!r}; from outrider.runner.job_child import main; main()"


class JobProcess:
    """It has a session of its own, so that the terminal's signals reach this program alone."""

    def __init__(self, spec: JobSpec, rows: IO[bytes] | None = None, again: bool = False) -> None:
        if not sys.executable:
            raise JobError("a job runs in a process of its own, and this Python does not know its program (sys.executable)")
        # No pipes: whoever dies or does not read, nobody waits for anybody.
        self._told, self._said = temporary_file(), temporary_file()
        # What is asked of the job stands in front of what it tells: it may be longer than an argument of a program's.
        options = json.dumps(spec.model_dump(mode="json", exclude_defaults=True)).encode()
        keep("the options", options, self._told)
        self._read, self._rest = len(options), b""
        # The last that it said, once it has ended.
        self._complaint = ""
        self._reading = threading.Lock()
        self._error: OutriderError | None = None
        self._ended: int | None = None
        self._drained = False
        handed = [self._told.fileno(), *([] if rows is None else [rows.fileno()])]
        asked = {
            "caller": os.getpid(),
            "told": self._told.fileno(),
            "rows": rows is not None,
            "again": again,
            "options": len(options),
        }
        begin = BEGIN.format(path=[str(Path(entry or ".").absolute()) for entry in sys.path])
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", begin, json.dumps(asked)],
                stdin=subprocess.DEVNULL,
                stdout=self._said,
                stderr=self._said,
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
        # This process was forked from the job's parent: the job is no child of it, so that there is nothing to wait for.
        return self._started is not None and _start_of(self._process.pid) == self._started

    def drain(self) -> None:
        """Rows under way may end, and then the job stops; asked a second time, it stops at once."""
        self._drained = True
        if self.running:
            with suppress(ProcessLookupError):
                os.kill(self._process.pid, signal.SIGTERM)

    def follow(self, tell: Callable[[dict[str, Any]], None], seconds: float | None = None) -> bool:
        """Until it has ended (True), or for so many seconds; ``tell`` gets what it tells."""
        deadline = None if seconds is None else time.monotonic() + seconds
        while True:
            # Asked first: what is told before the end is then there.
            running = self.running
            for event in self._news():
                tell(event)
            if not running:
                self._let_go()
                return True
            if deadline is not None and time.monotonic() >= deadline:
                return False
            time.sleep(POLL_SECONDS)

    def check(self) -> None:
        """Raise what has kept the job from its end, now that its process has ended."""
        if self._error is not None:
            raise self._error
        code = self._process.returncode if self._ended is None else self._ended
        # Where others have waited for the process, or SIGCHLD is ignored, Popen says 0; in a fork of its parent, None.
        unknown = self._ended is None and code in (None, 0, SOME_FAILED)
        stopped = unknown or code in (INTERRUPTED, -signal.SIGTERM)
        if (self._drained and stopped) or (code in (0, SOME_FAILED) and not unknown):
            return
        if unknown:
            how = "ended without a word of how"
        elif stopped:
            raise JobStoppedError("the job was stopped from outside; the same call goes on with it")
        else:
            how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        raise JobError(f"the process of the job {how}{self._complaint}; the same call goes on with it")

    def _news(self) -> list[dict[str, Any]]:
        """Each event once, whoever asks: several threads may wait for one job."""
        with self._reading:
            return [] if self._told.closed else self._read_on()

    def _read_on(self) -> list[dict[str, Any]]:
        while some := os.pread(self._told.fileno(), READ_AT_ONCE, self._read):
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

    def _let_go(self) -> None:
        """All that it told has been read. A program may keep many jobs that have ended, and has so many descriptors."""
        with self._reading:
            if not self._told.closed:
                self._complaint = _last_line(self._said)
                self._told.close()
                self._said.close()


def _last_line(file: IO[bytes]) -> str:
    size = os.fstat(file.fileno()).st_size
    said = os.pread(file.fileno(), LONGEST_COMPLAINT, max(0, size - LONGEST_COMPLAINT))
    lines = [line.strip() for line in said.decode(errors="replace").splitlines() if line.strip()]
    return f" ({lines[-1]})" if lines else ""


def _start_of(process: int) -> bytes | None:
    """When a process was started, by which it is told from a later one of its number; None where it does not live."""
    try:
        state, *fields = Path(f"/proc/{process}/stat").read_bytes().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if state in (b"Z", b"X") else fields[18]


def _event(line: bytes) -> dict[str, Any] | None:
    """None for a line without one: it is empty, or ends where a job began anew before it was whole."""
    try:
        event: dict[str, Any] = json.loads(line)
    except ValueError:
        return None
    return event
