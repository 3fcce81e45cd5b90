"""The command that a user wants run when a job ends (``--on-end``). It gets no word of any row: only numbers and a path."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path

from outrider.runner.hosts.ray_restart import ANEW
from outrider.runner.job.directory import is_job, open_job
from outrider.runner.safe_path import as_given
from outrider.workers.errors import JobError

SHELL = "/bin/sh"
# The token of the job's own Ray, and what only this process's next life needs.
NOT_HANDED_ON = ("RAY_AUTH_", ANEW)
COUNTS = ("rows", "done", "failed", "pending")


def environment(before: Mapping[str, str], directory: Path, exit_code: int) -> dict[str, str]:
    """What the command sees: what outrider was started with, and how the job has ended."""
    # The job may itself be what another one runs at its end: that one's numbers are not ours.
    left = {_variable(name) for name in COUNTS}
    found = {name: value for name, value in before.items() if not name.startswith(NOT_HANDED_ON) and name not in left}
    found |= {"OUTRIDER_JOB": str(directory.absolute()), "OUTRIDER_EXIT": str(exit_code)}
    try:
        if is_job(directory):
            with closing(open_job(directory)) as journal:
                counts = journal.counts()
            found |= {_variable(name): str(getattr(counts, name)) for name in COUNTS}
    except JobError:
        pass  # the journal is why the job has ended: it has said so, and the exit code says it here
    return found


def _variable(count: str) -> str:
    return f"OUTRIDER_{count.upper()}"


def run_on_end(
    command: str, before: Mapping[str, str], directory: Path, exit_code: int, say: Callable[[str], None]
) -> None:
    """The command's own end is told, and changes nothing of the job's."""
    try:
        ended = subprocess.run(
            [SHELL, "-c", command],
            env=environment(before, directory, exit_code),
            stdin=subprocess.DEVNULL,
            # Standard output belongs to --json.
            stdout=2,
            check=False,
        )
    except OSError as error:
        say(f"note: --on-end: {SHELL} could not be started: {error.strerror}")
    except KeyboardInterrupt:
        say("note: --on-end: the command was stopped")
    else:
        code = ended.returncode
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        if code:
            say(f"note: --on-end: the command {how}; the job's own exit code is {exit_code}")


def as_started() -> dict[str, str]:
    """The environment before Ray is prepared."""
    return as_given()
