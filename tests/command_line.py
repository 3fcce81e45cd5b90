"""The door a user takes: the command line in processes of its own, and what a job directory shows from outside."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from outrider.runner.journal import Journal

OUTRIDER = [sys.executable, "-c", "from outrider.runner.cli import main; main()"]
DEADLINE = 240
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


def rows_done(job: Path) -> int:
    if not (job / "job.db").exists():
        return 0
    journal = Journal(job / "job.db", read_only=True)
    try:
        return journal.counts().done if journal.filled else 0
    finally:
        journal.close()


def wait_for_rows(process: subprocess.Popen[str], job: Path, rows: int) -> None:
    deadline = time.monotonic() + DEADLINE
    while rows_done(job) < rows:
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline, f"no {rows} rows within {DEADLINE} s"
        time.sleep(0.02)
