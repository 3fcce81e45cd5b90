"""The user's command at the end of a job (``--on-end``). It is told counts of rows and a path, never a row's text."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path

from outrider.runner.hosts.ray_restart import ANEW
from outrider.runner.job.directory import is_job, open_job
from outrider.workers.errors import JobError

SHELL = "/bin/sh"
# Variables that the command does not get: the token of the job's own Ray, and the mark of a command that began anew.
NOT_HANDED_ON = ("RAY_AUTH_", ANEW)
COUNTS = ("rows", "done", "failed", "pending")


def environment(before: Mapping[str, str], directory: Path, exit_code: int) -> dict[str, str]:
    """The command's environment: the one that outrider was started with, plus how the job has ended."""
    # If this job was itself started by the --on-end of another, the environment has that job's counts: drop them.
    left = {_variable(name) for name in COUNTS}
    found = {name: value for name, value in before.items() if not name.startswith(NOT_HANDED_ON) and name not in left}
    found |= {"OUTRIDER_JOB": str(directory.absolute()), "OUTRIDER_EXIT": str(exit_code)}
    try:
        if is_job(directory):
            with closing(open_job(directory)) as journal:
                counts = journal.counts()
            found |= {_variable(name): str(getattr(counts, name)) for name in COUNTS}
    except JobError:
        pass  # a damaged journal has been reported already; the command sees OUTRIDER_EXIT and no counts
    return found


def _variable(count: str) -> str:
    return f"OUTRIDER_{count.upper()}"


def run_on_end(
    command: str, before: Mapping[str, str], directory: Path, exit_code: int, say: Callable[[str], None]
) -> None:
    """Run the command. Its failure is reported, and changes neither the job nor the job's exit code."""
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
