"""The options of outrider score, outrider quantize and outrider merge."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field

from outrider.runner.options.option import Option, OptionModel
from outrider.runner.options.shared import ComputedModel, ModelOptions, UnitOptions, WaitingOptions
from outrider.runner.options.values import Format, Method, Name, NamedPath, Precision


def _bits(value: int | None) -> int | None:
    if value not in (None, 4, 8):
        raise ValueError("be 4 or 8")
    return value


class ScoreSpec(ComputedModel, UnitOptions, WaitingOptions):
    """The score"""

    input: Annotated[
        NamedPath,
        Option(
            help="Rows in lines of JSON (the prompts are scored), or one text; .gz and .zst, too.",
            decides_text=False,
            metavar="INPUT",
            positional=True,
            if_missing="name a file of text, or of rows",
        ),
    ]
    format: Annotated[Format, Option(help="auto, jsonl (rows) or text (the whole file is one).", decides_text=False)] = (
        "auto"
    )
    skip_bad: Annotated[bool, Option(help="Leave bad rows out.", decides_text=False)] = False
    against: Annotated[
        Name | None,
        Option(help="Compare with this model, which has the same tokens.", decides_text=False, metavar="MODEL"),
    ] = None
    against_precision: Annotated[
        Precision,
        Option(
            help="Precision of the --against model; without one, compare with the same model in this precision.",
            decides_text=False,
        ),
    ] = "auto"
    window: Annotated[
        int | None,
        Field(ge=2),
        Option(help="Tokens of a window [default: 2048, or the model's context where that is less].", decides_text=False),
    ] = None
    stride: Annotated[
        int | None,
        Field(ge=1),
        Option(
            help="Tokens from one window's beginning to the next's [default: --window, so that none overlap].",
            decides_text=False,
        ),
    ] = None
    most_tokens: Annotated[
        int | None, Field(ge=1), Option(help="Stop after this many scored tokens [default: score all].", decides_text=False)
    ] = None


class QuantizeSpec(ModelOptions, UnitOptions, WaitingOptions):
    """The new checkpoint"""

    # out and bits are required; quantize reports a missing one.
    out: Annotated[
        NamedPath | None,
        Option(
            help="Directory of the new checkpoint.",
            decides_text=False,
            spellings=("-o",),
            metavar="DIR",
        ),
    ] = None
    bits: Annotated[
        int | None,
        AfterValidator(_bits),
        Option(help="4: int4 weights. 8: int8 weights, for int8 activations.", decides_text=False),
    ] = None
    method: Annotated[
        Method,
        Option(help="awq is for 4 bits, smoothquant for 8; auto: the best, layer by layer.", decides_text=False),
    ] = "auto"
    group: Annotated[
        int | None,
        Field(ge=8, le=1024),
        Option(
            help="Weights that share a scale, with --bits 4 [default: the largest up to 32 that divides all widths].",
            decides_text=False,
        ),
    ] = None
    calibration: Annotated[
        NamedPath | None,
        Option(
            help="Text to calibrate on: rows in lines of JSON, or one text [default: our own].",
            decides_text=False,
            metavar="FILE",
        ),
    ] = None
    format: Annotated[
        Format, Option(help="Of --calibration: auto, jsonl (rows) or text (one text).", decides_text=False)
    ] = "auto"
    skip_bad: Annotated[bool, Option(help="Leave bad rows of --calibration out.", decides_text=False)] = False


class MergeSpec(OptionModel):
    """The merged model"""

    adapter: Annotated[
        Name,
        Option(
            help="The adapter's directory or hub id: a LoRA as PEFT saves it.",
            decides_text=False,
            metavar="ADAPTER",
            positional=True,
            if_missing="name the directory of an adapter",
        ),
    ]
    model: Annotated[
        Name | None,
        Option(
            help="The model to merge it into [default: the one that the adapter names].",
            decides_text=False,
            spellings=("-m",),
            metavar="MODEL",
        ),
    ] = None
    # Required; merge reports a missing one.
    out: Annotated[
        NamedPath | None,
        Option(help="Directory of the merged model.", decides_text=False, spellings=("-o",), metavar="DIR"),
    ] = None
