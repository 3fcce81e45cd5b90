"""The options of outrider topology."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from outrider.runner.options.option import Option
from outrider.runner.options.shared import PlacementOptions, UnitOptions
from outrider.runner.options.values import CachePrecision, Name, NamedPath, Precision


class TopologySpec(UnitOptions, PlacementOptions):
    """The machine"""

    sysfs: Annotated[
        NamedPath | None,
        Option(
            help="Directory with a saved /sys of another machine, to be shown instead of this one.",
            decides_text=False,
            metavar="DIR",
        ),
    ] = None
    plan: Annotated[
        bool, Option(help="Show too which actor would get which cores; nothing is downloaded for it.", decides_text=False)
    ] = False
    model: Annotated[
        Name | None,
        Option(
            help="Target of --plan: directory, hub id, short name or 'pocket'.",
            decides_text=False,
            spellings=("-m",),
            metavar="MODEL",
        ),
    ] = None
    precision: Annotated[Precision, Option(help="Target's precision, as outrider run takes it.", decides_text=False)] = (
        "auto"
    )
    draft: Annotated[
        Name, Option(help="Draft of --plan, as outrider run takes it.", decides_text=False, metavar="DRAFT")
    ] = "auto"
    draft_precision: Annotated[
        Precision, Option(help="Draft's precision, as outrider run takes it.", decides_text=False)
    ] = "auto"
    cache_precision: Annotated[
        CachePrecision, Option(help="Precision of keys and values, as outrider run takes it.", decides_text=False)
    ] = "auto"
    batch: Annotated[
        int, Field(ge=1, le=4096), Option(help="Rows at once on a replica, as outrider run takes it.", decides_text=False)
    ] = 8
    model_bytes: Annotated[
        int | None, Field(ge=0), Option(help="Size of the target's weights in bytes, instead of -m.", decides_text=False)
    ] = None
    draft_bytes: Annotated[
        int | None,
        Field(ge=0),
        Option(
            help="Size of the draft's weights in bytes, beside --model-bytes; without it there is no draft.",
            decides_text=False,
        ),
    ] = None
    kv_bytes: Annotated[
        int | None,
        Field(ge=0),
        Option(
            help="Size of the target's KV cache in bytes [default: with -m that of the rows' first tokens, else 0].",
            decides_text=False,
        ),
    ] = None
    draft_kv_bytes: Annotated[
        int | None,
        Field(ge=0),
        Option(help="Size of the draft's KV cache in bytes [default: as of --kv-bytes].", decides_text=False),
    ] = None
    ray_resources: Annotated[bool, Option(help="Print the JSON for ray start --resources.", decides_text=False)] = False
    ray_folder: Annotated[
        bool,
        Option(help="Print the folder for ray start --temp-dir: nobody else can enter it.", decides_text=False),
    ] = False
    ray_labels: Annotated[bool, Option(help="Print the labels for ray start --labels.", decides_text=False)] = False
