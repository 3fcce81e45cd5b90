"""Runs the command line in its own processes, and reads the state of a job from its directory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from outrider.runner.job.journal import Journal

OUTRIDER = [sys.executable, "-c", "from outrider.runner.cli.main import main; main()"]
DEADLINE = 400
OFFLINE = {"HF_HUB_OFFLINE": "1"}


def outrider(
    *arguments: object, cwd: Path | None = None, environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs a command to its end, by default in this process's environment."""
    return subprocess.run(
        [*OUTRIDER, *map(str, arguments)],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        env={**os.environ, **OFFLINE} if environment is None else environment,
        check=False,
    )


def start(*arguments: object, cwd: Path | None = None, environment: dict[str, str] | None = None) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*OUTRIDER, *map(str, arguments)],
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, **OFFLINE} if environment is None else environment,
        start_new_session=True,
    )


def finish(process: subprocess.Popen[str], code: int = 0) -> str:
    """Waits for the process, which must exit with ``code`` and without a traceback: its output."""
    output, _ = process.communicate(timeout=DEADLINE)
    assert process.returncode == code, output
    assert "Traceback" not in output
    return output


def described(job: Path) -> dict[str, Any]:
    return dict(json.loads((job / "job.json").read_text()))


def known(job: Path, key: str) -> Any:
    """A value of the journal of a running job; None while the journal is not filled."""
    if not (job / "job.db").exists():
        return None
    journal = Journal(job / "job.db", read_only=True)
    try:
        if not journal.filled:
            return None
        return journal.counts().done if key == "done" else journal.meta(key)
    finally:
        journal.close()


def rows_done(job: Path) -> int:
    return int(known(job, "done") or 0)


def wait_for(process: subprocess.Popen[str], come: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + DEADLINE
    while not come():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline, f"no {what} within {DEADLINE} s"
        time.sleep(0.02)


def children_titled(ancestor: int, title: str) -> list[psutil.Process]:
    found = []
    for child in psutil.Process(ancestor).children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if title in " ".join(child.cmdline()):
                found.append(child)
    return found


def stop(process: psutil.Process) -> None:
    """Stop the process and wait until all its threads have stopped: shortly after the signal a thread may still answer."""
    process.suspend()
    deadline = time.monotonic() + DEADLINE
    while not all(map(_stopped, Path(f"/proc/{process.pid}/task").iterdir())):
        assert time.monotonic() < deadline, f"process {process.pid} does not stop"
        time.sleep(0.005)


def _stopped(thread: Path) -> bool:
    """Whether the thread is stopped, or has ended meanwhile."""
    with suppress(FileNotFoundError, ProcessLookupError):
        return (thread / "stat").read_text().rpartition(")")[2].split()[0] == "T"
    return True


@contextmanager
def targets_standing_still(ancestor: int) -> Iterator[None]:
    """Within the block all targets are stopped, so no row ends however long the block takes."""
    targets = children_titled(ancestor, "ray::TargetActor")
    assert targets, "no target is up"
    for target in targets:
        stop(target)
    try:
        yield
    finally:
        for target in targets:
            with suppress(psutil.NoSuchProcess):
                target.resume()


def wait_for_rows(process: subprocess.Popen[str], job: Path, rows: int) -> None:
    wait_for(process, lambda: rows_done(job) >= rows, f"{rows} rows")
