"""The command line. Nothing heavy is imported before a command needs it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

import outrider
from outrider.runner.cli_given import given
from outrider.workers.errors import InputError, OutriderError

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
        Path | None, typer.Argument(help="OpenAI batch JSONL, plain JSONL, or text with a prompt a line.")
    ] = None,
    model: Annotated[
        str, typer.Option("-m", "--model", "--model_name", help="Target: directory, hub id or 'pocket'.")
    ] = "pocket",
    draft: Annotated[
        str,
        typer.Option(
            "--draft",
            "--assistant-model",
            "--assistant_model",
            help="Draft model (also MODEL+lookup), or auto, lookup, none.",
        ),
    ] = "auto",
    assisted: Annotated[
        bool, typer.Option("--assisted/--no-assisted", "--assisted_generation", help="--no-assisted is --draft none.")
    ] = True,
    out: Annotated[Path | None, typer.Option("-o", "--out", help="Job directory [default: INPUT's name and -job].")] = None,
    format: Annotated[str, typer.Option(help="auto, jsonl or text.")] = "auto",
    skip_bad: Annotated[bool, typer.Option("--skip-bad", help="Turn bad lines into error records.")] = False,
    max_tokens: Annotated[int, typer.Option(help="New tokens a row, where the row does not say.")] = 128,
    min_tokens: Annotated[int, typer.Option(help="No end before so many; where the row does not say.")] = 0,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Write on past the model's end tokens.")] = False,
    do_sample: Annotated[
        bool, typer.Option("--do-sample", "--do_sample", help="Temperature 1, where --temperature is not given.")
    ] = False,
    temperature: Annotated[float, typer.Option(help="0 is greedy; where the row does not say.")] = 0.0,
    top_p: Annotated[float, typer.Option("--top-p", "--top_p", help="Where the row does not say.")] = 1.0,
    top_k: Annotated[int, typer.Option("--top-k", "--top_k", help="0 is off; where the row does not say.")] = 0,
    min_p: Annotated[float, typer.Option(help="0 is off; where the row does not say.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Seeds of rows that give none derive from it.")] = 0,
    engine: Annotated[str, typer.Option(help="auto, native or hf.")] = "auto",
    precision: Annotated[str, typer.Option(help="Target's precision; auto is the checkpoint's own.")] = "auto",
    draft_precision: Annotated[
        str, typer.Option("--draft-precision", "--draft_precision", help="Draft's precision.")
    ] = "auto",
    draft_tokens: Annotated[str, typer.Option(help="Candidates a round: a number, or auto.")] = "auto",
    draft_confidence: Annotated[
        float, typer.Option(help="The draft stops before a candidate that it holds less likely to be accepted.")
    ] = 0.0,
    fast_attention: Annotated[
        bool,
        typer.Option("--fast-attention/--no-fast-attention", "--fast_attention", help="Fused attention, or (hf) eager."),
    ] = True,
    draft_deadline: Annotated[float, typer.Option(help="Seconds a round waits for the draft at most.")] = 5.0,
    batch: Annotated[int, typer.Option(help="Rows at once on a replica.")] = 8,
    prefix_tokens: Annotated[
        int, typer.Option(help="Tokens of ended prompts kept for rows that begin alike; 0 shares nothing.")
    ] = 4096,
    replicas: Annotated[int | None, typer.Option(help="Pairs of target and draft [default: one a unit of --per].")] = None,
    per: Annotated[str, typer.Option(help="What a replica gets: auto, node, socket or machine.")] = "auto",
    layout: Annotated[str, typer.Option(help="Draft and target on split or shared cores, or auto.")] = "auto",
    draft_cores: Annotated[int | None, typer.Option(help="Cores of the draft's own.")] = None,
    devices: Annotated[str, typer.Option(help="Such as cuda:0,cpu: the target there, the draft on the CPU.")] = "",
    share_cores: Annotated[
        bool, typer.Option("--share-cores", help="Share cores with other replicas and runs that do: slow, for trying out.")
    ] = False,
    address: Annotated[
        str | None, typer.Option(help="Run on a Ray cluster: auto (the one that this host is in) or HOST:PORT.")
    ] = None,
    wait_for_cores: Annotated[float, typer.Option(help="Seconds to wait for cores that other runs hold.")] = 3600.0,
    allow_pickle: Annotated[bool, typer.Option("--allow-pickle", help="Run whatever a .bin file contains.")] = False,
    start_deadline: Annotated[float, typer.Option(help="Seconds a model may take to load.")] = 300.0,
    trace: Annotated[Path | None, typer.Option(help="Write who was busy when, for ui.perfetto.dev, to this file.")] = None,
    metrics_port: Annotated[int | None, typer.Option(help="Serve Prometheus metrics there while the job runs.")] = None,
    config: Annotated[Path | None, typer.Option(help="A YAML file with these options as keys.")] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
) -> None:
    """Run a batch job, or resume it: the same command on the same job directory does only what is missing."""
    from outrider.runner.config import build_spec
    from outrider.runner.running import run

    try:
        code = run(build_spec(given(context, leave_out={"config", "json_"}), config), as_json=json_)
    except KeyboardInterrupt:  # typer would end here too, without a word
        print("stopped; the same command resumes the job", file=sys.stderr)
        code = INTERRUPTED
    raise typer.Exit(code)


@app.command("status")
def status_command(
    job: Annotated[Path, typer.Argument(help="A job directory, or the id of a submitted job.")],
    json_: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
    address: Annotated[str | None, typer.Option(help="Ask this job server of Ray [for ids: the head's own].")] = None,
) -> None:
    """Count a job's rows by state."""
    from outrider.runner.job import JOURNAL, is_held, open_job

    if address is not None or (not (job / JOURNAL).is_file() and job.name.startswith("outrider-")):
        from outrider.runner.cli_cluster import status_on_cluster

        status_on_cluster(str(job), address, json_)
        return
    counts = open_job(job).counts()
    running = is_held(job)
    if json_:
        typer.echo(json.dumps({"rows": counts.rows, "done": counts.done, "failed": counts.failed, "running": running}))
    else:
        state = "running" if running else "not running"
        typer.echo(f"{job}: {counts.rows:,} rows, {counts.done:,} done, {counts.failed:,} failed, {state}")


@app.command("results")
def results_command(job: Annotated[Path, typer.Argument(help="A job directory.")]) -> None:
    """Write what is done so far to the job's results.jsonl and errors.jsonl."""
    from outrider.runner.job import open_job
    from outrider.runner.results import write_results

    for path in write_results(open_job(job), job):
        typer.echo(str(path))


@app.command("report")
def report_command(job: Annotated[Path, typer.Argument(help="A job directory.")]) -> None:
    """Write the job in pictures to its report.html, also while it runs."""
    from outrider.runner.job import is_held, open_job
    from outrider.runner.report import write_report

    typer.echo(str(write_report(open_job(job), job, is_held(job))))


def _register_other_commands() -> None:
    from outrider.runner.cli_bench import bench_command
    from outrider.runner.cli_cluster import cancel_command, list_command, logs_command, submit_command, token_command
    from outrider.runner.cli_machine import doctor_command, topology_command

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
    try:
        app()
    except InputError as error:
        for line in error.lines:
            print(line, file=sys.stderr)
        _fail(error)
    except OutriderError as error:
        _fail(error)


def _fail(error: OutriderError) -> None:
    print(f"outrider: {error}", file=sys.stderr)
    sys.exit(error.exit_code)
