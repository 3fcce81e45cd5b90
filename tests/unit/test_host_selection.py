"""Which hosts take part, and how raylets of one host share its cores."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
from sysfs_trees import build

from outrider.runner.hosts.cluster import warn_of_open_folders
from outrider.runner.hosts.host_report import FoundModel, HostReport, open_ray_folder
from outrider.runner.hosts.host_selection import RayNode, chosen_kind, declared_cores, numeric_kind, offered, refusals
from outrider.runner.planning.placement import plan
from outrider.runner.planning.placement_request import ModelSizes, PlacementRequest
from outrider.runner.planning.topology import Topology, read_topology
from outrider.workers import ray_compat
from outrider.workers.machine.core_leases import Holder

VERSIONS = {"outrider": "1", "python": "3.11", "torch": "2.9", "transformers": "5.0"}


def machine(folder: Path, nodes: int = 1, cores: int = 4) -> Topology:
    numbers = iter(range(nodes * cores))
    return read_topology(build(folder, {node: [(next(numbers),) for _ in range(cores)] for node in range(nodes)}))


def ray_node(
    node: str,
    topology: Topology,
    declared: dict[int, int],
    identity: str = "",
    held: tuple[str, ...] = (),
    isa: str = "avx512",
) -> RayNode:
    models = {"big": FoundModel("/models/big", "d")}
    holders = {name: Holder(name, 7) for name in held}
    return RayNode(node, node, declared, HostReport(node, identity or node, topology, holders, VERSIONS, isa, models))


def cores(topology: Topology) -> list[int]:
    return [core.identity for core in topology.usable_cores]


def test_a_host_offers_what_it_declares(tmp_path: Path) -> None:
    assert declared_cores({"numa0": 3.0, "numa1": 0.0, "numax": 2.0, "CPU": 8.0, "numa12": 1.0}) == {0: 3, 12: 1}
    [free] = offered([ray_node("a", machine(tmp_path, 2), {0: 3, 1: 1})], {}, share=False)
    assert (free.host, cores(free)) == ("a", [0, 1, 2, 4])


def test_two_raylets_of_one_host_are_dealt_its_cores(tmp_path: Path) -> None:
    host = machine(tmp_path, 2)
    pair = [ray_node("a", host, {0: 4, 1: 4}, "same"), ray_node("b", host, {0: 4, 1: 4}, "same")]
    first, second = offered(pair, {}, share=False)
    assert sorted(cores(first) + cores(second)) == list(range(8))
    assert len(cores(first)) == len(cores(second)) == 4
    made = plan([first, second], ModelSizes(1000), PlacementRequest(per="machine"))
    assert {actor.host for actor in made.actors} == {"a", "b"}


def test_a_raylet_that_declares_less_gets_less(tmp_path: Path) -> None:
    host = machine(tmp_path)
    first, second = offered([ray_node("a", host, {0: 1}, "same"), ray_node("b", host, {0: 4}, "same")], {}, share=False)
    assert (len(cores(first)), len(cores(second))) == (1, 3)


def test_what_is_held_or_taken_is_not_offered_again(tmp_path: Path) -> None:
    host = machine(tmp_path)
    pair = [ray_node("a", host, {0: 4}, "same", held=("0",)), ray_node("b", host, {0: 1}, "same")]
    first, second = offered(pair, {"b": {"1"}}, share=False)
    # Core 0 is another run's; b has claimed all that it declares.
    assert (cores(first), cores(second)) == ([2, 3], [])


def test_shared_cores_are_offered_to_each(tmp_path: Path) -> None:
    host = machine(tmp_path)
    pair = [ray_node("a", host, {0: 2}, "same", held=("3",)), ray_node("b", host, {0: 4}, "same")]
    first, second = offered(pair, {"b": {"0", "1"}}, share=True)
    assert (cores(first), cores(second)) == ([0, 1], [0, 1])


def test_heterogeneous_hosts_get_replicas_each_by_its_own_nodes(tmp_path: Path) -> None:
    large, small = machine(tmp_path / "l", 2, 8), machine(tmp_path / "s", 1, 2)
    hosts = offered([ray_node("l", large, {0: 8, 1: 8}), ray_node("s", small, {0: 2})], {}, share=False)
    made = plan(hosts, ModelSizes(1000), PlacementRequest(per="node"))
    assert sorted((actor.host, len(actor.cores)) for actor in made.actors) == [("l", 7), ("l", 8), ("s", 2)]


def test_hosts_that_cannot_do_their_part_are_told_apart(tmp_path: Path) -> None:
    host = machine(tmp_path)
    good, old, empty, other = (ray_node(name, host, {0: 1}) for name in ("good", "old", "empty", "other"))
    old = replace(old, report=replace(old.report, versions={**VERSIONS, "outrider": "0"}))
    empty = replace(empty, report=replace(empty.report, models={"big": FoundModel(problem="it is not there")}))
    other = replace(other, report=replace(other.report, models={"big": FoundModel("/models/big", "e")}))
    assert refusals([good, old, empty, other], {"big": "d"}, "1") == {
        "old": "has outrider 0, the driver has 1",
        "empty": "lacks the weights: it is not there",
        "other": 'has another "big" than the driver, at /models/big',
    }


@pytest.mark.parametrize(
    ("engine", "precision", "kept", "expected"),
    [
        ("native", "bf16", None, ("avx512",)),
        ("native", "bf16", "avx2", ("avx2",)),
        ("native", "bf16", "gone", ("avx512",)),
        ("native", "w4a8", None, ()),
        ("hf", "fp32", None, ("avx512", "torch 2.9", "transformers 5.0")),
    ],
)
def test_a_job_has_one_numeric_path(
    tmp_path: Path, engine: str, precision: str, kept: str | None, expected: tuple[str, ...]
) -> None:
    host = machine(tmp_path)
    there = [ray_node("a", host, {0: 1}, isa="avx2"), ray_node("b", host, {0: 1}), ray_node("c", host, {0: 1})]
    assert chosen_kind(there, engine, precision, kept) == expected
    assert numeric_kind(there[1].report, engine, precision) == expected or kept == "avx2"


def test_each_host_whose_rays_folder_is_open_to_others_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Where other users get to, unlike a folder of pytest's.
    with tempfile.TemporaryDirectory(dir="/var/tmp") as name:
        folder = Path(name) / "ray"
        session = folder / "session_1"
        session.mkdir(parents=True)
        monkeypatch.setattr(ray_compat, "session_folder", lambda: session)
        reports = {}
        for bits in (0o700, 0o777):
            Path(name).chmod(bits)
            folder.chmod(bits)
            reports[bits] = open_ray_folder()
        assert reports == {0o700: "", 0o777: str(folder)}
        topology = machine(tmp_path)
        ray_nodes = [ray_node(host, topology, {0: 4}) for host in ("closed", "open")]
        ray_nodes[1] = replace(ray_nodes[1], report=replace(ray_nodes[1].report, open_folder=reports[0o777]))
        said: list[str] = []
        warn_of_open_folders(ray_nodes, said.append)
        assert len(said) == 1
        assert said[0].startswith(f"note: open: Ray's folder {folder} is open to other users of the host, who can")
        assert f"chmod 700 {folder}" in said[0]
