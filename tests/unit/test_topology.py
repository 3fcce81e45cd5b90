"""The topology reader on trees of ordinary, odd and damaged machines."""

from __future__ import annotations

import os
import re
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sysfs_trees import GIB, accelerator, build, laptop, mask, write

from outrider.runner.planning import sysfs, topology
from outrider.runner.planning.accelerators import Accelerator, visible_here
from outrider.runner.planning.allowance import Allowance, read_allowance
from outrider.runner.planning.placement import plan
from outrider.runner.planning.placement_request import ModelSizes, PlacementRequest
from outrider.runner.planning.topology import Topology, ray_resources, read_topology
from outrider.runner.planning.topology_view import as_json
from outrider.workers.errors import PlacementError


def shape(machine: Topology) -> dict[int, list[tuple[int, ...]]]:
    return {node.id: [core.cpus for core in node.cores] for node in machine.nodes}


@given(st.sets(st.integers(0, 300)))
def test_lists_and_masks_read_back(members: set[int]) -> None:
    assert sysfs.parse_list(sysfs.format_list(members)) == members
    assert sysfs.parse_mask(mask(members, groups=10)) == members


@pytest.mark.parametrize("text", ["0-", "a", "3-1", "0-99999999", "-1", "1 2", "0-3;5"])
def test_a_damaged_list_is_not_understood(text: str) -> None:
    assert sysfs.parse_list(text) is None


def test_masks_of_other_shapes() -> None:
    assert sysfs.parse_mask("0000,00000000,00ff00ff") == set(range(8)) | set(range(16, 24))
    assert sysfs.parse_mask("f,00000000") == {32, 33, 34, 35}
    assert sysfs.parse_mask("1,0000000000000001") == {0, 64}
    assert sysfs.parse_mask("0x3") == {0, 1}
    assert sysfs.parse_mask("xyz") is None
    assert sysfs.parse_mask("") is None


def test_sapphire_rapids_with_clusters_and_flat_hbm(xeon: Path) -> None:
    machine = read_topology(xeon)
    assert machine.sockets == (0, 1)
    assert [node.id for node in machine.nodes] == list(range(16))
    assert [len(node.cores) for node in machine.nodes] == [14] * 8 + [0] * 8
    assert [node.socket for node in machine.nodes] == [0] * 4 + [1] * 4 + [0] * 4 + [1] * 4
    assert machine.node(1).cores[0].cpus == (14, 126)
    assert machine.node(8).memory_bytes == 16 * GIB
    assert machine.node(0).distance(machine.node(8)) == 13
    assert machine.warnings == ()
    assert ray_resources(machine) == {f"numa{node}": 14.0 for node in range(8)}


def test_a_laptop_with_two_kinds_of_core(tmp_path: Path) -> None:
    machine = read_topology(laptop(tmp_path))
    assert shape(machine) == {0: [(0, 1), (2, 3), (4, 5), (6, 7), *((cpu,) for cpu in range(8, 16))]}


def test_sparse_ids_and_offline_cpus(tmp_path: Path) -> None:
    tree = build(
        tmp_path,
        {0: [(0, 1, 2, 3), (4, 5, 6, 7)], 8: [(80, 81, 82, 83)], 253: []},
        {0: 0, 8: 8, 253: 0},
        {0: GIB, 8: GIB, 253: 16 * GIB},
        {0: [10, 40, 80], 8: [40, 10, 80], 253: [80, 80, 10]},
        offline=(1, 2, 3, 5, 6, 7, 82, 83),
    )
    machine = read_topology(tree)
    assert shape(machine) == {0: [(0,), (4,)], 8: [(80, 81)], 253: []}
    assert machine.node(253).distances == {0: 80, 8: 80, 253: 10}
    assert machine.sockets == (0, 8)


def test_an_offline_node_is_not_there(tmp_path: Path) -> None:
    tree = build(tmp_path, {0: [(0,)], 1: [(1,)]})
    write(tree / "devices/system/node/online", "0")
    write(tree / "devices/system/cpu/online", "0")
    assert shape(read_topology(tree)) == {0: [(0,)]}


def test_masks_serve_where_lists_are_missing_and_nul_bytes_do_not_matter(tmp_path: Path) -> None:
    tree = build(tmp_path, {0: [(0, 2)], 1: [(1, 3)]}, {0: 0, 1: 1}, lists=False)
    for path in tree.rglob("*"):
        if path.is_file():
            path.write_bytes(path.read_bytes() + b"\0" * 7)
    shutil.rmtree(tree / "devices/system/node/online", ignore_errors=True)
    for name in ("node/online", "node/possible", "cpu/online", "cpu/possible"):
        (tree / "devices/system" / name).unlink()
    assert shape(read_topology(tree)) == {0: [(0, 2)], 1: [(1, 3)]}


def test_no_node_folder_is_one_node(tmp_path: Path) -> None:
    tree = build(tmp_path, {0: [(0, 1), (2, 3)]})
    shutil.rmtree(tree / "devices/system/node")
    write(tmp_path / "proc/meminfo", "MemTotal:        2048 kB")
    machine = read_topology(tree)
    assert shape(machine) == {0: [(0, 1), (2, 3)]}
    assert machine.node(0).memory_bytes == 2048 * 1024


def test_nothing_but_cpu_folders(tmp_path: Path) -> None:
    for cpu in range(3):
        (tmp_path / f"sys/devices/system/cpu/cpu{cpu}").mkdir(parents=True)
    machine = read_topology(tmp_path / "sys")
    assert shape(machine) == {0: [(0,), (1,), (2,)]}
    assert machine.node(0).memory_bytes is None
    assert any("memory" in warning for warning in machine.warnings)


def test_nothing_but_a_list_of_cpus(tmp_path: Path) -> None:
    write(tmp_path / "sys/devices/system/cpu/online", "0-1")
    assert shape(read_topology(tmp_path / "sys")) == {0: [(0,), (1,)]}


@pytest.mark.parametrize("tree", ["missing", "."])
def test_what_is_no_tree_is_refused_in_a_sentence(tmp_path: Path, tree: str) -> None:
    with pytest.raises(PlacementError, match="describes no CPU"):
        read_topology(tmp_path / tree)


def test_a_cpu_in_two_nodes_belongs_to_the_first(tmp_path: Path) -> None:
    tree = build(tmp_path, {0: [(0,), (1,)], 1: [(2,)]})
    write(tree / "devices/system/node/node1/cpulist", "1-2")
    machine = read_topology(tree)
    assert shape(machine) == {0: [(0,), (1,)], 1: [(2,)]}
    assert any("CPUs 1: in node 0 and in node 1" in warning for warning in machine.warnings)


def test_a_core_never_reaches_across_nodes(tmp_path: Path) -> None:
    tree = build(tmp_path, {0: [(0,), (1,)], 1: [(2,)]})
    for cpu in (1, 2):
        write(tree / f"devices/system/cpu/cpu{cpu}/topology/core_cpus_list", "1-2")
    machine = read_topology(tree)
    assert shape(machine) == {0: [(0,), (1,)], 1: [(2,)]}
    assert any("across nodes" in warning for warning in machine.warnings)


def test_siblings_that_disagree(tmp_path: Path) -> None:
    tree = build(tmp_path, {0: [(0,), (1,), (2,)]})
    write(tree / "devices/system/cpu/cpu0/topology/core_cpus_list", "0-1")
    machine = read_topology(tree)
    assert shape(machine) == {0: [(0,), (1,), (2,)]}
    assert any("do not agree" in warning for warning in machine.warnings)


def test_core_ids_serve_where_siblings_are_missing(tmp_path: Path) -> None:
    tree = build(tmp_path, {0: [(0, 4), (1, 5)], 1: [(2, 6), (3, 7)]}, {0: 0, 1: 0})
    for name in ("core_cpus_list", "thread_siblings_list", "thread_siblings"):
        for path in tree.rglob(name):
            path.unlink()
    # Core ids count from 0 on each node here, as on some machines with two nodes a socket.
    assert shape(read_topology(tree)) == {0: [(0, 4), (1, 5)], 1: [(2, 6), (3, 7)]}


def test_unknown_packages_fall_back_to_nodes(tmp_path: Path) -> None:
    tree = build(tmp_path, {0: [(0,)], 1: [(1,)]}, {0: -1, 1: -1})
    assert [node.socket for node in read_topology(tree).nodes] == [0, 1]
    for cpu in (0, 1):
        write(tree / f"devices/system/cpu/cpu{cpu}/topology/core_siblings_list", "0-1")
    assert [node.socket for node in read_topology(tree).nodes] == [0, 0]


def test_memory_that_is_reserved_as_huge_pages_is_left_out(tmp_path: Path) -> None:
    two = build(tmp_path / "two", {0: [(0,)], 1: [(1,)]}, memory={0: 64 * GIB, 1: 2 * GIB})
    write(two / "devices/system/node/node0/hugepages/hugepages-1048576kB/nr_hugepages", "48")
    write(two / "devices/system/node/node0/hugepages/hugepages-2048kB/nr_hugepages", "512")
    write(two / "devices/system/node/node1/hugepages/hugepages-1048576kB/nr_hugepages", "3")
    assert [node.memory_bytes for node in read_topology(two).nodes] == [15 * GIB, 0]
    one = build(tmp_path / "one/tree", {0: [(0,)]}, memory={0: 64 * GIB})
    write(one.parent / "proc/meminfo", f"MemTotal: {64 << 20} kB\nHugetlb: {48 << 20} kB")
    assert read_topology(one).nodes[0].memory_bytes == 16 * GIB


def test_contradictory_online_files_keep_the_cpu_out(tmp_path: Path) -> None:
    tree = build(tmp_path, {0: [(0,), (1,), (2,)]}, offline=(2,))
    write(tree / "devices/system/cpu/online", "0-2,9")
    write(tree / "devices/system/node/node0/cpulist", "0-2,11")
    machine = read_topology(tree)
    assert shape(machine) == {0: [(0,), (1,)]}
    text = " ".join(machine.warnings)
    assert "CPUs 2: online by one file" in text
    assert "CPUs 9: said to be online" in text
    assert "CPUs 11, which do not exist" in text


# Files under load can be slow: what counts is that the answer comes.
@settings(deadline=None, derandomize=True)
@given(data=st.data())
def test_a_damaged_file_never_makes_a_traceback(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    tree = build(
        tmp_path_factory.mktemp("tree"),
        {0: [(0, 2)], 1: [(1, 3)], 5: []},
        {0: 0, 1: 1, 5: 0},
        distances={0: [10, 20, 15], 1: [20, 10, 15], 5: [15, 15, 10]},
    )
    files = sorted(path for path in tree.rglob("*") if path.is_file())
    for path in data.draw(st.lists(st.sampled_from(files), max_size=6, unique=True)):
        kind = data.draw(st.sampled_from(["gone", "empty", "folder", "junk", "numbers"]))
        path.unlink()
        if kind == "folder":
            path.mkdir()
        elif kind != "gone":
            junk = {"empty": st.just(b""), "junk": st.binary(max_size=20), "numbers": st.from_regex(rb"[0-9,\-]{1,8}")}
            path.write_bytes(data.draw(junk[kind]))
    machine = read_topology(tree)
    cpus = [cpu for core in machine.cores for cpu in core.cpus]
    assert cpus
    assert len(cpus) == len(set(cpus))
    assert set(cpus) <= {0, 1, 2, 3}
    assert {node.id for node in machine.nodes} <= {0, 1, 5}


def test_knights_landing_with_clusters_and_flat_fast_memory(tmp_path: Path) -> None:
    cores = {
        node: [tuple(node * 16 + core + 64 * thread for thread in range(4)) for core in range(16)] for node in range(4)
    }
    rows = [[10, 21, 21, 21, 31, 41, 41, 41]] * 8
    near = {node: [31 if other == node - 4 else 41 for other in range(4)] + [41] * 4 for node in range(4, 8)}
    tree = build(
        tmp_path,
        cores | {node: [] for node in range(4, 8)},
        dict.fromkeys(range(8), 0),
        {node: (24 if node < 4 else 4) * GIB for node in range(8)},
        {node: near.get(node, rows[node]) for node in range(8)},
    )
    machine = read_topology(tree)
    assert len(machine.usable_cores) == 64
    assert machine.node(3).cores[0].cpus == (48, 112, 176, 240)
    assert {node.socket for node in machine.nodes} == {0}


def test_power_with_threads_switched_off_and_no_package_ids(tmp_path: Path) -> None:
    cores = {
        node: [tuple(range(first, first + 8)) for first in range(start, start + 32, 8)] for node, start in ((0, 0), (1, 32))
    }
    offline = [cpu for cpu in range(64) if cpu % 8]
    tree = build(tmp_path, cores, {0: -1, 1: -1}, offline=offline, lists=False)
    for path in tree.rglob("core_id"):
        path.unlink()
    machine = read_topology(tree)
    assert shape(machine) == {0: [(0,), (8,), (16,), (24,)], 1: [(32,), (40,), (48,), (56,)]}
    assert machine.sockets == (0, 1)


def test_a_kernel_older_than_topology_folders(tmp_path: Path) -> None:
    """SGI's ia64 machines: masks of nodes, and of a CPU nothing but its folder."""
    tree = build(tmp_path, {0: [(0,), (1,)], 1: [(2,), (3,)]}, lists=False)
    for path in tree.rglob("topology"):
        shutil.rmtree(path)
    for name in ("cpu/online", "cpu/possible", "node/online", "node/possible"):
        (tree / "devices/system" / name).unlink()
    machine = read_topology(tree)
    assert shape(machine) == {0: [(0,), (1,)], 1: [(2,), (3,)]}
    assert machine.sockets == (0, 1)


def test_a_node_whose_cpus_are_all_off_is_memory_only(tmp_path: Path) -> None:
    tree = build(tmp_path, {0: [(0,)], 1: [(1,)]}, {0: 0, 1: 1}, offline=(1,))
    machine = read_topology(tree)
    assert shape(machine) == {0: [(0,)], 1: []}


def test_core_ids_that_are_all_alike_make_no_giant_core(tmp_path: Path) -> None:
    tree = build(tmp_path, {0: [(cpu,) for cpu in range(12)]})
    for path in [*tree.rglob("core_cpus_list"), *tree.rglob("thread_siblings*")]:
        path.unlink()
    for path in tree.rglob("core_id"):
        path.write_text("0\n")
    assert len(read_topology(tree).cores) == 12


def here(monkeypatch: pytest.MonkeyPatch, tree: Path, allowance: Allowance) -> Topology:
    monkeypatch.setattr(topology, "read_allowance", lambda: allowance)
    return topology._read(tree, tree.parent / "proc/meminfo", "here", allowance)


def test_a_container_with_three_odd_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = laptop(tmp_path)
    machine = here(monkeypatch, tree, Allowance(cpus=frozenset({3, 9, 11}), memory_nodes=frozenset({0})))
    assert [core.allowed for core in machine.usable_cores] == [(3,), (9,), (11,)]
    assert machine.usable_cores[0].cpus == (2, 3)
    assert ray_resources(machine) == {"numa0": 3.0}
    assert len(machine.without({"2", "9"}).usable_cores) == 1


def test_memory_nodes_out_of_bounds_are_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = build(tmp_path, {0: [(0,)], 1: [(1,)]})
    machine = here(monkeypatch, tree, Allowance(cpus=frozenset({0, 1}), memory_nodes=frozenset({1})))
    assert [node.has_memory for node in machine.nodes] == [False, True]


def test_a_sandbox_that_hides_sys_still_has_its_cpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "proc/meminfo", "MemTotal:        2048 kB")
    machine = here(monkeypatch, tmp_path / "sys", Allowance(cpus=frozenset({4, 6})))
    assert shape(machine) == {0: [(4,), (6,)]}
    assert machine.node(0).memory_bytes == 2048 * 1024
    assert any("sandbox" in warning for warning in machine.warnings)


def test_a_saved_tree_takes_nothing_from_this_machine(xeon: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: object) -> None:
        raise AssertionError("a saved tree must not look at this machine")

    monkeypatch.setattr(os, "sched_getaffinity", forbidden)
    monkeypatch.setattr(topology, "read_allowance", forbidden)
    assert len(read_topology(xeon).usable_cores) == 112


def test_this_machine_is_understood() -> None:
    machine = read_topology()
    allowed = {cpu for core in machine.cores for cpu in core.allowed}
    assert allowed == os.sched_getaffinity(0)


def test_the_allowance_of_both_cgroup_versions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    write(tmp_path / "proc/self/status", "Name: x\nMems_allowed:\t3\nMems_allowed_list:\t0-1")
    write(tmp_path / "proc/self/cgroup", "0::/a/b")
    group = tmp_path / "cgroup/a"
    write(group / "b/cpuset.cpus.effective", "1-5")
    write(group / "memory.max", "1000000")
    write(group / "b/memory.max", "max")
    write(group / "b/cpu.max", "250000 100000")
    found = read_allowance(tmp_path / "proc", tmp_path / "cgroup")
    assert found == Allowance(frozenset({1, 2, 3}), frozenset({0, 1}), 1000000, 2.5)

    write(tmp_path / "proc/self/cgroup", "3:cpuset:/c\n4:memory:/c\n1:cpu,cpuacct:/c")
    write(tmp_path / "cgroup/cpuset/c/cpuset.effective_cpus", "2")
    write(tmp_path / "cgroup/memory/c/memory.limit_in_bytes", "9223372036854771712")
    write(tmp_path / "cgroup/cpu,cpuacct/c/cpu.cfs_quota_us", "-1")
    write(tmp_path / "cgroup/cpu,cpuacct/c/cpu.cfs_period_us", "100000")
    found = read_allowance(tmp_path / "proc", tmp_path / "cgroup")
    assert found == Allowance(frozenset({2}), frozenset({0, 1}))

    write(tmp_path / "cgroup/cpuset/c/cpuset.effective_cpus", "77")
    found = read_allowance(tmp_path / "proc", tmp_path / "cgroup")
    assert found.cpus == {0, 1, 2, 3}
    assert len(found.warnings) == 1


def test_accelerators_hang_on_their_node(tmp_path: Path) -> None:
    tree = build(tmp_path, {0: [(0,)], 1: [(1,)]})
    accelerator(tree, "0000:3a:00.0", "0x10de", "0x030200", 1)
    accelerator(tree, "0000:17:00.0", "0x10de", "0x030000", -1, local="0")
    accelerator(tree, "0000:5d:00.0", "0x8086", "0x038000", -1)
    accelerator(tree, "0000:03:00.0", "0x1a03", "0x030000", 0)  # the board's own display chip
    accelerator(tree, "0000:17:00.1", "0x10de", "0x040300", 0)  # the card's audio
    found = [(each.name, each.node) for each in read_topology(tree).accelerators]
    assert found == [("cuda:0", 0), ("cuda:1", 1), ("xpu:0", None)]


def test_only_accelerators_with_device_files_are_visible(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    model_infos = tuple(Accelerator(f"cuda:{index}", f"0000:{index:02x}:00.0", index, str(index)) for index in range(3))
    assert visible_here(model_infos, tmp_path, tmp_path) == ()
    (tmp_path / "nvidia1").touch()
    (tmp_path / "nvidia2").touch()
    shown = visible_here(model_infos, tmp_path, tmp_path)
    assert [(each.name, each.node, each.selector) for each in shown] == [("cuda:0", 1, "0"), ("cuda:1", 2, "1")]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    shown = visible_here(model_infos, tmp_path, tmp_path)
    assert [(each.name, each.node, each.selector) for each in shown] == [("cuda:0", 2, "1")]
    assert [each.node for each in visible_here((), tmp_path, tmp_path)] == [None]


UUIDS = ("GPU-5f1c2a3b-0000-0000-0000-000000000000", "GPU-5f1c2a3b-1111-0000-0000-000000000001", "GPU-99")


@pytest.fixture
def three_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Accelerator, ...]:
    """And nvidia-smi as it writes of them; the last one's memory it does not know."""
    lines = [
        f"0000{index:04x}:{index:02X}:00.0, {'[N/A]' if index == 2 else 81920}, {uuid}\n"
        for index, uuid in enumerate(UUIDS)
    ]

    def run(command: list[str], **_: object) -> SimpleNamespace:
        assert command[:2] == ["nvidia-smi", "--query-gpu=pci.bus_id,memory.total,uuid"]
        return SimpleNamespace(stdout="".join(lines))

    monkeypatch.setattr("outrider.runner.planning.accelerators.subprocess.run", run)
    for index in range(3):
        (tmp_path / f"nvidia{index}").touch()
    return tuple(Accelerator(f"cuda:{index}", f"{index:04x}:{index:02x}:00.0", 0, str(index)) for index in range(3))


@pytest.mark.parametrize(
    ("variable", "selectors"),
    [
        (UUIDS[1], ["1"]),
        (f"{UUIDS[1]},{UUIDS[0]}", ["1", "0"]),
        ("GPU-9", ["2"]),  # abbreviated, as CUDA allows
        ("GPU-5f1c2a3b-1, 2", ["1", "2"]),
        ("", []),
        ("1,nonsense,GPU-99", ["1"]),
    ],
)
def test_devices_are_named_by_uuid_too(
    three_devices: tuple[Accelerator, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    variable: str,
    selectors: list[str],
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", variable)
    shown = visible_here(three_devices, tmp_path, tmp_path)
    assert [(each.name, each.selector) for each in shown] == [
        (f"cuda:{index}", selector) for index, selector in enumerate(selectors)
    ]
    assert all(each.memory_bytes == (None if each.selector == "2" else 81920 << 20) for each in shown)


@pytest.mark.parametrize(
    ("variable", "said"),
    [
        ("MIG-0", 'CUDA_VISIBLE_DEVICES names "MIG-0" by UUID, which is a part of a device; give numbers'),
        ("0,GPU-77", 'names "GPU-77" by UUID, which nvidia-smi tells of no device here; give numbers'),
        ("GPU-5f1c", 'names "GPU-5f1c" by UUID, which fits several devices; give numbers'),
    ],
)
def test_a_uuid_that_fits_no_device_is_refused_where_devices_are_wanted_and_only_there(
    three_devices: tuple[Accelerator, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str, said: str
) -> None:
    """Another's device would be taken otherwise; but a job on the CPU is none of its business."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", variable)
    with pytest.raises(PlacementError, match=re.escape(said)):
        visible_here(three_devices, tmp_path, tmp_path)
    assert visible_here((), tmp_path / "none", tmp_path) == (), "where there is no device, nothing is confused"
    monkeypatch.setattr(
        "outrider.runner.planning.topology.visible_here", lambda found: visible_here(three_devices, tmp_path, tmp_path)
    )
    here = read_topology()
    assert here.accelerators == ()
    assert plan([here], ModelSizes(1000), PlacementRequest(per="machine")).replicas == 1
    for device in ("cuda", "cuda:0"):
        with pytest.raises(PlacementError, match=re.escape(said)):
            plan([here], ModelSizes(1000), PlacementRequest(devices=(device,)))
    assert any(said in warning for warning in as_json(here)["warnings"])
    other = replace(here, host="other", accelerators=three_devices[:1], accelerators_refused="")
    assert plan([here, other], ModelSizes(1000), PlacementRequest(devices=("cuda",))).actors[0].host == "other"


def test_memory_stays_where_an_outer_numactl_has_bound_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "self").mkdir()
    (tmp_path / "self" / "status").write_text("Mems_allowed_list:\t0-3\n")
    for policy, allowed in (
        (("bind", (1, 2)), {1, 2}),
        (("default", ()), {0, 1, 2, 3}),
        (("preferred", (1,)), {0, 1, 2, 3}),
    ):
        monkeypatch.setattr("outrider.runner.planning.allowance.memory_policy", lambda policy=policy: policy)
        assert read_allowance(tmp_path, tmp_path / "none").memory_nodes == allowed
