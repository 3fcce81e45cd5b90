"""Which hosts of a cluster take part in a job, and with which cores. Pure: everything follows from what the hosts said.

A place is a Ray node. Most hosts are one place; several Ray nodes on one host share its cores out among them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from outrider.runner.hosts.host_report import HostReport
from outrider.runner.planning.topology import Core, Topology

INTEGER_PRECISIONS = ("w8a8", "w4a8")


@dataclass(frozen=True, slots=True)
class Place:
    """A Ray node: its id, what people call it, and the cores of each NUMA node that it declares to Ray."""

    node: str
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


def refusals(places: Iterable[Place], digests: Mapping[str, str], version: str) -> dict[str, str]:
    """By place: why it cannot take part at all. ``digests`` are those of the driver's own models."""
    found = {}
    for place in places:
        problems = []
        theirs = place.report.versions["outrider"]
        if theirs != version:
            problems.append(f"has outrider {theirs}, the driver has {version}")
        for name, digest in digests.items():
            model = place.report.models[name]
            if model.problem:
                problems.append(f"lacks the weights: {model.problem}")
            elif model.digest != digest:
                problems.append(f'has another "{name}" than the driver, at {model.path}')
        if problems:
            found[place.node] = "; ".join(problems)
    return found


def numeric_kind(report: HostReport, engine: str, precision: str) -> tuple[str, ...]:
    """What of a host decides the bits of a result, as far as can be told before a model is loaded."""
    if engine == "native":
        return () if precision in INTEGER_PRECISIONS else (report.instruction_set,)
    return (report.instruction_set, f"torch {report.versions['torch']}", f"transformers {report.versions['transformers']}")


def chosen_kind(places: Sequence[Place], engine: str, precision: str, kept: str | None) -> tuple[str, ...]:
    """The kind of most cores; where a job goes on that was begun with an instruction set, hosts of that one."""
    cores: Counter[tuple[str, ...]] = Counter()
    for place in places:
        cores[numeric_kind(place.report, engine, precision)] += sum(place.declared.values())
    candidates = [kind for kind in cores if engine == "native" and kept in kind] or list(cores)
    return max(candidates, key=lambda kind: (cores[kind], kind))


def offered(places: Sequence[Place], taken: Mapping[str, Collection[str]], share: bool) -> list[Topology]:
    """Each place's machine with the cores that it may still use; ``host`` becomes the place's Ray node.

    Left out are cores held by other runs, those ``taken`` by this one (lease names by place), and what a place has not
    declared. Places on one host are dealt its cores in turn, unless they are to ``share`` them.
    """
    by_identity: dict[str, list[Place]] = {}
    for place in places:
        by_identity.setdefault(place.report.identity, []).append(place)
    result = {}
    for group in by_identity.values():
        gone = {lease for place in group for lease in place.report.held}
        if not share:
            gone |= {lease for place in group for lease in taken.get(place.node, ())}
        free = {place.node: place.report.topology.without(gone) for place in group}
        left = {place.node: _left(place, taken.get(place.node, ())) for place in group}
        if share:
            dealt = {place.node: _deal([place], free, left)[place.node] for place in group}
        else:
            dealt = _deal(group, free, left)
        for place in group:
            mine = {core.identity for core in dealt[place.node]}
            others = {str(core.identity) for core in free[place.node].cores if core.identity not in mine}
            result[place.node] = replace(free[place.node].without(others), host=place.node)
    return [result[place.node] for place in places]


def _left(place: Place, taken: Collection[str]) -> Counter[int]:
    """How many cores of each NUMA node this job may still claim there."""
    left = Counter(place.declared)
    left.subtract(core.node for core in place.report.topology.cores if str(core.identity) in taken)
    return left


def _deal(group: Sequence[Place], free: Mapping[str, Topology], left: Mapping[str, Counter[int]]) -> dict[str, list[Core]]:
    """Card by card, so that two Ray nodes which both declare the whole host get a half each."""
    dealt: dict[str, list[Core]] = {place.node: [] for place in group}
    given: set[int] = set()
    more = True
    while more:
        more = False
        for place in group:
            card = next(
                (
                    core
                    for core in free[place.node].usable_cores
                    if core.identity not in given and left[place.node][core.node] > 0
                ),
                None,
            )
            if card is not None:
                given.add(card.identity)
                left[place.node][card.node] -= 1
                dealt[place.node].append(card)
                more = True
    return dealt
