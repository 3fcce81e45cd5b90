"""``outrider run``: prepare or resume the job, run its rows, and write results, job.json and report."""

from __future__ import annotations

import json
import os
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.runner.counted import counted
from outrider.runner.drive_job import drive
from outrider.runner.exit_codes import ALL_DONE, INTERRUPTED, SOME_FAILED
from outrider.runner.hosts.auth import require_token
from outrider.runner.hosts.limits import check_limits
from outrider.runner.hosts.ray_restart import restart
from outrider.runner.job.directory import (
    DESCRIPTION,
    JOURNAL,
    check_apart,
    check_free,
    default_directory,
    job_lock,
    open_job,
    path_exists,
)
from outrider.runner.job.piped_input import is_piped
from outrider.runner.job.prompts import check_input
from outrider.runner.on_end import run_on_end
from outrider.runner.options.job import JobSpec
from outrider.runner.prepare_job import prepare
from outrider.runner.printable import printable
from outrider.runner.report.display import Display, Watcher, console, summary_table
from outrider.runner.report.status import status_of
from outrider.runner.report.words import failure_lines
from outrider.runner.safe_path import environment_as_given
from outrider.runner.streams import lost_output
from outrider.runner.writable import check_file
from outrider.workers.errors import JobHeldError, OutriderError, RayLostError, UsageError
from outrider.workers.models.draft_names import AUTO, LOOKUP, MODEL, NONE, SUFFIX, split_draft


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run of a job ended."""

    directory: Path
    summary: dict[str, Any]
    over_time: list[dict[str, Any]]
    interrupted: bool

    @property
    def exit_code(self) -> int:
        return INTERRUPTED if self.interrupted else SOME_FAILED if self.summary["failed"] else ALL_DONE


def run(spec: JobSpec, as_json: bool = False, retry_failed: bool = False) -> int:
    """Run the job for the command line: messages on standard error, with ``as_json`` the summary on standard output."""
    outcome = run_job(spec, Display(console()), retry_failed)
    summary = outcome.summary
    if as_json:
        print(json.dumps({"job": str(outcome.directory), **summary}))
        if (error := lost_output()) is not None:
            said = f"the summary cannot be printed ({error.strerror}); it stands in {outcome.directory / DESCRIPTION}, too"
            console().print(printable(said), markup=False, highlight=False, soft_wrap=True)
    else:
        console().print(summary_table(summary, outcome.over_time, str(outcome.directory)))
        for line in _failures(outcome):
            console().print(f"failed: {line}", markup=False, highlight=False, soft_wrap=True)
    if outcome.interrupted:
        left = counted(summary["pending"], "row")
        console().print(f"stopped with {left} to go; the same command goes on with them", markup=False)
    return outcome.exit_code


def _failures(outcome: Outcome) -> list[str]:
    if not outcome.summary["failed"]:
        return []
    with closing(open_job(outcome.directory)) as journal:
        return list(failure_lines(status_of(journal).failures))


def run_job(spec: JobSpec, display: Watcher, retry_failed: bool = False) -> Outcome:
    """Prepare or resume the job, and run it to its end or until it is stopped; ``retry_failed``: failed rows again too."""
    if spec.on_end is None:
        return _run_job(spec, display, retry_failed)
    before = environment_as_given()
    directory = spec.out or default_directory(spec.input)
    try:
        outcome = _run_job(spec, display, retry_failed)
    except JobHeldError:  # another process runs the job, so it has not ended
        raise
    except BaseException as error:
        run_on_end(spec.on_end, before, directory, _exit_code_of(error), display.say)
        raise
    run_on_end(spec.on_end, before, directory, outcome.exit_code, display.say)
    return outcome


def _exit_code_of(error: BaseException) -> int:
    return (
        error.exit_code if isinstance(error, OutriderError) else INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1
    )


def _run_job(spec: JobSpec, display: Watcher, retry_failed: bool) -> Outcome:
    directory = spec.out or default_directory(spec.input)
    check_apart("INPUT", spec.input, directory)
    if spec.trace is not None:
        check_apart("--trace", spec.trace, directory)
        if path_exists(spec.trace) and path_exists(spec.input) and spec.trace.samefile(spec.input):
            raise UsageError(f"--trace: {spec.trace} is the input; name another file")
        check_file("--trace", spec.trace)
    # A job whose rows are in its journal no longer needs the input file; a pipe can be read only once.
    if not path_exists(directory / JOURNAL):
        spec.check_new()
        if not is_piped(spec.input):
            check_input(spec.input, spec.split)
    check_free(directory, is_piped(spec.input))
    if spec.address is not None:
        require_token(display.say)
    else:
        # Checked before the tokenizer process starts, since that one needs file descriptors and processes as well.
        check_limits(_least_actors(spec))
    try:
        with job_lock(directory), display:
            outcome = _run_held(spec, directory, display, retry_failed)
    except RayLostError as lost:
        display.say(f"{lost}: it is started anew, and the job goes on")
        restart()
    return Outcome(directory, outcome["summary"], outcome["over_time"], outcome["interrupted"])


def _least_actors(spec: JobSpec) -> int:
    """The least number of actors that the options allow: whether the model has a draft of its own is not known yet."""
    named = split_draft(spec.draft)[0] not in (AUTO, MODEL, LOOKUP, SUFFIX, NONE)
    has_draft = named and spec.draft_tokens != 0
    # More replicas than cores find no place, as the plan says: threads of 4,096 were started for minutes before it could.
    return min(spec.replicas or 1, len(os.sched_getaffinity(0))) * (1 + has_draft)


def _run_held(spec: JobSpec, directory: Path, display: Watcher, retry_failed: bool) -> dict[str, Any]:
    prepared = prepare(spec, directory, display, retry_failed)
    outcome = drive(spec, directory, prepared, display)
    prepared.journal.close()
    return outcome
