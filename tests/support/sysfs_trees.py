"""Builds /sys trees as a kernel would present them for a machine, including the faults of real ones."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from outrider.runner.planning import sysfs

GIB = 1 << 30


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")


def mask(cpus: Iterable[int], groups: int = 2) -> str:
    value = sum(1 << cpu for cpu in set(cpus))
    return ",".join(f"{value >> 32 * group & 0xFFFFFFFF:08x}" for group in reversed(range(groups)))


def build(
    root: Path,
    cores: Mapping[int, Iterable[tuple[int, ...]]],
    sockets: Mapping[int, int] | None = None,
    memory: Mapping[int, int | None] | None = None,
    distances: Mapping[int, list[int]] | None = None,
    offline: Iterable[int] = (),
    lists: bool = True,
) -> Path:
    """Builds a tree and returns its ``sys``. ``cores``: each node's groups of sibling CPUs; none for a memory-only node."""
    tree = root / "sys"
    system = tree / "devices/system"
    sockets = sockets or dict.fromkeys(cores, 0)
    groups = {node: [tuple(group) for group in each] for node, each in cores.items()}
    everything = {cpu for each in groups.values() for group in each for cpu in group}
    online = everything - set(offline)
    write(system / "cpu/online", sysfs.format_list(online))
    write(system / "cpu/possible", sysfs.format_list(everything))
    write(system / "node/online", sysfs.format_list(cores))
    write(system / "node/possible", sysfs.format_list(cores))
    for node, each in groups.items():
        folder = system / f"node/node{node}"
        members = {cpu for group in each for cpu in group} & online
        write(folder / "cpumap", mask(members))
        if lists:
            write(folder / "cpulist", sysfs.format_list(members))
        if distances is not None:
            write(folder / "distance", " ".join(map(str, distances[node])))
        size = (memory or {}).get(node, 64 * GIB)
        if size is not None:
            write(folder / "meminfo", f"Node {node} MemTotal:       {size // 1024} kB\nNode {node} MemFree:  1 kB")
        for index, group in enumerate(each):
            for cpu in group:
                folder = system / f"cpu/cpu{cpu}"
                if cpu:
                    write(folder / "online", str(int(cpu in online)))
                if cpu not in online:
                    folder.mkdir(parents=True, exist_ok=True)
                    continue
                mates = set(group) & online
                write(folder / "topology/core_id", str(index))
                write(folder / "topology/physical_package_id", str(sockets[node]))
                write(folder / "topology/thread_siblings", mask(mates))
                if lists:
                    write(folder / "topology/thread_siblings_list", sysfs.format_list(mates))
                    write(folder / "topology/core_cpus_list", sysfs.format_list(mates))
    return tree


def sapphire_rapids(root: Path) -> Path:
    """Two sockets of 56 cores in sub-NUMA clusters of 14, siblings interleaved (0 and 112), HBM as nodes 8 to 15."""
    cores = {node: [(node * 14 + core, node * 14 + core + 112) for core in range(14)] for node in range(8)}
    sockets = {node: node // 4 for node in range(8)} | {node + 8: node // 4 for node in range(8)}

    def distance(one: int, other: int) -> int:
        if one == other:
            return 10
        if one % 8 == other % 8:
            return 13
        return (12 if max(one, other) < 8 else 14) if sockets[one] == sockets[other] else 21 + (max(one, other) >= 8) * 2

    return build(
        root,
        cores | {node: [] for node in range(8, 16)},
        sockets,
        {node: (64 if node < 8 else 16) * GIB for node in range(16)},
        {one: [distance(one, other) for other in range(16)] for one in range(16)},
    )


def laptop(root: Path) -> Path:
    """Four cores with two threads each, numbered side by side, and eight without."""
    return build(root, {0: [(0, 1), (2, 3), (4, 5), (6, 7), *((cpu,) for cpu in range(8, 16))]}, memory={0: 32 * GIB})


def accelerator(tree: Path, address: str, vendor: str, kind: str, node: int | None, local: str | None = None) -> None:
    folder = tree / "bus/pci/devices" / address
    write(folder / "vendor", vendor)
    write(folder / "class", kind)
    if node is not None:
        write(folder / "numa_node", str(node))
    if local is not None:
        write(folder / "local_cpulist", local)
