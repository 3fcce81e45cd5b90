"""The options of outrider bench."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, field_validator

from outrider.runner.options.option import Option
from outrider.runner.options.shared import Options
from outrider.runner.options.values import Method, NamedPath


class BenchSpec(Options):
    """The benchmark"""

    task: Annotated[
        Literal["decode", "benchmark", "benchmark_code", "quantize"],
        Option(
            help="decode: ten short prompts. benchmark: prompts by length. benchmark_code: beginnings of Python functions. "
            "quantize: make a smaller checkpoint, as outrider quantize does.",
            decides_text=True,
        ),
    ] = "decode"
    algorithm: Annotated[
        Method,
        Option(help="Of --task quantize; auto: the best of them, layer by layer.", decides_text=False),
    ] = "auto"
    out: Annotated[
        NamedPath | None,
        Option(
            help="Of --task quantize: directory of the new checkpoint.",
            decides_text=False,
            spellings=("-o",),
            metavar="DIR",
        ),
    ] = None
    calibration: Annotated[
        NamedPath | None,
        Option(help="Of --task quantize: text to calibrate on [default: our own].", decides_text=False, metavar="FILE"),
    ] = None
    lengths: Annotated[
        tuple[int, ...],
        Option(help="Prompt lengths of --task benchmark, such as 256,512 [default: 256,512,1024,1968].", decides_text=True),
    ] = ()
    new_tokens: Annotated[
        tuple[int, ...],
        Option(
            help="New tokens for each prompt, such as 64,128 [default: decode 30; benchmark 64 to 1024, 60 behind long "
            "prompts; benchmark_code 128].",
            decides_text=True,
            spellings=("--max_new_tokens",),
        ),
    ] = ()
    compare: Annotated[
        bool,
        Option(
            help="Measure plain and assisted in turn, with the speed-up; otherwise assisted alone (--no-assisted: plain).",
            decides_text=False,
        ),
    ] = False
    # The answers of the older tools' tables ended so.
    stop_at_end: Annotated[
        bool,
        Option(
            help="Let an end token end an answer before --new-tokens; otherwise end tokens are ignored.", decides_text=True
        ),
    ] = False
    repeat: Annotated[
        int,
        Field(ge=1, le=1000),
        Option(help="Measurements of each example; the median one is shown.", decides_text=False),
    ] = 1
    json_file: Annotated[
        Path | None,
        Option(help="Write everything measured to this file.", decides_text=False, flag="--json", metavar="FILE"),
    ] = None
    plot: Annotated[Path | None, Option(help="Draw a chart: FILE.svg or FILE.png.", decides_text=False, metavar="FILE")] = (
        None
    )
    # The benchmark runs one pair, one row at a time.
    replicas: Annotated[
        int | None, Field(ge=1, le=4096), Option(help="One pair is measured.", decides_text=False, on_command_line=False)
    ] = None
    batch: Annotated[
        Literal[1], Option(help="One row at a time is measured.", decides_text=False, on_command_line=False)
    ] = 1
    # Prompts are repeated, so neither suffixes nor a learning draft may know an earlier answer to the same prompt.
    answer_tokens: Annotated[
        Literal[0], Option(help="No answer knows another.", decides_text=False, on_command_line=False)
    ] = 0
    draft_learns: Annotated[
        Literal[False], Option(help="The draft does not learn.", decides_text=False, on_command_line=False)
    ] = False
    # Each prompt is prefilled in full each time.
    prefix_tokens: Annotated[
        Literal[0], Option(help="Prompts are read at their full cost.", decides_text=False, on_command_line=False)
    ] = 0
    # Packing a large model for the first time takes minutes.
    start_deadline: Annotated[
        float, Field(gt=0.0), Option(help="Seconds that a model may take to load.", decides_text=False)
    ] = 3600.0

    @field_validator("lengths", "new_tokens")
    @classmethod
    def _counts(cls, counts: tuple[int, ...]) -> tuple[int, ...]:
        if any(count < 1 for count in counts):
            raise ValueError("must be whole numbers from 1 on")
        return counts
