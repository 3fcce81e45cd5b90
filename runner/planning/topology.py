"""The machine: sockets, NUMA nodes, physical cores with their sibling CPUs, memory, accelerators.

Read from sysfs, of this machine or of a saved tree. Files of one machine may contradict each other (virtual machines,
old kernels, partly saved trees), so there are fixed rules:

* a CPU exists if it has a folder, and is online unless a file says otherwise;
* a node's list of CPUs decides which CPUs belong to it; a CPU listed twice belongs to the lowest node;
* sibling lists decide what a physical core is, and a core never spans nodes;
* each decision against a file is noted in ``warnings``.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from outrider.kernels.program import Scales
from outrider.runner.planning import sysfs
from outrider.runner.planning.accelerators import Accelerator, read_accelerators, visible_here
from outrider.runner.planning.allowance import Allowance, read_allowance
from outrider.runner.planning.cpus import Cpus, physical_cores, read_cpus
from outrider.workers.errors import PlacementError
from outrider.workers.models.model_memory import PAIRED, scales_in_pairs

# A distance from here on means another kind of memory, such as that of a GPU on an NVLink POWER machine.
FAR_AWAY = 80


@dataclass(frozen=True, slots=True)
class Core:
    """One physical core: its online CPUs, and the ones that this process may use. ``identity``: its name on the host."""

    cpus: tuple[int, ...]
    allowed: tuple[int, ...]
    node: int
    socket: int

    @property
    def identity(self) -> int:
        return self.cpus[0]


@dataclass(frozen=True, slots=True)
class Node:
    """A NUMA node. Without cores it is memory only; ``memory_bytes`` is None if unknown."""

    id: int
    socket: int
    cores: tuple[Core, ...]
    memory_bytes: int | None
    memory_allowed: bool
    distances: Mapping[int, int]

    @property
    def usable_cores(self) -> tuple[Core, ...]:
        return tuple(core for core in self.cores if core.allowed)

    @property
    def has_memory(self) -> bool:
        """Whether this process can use memory of this node, as far as is known."""
        return self.memory_allowed and self.memory_bytes != 0

    def distance(self, other: Node) -> int:
        """The distance to another node; without a table 10 (local), 15 (same socket) or 20."""
        default = 10 if other.id == self.id else 15 if other.socket == self.socket else 20
        return self.distances.get(other.id, default)


@dataclass(frozen=True, slots=True)
class Topology:
    """A host as this process may use it. ``accelerators_refused``: why none of its accelerators can be used, if so.

    ``planned_cores``: the number of cores that the run has already when it plans further replicas; they are not in here,
    but count towards the CPU quota. None: the first plan, which may leave a core to Ray. ``in_pairs``: the scales of codes
    that its kernels multiply in pairs of channels (of a saved tree: all that might be). ``machine``: several hosts (Ray
    nodes) with the same machine share its memory; "" is a machine of its own.
    """

    host: str
    nodes: tuple[Node, ...]
    accelerators: tuple[Accelerator, ...] = ()
    memory_limit_bytes: int | None = None
    cpu_quota: float | None = None
    warnings: tuple[str, ...] = ()
    accelerators_refused: str = ""
    planned_cores: int | None = None
    in_pairs: frozenset[Scales] = frozenset()
    machine: str = ""

    @property
    def cores(self) -> tuple[Core, ...]:
        return tuple(core for node in self.nodes for core in node.cores)

    @property
    def usable_cores(self) -> tuple[Core, ...]:
        return tuple(core for core in self.cores if core.allowed)

    @property
    def sockets(self) -> tuple[int, ...]:
        return tuple(sorted({core.socket for core in self.cores}))

    def node(self, number: int) -> Node:
        return next(node for node in self.nodes if node.id == number)

    def without(self, leases: Collection[str]) -> Topology:
        """The same host without what others hold: leases are core identities, or devices such as ``cuda-0``."""

        def part(node: Node) -> Node:
            cores = (replace(core, allowed=()) if str(core.identity) in leases else core for core in node.cores)
            return replace(node, cores=tuple(cores))

        return replace(
            self,
            nodes=tuple(part(node) for node in self.nodes),
            accelerators=tuple(each for each in self.accelerators if each.lease not in leases),
        )

    def less(self, booked: Mapping[int, int]) -> Topology:
        """The same host without the memory that is booked already, in bytes by node."""

        def left(node: Node) -> int | None:
            # At least 1: 0 means a node without memory, whose cores would be given another node's.
            return node.memory_bytes and max(1, node.memory_bytes - booked.get(node.id, 0))

        limit = self.memory_limit_bytes
        return replace(
            self,
            nodes=tuple(replace(node, memory_bytes=left(node)) for node in self.nodes),
            memory_limit_bytes=None if limit is None else max(0, limit - sum(booked.values())),
        )


def ray_resources(topology: Topology) -> dict[str, float]:
    """A host's Ray resources: ``numa<i>`` is the number of usable physical cores of node i."""
    return {f"numa{node.id}": float(len(node.usable_cores)) for node in topology.nodes if node.usable_cores}


def read_topology(tree: Path | None = None) -> Topology:
    """This machine as this process may use it, or all of the machine whose /sys was saved at ``tree``."""
    if tree is None:
        return _read(Path("/sys"), Path("/proc/meminfo"), socket.gethostname(), read_allowance())
    tree = tree.absolute()
    # A complete saved tree has proc beside sys, which tells the memory of a machine without node folders.
    meminfo = tree.parent / "proc/meminfo"
    host = tree.parent.name if tree.name == "sys" else tree.name
    return _read(tree, meminfo, host or "localhost", None)


def _read(root: Path, meminfo: Path, host: str, allowance: Allowance | None) -> Topology:
    warnings: list[str] = list(allowance.warnings) if allowance else []
    folders, claims = _nodes(root / "devices/system/node", warnings)
    cpus = _cpus(root, frozenset().union(*claims.values()), allowance, warnings)
    members = _nodes_of_cpus(claims, cpus, warnings)
    cores = _cores(members, cpus, allowance, warnings)
    distances = _distances(folders, warnings)
    memory = _memory_of_nodes(folders, members, meminfo, warnings)
    memory_nodes = allowance.memory_nodes if allowance else None
    nodes = tuple(
        Node(
            id=node,
            socket=min((core.socket for core in cores[node]), default=_nearest_socket(node, cores, distances)),
            cores=tuple(cores[node]),
            memory_bytes=memory[node],
            memory_allowed=memory_nodes is None or node in memory_nodes or not memory_nodes & members.keys(),
            distances=distances.get(node, {}),
        )
        for node in members
    )
    accelerators, refused = read_accelerators(root, {node: frozenset(group) for node, group in members.items()}), ""
    if allowance:
        try:
            accelerators = visible_here(accelerators)
        except PlacementError as refusal:  # raised again if accelerators are asked for
            accelerators, refused = (), str(refusal)
    return Topology(
        host=host,
        nodes=nodes,
        accelerators=accelerators,
        memory_limit_bytes=allowance.memory_limit_bytes if allowance else None,
        cpu_quota=allowance.cpu_quota if allowance else None,
        warnings=tuple(dict.fromkeys(warnings)),
        accelerators_refused=refused,
        in_pairs=scales_in_pairs() if allowance else frozenset(PAIRED),
    )


def _cpus(root: Path, claimed: frozenset[int], allowance: Allowance | None, warnings: list[str]) -> Cpus:
    """The machine's CPUs. Where /sys describes none, each CPU that this process may use counts as a core."""
    cpus = read_cpus(root / "devices/system/cpu", claimed, warnings)
    if cpus.online:
        return cpus
    if allowance and allowance.cpus:
        warnings.append(
            f"{root} describes no CPU (a sandbox may hide them): each that this process may use is taken as a core"
        )
        return Cpus(allowance.cpus, allowance.cpus, {}, {}, {}, {}, {})
    raise PlacementError(f"{root} describes no CPU: it must be a /sys or a saved copy of one, with devices/system/cpu")


def _cores(
    members: Mapping[int, tuple[int, ...]], cpus: Cpus, allowance: Allowance | None, warnings: list[str]
) -> dict[int, list[Core]]:
    """The physical cores of each node, with the CPUs of each that this process may use."""
    node_of = {cpu: node for node, group in members.items() for cpu in group}
    groups = physical_cores(cpus, node_of, warnings)
    socket_of = cpus.sockets(node_of)
    allowed = cpus.online if allowance is None or allowance.cpus is None else allowance.cpus
    if not allowed & node_of.keys():
        warnings.append("none of the CPUs that this process may use is described: all CPUs are taken to be usable")
        allowed = cpus.online
    cores: dict[int, list[Core]] = {node: [] for node in members}
    for group in groups:
        node = node_of[group[0]]
        cores[node].append(Core(group, tuple(cpu for cpu in group if cpu in allowed), node, socket_of[group[0]]))
    return cores


def _memory_of_nodes(
    folders: Mapping[int, Path], nodes: Collection[int], meminfo: Path, warnings: list[str]
) -> dict[int, int | None]:
    """Bytes of memory of each node, without reserved huge pages. None: unknown."""
    memory = {node: _memory(folder / "meminfo") for node, folder in folders.items()}
    reserved = {node: _huge_pages(folder / "hugepages") for node, folder in folders.items()}
    if len(nodes) == 1:
        # Memory that is added to a running virtual machine appears in /proc/meminfo before it does in the node's.
        whole = _memory(meminfo)
        memory = {node: max(filter(None, (memory.get(node), whole)), default=None) for node in nodes}
        reserved = {node: max(reserved.get(node, 0), _memory(meminfo, "Hugetlb") or 0) for node in nodes}
    if unknown := [node for node in nodes if memory.get(node) is None]:
        warnings.append(f"node {sysfs.format_list(unknown)}: how much memory there is cannot be read")
    return {node: None if (total := memory.get(node)) is None else max(0, total - reserved[node]) for node in nodes}


def _nodes(folder: Path, warnings: list[str]) -> tuple[dict[int, Path], dict[int, frozenset[int]]]:
    """The folders of online nodes, and the CPUs that each lists. A machine without nodes gets a node 0 that lists none."""
    folders = sysfs.numbered(folder, "node")
    online = sysfs.read_set(folder, "online") if not folders else sysfs.parse_list(sysfs.read_text(folder / "online"))
    if folders and online:
        if missing := online - folders.keys():
            warnings.append(f"node {sysfs.format_list(missing)}: said to be online, but has no folder")
        folders = {node: path for node, path in folders.items() if node in online} or folders
    if not folders:
        return {}, {0: frozenset()}
    members = {}
    for node, path in folders.items():
        claimed = sysfs.read_set(path, "cpulist", "cpumap")
        if claimed is None:
            claimed = frozenset(sysfs.numbered(path, "cpu"))
        members[node] = claimed
    return folders, members


def _nodes_of_cpus(members: dict[int, frozenset[int]], cpus: Cpus, warnings: list[str]) -> dict[int, tuple[int, ...]]:
    """Assign every online CPU to exactly one node."""
    assigned: dict[int, list[int]] = {node: [] for node in members}
    placed: dict[int, int] = {}
    for node, claimed in members.items():
        if unknown := claimed - cpus.known:
            warnings.append(f"node {node}: lists CPUs {sysfs.format_list(unknown)}, which do not exist")
        if twice := claimed & placed.keys():
            owners = sysfs.format_list({placed[cpu] for cpu in twice})
            warnings.append(
                f"CPUs {sysfs.format_list(twice)}: in node {owners} and in node {node}; taken as node {owners}'s"
            )
        for cpu in sorted((claimed & cpus.online) - placed.keys()):
            placed[cpu] = node
            assigned[node].append(cpu)
    strays = sorted(cpus.online - placed.keys())
    if not strays:
        return {node: tuple(group) for node, group in assigned.items()}
    nobody_claims = not placed
    lost = []
    for cpu in strays:
        home = cpus.node_links.get(cpu)
        if home not in assigned:
            home = next((placed[other] for other in sorted(cpus.siblings.get(cpu, ())) if other in placed), None)
        if home is None and nobody_claims:
            home = min(assigned)
        if home is None:
            lost.append(cpu)
            continue
        placed[cpu] = home
        assigned[home].append(cpu)
    if lost:
        warnings.append(f"CPUs {sysfs.format_list(lost)}: online, but in no node; they are left out")
    if nobody_claims and len(members) > 1:
        warnings.append("no node says which CPUs it has")
    return {node: tuple(sorted(group)) for node, group in assigned.items()}


def _distances(folders: dict[int, Path], warnings: list[str]) -> dict[int, dict[int, int]]:
    """Each node's distances. A file has one number for each online node, in the order of their ids."""
    table = {}
    odd = []
    for node, path in folders.items():
        words = (sysfs.read_text(path / "distance") or "").split()
        values = [int(word) for word in words if word.isdecimal()]
        if len(values) == len(words) == len(folders):
            table[node] = dict(zip(folders, values, strict=True))
        elif words:
            odd.append(node)
    if odd:
        warnings.append(f"node {sysfs.format_list(odd)}: distances do not match the online nodes and are not used")
    return table


def _memory(path: Path, name: str = "MemTotal") -> int | None:
    match = re.search(rf"{name}:\s*(\d+)\s*kB", sysfs.read_text(path) or "")
    return int(match[1]) * 1024 if match else None


def _huge_pages(folder: Path) -> int:
    """The bytes of a node that are reserved as huge pages, which ordinary allocations cannot use."""
    reserved = 0
    for file in folder.glob("hugepages-*kB/nr_hugepages"):
        size = file.parent.name.removeprefix("hugepages-").removesuffix("kB")
        if size.isascii() and size.isdecimal():
            reserved += 1024 * int(size) * max(0, sysfs.read_int(file) or 0)
    return reserved


def _nearest_socket(node: int, cores: dict[int, list[Core]], distances: dict[int, dict[int, int]]) -> int:
    """The socket nearest to a node without CPUs."""
    row = distances.get(node, {})

    def distance(other: int) -> tuple[int, int, int]:
        # Both directions, since a memory-only node sometimes has the same distance to all others.
        to_other, from_other = row.get(other, FAR_AWAY), distances.get(other, {}).get(node, FAR_AWAY)
        return min(to_other, from_other), max(to_other, from_other), other

    with_cores = [other for other, group in cores.items() if group]
    return min(core.socket for core in cores[min(with_cores, key=distance)])
