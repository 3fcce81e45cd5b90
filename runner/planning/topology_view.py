"""The machine's topology and a plan, as JSON and as a drawing for the terminal."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from outrider.runner.planning import sysfs
from outrider.runner.planning.placement import Plan, PlannedActor
from outrider.runner.planning.replica_memory import ReplicaMemory
from outrider.runner.planning.topology import Core, Node, Topology
from outrider.runner.printable import printable

KIB, GIB = 1 << 10, 1 << 30
COLOURS = ("cyan", "magenta", "green", "yellow", "blue", "red")
CORES_A_LINE = 16
MOST_NODES_IN_A_TABLE = 16


def as_json(topology: Topology, plan: Plan | None = None, refusal: str | None = None) -> dict[str, Any]:
    """``nodes`` and ``actors`` are a stable interface. A node of unknown memory has 0, and there is a warning."""
    answer: dict[str, Any] = {
        "host": topology.host,
        "nodes": [
            {
                "id": node.id,
                "socket": node.socket,
                "cores": [list(core.cpus) for core in node.cores],
                "memory_bytes": node.memory_bytes or 0,
            }
            for node in topology.nodes
        ],
        "usable_cpus": sorted(cpu for core in topology.usable_cores for cpu in core.allowed),
        "accelerators": [{"name": each.name, "address": each.address, "node": each.node} for each in topology.accelerators],
        "warnings": _warnings(topology),
    }
    if plan is not None or refusal is not None:
        answer["actors"] = [actor_as_json(actor) for actor in (plan.actors if plan else ())]
        answer["notes"] = list(plan.notes) if plan else []
    if refusal is not None:
        answer["refused"] = refusal
    return answer


def actor_as_json(actor: PlannedActor) -> dict[str, Any]:
    return {
        "role": actor.role,
        "replica": actor.replica,
        "host": actor.host,
        "cores": list(actor.cores),
        "memory_nodes": list(actor.memory_nodes),
        "device": actor.device,
    }


def draw(console: Console, topology: Topology, plan: Plan | None = None) -> None:
    actors = [actor for actor in (plan.actors if plan else ()) if actor.host == topology.host]
    console.print(f"[bold]{escape(printable(topology.host))}[/]: {_summary(topology)}", highlight=False)
    for node in topology.nodes:
        console.print(_panel(topology, node, actors))
    if 1 < len(topology.nodes) <= MOST_NODES_IN_A_TABLE and all(node.distances for node in topology.nodes):
        console.print(_distances(topology))
    if actors:
        console.print(Text.assemble(("T0", "reverse"), " target of replica 0   ", ("d0", ""), " its draft   "), end="")
        console.print(Text("TD0 both, one after the other   ·· free (Ray, driver)   -- not ours to use"))
        console.print(_actors(actors))
    for note in plan.notes if plan else ():
        console.print(f"note: {printable(note)}", highlight=False, markup=False)
    for warning in _warnings(topology):
        console.print(f"warning: {printable(warning)}", highlight=False, markup=False)


def of_what_is_counted(memory: ReplicaMemory) -> str:
    """A note on the memory of keys and values that the plan does not count, as far as it is known."""
    processes = [("target", memory.target), *([("draft", memory.draft)] if memory.draft is not None else [])]
    target = memory.target.model
    a_token = "" if target.token else " a token"
    known = [f"{each.model.token / KIB:,.1f} KiB{a_token} ({role})" for role, each in processes if each.model.token]
    if target.first_tokens:
        counted = f"{target.first_tokens} tokens of each row are counted; each further one takes {' + '.join(known)}"
    elif target.token:
        counted = f"the rows' KV cache is not counted, of which each token takes {' + '.join(known)}"
    else:
        counted = f"the rows' KV cache is not counted{f' beside {known[0]}' if known else ''}"
    return f"{counted}; --kv-bytes sets what is counted"


def _warnings(topology: Topology) -> list[str]:
    return [*topology.warnings, *filter(None, [topology.accelerators_refused])]


def _summary(topology: Topology) -> str:
    cores, usable = len(topology.cores), len(topology.usable_cores)
    memory = sum(node.memory_bytes or 0 for node in topology.nodes)
    parts = [
        _count(len(topology.sockets), "socket"),
        _count(len(topology.nodes), "NUMA node"),
        _count(cores, "physical core") + ("" if usable == cores else f" ({usable} usable)"),
        f"{memory / GIB:,.1f} GiB",
    ]
    if topology.accelerators:
        parts.append(", ".join(each.name for each in topology.accelerators))
    if topology.memory_limit_bytes is not None:
        parts.append(f"limited to {topology.memory_limit_bytes / GIB:,.1f} GiB")
    if topology.cpu_quota is not None:
        parts.append(f"limited to {topology.cpu_quota:g} CPUs' time")
    return ", ".join(parts)


def _count(number: int, word: str) -> str:
    return f"{number} {word}" if number == 1 else f"{number} {word}s"


def _panel(topology: Topology, node: Node, actors: Iterable[PlannedActor]) -> Panel:
    memory = "memory unknown" if node.memory_bytes is None else f"{node.memory_bytes / GIB:,.1f} GiB"
    kind = _count(len(node.cores), "core") if node.cores else "memory only"
    title = f"node {node.id} · socket {node.socket} · {kind} · {memory}{'' if node.memory_allowed else ' (not allowed)'}"
    parts: list[RenderableType] = []
    if node.cores:
        cells = [_cell(core, actors) for core in node.cores]
        lines = [cells[start : start + CORES_A_LINE] for start in range(0, len(cells), CORES_A_LINE)]
        parts.append(Text("\n").join(Text(" ").join(line) for line in lines))
        cpus = sysfs.format_list(cpu for core in node.cores for cpu in core.cpus)
        width = max(len(core.cpus) for core in node.cores)
        parts.append(Text(f"CPUs {cpus}" + (f", up to {width} a core" if width > 1 else ""), style="dim"))
    if users := sorted({(actor.replica, actor.role) for actor in actors if actor.memory.get(node.id)}):
        booked = sum(actor.memory.get(node.id, 0) for actor in actors)
        names = ", ".join(f"{role[0].upper() if role == 'target' else role[0]}{replica}" for replica, role in users)
        parts.append(Text(f"memory for {names}: {booked / GIB:,.2f} GiB"))
    if here := [each.name for each in topology.accelerators if each.node == node.id]:
        parts.append(Text(", ".join(here)))
    return Panel(Group(*parts), title=title, title_align="left", expand=False)


def _cell(core: Core, actors: Iterable[PlannedActor]) -> Text:
    if not core.allowed:
        return Text("-- ", style="dim")
    here = [actor for actor in actors if core.allowed[0] in actor.cores]
    if not here:
        return Text("·· ")
    replica = here[0].replica
    letters = "TD" if len(here) > 1 else "T" if here[0].role == "target" else "d"
    style = COLOURS[replica % len(COLOURS)] + (" reverse" if letters != "d" else "")
    return Text(f"{letters}{replica}".ljust(3), style=style)


def _distances(topology: Topology) -> Table:
    table = Table(title="distances", title_justify="left", show_lines=False, box=None, padding=(0, 1))
    table.add_column("node", justify="right")
    for node in topology.nodes:
        table.add_column(str(node.id), justify="right")
    for node in topology.nodes:
        table.add_row(str(node.id), *(str(node.distance(other)) for other in topology.nodes))
    return table


def _actors(actors: Iterable[PlannedActor]) -> Table:
    table = Table(box=None, padding=(0, 1))
    for name in ("replica", "role", "device", "threads", "CPUs", "memory nodes", "memory"):
        table.add_column(name, justify="right" if name in ("replica", "threads", "memory") else "left")
    for actor in actors:
        table.add_row(
            str(actor.replica),
            actor.role,
            actor.device,
            str(actor.threads),
            sysfs.format_list(actor.cores),
            sysfs.format_list(actor.memory_nodes),
            f"{(actor.device_bytes or sum(actor.memory.values())) / GIB:,.2f} GiB",
        )
    return table
