"""The commands about the machine itself: ``outrider topology`` and ``outrider doctor``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from outrider.runner.cli import shared_options as options
from outrider.runner.printable import printable


def topology_command(
    sysfs: Annotated[
        Path | None,
        typer.Option(
            parser=options.path,
            metavar="DIR",
            help="A saved /sys of another machine; nothing of this one is then mixed in.",
        ),
    ] = None,
    show_plan: Annotated[bool, typer.Option("--plan", help="Show who would sit where, too.")] = False,
    model: Annotated[
        str | None,
        typer.Option(
            "-m",
            "--model",
            parser=options.words,
            metavar="MODEL",
            help="The target, for its size: directory, hub id or 'pocket'.",
        ),
    ] = None,
    draft: Annotated[
        str | None, typer.Option(parser=options.words, metavar="DRAFT", help="The draft, for its size.")
    ] = None,
    model_bytes: Annotated[int | None, typer.Option(help="Size of the target, where no model is named.")] = None,
    draft_bytes: Annotated[int | None, typer.Option(help="Size of the draft; without one there is no draft.")] = None,
    kv_bytes: Annotated[int, typer.Option(help="Size of the target's KV cache.")] = 0,
    draft_kv_bytes: Annotated[int, typer.Option(help="Size of the draft's KV cache.")] = 0,
    per: Annotated[str, typer.Option(help="What a replica gets: auto, node, socket or machine.")] = "auto",
    replicas: Annotated[int | None, typer.Option(help="Pairs of target and draft [default: as many as fit].")] = None,
    draft_cores: Annotated[int | None, typer.Option(help="Cores of the draft's own.")] = None,
    layout: Annotated[str, typer.Option(help="Draft and target on split or shared cores, or auto.")] = "auto",
    devices: Annotated[str, typer.Option(help="Such as cuda:0,cpu: the target there, the draft on the CPU.")] = "",
    ray_resources: Annotated[
        bool, typer.Option("--ray-resources", help="Print the JSON for ray start --resources.")
    ] = False,
    ray_folder: Annotated[
        bool, typer.Option("--ray-folder", help="Print the folder for ray start --temp-dir: nobody else can enter it.")
    ] = False,
    ray_labels: Annotated[bool, typer.Option("--ray-labels", help="Print the labels for ray start --labels.")] = False,
    json_: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """The machine as outrider sees it, and with --plan who would sit where."""
    from outrider.runner.hosts.host_report import labels_of
    from outrider.runner.planning import topology_view
    from outrider.runner.planning.placement import Plan, plan
    from outrider.runner.planning.placement_request import Sizes, Wishes
    from outrider.runner.planning.topology import ray_resources as resources_of
    from outrider.runner.planning.topology import read_topology
    from outrider.workers.errors import PlacementError, UsageError
    from outrider.workers.machine.private_folder import lasting_folder
    from outrider.workers.models.cards import weight_bytes
    from outrider.workers.ray_compat import longest_below_folder

    if ray_folder:
        typer.echo(lasting_folder("ray", longest_below_folder()))
        return
    machine = read_topology(sysfs)
    if ray_resources:
        typer.echo(json.dumps(resources_of(machine)))
        return
    if ray_labels:
        typer.echo(",".join(f"{name}={value}" for name, value in labels_of(machine).items()))
        return
    made: Plan | None = None
    refusal: UsageError | None = None
    if show_plan or model is not None or model_bytes is not None:
        target_bytes = model_bytes if model is None else weight_bytes(model)
        if target_bytes is None:
            raise UsageError("--plan needs a model: give --model-bytes N, or -m MODEL")
        try:
            # As on disk; a run that packs them for the native engine needs less.
            sizes = Sizes(target_bytes, draft_bytes if draft is None else weight_bytes(draft), kv_bytes, draft_kv_bytes)
            wanted = tuple(device.strip() for device in devices.split(",") if device.strip())
            made = plan([machine], sizes, Wishes(per, replicas, draft_cores, layout, wanted))
        except PlacementError as error:
            refusal = error
    if json_:
        answer = topology_view.as_json(machine, made, None if refusal is None else str(refusal))
        typer.echo(json.dumps(answer))
    else:
        topology_view.draw(_console(), machine, made)
    if refusal is not None:
        raise refusal


def doctor_command(json_: Annotated[bool, typer.Option("--json", help="For programs.")] = False) -> None:
    """What of this machine is set up well, what could be better, what is wrong, and the command that mends it."""
    from outrider.runner.hosts.doctor import WRONG, examine

    checks = examine()
    if json_:
        typer.echo(json.dumps([{"name": c.name, "state": c.state, "found": c.found, "mend": c.mend} for c in checks]))
    else:
        from rich.table import Table

        colours = {"ok": "green", "could be better": "yellow", "wrong": "bold red"}
        table = Table(box=None, padding=(0, 1), show_header=False)
        for name in ("state", "name", "found"):
            table.add_column(name, no_wrap=name != "found", overflow="fold")
        for check in checks:
            table.add_row(f"[{colours[check.state]}]{check.state}[/]", _plain(check.name), _plain(check.found))
            if check.mend:
                table.add_row("", "", _plain(f"→ {check.mend}"))
        _console().print(table)
    if any(check.state == WRONG for check in checks):
        raise typer.Exit(1)


def _console() -> Any:
    from rich.console import Console

    return Console(highlight=False)


def _plain(text: str) -> str:
    from rich.markup import escape

    return escape(printable(text))
