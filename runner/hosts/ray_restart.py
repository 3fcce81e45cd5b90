"""After a job has lost its Ray: whether it goes on with a new one, and executing the command anew."""

from __future__ import annotations

import os
import sys
from typing import NoReturn

from outrider.runner import streams
from outrider.runner.job.journal import Journal
from outrider.runner.safe_path import environment_as_given
from outrider.workers.errors import JobError, RayLostError

# The job stops when this many Rays are lost without a row ending in between.
MOST_IDLE_LOSSES = 3
# A job does not wait longer for a reader of its messages.
LAST_WORDS_SECONDS = 1.0
# Environment variable of a command that was executed anew: what is done once per command is done already.
ANEW = "OUTRIDER_ANEW"


def check_worth_another(journal: Journal, lost: RayLostError, ours: bool) -> None:
    """Raise an error unless a job whose Ray is lost should go on with a new one; ``ours``: it was not a cluster's."""
    kept = "the rows already done are kept, and the same command goes on with them"
    if not ours:
        raise JobError(f"{lost}; {kept} once it is there again") from lost
    counts = journal.counts()
    rows = counts.done + counts.failed
    idle = [*(earlier for earlier in journal.meta("ray_losses") or [] if earlier == rows), rows]
    hopeless = len(idle) >= MOST_IDLE_LOSSES
    journal.set_meta("ray_losses", [] if hopeless else idle)
    if hopeless:
        raise JobError(f"{lost}, {MOST_IDLE_LOSSES} times without a row ending in between; {kept}") from lost


def restart() -> NoReturn:
    """Execute this command anew in this process, which drops the state that Ray's libraries have of the lost Ray."""
    sys.stdout.flush()
    streams.finish(LAST_WORDS_SECONDS)
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment_as_given() | {ANEW: "1"})
