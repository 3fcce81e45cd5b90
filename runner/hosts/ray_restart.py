"""After the loss of a Ray: whether the job goes on with another one, and how."""

from __future__ import annotations

import os
import sys
from typing import NoReturn

from outrider.runner.job.journal import Journal
from outrider.runner.safe_path import environment_as_given
from outrider.workers.errors import JobError, RayLostError

# So many Rays may be lost without a row ending in between; more of them would fare no better.
MOST_IDLE_LOSSES = 3
# Told to the command's next life: what it was to do once is done.
ANEW = "OUTRIDER_ANEW"


def check_worth_another(journal: Journal, lost: RayLostError, ours: bool) -> None:
    """Whether a job whose Ray is lost goes on by itself with another one of ours; an error where it does not."""
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
    """This very command from its beginning, in this very process, without what Ray's libraries remember of the lost Ray."""
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment_as_given() | {ANEW: "1"})
