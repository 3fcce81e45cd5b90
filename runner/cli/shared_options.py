"""The options that ``run`` and ``bench`` have in common, each declared once. The older tools' spellings are taken too."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def words(text: str) -> str:
    """An option's text. An empty one is a variable of the user's shell that is not set."""
    if not text:
        raise typer.BadParameter("must not be empty")
    return text


def path(text: str) -> Path:
    return Path(words(text))


Model = Annotated[
    str,
    typer.Option(
        "-m",
        "--model",
        "--model_name",
        parser=words,
        metavar="MODEL",
        help="Target: directory, hub id, short name or 'pocket'.",
    ),
]
Draft = Annotated[
    str,
    typer.Option(
        "--draft",
        "--assistant-model",
        "--assistant_model",
        parser=words,
        metavar="DRAFT",
        help="Draft model (also MODEL+lookup), or auto, lookup, none.",
    ),
]
Assisted = Annotated[
    bool, typer.Option("--assisted/--no-assisted", "--assisted_generation", help="--no-assisted is --draft none.")
]
DoSample = Annotated[
    bool, typer.Option("--do-sample", "--do_sample", help="Temperature 1, where --temperature is not given.")
]
Temperature = Annotated[float, typer.Option(help="0 is greedy; a row's own comes first.")]
TopP = Annotated[float, typer.Option("--top-p", "--top_p", help="1 is off; a row's own comes first.")]
TopK = Annotated[int, typer.Option("--top-k", "--top_k", help="0 is off; a row's own comes first.")]
MinP = Annotated[float, typer.Option(help="0 is off; a row's own comes first.")]
Seed = Annotated[int, typer.Option(help="Rows that have no seed of their own derive one from it.")]
Engine = Annotated[str, typer.Option(help="auto, native or hf.")]
Precision = Annotated[str, typer.Option(help="Target's precision; auto is the checkpoint's own.")]
DraftPrecision = Annotated[
    str,
    typer.Option(
        "--draft-precision",
        "--draft_precision",
        help="Draft's precision; auto: its own, on the CPU bf16 for fp16, fp32.",
    ),
]
DraftTokens = Annotated[str, typer.Option(help="Candidates a round: a number (6 is classic), or auto.")]
DraftConfidence = Annotated[
    float, typer.Option(help="The draft stops before a candidate that it holds less likely to be accepted.")
]
RunnersUp = Annotated[
    bool,
    typer.Option(
        "--runners-up/--no-runners-up", help="Where a pass has room, try what the draft would have said second, too."
    ),
]
SmallDraftCache = Annotated[
    bool,
    typer.Option(help="Keys and values of a w4a8 or w8a8 draft in 8 bits: fewer bytes a step, and no text depends on it."),
]
FastAttention = Annotated[
    bool,
    typer.Option("--fast-attention/--no-fast-attention", "--fast_attention", help="Fused attention, or (hf) eager."),
]
DraftDeadline = Annotated[float, typer.Option(help="Seconds a round waits for the draft at most.")]
Per = Annotated[str, typer.Option(help="What a replica gets: auto, node, socket or machine.")]
Layout = Annotated[str, typer.Option(help="Draft and target on split or shared cores, or auto.")]
DraftCores = Annotated[int | None, typer.Option(help="Cores of the draft's own.")]
Devices = Annotated[str, typer.Option(help="Such as cuda:0,cpu: the target there, the draft on the CPU.")]
WaitForCores = Annotated[float, typer.Option(help="Seconds to wait for cores that other runs hold.")]
AllowPickle = Annotated[bool, typer.Option("--allow-pickle", help="Run whatever a .bin file contains.")]
StartDeadline = Annotated[float, typer.Option(help="Seconds a model may take to load.")]
Config = Annotated[Path | None, typer.Option(parser=path, metavar="FILE", help="A YAML file with these options as keys.")]
