"""``outrider retry``."""

from __future__ import annotations

from typing import Annotated

import typer

from outrider.workers.errors import UsageError


def retry_command(
    context: typer.Context,
    json_: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
) -> None:
    """Run a job's failed rows again, as the job was run. Options of outrider run that are given replace the job's own.

    --on-end, --allow-pickle, --address, --metrics-port and --trace hold for one run and are given again.
    """
    from outrider.runner.cli.arguments import Deferred, given
    from outrider.runner.cli.ending import exit_code_of, interrupt_on_signals
    from outrider.runner.options.job import JobSpec
    from outrider.runner.retry import retry_spec
    from outrider.runner.run_job import run

    run_command = context.find_root().command.get_command(context, "run")  # type: ignore[attr-defined]
    command = Deferred("retry", callback=run_command.callback)
    for parameter in command.params:
        if parameter.name == "input":
            parameter.metavar = "JOB"
    parsed = command.make_context("outrider retry", list(context.args))
    if parsed.params["config"] is not None:
        raise UsageError("--config: a retry takes the job's own options; give those that differ on the command line")
    asked = given(parsed, JobSpec)
    job = asked.pop("input", None)
    if job is None:
        raise UsageError("JOB is missing: name the directory of a job")
    interrupt_on_signals()
    spec = retry_spec(job, asked)
    raise typer.Exit(exit_code_of(lambda: run(spec, as_json=json_, retry_failed=True)))
