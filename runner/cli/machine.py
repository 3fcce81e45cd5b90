"""The commands about the machine itself: ``outrider topology`` and ``outrider doctor``."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outrider.runner.cli.arguments import with_options
from outrider.runner.printable import printable

if TYPE_CHECKING:
    from outrider.runner.options.topology import TopologySpec
    from outrider.runner.planning.placement_request import ModelSizes, PlacementRequest


def topology_command() -> Callable[..., None]:
    """Show the machine as outrider sees it, and with --plan which actor would get which cores."""
    from outrider.runner.options.topology import TopologySpec

    return with_options(TopologySpec, _topology)


def _topology(
    given: dict[str, Any], json_: Annotated[bool, typer.Option("--json", help="Print as JSON, for programs.")] = False
) -> None:
    from outrider.runner.hosts.host_report import labels_of
    from outrider.runner.options.option import build_options
    from outrider.runner.options.topology import TopologySpec
    from outrider.runner.planning import topology_view
    from outrider.runner.planning.placement import Plan, plan
    from outrider.runner.planning.topology import ray_resources as resources_of
    from outrider.runner.planning.topology import read_topology
    from outrider.workers.errors import PlacementError
    from outrider.workers.machine.private_folder import lasting_folder
    from outrider.workers.ray_compat import longest_below_folder

    spec = build_options(TopologySpec, given)
    planned = spec.plan or spec.model is not None or spec.model_bytes is not None
    _refuse_unread(spec, planned, json_)
    if spec.ray_folder:
        typer.echo(lasting_folder("ray", longest_below_folder()))
        return
    machine = read_topology(spec.sysfs)
    if spec.ray_resources:
        typer.echo(json.dumps(resources_of(machine)))
        return
    if spec.ray_labels:
        typer.echo(",".join(f"{name}={value}" for name, value in labels_of(machine, spec.sysfs is None).items()))
        return
    made: Plan | None = None
    refusal: PlacementError | None = None
    if planned:
        sizes, request, uncounted = _asked_by_run(spec, len(machine.usable_cores))
        try:
            made = plan([machine], sizes, request)
            made = replace(made, notes=(*made.notes, *uncounted))
        except PlacementError as error:
            refusal = error
    if json_:
        answer = topology_view.as_json(machine, made, None if refusal is None else str(refusal))
        typer.echo(json.dumps(answer))
    else:
        topology_view.draw(_console(), machine, made)
    if refusal is not None:
        raise refusal


def _refuse_unread(spec: TopologySpec, planned: bool, json_: bool) -> None:
    """Refuse options that what is printed does not depend on: one kind of output at a time."""
    from outrider.runner.options.option import flag_of
    from outrider.runner.options.topology import TopologySpec
    from outrider.workers.errors import UsageError

    for_ray = [flag_of(TopologySpec, name) for name in ("ray_resources", "ray_folder", "ray_labels") if getattr(spec, name)]
    asked = [*for_ray, *(["--json"] if json_ else []), *(["--plan"] if spec.plan else [])]
    if for_ray and len(asked) > 1:
        raise UsageError(f"{asked[0]} prints what ray start takes, and nothing else: leave out {' and '.join(asked[1:])}")
    if spec.ray_folder and spec.sysfs is not None:
        raise UsageError("--ray-folder is a folder of this machine, --sysfs another machine's: leave out one")
    of_a_plan = spec.model_fields_set - {"sysfs", "plan", "ray_resources", "ray_folder", "ray_labels"}
    if of_a_plan and for_ray:
        unread = flag_of(TopologySpec, min(of_a_plan))
        raise UsageError(f"{unread} is about a plan, which {for_ray[0]} does not print: leave it out")
    if of_a_plan and not planned:
        unread = flag_of(TopologySpec, min(of_a_plan))
        raise UsageError(f"{unread} is about a plan: ask for one with --plan and -m MODEL, or leave it out")


def _asked_by_run(spec: TopologySpec, cores: int) -> tuple[ModelSizes, PlacementRequest, list[str]]:
    """Sizes and placement request that a run of these models would make on ``cores`` cores, and notes on the sizes."""
    from outrider.runner.job.tokenizer_process import PlanningProcess
    from outrider.runner.model_choice import is_movable, placement_request_of
    from outrider.runner.options.job import JobSpec
    from outrider.runner.options.option import build_options, flag_of
    from outrider.runner.options.topology import TopologySpec
    from outrider.runner.options.values import NO_DRAFT
    from outrider.runner.planning.placement_request import ModelSizes
    from outrider.runner.planning.replica_memory import PROCESS_BYTES
    from outrider.runner.planning.topology_view import of_what_is_counted
    from outrider.runner.prepare_job import prepare_models
    from outrider.workers.errors import UsageError
    from outrider.workers.messages import ModelSpec

    def say(text: str) -> None:
        typer.echo(printable(text), err=True)

    notes: list[str] = []
    shared = {name: getattr(spec, name) for name in spec.model_fields_set & JobSpec.model_fields.keys()}
    if spec.model is not None:
        if spec.model_bytes is not None or spec.draft_bytes is not None:
            raise UsageError(
                "--model-bytes and --draft-bytes are sizes of models that are not named: leave them out, or -m"
            )
        run = build_options(JobSpec, {"input": "-", **shared})
        with PlanningProcess() as tokenizer_process:
            models = prepare_models(run, tokenizer_process, say)
        if spec.kv_bytes is None and spec.draft_kv_bytes is None:
            notes.append(of_what_is_counted(models.memory))
        sizes, pair = models.memory.sizes(run.batch), (models.target_model, models.draft_model)
    elif spec.model_bytes is None:
        raise UsageError("--plan needs a model: give --model-bytes N, or -m MODEL")
    elif named := sorted({"draft", "precision", "draft_precision", "cache_precision", "batch"} & shared.keys()):
        raise UsageError(f"{flag_of(TopologySpec, named[0])} is about models that are named: name the target, too, with -m")
    else:
        drafted = spec.draft_bytes is not None
        run = build_options(JobSpec, {"input": "-", "draft": "auto" if drafted else NO_DRAFT, **shared})
        room = PROCESS_BYTES["native"]
        sizes = ModelSizes(spec.model_bytes, spec.draft_bytes, target_room=room, draft_room=room if drafted else 0)
        native = ModelSpec("", "native", "auto")
        pair = (native, native if drafted else None)
    movable = is_movable(run, *pair)
    if spec.kv_bytes is not None:
        sizes = replace(sizes, target_kv=spec.kv_bytes)
    if spec.draft_kv_bytes is not None:
        sizes = replace(sizes, draft_kv=spec.draft_kv_bytes)
    return sizes, placement_request_of(run, movable, cores), notes


def doctor_command(json_: Annotated[bool, typer.Option("--json", help="Print as JSON, for programs.")] = False) -> None:
    """Check this machine's setup: what is well, what could be better, what is wrong, and the command that mends it."""
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

    return Console(highlight=False, emoji=False)


def _plain(text: str) -> str:
    from rich.markup import escape

    return escape(printable(text))
