"""The command line in processes of its own, and what a job directory shows from outside."""

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
    """A command to its end. Without an environment, this one's."""
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
    """All that it said, once it has ended as it should."""
    output, _ = process.communicate(timeout=DEADLINE)
    assert process.returncode == code, output
    assert "Traceback" not in output
    return output


def described(job: Path) -> dict[str, Any]:
    return dict(json.loads((job / "job.json").read_text()))


def known(job: Path, key: str) -> Any:
    """What the journal of a job under way says; None where it says nothing yet."""
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
    """Stop it, and wait until all of its threads stand still: for a moment after the signal one may still answer."""
    process.suspend()
    deadline = time.monotonic() + DEADLINE
    while not all(map(_stopped, Path(f"/proc/{process.pid}/task").iterdir())):
        assert time.monotonic() < deadline, f"process {process.pid} does not stop"
        time.sleep(0.005)


def _stopped(thread: Path) -> bool:
    """Also of a thread that has ended in between."""
    with suppress(FileNotFoundError, ProcessLookupError):
        return (thread / "stat").read_text().rpartition(")")[2].split()[0] == "T"
    return True


@contextmanager
def targets_standing_still(ancestor: int) -> Iterator[None]:
    """No row ends meanwhile, however long what is done meanwhile takes."""
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
