"""Which hosts of a cluster take part in a job, and with which cores. Pure: everything follows from the hosts' reports.

Most hosts run one Ray node; if there are several, the host's cores are dealt out among them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from outrider.runner.hosts.host_report import HostReport
from outrider.runner.planning.topology import Core, Topology
from outrider.workers.precisions import arithmetic

INTEGER_PRECISIONS = ("w8a8", "w4a8")


@dataclass(frozen=True, slots=True)
class RayNode:
    """A Ray node: its id, its name in messages, and the cores of each NUMA node that it declares to Ray."""

    id: str
    name: str
    declared: Mapping[int, int]
    report: HostReport


def declared_cores(resources: Mapping[str, float]) -> dict[int, int]:
    """The physical cores that a Ray node offers, by NUMA node: its resources ``numa<i>``."""
    found = {}
    for name, amount in resources.items():
        if name.startswith("numa") and name[4:].isdecimal() and int(amount) > 0:
            found[int(name[4:])] = int(amount)
    return found


def other_outrider(report: HostReport, versions: Mapping[str, str]) -> str:
    """How the host's outrider differs from the driver's (``versions``); "" if it does not."""
    theirs, ours = report.versions["outrider"], versions["outrider"]
    if theirs != ours:
        return f"has outrider {theirs}, the driver has {ours}"
    if report.versions.get("build") != versions["build"]:
        return f"has another build of outrider {ours} than the driver: install the same wheel on all hosts"
    return ""


def refusals(ray_nodes: Iterable[RayNode], digests: Mapping[str, str], versions: Mapping[str, str]) -> dict[str, str]:
    """By Ray node: why it cannot take part. ``digests`` and ``versions`` are the driver's.

    The report of a node with another outrider has no models.
    """
    found = {}
    for ray_node in ray_nodes:
        if other := other_outrider(ray_node.report, versions):
            found[ray_node.id] = other
            continue
        problems = []
        for name, digest in digests.items():
            model = ray_node.report.models[name]
            if model.problem:
                problems.append(f"lacks the weights: {model.problem}")
            elif model.digest != digest:
                problems.append(f'has another "{name}" than the driver, at {model.path}')
        if problems:
            found[ray_node.id] = "; ".join(problems)
    return found


def numeric_kind(report: HostReport, engine: str, precision: str) -> tuple[str, ...]:
    """The properties of a host that decide the bits of results, as far as they are known before a model is loaded."""
    if engine == "native":
        return () if arithmetic(precision) in INTEGER_PRECISIONS else (report.instruction_set,)
    return (report.instruction_set, f"torch {report.versions['torch']}", f"transformers {report.versions['transformers']}")


def chosen_kind(ray_nodes: Sequence[RayNode], engine: str, precision: str, kept: str | None) -> tuple[str, ...]:
    """The numeric kind with the most cores; for a resumed job, the one with the instruction set that it began with."""
    cores: Counter[tuple[str, ...]] = Counter()
    for ray_node in ray_nodes:
        cores[numeric_kind(ray_node.report, engine, precision)] += sum(ray_node.declared.values())
    candidates = [kind for kind in cores if engine == "native" and kept in kind] or list(cores)
    return max(candidates, key=lambda kind: (cores[kind], kind))


def offered(ray_nodes: Sequence[RayNode], taken: Mapping[str, Collection[str]], share: bool) -> list[Topology]:
    """Each Ray node's machine with the cores that it may still use; ``host`` is the Ray node's id.

    Without cores held by other runs, those ``taken`` by this one (lease names by Ray node), and those that the Ray node has
    not declared. Ray nodes on one host get its cores in turn, unless they are to ``share`` them.
    """
    by_identity: dict[str, list[RayNode]] = {}
    for ray_node in ray_nodes:
        by_identity.setdefault(ray_node.report.identity, []).append(ray_node)
    result = {}
    for group in by_identity.values():
        gone = {lease for ray_node in group for lease in ray_node.report.held}
        if not share:
            gone |= {lease for ray_node in group for lease in taken.get(ray_node.id, ())}
        free = {ray_node.id: ray_node.report.topology.without(gone) for ray_node in group}
        left = {ray_node.id: _left(ray_node, taken.get(ray_node.id, ())) for ray_node in group}
        if share:
            dealt = {ray_node.id: _deal([ray_node], free, left)[ray_node.id] for ray_node in group}
        else:
            dealt = _deal(group, free, left)
        for ray_node in group:
            mine = {core.identity for core in dealt[ray_node.id]}
            others = {str(core.identity) for core in free[ray_node.id].cores if core.identity not in mine}
            result[ray_node.id] = replace(free[ray_node.id].without(others), host=ray_node.id)
    return [result[ray_node.id] for ray_node in ray_nodes]


def _left(ray_node: RayNode, taken: Collection[str]) -> Counter[int]:
    """The number of cores of each NUMA node that this job may still claim there."""
    left = Counter(ray_node.declared)
    left.subtract(core.node for core in ray_node.report.topology.cores if str(core.identity) in taken)
    return left


def _deal(
    group: Sequence[RayNode], free: Mapping[str, Topology], left: Mapping[str, Counter[int]]
) -> dict[str, list[Core]]:
    """Deal free cores out one by one, so that two Ray nodes that both declare the whole host get a half each."""
    dealt: dict[str, list[Core]] = {ray_node.id: [] for ray_node in group}
    given: set[int] = set()
    more = True
    while more:
        more = False
        for ray_node in group:
            core = next(
                (
                    core
                    for core in free[ray_node.id].usable_cores
                    if core.identity not in given and left[ray_node.id][core.node] > 0
                ),
                None,
            )
            if core is not None:
                given.add(core.identity)
                left[ray_node.id][core.node] -= 1
                dealt[ray_node.id].append(core)
                more = True
    return dealt
