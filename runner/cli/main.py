"""The command line. Nothing heavy is imported before a command needs it."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer

import outrider
from outrider.runner import streams
from outrider.runner.cli import shared_options as options
from outrider.runner.cli.arguments import given
from outrider.runner.printable import printable
from outrider.runner.process_exit import end
from outrider.workers.errors import OutriderError

app = typer.Typer(
    name="outrider",
    help="Batch jobs for assisted generation: a draft model rides ahead, the target checks, the text is the target's own.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

INTERRUPTED = 130


@app.callback(invoke_without_command=True)
def _options(version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False) -> None:
    if version:
        typer.echo(f"outrider {outrider.__version__}")
        raise typer.Exit


@app.command("run")
def run_command(
    context: typer.Context,
    input: Annotated[
        Path | None,
        typer.Argument(
            parser=options.path,
            metavar="INPUT",
            help="OpenAI batch JSONL, plain JSONL, or text with a prompt a line; .gz and .zst, too. - is standard input.",
        ),
    ] = None,
    model: options.Model = "pocket",
    draft: options.Draft = "auto",
    assisted: options.Assisted = True,
    out: Annotated[
        Path | None,
        typer.Option(
            "-o", "--out", parser=options.path, metavar="DIR", help="Job directory [default: INPUT's name and -job]."
        ),
    ] = None,
    format: Annotated[str, typer.Option(help="auto, jsonl or text.")] = "auto",
    skip_bad: Annotated[bool, typer.Option("--skip-bad", help="Turn bad lines into error records.")] = False,
    max_tokens: Annotated[int, typer.Option(help="New tokens a row, where the row does not say.")] = 128,
    min_tokens: Annotated[int, typer.Option(help="No end before so many; where the row does not say.")] = 0,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Write on past the model's end tokens.")] = False,
    do_sample: options.DoSample = False,
    temperature: options.Temperature = 0.0,
    top_p: options.TopP = 1.0,
    top_k: options.TopK = 0,
    min_p: options.MinP = 0.0,
    seed: options.Seed = 0,
    engine: options.Engine = "auto",
    precision: options.Precision = "auto",
    draft_precision: options.DraftPrecision = "auto",
    draft_tokens: options.DraftTokens = "auto",
    draft_confidence: options.DraftConfidence = 0.0,
    runners_up: options.RunnersUp = True,
    small_draft_cache: options.SmallDraftCache = True,
    fast_attention: options.FastAttention = True,
    draft_deadline: options.DraftDeadline = 5.0,
    batch: Annotated[int, typer.Option(help="Rows at once on a replica.")] = 8,
    prefix_tokens: Annotated[
        int, typer.Option(help="Most tokens of ended prompts kept for rows that begin alike; 0 shares nothing.")
    ] = 4096,
    replicas: Annotated[int | None, typer.Option(help="Pairs of target and draft [default: one a unit of --per].")] = None,
    per: options.Per = "auto",
    layout: options.Layout = "auto",
    draft_cores: options.DraftCores = None,
    devices: options.Devices = "",
    share_cores: Annotated[
        bool, typer.Option("--share-cores", help="Share cores with other replicas and runs that do: slow, for trying out.")
    ] = False,
    address: Annotated[
        str | None,
        typer.Option(
            parser=options.words,
            metavar="WHERE",
            help="Run on a Ray cluster: auto (the one that this host is in) or HOST:PORT.",
        ),
    ] = None,
    wait_for_cores: options.WaitForCores = 3600.0,
    allow_pickle: options.AllowPickle = False,
    start_deadline: options.StartDeadline = 300.0,
    trace: Annotated[
        Path | None,
        typer.Option(
            parser=options.path, metavar="FILE", help="Write who was busy when, for ui.perfetto.dev, to this file."
        ),
    ] = None,
    metrics_port: Annotated[int | None, typer.Option(help="Serve Prometheus metrics there while the job runs.")] = None,
    config: options.Config = None,
    json_: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
) -> None:
    """Run a batch job, or resume it: the same command on the same job directory does only what is missing."""
    from outrider.runner.options import build_spec
    from outrider.runner.run_job import run

    # Until rows are under way a request to end is a Ctrl-C.
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        code = run(build_spec(given(context, leave_out={"config", "json_"}), config), as_json=json_)
    except KeyboardInterrupt:  # typer would end here too, without a word
        print("stopped; the same command resumes the job", file=sys.stderr)
        code = INTERRUPTED
    raise typer.Exit(code)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


@app.command("status")
def status_command(
    job: Annotated[
        Path, typer.Argument(parser=options.path, metavar="JOB", help="A job directory, or the id of a submitted job.")
    ],
    json_: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
    address: Annotated[
        str | None,
        typer.Option(parser=options.words, metavar="URL", help="Ask this job server of Ray [for ids: the head's own]."),
    ] = None,
) -> None:
    """Count a job's rows by state."""
    from outrider.runner.job.directory import JOURNAL, open_job, there
    from outrider.runner.job.lock import is_held

    if address is not None or (not there(job / JOURNAL) and job.name.startswith("outrider-")):
        from outrider.runner.cli.cluster import status_on_cluster

        status_on_cluster(str(job), address, json_)
        return
    counts = open_job(job).counts()
    running = is_held(job)
    states = {True: "running", False: "not running", None: "whether it is running cannot be seen by this user"}
    if json_:
        typer.echo(json.dumps({"rows": counts.rows, "done": counts.done, "failed": counts.failed, "running": running}))
    else:
        ended = f"{counts.done:,} done, {counts.failed:,} failed"
        typer.echo(f"{printable(job)}: {counts.rows:,} rows, {ended}, {states[running]}")


@app.command("results")
def results_command(
    job: Annotated[Path, typer.Argument(parser=options.path, metavar="JOB", help="A job directory.")],
    out: Annotated[
        Path | None, typer.Option("-o", "--out", parser=options.path, metavar="DIR", help="Write them there instead.")
    ] = None,
) -> None:
    """Write what is done so far to the job's results.jsonl and errors.jsonl."""
    from outrider.runner.job.directory import open_job, place_for
    from outrider.runner.job.results import write_results

    journal = open_job(job)
    for path in write_results(journal, place_for(job, out)):
        typer.echo(printable(path))


@app.command("report")
def report_command(
    job: Annotated[Path, typer.Argument(parser=options.path, metavar="JOB", help="A job directory.")],
    out: Annotated[
        Path | None, typer.Option("-o", "--out", parser=options.path, metavar="DIR", help="Write it there instead.")
    ] = None,
) -> None:
    """Write the job in pictures to its report.html, also while it runs."""
    from outrider.runner.job.directory import open_job, place_for, read_description
    from outrider.runner.job.lock import is_held
    from outrider.runner.report.report import write_report

    journal = open_job(job)
    if note := read_description(job, journal)[1]:
        typer.echo(f"note: {printable(note)}", err=True)
    typer.echo(printable(write_report(journal, job, bool(is_held(job)), place_for(job, out))))


def _register_other_commands() -> None:
    from outrider.runner.cli.bench import bench_command
    from outrider.runner.cli.cluster import cancel_command, list_command, logs_command, submit_command, token_command
    from outrider.runner.cli.machine import doctor_command, topology_command

    app.command("bench")(bench_command)
    # What submit does not know itself, it hands on to run.
    handing_on = {"allow_extra_args": True, "ignore_unknown_options": True}
    usage = "INPUT|JOB.yaml [OPTIONS OF RUN]"
    app.command("submit", context_settings=handing_on, options_metavar=usage)(submit_command)
    app.command("logs")(logs_command)
    app.command("cancel")(cancel_command)
    app.command("list")(list_command)
    app.command("token")(token_command)

    app.command("topology")(topology_command)
    app.command("doctor")(doctor_command)


_register_other_commands()


def main() -> None:
    streams.settle()
    try:
        _run()
    except SystemExit as done:
        code = _code_with_all_said(done.code)
        end(code)
        sys.exit(code)


def _code_with_all_said(code: str | int | None) -> str | int | None:
    """A command whose answer did not get out has failed."""
    if (error := streams.lost_output()) is None:
        return code
    print(f"outrider: standard output cannot be written: {error.strerror}", file=sys.stderr)
    return code or 1


def _run() -> None:
    try:
        app()
    except OutriderError as error:
        _fail(error)


def _fail(error: OutriderError) -> None:
    for line in error.lines:
        print(printable(line), file=sys.stderr)
    print(f"outrider: {printable(error)}", file=sys.stderr)
    sys.exit(error.exit_code)
