"""The commands about jobs on a cluster: ``outrider submit``, ``logs``, ``cancel``, ``list`` and ``token``."""

from __future__ import annotations

import json
import re
import sys
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from outrider.runner.cli.arguments import words
from outrider.runner.counted import counted
from outrider.runner.exit_codes import INTERRUPTED
from outrider.runner.printable import printable, printable_lines
from outrider.runner.streams import is_taken

Address = Annotated[
    str | None,
    typer.Option(
        parser=words,
        metavar="URL",
        help="Ray's job server [default: http://127.0.0.1:8265, which is the head's own].",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print as JSON, for programs.")]
Job = Annotated[str, typer.Argument(parser=words, metavar="JOB", help="A job directory, or an id from outrider list.")]

# Ray's message about a driver that failed, before the end of its log; negative: the number of the signal that killed it.
EXIT_CODE = re.compile(r"Job entrypoint command failed with exit code (-?\d+)")


def submit_command(
    context: typer.Context,
    address: Address = None,
    follow: Annotated[bool, typer.Option("--follow", help="Show the job's log until it ends.")] = False,
    json_: AsJson = False,
) -> None:
    """Run a job on a cluster: a file of prompts with any options of outrider run, or a YAML file of options (as --config).

    Sent again, the job goes on where it was. With --follow the exit code is the job's.
    """
    from outrider.runner.hosts.submit import JobServer, absolute, as_json, complaint
    from outrider.workers.errors import JobError, JobStoppedError

    spec = absolute(_spec(context))
    server = JobServer(address, _say)
    job = server.submit(spec.model_copy(update={"address": spec.address or "auto"}))
    _say(f"submitted as {job.id}; waiting until its driver has read {spec.input}")
    job = server.wait_until_accepted(job)
    if job.state == "FAILED":
        raise JobError(f"{job.id} has failed on the driver's host: {complaint(server.logs(job))}")
    if job.state == "STOPPED":
        raise JobStoppedError(f"{job.id} was stopped while it was waited for; submit it again to go on")
    if json_:
        typer.echo(as_json(job))
    else:
        _say(f"outrider logs -f {job.id} follows it; results will be in {job.directory}, on the host of the driver")
    if follow:
        _follow(server, job)


def logs_command(
    job: Job,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Go on showing the log until the job ends.")] = False,
    address: Address = None,
) -> None:
    """Print the log of a job on a cluster; with --follow the exit code is the job's."""
    from outrider.runner.hosts.submit import JobServer

    server = JobServer(address, _say)
    found = server.find(job)
    if follow:
        _follow(server, found)
    else:
        typer.echo(printable_lines(server.logs(found)), nl=False)


def cancel_command(job: Job, address: Address = None) -> None:
    """Stop a job on a cluster; rows under way end first. Submitted again, it goes on where it was."""
    from outrider.runner.hosts.submit import JobServer

    server = JobServer(address, _say)
    found = server.find(job)
    if found.ended:
        _say(f"{found.id} is {found.state.lower()} already")
        return
    server.stop(found)
    _say(f"{found.id} finishes the rows under way and stops; submit it again to go on")


def list_command(address: Address = None, json_: AsJson = False) -> None:
    """List the jobs that were submitted to a cluster, the latest last."""
    from outrider.runner.hosts.submit import JobServer, as_json

    jobs = JobServer(address, _say).all()
    if json_:
        typer.echo(json.dumps([json.loads(as_json(job)) for job in jobs]))
        return
    for job in jobs:
        started = datetime.fromtimestamp(job.started).strftime("%Y-%m-%d %H:%M") if job.started else "not yet"
        typer.echo(f"{job.id}  {job.state.lower():9}  {started}  {printable(job.directory)}")


def token_command() -> None:
    """Make the token that guards a cluster, if there is none, and print its path, never the token itself."""
    from outrider.runner.hosts.auth import make_token

    path, new = make_token()
    _say(f"{path}: {'made' if new else 'is there already'}, readable by you alone")


def status_on_cluster(job: str, address: str | None, as_json_: bool) -> None:
    """For ``outrider status`` of a job that is not a directory here."""
    from outrider.runner.hosts.submit import JobServer, as_json
    from outrider.runner.job.directory import JOURNAL, open_job, path_exists
    from outrider.runner.report.status import status_of

    found = JobServer(address, _say).find(job)
    directory = Path(found.directory)
    # The job's directory may be on a file system that this host mounts too.
    status = status_of(open_job(directory)) if path_exists(directory / JOURNAL) else None
    counts = None if status is None else status.counts
    answer: dict[str, Any] = json.loads(as_json(found))
    if status is not None and counts is not None:
        answer |= {"rows": counts.rows, "done": counts.done, "failed": counts.failed, **status.as_dict()}
    if as_json_:
        typer.echo(json.dumps(answer | {"running": not found.ended}))
        return
    rows = "" if counts is None else f"{counted(counts.rows, 'row')}, {counts.done:,} done, {counts.failed:,} failed, "
    typer.echo(f"{printable(found.directory)}: {rows}{found.state.lower()} as {found.id}")
    for line in () if status is None else status.lines(running=not found.ended):
        typer.echo(f"  {line}")


def _follow(server: Any, job: Any) -> None:
    """Print the log to its end, and exit with the driver's exit code."""
    from outrider.runner.hosts.submit import complaint
    from outrider.workers.errors import JobError

    for piece in server.follow(job):
        sys.stdout.write(printable_lines(piece))
        sys.stdout.flush()
        if not is_taken():  # the reader of our pipe has closed it
            return
    job = server.find(job.id)
    if job.state == "STOPPED":
        raise typer.Exit(INTERRUPTED)
    if job.state == "FAILED":
        said = EXIT_CODE.match(job.message)
        if said is not None and (code := int(said[1])) > 0:
            raise typer.Exit(code)
        # A death by signal leaves nothing in the log.
        why = complaint(job.message) if said is None else f"its process was ended by signal {-code}"
        raise JobError(f"{job.id} has failed on the driver's host: {why}")


def _spec(context: typer.Context) -> Any:
    """The job that ``outrider run`` would make of submit's arguments; refuses what run would refuse."""
    from outrider.runner.cli.arguments import given
    from outrider.runner.options.job import JobSpec, build_spec
    from outrider.runner.options.values import CONFIG_SUFFIXES
    from outrider.workers.errors import UsageError

    arguments = list(context.args)
    run = context.find_root().command.get_command(context, "run")  # type: ignore[attr-defined]
    parsed = run.make_context("outrider submit", arguments)
    asked = given(parsed, JobSpec)
    config = parsed.params["config"]
    if Path(asked.get("input", "")).suffix.lower() in CONFIG_SUFFIXES:
        if config is not None:
            raise UsageError(f"{asked['input']} is a file of options, and so is --config {config}: leave out one")
        config = asked.pop("input")
    return build_spec(asked, config)


def _say(text: str) -> None:
    typer.echo(printable(text), err=True)
