"""The report's sections on placement and layout: what each actor asked for and what it got."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from outrider.runner.report.charts import number, replica_color
from outrider.runner.report.sections import Cell, Core, CoreUser, HostCores, Section, Table

# With more cores only the table is shown.
MOST_CELLS = 512


def placement(pinning: Sequence[dict[str, Any]]) -> Section:
    if not pinning:
        return Section("Placement", "No replica has come up yet.")
    actors = sorted(pinning, key=lambda actor: (actor["replica"], actor["role"] != "target"))
    head = ["actor", "on", "cores asked", "got", "memory asked", "got", "threads", "weights lie on", "as asked"]
    return Section(
        "Placement: asked and got",
        "Read back from the kernel in each worker, once its weights were loaded.",
        hosts=list(_hosts(actors)),
        table=Table(head, [_row(actor) for actor in actors], numeric_from=99),
    )


def layouts(found: dict[str, dict[str, Any]]) -> Section | None:
    """The layout that each replica took, and the measured speeds of the others."""
    names = list(dict.fromkeys(name for layout in found.values() for name in layout["rates"]))
    if not found:
        return None
    rows: list[list[Cell]] = [
        [
            f"replica {replica}",
            str(layout["took"]),
            *(_rate(layout["rates"].get(name)) for name in names),
            str(layout["sentence"]),
        ]
        for replica, layout in sorted(found.items(), key=lambda item: int(item[0]))
    ]
    return Section(
        "Layout",
        "How target and draft share their cores, with the tokens a second of each way that was tried.",
        table=Table(["", "took", *names, "why"], rows, numeric_from=99),
    )


def _rate(tokens_a_second: float | None) -> str:
    return "not tried" if tokens_a_second is None else number(tokens_a_second)


def _hosts(actors: Sequence[dict[str, Any]]) -> Iterable[HostCores]:
    for host in dict.fromkeys(actor["host"] for actor in actors):
        here = [actor for actor in actors if actor["host"] == host]
        cores = sorted({core for actor in here for core in (*actor["asked"]["cores"], *actor["cores"])})
        if 0 < len(cores) <= MOST_CELLS:
            yield HostCores(str(host), [_core(core, here) for core in cores])


def _core(core: int, actors: Sequence[dict[str, Any]]) -> Core:
    users, differs = [], False
    for actor in actors:
        asked, got = core in actor["asked"]["cores"], core in actor["cores"]
        if not asked and not got:
            continue
        differs |= asked != got
        word = "" if asked and got else " asked, not got" if asked else " got, not asked"
        users.append(CoreUser(f"{actor['role']} {actor['replica']}{word}", replica_color(actor["replica"])))
    return Core(core, users, differs)


def _row(actor: dict[str, Any]) -> list[Cell]:
    asked = actor["asked"]
    device = "" if asked.get("device", "cpu") == "cpu" else f", {asked['device']}"
    got_threads = actor["threads"] if actor.get("kernel_threads") is None else actor["kernel_threads"]
    return [
        f"{actor['role']} {actor['replica']}",
        f"{actor['host']}, process {actor['pid']}{device}",
        ranges(asked["cores"]),
        ranges(actor["cores"]),
        f"node {ranges(asked['memory_nodes'])}" if asked["memory_nodes"] else "any",
        _policy(actor),
        f"{asked['threads']} asked, {got_threads} got",
        _pages(actor.get("weight_pages") or {}),
        [str(each) for each in (*actor.get("differences", ()), *actor.get("warnings", ()))],
    ]


def _policy(actor: dict[str, Any]) -> str:
    nodes = ranges(actor["memory_nodes"])
    return f"{actor['memory_policy']} {nodes}".strip()


def _pages(pages: dict[str, int]) -> str:
    """The share of the weights' sampled pages on each node."""
    total = sum(pages.values())
    return ", ".join(f"node {node}: {100 * count / total:.0f}%" for node, count in pages.items()) if total else "unknown"


def ranges(members: Iterable[int]) -> str:
    """As numactl writes them: 0-3,8."""
    found: list[list[int]] = []
    for member in sorted(members):
        if found and member == found[-1][1] + 1:
            found[-1][1] = member
        else:
            found.append([member, member])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in found)
