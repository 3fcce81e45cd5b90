"""The CPUs of a sysfs tree: which are online, which are siblings on one physical core, and which socket holds them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from outrider.runner.planning import sysfs

# The most threads of a core (POWER has eight); a larger group of CPUs with equal core ids means that the file is wrong.
MOST_SIBLINGS = 8


@dataclass(frozen=True, slots=True)
class Cpus:
    """``known``: CPUs with a folder (or listed, if none has a folder). The maps hold the files' values, unchecked."""

    known: frozenset[int]
    online: frozenset[int]
    siblings: Mapping[int, frozenset[int]]
    core_ids: Mapping[int, tuple[int, ...]]
    packages: Mapping[int, int]
    package_mates: Mapping[int, frozenset[int]]
    node_links: Mapping[int, int]

    def sockets(self, node_of: Mapping[int, int]) -> dict[int, int]:
        """Each CPU's socket: its package id, else the index of its group of package mates, else its node."""
        if any(package >= 0 for package in self.packages.values()):
            known = {cpu: package for cpu, package in self.packages.items() if package >= 0}
            fallback = min(known.values())
            by_node = {node_of[cpu]: package for cpu, package in sorted(known.items(), reverse=True) if cpu in node_of}
            return {cpu: known.get(cpu, by_node.get(node_of[cpu], fallback)) for cpu in node_of}
        groups = sorted({min(self.package_mates[cpu] & self.online | {cpu}) for cpu in self.package_mates})
        if self.package_mates.keys() >= node_of.keys():
            return {cpu: groups.index(min(self.package_mates[cpu] & self.online | {cpu})) for cpu in node_of}
        return dict(node_of)


def read_cpus(folder: Path, listed_by_nodes: frozenset[int], warnings: list[str]) -> Cpus:
    folders = sysfs.numbered(folder, "cpu")
    listed = sysfs.parse_list(sysfs.read_text(folder / "online"))
    if not folders:
        known = listed or listed_by_nodes or sysfs.parse_list(sysfs.read_text(folder / "present")) or frozenset()
        if known:
            warnings.append("no CPU has a folder of its own: each is taken as a core")
        return Cpus(known, known, {}, {}, {}, {}, {})

    switched_off = {cpu for cpu, path in folders.items() if sysfs.read_int(path / "online") == 0}
    if listed is None:
        switched_off |= sysfs.parse_list(sysfs.read_text(folder / "offline")) or frozenset()
    online = frozenset(folders) - switched_off
    if listed and listed & online:
        if strange := listed - folders.keys():
            warnings.append(f"CPUs {sysfs.format_list(strange)}: said to be online, but have no folder")
        if contradicted := listed & switched_off:
            warnings.append(f"CPUs {sysfs.format_list(contradicted)}: online by one file and offline by another; not used")
        online &= listed
    elif listed:
        warnings.append("the list of online CPUs names none that has a folder, and is not used")

    siblings, core_ids, packages, package_mates, node_links = {}, {}, {}, {}, {}
    for cpu in sorted(online):
        topology = folders[cpu] / "topology"
        mates = sysfs.read_set(topology, "core_cpus_list", "core_cpus", "thread_siblings_list", "thread_siblings")
        if mates is not None:
            siblings[cpu] = mates
        core = sysfs.read_int(topology / "core_id")
        package = sysfs.read_int(topology / "physical_package_id")
        if package is not None:
            packages[cpu] = package
        if core is not None and core >= 0 and package is not None and package >= 0:
            core_ids[cpu] = (package, sysfs.read_int(topology / "die_id") or 0, core)
        whole = sysfs.read_set(topology, "package_cpus_list", "package_cpus", "core_siblings_list", "core_siblings")
        if whole is not None:
            package_mates[cpu] = whole
        # Used only if there is exactly one link: some trees have several.
        if len(links := list(sysfs.numbered(folders[cpu], "node"))) == 1:
            node_links[cpu] = links[0]
    return Cpus(frozenset(folders), online, siblings, core_ids, packages, package_mates, node_links)


def physical_cores(cpus: Cpus, node_of: Mapping[int, int], warnings: list[str]) -> list[tuple[int, ...]]:
    """Groups of sibling CPUs, every placed CPU in exactly one, in the order of their lowest CPU."""
    by_id: dict[tuple[int, ...], set[int]] = {}
    for cpu, core in cpus.core_ids.items():
        if cpu in node_of:
            # On some machines with several nodes per socket core ids are unique only within a node.
            by_id.setdefault((*core, node_of[cpu]), set()).add(cpu)

    taken: set[int] = set()
    groups = []
    crossing, one_sided = set(), set()
    for cpu in sorted(node_of):
        if cpu in taken:
            continue
        if cpu in cpus.siblings:
            mates = set(cpus.siblings[cpu]) & node_of.keys()
            one_sided |= {mate for mate in mates if cpu not in cpus.siblings.get(mate, {cpu})} | (mates & taken)
            mates = {mate for mate in mates if cpu in cpus.siblings.get(mate, {cpu})} - taken
        else:
            alike = by_id.get((*cpus.core_ids[cpu], node_of[cpu]), set()) if cpu in cpus.core_ids else set()
            mates = alike - taken if len(alike) <= MOST_SIBLINGS else set()
        crossing |= {mate for mate in mates if node_of[mate] != node_of[cpu]}
        group = {mate for mate in mates if node_of[mate] == node_of[cpu]} | {cpu}
        taken |= group
        groups.append(tuple(sorted(group)))
    if crossing:
        warnings.append(f"CPUs {sysfs.format_list(crossing)}: on a core that reaches across nodes; it is cut at the border")
    if one_sided:
        warnings.append(f"CPUs {sysfs.format_list(one_sided)}: their siblings do not agree that they are siblings")
    return groups
