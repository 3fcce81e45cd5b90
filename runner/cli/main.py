"""The command line. Nothing heavy is imported before a command needs it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

import outrider
from outrider.runner import streams
from outrider.runner.cli.arguments import Config, Deferred, path, with_options, words
from outrider.runner.cli.ending import exit_code_of, interrupt_on_signals
from outrider.runner.counted import counted
from outrider.runner.printable import printable
from outrider.runner.process_exit import end
from outrider.runner.safe_path import safe_path
from outrider.runner.working_directory import working_directory
from outrider.workers.errors import OutriderError, UsageError

app = typer.Typer(
    name="outrider",
    help="Batch jobs for assisted generation: a draft proposes tokens, the target verifies them; texts are the target's.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


@app.callback(invoke_without_command=True)
def _options(version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False) -> None:
    if version:
        typer.echo(f"outrider {outrider.__version__}")
        raise typer.Exit


@app.command("run", cls=Deferred)
def run_command() -> Callable[..., None]:
    """Run a batch job, or resume it: the same command on the same job directory does only what is missing."""
    from outrider.runner.options.job import JobSpec

    return with_options(JobSpec, _run_job)


def _run_job(
    given: dict[str, Any],
    config: Config = None,
    json_: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
) -> None:
    from outrider.runner.options.job import build_spec
    from outrider.runner.run_job import run

    # Until rows are in progress (then the job drains), SIGTERM and SIGHUP interrupt as Ctrl-C does.
    interrupt_on_signals()
    raise typer.Exit(exit_code_of(lambda: run(build_spec(given, config), as_json=json_)))


@app.command("status")
def status_command(
    job: Annotated[Path, typer.Argument(parser=path, metavar="JOB", help="A job directory, or the id of a submitted job.")],
    json_: Annotated[bool, typer.Option("--json", help="Print as JSON, for programs.")] = False,
    address: Annotated[
        str | None,
        typer.Option(
            parser=words,
            metavar="URL",
            help="Ray's job server, for a submitted job [default: http://127.0.0.1:8265, which is the head's own].",
        ),
    ] = None,
) -> None:
    """Show a job's rows by state, how fast it is, when it will be done, and why rows have failed."""
    from outrider.runner.job.directory import JOURNAL, open_job, path_exists
    from outrider.runner.job.lock import is_held

    if address is not None or (not path_exists(job / JOURNAL) and job.name.startswith("outrider-")):
        from outrider.runner.cli.cluster import status_on_cluster

        status_on_cluster(str(job), address, json_)
        return
    from outrider.runner.report.status import status_of

    status = status_of(open_job(job))
    counts = status.counts
    running = is_held(job)
    states = {True: "running", False: "not running", None: "whether it is running cannot be seen by this user"}
    if json_:
        answer = {"rows": counts.rows, "done": counts.done, "failed": counts.failed, "running": running}
        typer.echo(json.dumps(answer | status.as_dict()))
    else:
        ended = f"{counts.done:,} done, {counts.failed:,} failed"
        typer.echo(f"{printable(job)}: {counted(counts.rows, 'row')}, {ended}, {states[running]}")
        for line in status.lines(running):
            typer.echo(f"  {line}")


@app.command("results")
def results_command(
    job: Annotated[Path, typer.Argument(parser=path, metavar="JOB", help="A job directory.")],
    out: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--out",
            parser=path,
            metavar="DIR|FILE",
            help="Directory for both files, or a table's file [default: the job directory].",
        ),
    ] = None,
    format_: Annotated[
        str | None,
        typer.Option(
            "--format",
            parser=words,
            metavar="FORMAT",
            help="openai, or one table: parquet, csv, jsonl or dataset [default: by FILE's name, else openai].",
        ),
    ] = None,
) -> None:
    """Write what is done so far to the job's results.jsonl and errors.jsonl, or to one table."""
    from outrider.runner.job.directory import open_job, output_folder
    from outrider.runner.job.results import ERRORS, RESULTS, write_results
    from outrider.runner.job.tables import DATASET, NAMES, check_not_input, table_of, write_table

    journal = open_job(job)
    named = table_of(out, format_)
    form = format_ or named or "openai"
    if form not in ("openai", *NAMES):
        raise UsageError(f'--format: must be openai, {", ".join(NAMES)}, got "{form}"')
    if named is not None and form != named:
        raise UsageError(f"--format: {form} does not fit to the name {out}; leave out one, or name a directory")
    if form == "openai":
        folder = output_folder(job, out, or_table=True)
        for name in (RESULTS, ERRORS):
            check_not_input(folder / name, job, journal)
        for written in write_results(journal, folder):
            typer.echo(printable(written))
        return
    journal.close()
    to = out if out is not None and (named or form == DATASET) else output_folder(job, out, or_table=True) / NAMES[form]
    typer.echo(printable(write_table(job, to, form)))


@app.command("report")
def report_command(
    job: Annotated[Path, typer.Argument(parser=path, metavar="JOB", help="A job directory.")],
    out: Annotated[
        Path | None,
        typer.Option(
            "-o", "--out", parser=path, metavar="DIR", help="Directory for the report [default: the job directory]."
        ),
    ] = None,
) -> None:
    """Write report.html, the job in charts, also while it runs."""
    from outrider.runner.report.report import report_of

    written, note = report_of(job, out)
    if note:
        typer.echo(f"note: {printable(note)}", err=True)
    typer.echo(printable(written))


def _register_other_commands() -> None:
    from outrider.runner.cli.bench import bench_command
    from outrider.runner.cli.cluster import cancel_command, list_command, logs_command, submit_command, token_command
    from outrider.runner.cli.machine import doctor_command, topology_command
    from outrider.runner.cli.merge import merge_command
    from outrider.runner.cli.quantize import quantize_command
    from outrider.runner.cli.retry import retry_command
    from outrider.runner.cli.score import score_command
    from outrider.runner.cli.serve import serve_command

    app.command("bench", cls=Deferred)(bench_command)
    app.command("score", cls=Deferred)(score_command)
    app.command("quantize", cls=Deferred)(quantize_command)
    app.command("merge", cls=Deferred)(merge_command)
    app.command("serve", cls=Deferred)(serve_command)
    # submit and retry parse the options of run themselves.
    any_options = {"allow_extra_args": True, "ignore_unknown_options": True}
    usage = "INPUT|JOB.yaml [OPTIONS OF RUN]"
    app.command("submit", context_settings=any_options, options_metavar=usage)(submit_command)
    app.command("retry", context_settings=any_options, options_metavar="JOB [OPTIONS OF RUN]")(retry_command)
    app.command("logs")(logs_command)
    app.command("cancel")(cancel_command)
    app.command("list")(list_command)
    app.command("token")(token_command)

    app.command("topology", cls=Deferred)(topology_command)
    app.command("doctor")(doctor_command)


_register_other_commands()


def main() -> None:
    streams.prepare()
    try:
        with safe_path():
            _run()
    except SystemExit as done:
        code = _code_unless_output_lost(done.code)
        end(code)
        sys.exit(code)


def _code_unless_output_lost(code: str | int | None) -> str | int | None:
    """The exit code; a command whose standard output could not be written has failed."""
    if (error := streams.lost_output()) is None:
        return code
    print(f"outrider: standard output cannot be written: {error.strerror}", file=sys.stderr)
    return code or 1


def _run() -> None:
    try:
        app()
    except OutriderError as error:
        _fail(error)
    except FileNotFoundError:
        try:
            working_directory()
        except UsageError as error:
            _fail(error)
        raise


def _fail(error: OutriderError) -> None:
    for line in error.lines:
        print(printable(line), file=sys.stderr)
    print(f"outrider: {printable(error)}", file=sys.stderr)
    sys.exit(error.exit_code)
