"""``outrider bench``: the command line. It takes the spellings of the older tools too."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from outrider.runner.cli import shared_options as options
from outrider.runner.cli.arguments import given


def bench_command(
    context: typer.Context,
    model: options.Model = "pocket",
    draft: options.Draft = "auto",
    assisted: options.Assisted = True,
    task: Annotated[
        str, typer.Option(help="decode: ten short prompts. benchmark: by prompt length. benchmark_code: Python.")
    ] = "decode",
    lengths: Annotated[
        str, typer.Option(help="Prompt lengths of --task benchmark, such as 256,512 [default: 256,512,1024,1968].")
    ] = "",
    new_tokens: Annotated[
        str,
        typer.Option(
            "--new-tokens",
            "--max_new_tokens",
            help="New tokens of each prompt, such as 64,128 [default: 30; 64 to 1024, 60 for long prompts; 128].",
        ),
    ] = "",
    compare: Annotated[bool, typer.Option("--compare", help="Plain and assisted in turn, and the speed-up.")] = False,
    stop_at_end: Annotated[
        bool, typer.Option("--stop-at-end", help="End an answer at an end token, so that it may be shorter than was asked.")
    ] = False,
    repeat: Annotated[int, typer.Option(help="Measurements of each example; the median one is shown.")] = 1,
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
    per: options.Per = "auto",
    layout: options.Layout = "auto",
    draft_cores: options.DraftCores = None,
    devices: options.Devices = "",
    wait_for_cores: options.WaitForCores = 3600.0,
    allow_pickle: options.AllowPickle = False,
    start_deadline: options.StartDeadline = 3600.0,
    config: options.Config = None,
    json_file: Annotated[
        Path | None,
        typer.Option("--json", parser=options.path, metavar="FILE", help="Write everything measured to this file."),
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(parser=options.path, metavar="FILE", help="Draw a chart: FILE.svg or FILE.png.")
    ] = None,
) -> None:
    """Measure a target, with and without its draft: one row at a time, the classic tables as GitHub Markdown."""
    from outrider.runner.bench.bench import BenchSpec, bench
    from outrider.runner.options import build_options

    chosen = given(context, leave_out={"config"})
    for name in ("lengths", "new_tokens"):
        if name in chosen:
            chosen[name] = tuple(part.strip() for part in chosen[name].split(","))
    bench(build_options(BenchSpec, chosen, config))
