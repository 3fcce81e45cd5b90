"""``outrider bench``: the command line. It takes the spellings of the older tools too."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from outrider.runner.cli_given import given


def bench_command(
    context: typer.Context,
    model: Annotated[
        str, typer.Option("-m", "--model", "--model_name", help="Target: directory, hub id, short name or 'pocket'.")
    ] = "pocket",
    draft: Annotated[
        str,
        typer.Option("--draft", "--assistant-model", "--assistant_model", help="Draft model, or auto, lookup, none."),
    ] = "auto",
    assisted: Annotated[
        bool, typer.Option("--assisted/--no-assisted", "--assisted_generation", help="--no-assisted is --draft none.")
    ] = True,
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
    repeat: Annotated[int, typer.Option(help="Measurements of each example; the median one is shown.")] = 1,
    do_sample: Annotated[
        bool, typer.Option("--do-sample", "--do_sample", help="Temperature 1, where --temperature is not given.")
    ] = False,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option("--top-p", "--top_p", help="1 is off.")] = 1.0,
    top_k: Annotated[int, typer.Option("--top-k", "--top_k", help="0 is off.")] = 0,
    min_p: Annotated[float, typer.Option(help="0 is off.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Of what is sampled.")] = 0,
    engine: Annotated[str, typer.Option(help="auto, native or hf.")] = "auto",
    precision: Annotated[str, typer.Option(help="Target's precision; auto is the checkpoint's own.")] = "auto",
    draft_precision: Annotated[
        str, typer.Option("--draft-precision", "--draft_precision", help="Draft's precision.")
    ] = "auto",
    draft_tokens: Annotated[str, typer.Option(help="Candidates a round: a number (6 is classic), or auto.")] = "auto",
    fast_attention: Annotated[
        bool,
        typer.Option("--fast-attention/--no-fast-attention", "--fast_attention", help="Fused attention, or (hf) eager."),
    ] = True,
    draft_deadline: Annotated[float, typer.Option(help="Seconds a round waits for the draft at most.")] = 5.0,
    per: Annotated[str, typer.Option(help="What the pair gets: auto, node, socket or machine.")] = "auto",
    layout: Annotated[str, typer.Option(help="Draft and target on split or shared cores, or auto.")] = "auto",
    draft_cores: Annotated[int | None, typer.Option(help="Cores of the draft's own.")] = None,
    devices: Annotated[str, typer.Option(help="Such as cuda:0,cpu: the target there, the draft on the CPU.")] = "",
    wait_for_cores: Annotated[float, typer.Option(help="Seconds to wait for cores that other runs hold.")] = 3600.0,
    allow_pickle: Annotated[bool, typer.Option("--allow-pickle", help="Run whatever a .bin file contains.")] = False,
    start_deadline: Annotated[float, typer.Option(help="Seconds a model may take to load.")] = 3600.0,
    config: Annotated[Path | None, typer.Option(help="A YAML file with these options as keys.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write everything measured to this file.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw a chart: FILE.svg or FILE.png.")] = None,
) -> None:
    """Measure a target, with and without its draft: one row at a time, the classic tables as GitHub Markdown."""
    from outrider.runner.bench import BenchSpec, bench
    from outrider.runner.config import build_options

    options = given(context, leave_out={"config"})
    for name in ("lengths", "new_tokens"):
        if name in options:
            options[name] = tuple(part.strip() for part in options[name].split(","))
    bench(build_options(BenchSpec, options, config))
