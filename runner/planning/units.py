"""Units that replicas are placed on: the cores and memory of a node, a socket or a machine, and their division. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from outrider.runner.planning.topology import FAR_AWAY, Core, Node, Topology

# From this many cores on, one is left to Ray and the driver.
CORES_TO_SPARE_ONE = 8
# Measured memory of Ray's own processes and the driver.
HOST_BYTES = 300_000_000


@dataclass(frozen=True, slots=True)
class Unit:
    """The cores, in the order of their nodes, and memory nodes that a single replica on this unit may use.

    ``extra``: memory-only nodes (HBM, CXL), used only if ``memory`` is too small.
    """

    topology: Topology
    name: str
    cores: tuple[Core, ...]
    memory: tuple[int, ...]
    extra: tuple[int, ...] = ()


@dataclass(slots=True)
class FreeMemory:
    """Free memory while a plan is made, by (machine, node), and the limit of each host; None: unknown, so unlimited."""

    free: dict[tuple[str, int], int | None] = field(default_factory=dict)
    limits: dict[str, int | None] = field(default_factory=dict)
    machines: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, hosts: Iterable[Topology]) -> FreeMemory:
        free_memory = cls()
        for host in hosts:
            free_memory.limits[host.host] = host.memory_limit_bytes
            machine = free_memory.machines[host.host] = host.machine or host.host
            for node in host.nodes:
                if node.memory_allowed:
                    free_memory.free[machine, node.id] = node.memory_bytes
                else:
                    free_memory.free.setdefault((machine, node.id), 0)
            room = free_memory.room(host.host, [node.id for node in host.nodes])
            free_memory.limits[host.host] = None if room is None else max(0, room - HOST_BYTES)
        return free_memory

    def room(self, host: str, nodes: Sequence[int]) -> int | None:
        """The free memory of these nodes together; None if unknown."""
        free = [self.free[self.machines[host], node] for node in nodes]
        total = None if None in free else sum(filter(None, free))
        return min((bound for bound in (total, self.limits[host]) if bound is not None), default=None)

    def take(self, host: str, nodes: Sequence[int], size: int) -> dict[int, int]:
        """Book ``size`` bytes, on the earlier nodes first; the caller has checked ``room``."""
        booked, machine = {}, self.machines[host]
        limit = self.limits[host]
        if limit is not None:
            self.limits[host] = limit - size
        for node in nodes:
            free = self.free[machine, node]
            part = size if free is None else min(size, free)
            if free is not None:
                self.free[machine, node] = free - part
            if part:
                booked[node] = part
                size -= part
        return booked


def spared_core(topology: Topology) -> Core | None:
    """The core that is left to Ray and the driver; None if there are too few cores, or an earlier plan has left one."""
    if topology.planned_cores is not None or len(topology.usable_cores) < CORES_TO_SPARE_ONE:
        return None
    # From the largest node, for which it is the smallest loss.
    return max(topology.nodes, key=lambda node: (len(node.usable_cores), -node.id)).usable_cores[0]


def working_cores(topology: Topology) -> tuple[Core, ...]:
    """The cores that replicas may have: all usable ones, but one for Ray and the driver, and within the CPU quota."""
    spare = spared_core(topology)
    cores = tuple(core for core in topology.usable_cores if core != spare)
    if topology.cpu_quota is not None:
        within_quota = max(1, int(topology.cpu_quota)) - (topology.planned_cores or 0)
        cores = cores[: max(0, within_quota)]
    return cores


def units(topology: Topology, per: str) -> list[Unit]:
    """The units of a machine that have cores."""
    working = working_cores(topology)
    groups: dict[tuple[str, int], list[Node]] = {}
    for node in topology.nodes:
        key = {"node": ("node", node.id), "socket": ("socket", node.socket), "machine": ("machine", 0)}[per]
        groups.setdefault(key, []).append(node)
    found = []
    for (kind, number), nodes in groups.items():
        ids = {node.id for node in nodes}
        cores = tuple(core for core in working if core.node in ids)
        if not cores:
            continue
        homes = [node for node in nodes if node.usable_cores]
        memory = memory_of(topology, homes)
        # Nodes whose cores may not be used can still give memory to a wider unit.
        extra = [
            node
            for node in nodes
            if per != "node" and node.has_memory and node.id not in memory and _nearest(node, homes) < FAR_AWAY
        ]
        extra.sort(key=lambda node: (_nearest(node, homes), node.id))
        name = f"node {number}" if kind == "node" else f"socket {number}" if kind == "socket" else "the machine"
        found.append(Unit(topology, name, cores, memory, tuple(node.id for node in extra)))
    return found


def _nearest(node: Node, homes: Sequence[Node]) -> int:
    return min(home.distance(node) for home in homes)


def memory_of(topology: Topology, homes: Iterable[Node]) -> tuple[int, ...]:
    """The memory nodes for these nodes: each its own or, without memory, the nearest that has some."""
    chosen: list[int] = []
    for home in homes:
        candidates = [node for node in topology.nodes if node.has_memory]
        # If no node is known to have memory, the node itself is taken.
        nearest = min(candidates, key=lambda node: (home.distance(node), node.id), default=home)
        chosen.append((home if home.has_memory else nearest).id)
    return tuple(dict.fromkeys(chosen))


def divide(cores: Sequence[Core], replicas: int) -> list[tuple[Core, ...]]:
    """Divide a unit's cores among replicas, each on as few nodes as possible and with at least one core."""
    by_node: dict[int, list[Core]] = {}
    for core in cores:
        by_node.setdefault(core.node, []).append(core)
    if replicas >= len(by_node):
        counts = dict.fromkeys(by_node, 1)
        for _ in range(replicas - len(by_node)):
            roomiest = max(by_node, key=lambda node: (len(by_node[node]) / (counts[node] + 1), -node))
            counts[roomiest] += 1
        return [part for node, group in by_node.items() for part in _even(group, counts[node])]
    if len(by_node) % replicas == 0:
        nodes = list(by_node.values())
        width = len(nodes) // replicas
        return [
            tuple(core for group in nodes[start : start + width] for core in group) for start in range(0, len(nodes), width)
        ]
    return _even(cores, replicas)


def _even(cores: Sequence[Core], parts: int) -> list[tuple[Core, ...]]:
    """Consecutive parts whose sizes differ by at most one."""
    edges = [len(cores) * part // parts for part in range(parts + 1)]
    return [tuple(cores[first:last]) for first, last in pairwise(edges)]
