"""The choice of hosts for a job, and the division of a host's cores among its raylets."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sysfs_trees import GIB, build

from outrider.kernels.library import KernelsUnavailable
from outrider.runner.hosts import cluster, examination, host_report, ray_nodes
from outrider.runner.hosts.cluster import ClusterHosts, warn_of_open_folders
from outrider.runner.hosts.host_report import FoundModel, HostReport, open_ray_folder
from outrider.runner.hosts.host_selection import RayNode, chosen_kind, declared_cores, numeric_kind, offered, refusals
from outrider.runner.planning.accelerators import Accelerator
from outrider.runner.planning.placement import PlannedActor, plan
from outrider.runner.planning.placement_request import ModelSizes, PlacementRequest
from outrider.runner.planning.replica_plan import ReplicaTemplate
from outrider.runner.planning.topology import Core, Node, Topology, ray_resources, read_topology
from outrider.workers import ray_compat
from outrider.workers.errors import JobError, PlacementError
from outrider.workers.machine.core_leases import Holder
from outrider.workers.machine.pinning import Launch
from outrider.workers.messages import ModelSpec, ReplicaSpec

VERSIONS = {"outrider": "1", "build": "a", "python": "3.11", "torch": "2.9", "transformers": "5.0"}
OURS = {"outrider": "1", "build": "a"}


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


def test_two_raylets_of_one_host_have_one_memory() -> None:
    """What one books the other lacks, while a limit of its own is its own."""
    host = Topology("", (Node(0, 0, tuple(Core((cpu,), (cpu,), 0, 0) for cpu in range(4)), 10 * 10**9, True, {}),))
    apart = [replace(host, host=name) for name in "ab"]
    assert plan(apart, ModelSizes(6 * 10**9), PlacementRequest()).replicas == 2
    together = [replace(each, machine="one") for each in apart]
    assert plan(together, ModelSizes(6 * 10**9), PlacementRequest()).replicas == 1
    with pytest.raises(PlacementError, match="of which 1 fits these hosts, not 2"):
        plan(together, ModelSizes(6 * 10**9), PlacementRequest(replicas=2))
    limited = [replace(together[0], memory_limit_bytes=5 * 10**9), together[1]]
    assert [actor.host for actor in plan(limited, ModelSizes(6 * 10**9), PlacementRequest()).actors] == ["b"]


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
    names = ("good", "old", "rebuilt", "older", "empty", "other")
    good, old, rebuilt, older, empty, other = (ray_node(name, host, {0: 1}) for name in names)
    old = replace(old, report=replace(old.report, versions={**VERSIONS, "outrider": "0"}, models={}))
    rebuilt = replace(rebuilt, report=replace(rebuilt.report, versions={**VERSIONS, "build": "b"}, models={}))
    older = replace(older, report=replace(older.report, versions={"outrider": "1"}))
    empty = replace(empty, report=replace(empty.report, models={"big": FoundModel(problem="it is not there")}))
    other = replace(other, report=replace(other.report, models={"big": FoundModel("/models/big", "e")}))
    another = "has another build of outrider 1 than the driver: install the same wheel on all hosts"
    assert refusals([good, old, rebuilt, older, empty, other], {"big": "d"}, OURS) == {
        "old": "has outrider 0, the driver has 1",
        "rebuilt": another,
        "older": another,
        "empty": "lacks the weights: it is not there",
        "other": 'has another "big" than the driver, at /models/big',
    }


def test_the_code_that_runs_is_digested_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two installations of one wheel are alike, also where one of them has been used, or is editable."""
    written = tmp_path / "written"
    for package in (tmp_path / "installed", written):
        package.mkdir()
        for name in ("__init__.py", "runner/options/job.py"):
            (package / name).parent.mkdir(parents=True, exist_ok=True)
            (package / name).write_text(name)
    editable = tmp_path / "editable"
    editable.mkdir()
    (editable / "__init__.py").write_text("__init__.py")
    (editable / "runner").symlink_to(written / "runner")

    def build(package: Path, kernels: str | None = "abc") -> str:
        def sources() -> str:
            if kernels is None:
                raise KernelsUnavailable("not installed")
            return kernels

        monkeypatch.setattr(host_report.outrider, "__file__", str(package / "__init__.py"))
        monkeypatch.setattr("outrider.kernels.library.sources", sources)
        host_report._build.cache_clear()
        return host_report.own_versions()["build"]

    try:
        first = build(tmp_path / "installed")
        (tmp_path / "installed/runner/__pycache__").mkdir()
        (tmp_path / "installed/runner/__pycache__/options.pyc").write_bytes(b"compiled")
        assert build(tmp_path / "installed") == build(written) == build(editable) == first
        assert len({build(written, kernels) for kernels in ("abc", "def", None)}) == 3
        (written / "runner/options/job.py").write_text("one line more")
        assert build(written) != first
    finally:
        monkeypatch.undo()
        host_report._build.cache_clear()


class Cluster:
    """Ray's nodes without a Ray. Whoever is asked answers when the test says so; the clock goes on by what is waited."""

    ANSWER_SECONDS = ray_nodes.ANSWER_SECONDS
    names = staticmethod(ray_nodes.names)
    offering = staticmethod(ray_nodes.offering)

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path, hosts: Sequence[str]) -> None:
        self.machines = {name: machine(folder / name) for name in hosts}
        self.hosts = list(hosts)
        self.now = 0.0
        # By the name of the function and the host: what is answered, and from when on.
        self.answers: dict[tuple[str, str], tuple[float, Any]] = {}
        self.asked: list[tuple[str, str]] = []
        self.said: list[str] = []
        # By host: the cores that other runs hold.
        self.held: dict[str, tuple[int, ...]] = {}
        self.after: Callable[[], None] = lambda: None
        clock = SimpleNamespace(monotonic=lambda: self.now, sleep=self._sleep)
        for module in (cluster, examination):
            monkeypatch.setattr(module, "nodes", self)
            monkeypatch.setattr(module, "time", clock)
        monkeypatch.setattr(cluster, "own_versions", lambda: OURS)

    def hosts_of_a_job(
        self,
        models: dict[str, tuple[str, str]],
        target: int = 1000,
        replicas: int | None = None,
        devices: tuple[str, ...] = (),
    ) -> ClusterHosts:
        head: Any = SimpleNamespace(lost=lambda: None, silent=False, answers=lambda: True)
        template = ReplicaTemplate(ModelSpec(models["big"][0], "native", "w4a8"), None, ReplicaSpec(4, 0))
        request = PlacementRequest(replicas=replicas, devices=devices)
        sizes = ModelSizes(target)
        return ClusterHosts(template, sizes, replicas, lambda cores: request, models, None, self.said.append, head)

    def slow(self, question: str, host: str, until: float, answer: Any = None) -> None:
        self.answers[question, host] = (until, answer)

    def own(self) -> str:
        return "driver"

    def alive(self) -> list[dict[str, Any]]:
        one = {"Alive": True, "NodeManagerAddress": "10.0.0.1"}
        others = [
            {**one, "NodeID": name, "NodeManagerHostname": name, "Resources": ray_resources(self.machines[name])}
            for name in self.hosts
        ]
        return [{**one, "NodeID": "driver", "NodeManagerHostname": "driver", "Resources": {}}, *others]

    def start(self, function: Callable[..., Any], node: str, *given: Any) -> tuple[str, str, int]:
        self.asked.append((function.__name__, node))
        return function.__name__, node, len(self.asked)

    def answered(self, futures: Sequence[tuple[str, str, int]], seconds: float) -> list[tuple[str, str, int]]:
        def ready() -> list[tuple[str, str, int]]:
            return [future for future in futures if self.answers.get(future[:2], (0.0, None))[0] <= self.now]

        if not ready():
            self._sleep(seconds)
        return ready()

    def _sleep(self, seconds: float) -> None:
        self.now += seconds
        self.after()

    def answer(self, future: tuple[str, str, int]) -> Any:
        question, host, _ = future
        _, answer = self.answers.get((question, host), (0.0, None))
        usual: dict[str, Any] = {
            "report_host": HostReport(host, host, self.machines[host], self._holders(host), VERSIONS, "avx512"),
            "find_models": {"big": FoundModel("/models/big", "d")},
        }
        return usual[question] if answer is None else answer

    def _holders(self, host: str) -> dict[str, Holder]:
        return {str(core): Holder(str(core), 7) for core in self.held.get(host, ())}

    def ask(self, function: Callable[..., Any], arguments: dict[str, tuple[Any, ...]]) -> dict[str, Any]:
        if function.__name__ == "probe_pins":
            return {node: [Launch(pin, "affinity", (), "python3") for pin in pins] for node, (pins,) in arguments.items()}
        return {node: self.answer((function.__name__, node, 0)) for node in arguments}


AN_HOUR = 3600.0


@pytest.fixture
def big(tmp_path: Path) -> dict[str, tuple[str, str]]:
    """A model as the driver has it, of 3 GB that take no room."""
    (tmp_path / "big").mkdir()
    with (tmp_path / "big/model.safetensors").open("wb") as file:
        file.truncate(3_000_000_000)
    return {"big": (str(tmp_path / "big"), "d")}


def test_a_host_may_read_its_weights_for_an_hour(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, big: dict[str, tuple[str, str]]
) -> None:
    there = Cluster(monkeypatch, tmp_path, ["quick", "slow"])
    there.slow("find_models", "slow", until=AN_HOUR)
    plans = there.hosts_of_a_job(big).open(0.0)
    assert {plan.target.node for plan in plans} == {"quick", "slow"}
    assert there.now >= AN_HOUR
    assert there.said == [
        "slow (10.0.0.1, slow) reads 3.0 GB of weights to hash them; only once, if its cache can be written"
    ]


def test_all_that_is_wrong_with_hosts_is_listed_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, big: dict[str, tuple[str, str]]
) -> None:
    there = Cluster(monkeypatch, tmp_path, ["dead", "good", "lacking", "other", "silent"])
    report = HostReport("other", "other", there.machines["other"], {}, {**VERSIONS, "build": "b"}, "avx512")
    there.slow("report_host", "dead", 0.0, "its process died")
    there.slow("report_host", "other", 0.0, report)
    there.slow("report_host", "silent", until=AN_HOUR)
    there.slow("find_models", "lacking", 0.0, {"big": FoundModel(problem="it is not there")})
    with pytest.raises(JobError, match="4 of 5 hosts cannot take part in this job: see above") as caught:
        there.hosts_of_a_job(big).open(0.0)
    assert there.now == pytest.approx(there.ANSWER_SECONDS, abs=5.0)
    assert [line.partition(") ")[2] for line in caught.value.lines] == [
        "does not answer: its process died",
        "lacks the weights: it is not there",
        "has another build of outrider 1 than the driver: install the same wheel on all hosts",
        "does not answer: no answer within 120 s",
    ]
    assert ("find_models", "other") not in there.asked, "another build may not know that question"


def test_a_job_counts_the_memory_of_two_raylets_of_one_host_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, big: dict[str, tuple[str, str]]
) -> None:
    there = Cluster(monkeypatch, tmp_path, ["a", "b"])
    for name in there.hosts:
        there.slow("report_host", name, 0.0, HostReport(name, "one", there.machines["a"], {}, VERSIONS, "avx512"))
    assert {plan.target.node for plan in there.hosts_of_a_job(big, target=20 * GIB).open(0.0)} == {"a", "b"}
    assert [plan.target.node for plan in there.hosts_of_a_job(big, target=40 * GIB).open(0.0)] == ["a"]


def test_a_host_that_leaves_while_others_read_is_no_reason_to_refuse_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, big: dict[str, tuple[str, str]]
) -> None:
    there = Cluster(monkeypatch, tmp_path, ["leaves", "dies", "slow"])
    there.slow("find_models", "slow", until=AN_HOUR)
    there.slow("find_models", "dies", until=60.0, answer="its process died")

    def leave() -> None:
        if there.now > 30.0:
            there.hosts = ["slow"]

    there.after = leave
    plans = there.hosts_of_a_job(big).open(0.0)
    assert {plan.target.node for plan in plans} == {"slow"}
    assert sorted(said.partition(" ")[0] for said in there.said if "has left" in said) == ["dies", "leaves"]
    there.slow("find_models", "slow", until=2 * AN_HOUR)
    there.after = there.hosts.clear
    with pytest.raises(JobError, match="all hosts of this cluster that offer cores have left; the job has not begun"):
        there.hosts_of_a_job(big).open(0.0)


def joined(hosts: ClusterHosts) -> list[str]:
    return [str(plan.target.node) for plan in hosts.new_replica_plans(0)]


def test_a_host_that_joins_is_used_when_it_has_read_its_weights_and_others_are_watched_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, big: dict[str, tuple[str, str]]
) -> None:
    there = Cluster(monkeypatch, tmp_path, ["first", "second", "third", "slow"])
    there.hosts = ["first"]
    hosts = there.hosts_of_a_job(big)
    assert [plan.target.node for plan in hosts.open(0.0)] == ["first"]
    there.slow("find_models", "slow", until=AN_HOUR)
    there.hosts += ["slow"]
    for _ in range(10):
        hosts._step()
    assert joined(hosts) == []
    assert there.said == [
        "slow (10.0.0.1, slow) reads 3.0 GB of weights to hash them; only once, if its cache can be written"
    ]
    there.hosts += ["second"]
    hosts._step()
    assert joined(hosts) == ["second"]
    there.hosts.remove("first")
    hosts._step()
    assert there.asked.count(("find_models", "slow")) == 1
    there.now = AN_HOUR
    hosts._step()
    assert joined(hosts) == ["slow"]
    assert any("first" in said and "has left" in said for said in there.said)


def test_a_host_that_joins_and_gives_no_answer_is_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, big: dict[str, tuple[str, str]]
) -> None:
    there = Cluster(monkeypatch, tmp_path, ["first", "slow", "gone"])
    there.hosts = ["first"]
    hosts = there.hosts_of_a_job(big)
    hosts.open(0.0)
    there.slow("report_host", "slow", until=AN_HOUR)
    there.slow("report_host", "gone", until=AN_HOUR)
    there.hosts = ["first", "slow", "gone"]
    hosts._step()
    there.hosts = ["first", "slow"]
    while there.now < AN_HOUR - 10.0:
        hosts._step()
        there.now += 10.0
    assert joined(hosts) == []
    assert there.said == ["note: slow (10.0.0.1, slow) does not answer: no answer within 120 s; it is asked again"]
    assert there.asked.count(("report_host", "slow")) > 10
    assert there.asked.count(("report_host", "gone")) == 1
    there.now = AN_HOUR
    hosts._step()
    assert joined(hosts) == ["slow"]


def test_a_host_that_joins_and_cannot_take_part_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, big: dict[str, tuple[str, str]]
) -> None:
    there = Cluster(monkeypatch, tmp_path, ["first", "lacking"])
    there.hosts = ["first"]
    hosts = there.hosts_of_a_job(big)
    hosts.open(0.0)
    there.slow("find_models", "lacking", 0.0, {"big": FoundModel(problem="it is not there")})
    there.hosts = ["first", "lacking"]
    for _ in range(3):
        hosts._step()
    assert joined(hosts) == []
    assert there.said == ["note: lacking (10.0.0.1, lackin) is not used: it lacks the weights: it is not there"]


def later(there: Cluster, hosts: ClusterHosts, held: tuple[int, ...] = ()) -> list[PlannedActor]:
    """What is placed within a minute, while other runs hold some cores of the host "one"."""
    there.held = {"one": held}
    for _ in range(6):
        there.now += 10.0
        hosts._step()
    return [each.target.actor for each in hosts.new_replica_plans(1)]


@pytest.mark.parametrize("replicas", [None, 2])
def test_a_replica_that_lost_its_cores_gets_others_of_its_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, big: dict[str, tuple[str, str]], replicas: int | None
) -> None:
    there = Cluster(monkeypatch, tmp_path, ["one"])
    there.machines["one"] = machine(tmp_path / "two nodes", nodes=2, cores=8)
    hosts = there.hosts_of_a_job(big, replicas=replicas)
    plans = hosts.open(0.0)
    second = tuple(range(8, 16))
    assert [plan.target.actor.cores for plan in plans] == [tuple(range(1, 8)), second]
    assert later(there, hosts) == []
    hosts.release(plans[1])
    assert later(there, hosts, held=second) == [], "the first node's core 0 is left to Ray"
    assert [actor.cores for actor in later(there, hosts)] == [second]
    assert later(there, hosts) == [], "it has lost its cores once"
    assert there.said == [], "no host has joined"


def test_replicas_of_a_host_are_not_placed_anew_in_memory_of_one_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, big: dict[str, tuple[str, str]]
) -> None:
    there = Cluster(monkeypatch, tmp_path, ["one"])
    memory: dict[int, int | None] = {0: 15 * GIB, 1: 15 * GIB}
    there.machines["one"] = read_topology(build(tmp_path / "one", {0: [(0,), (1,)], 1: [(2,), (3,)]}, memory=memory))
    hosts = there.hosts_of_a_job(big, target=10 * GIB)
    there.held = {"one": (1,)}
    plans = hosts.open(0.0)
    assert [plan.target.actor.cores for plan in plans] == [(0,), (2, 3)]
    hosts.release(plans[1])
    [anew] = later(there, hosts, held=(2, 3))
    assert (anew.cores, anew.memory) == ((1,), {0: 5 * GIB, 1: 5 * GIB})


def test_a_replica_that_lost_its_card_gets_it_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, big: dict[str, tuple[str, str]]
) -> None:
    there = Cluster(monkeypatch, tmp_path, ["one"])
    cards = tuple(Accelerator(f"cuda:{index}", "", 0, str(index)) for index in range(2))
    there.machines["one"] = replace(there.machines["one"], accelerators=cards)
    hosts = there.hosts_of_a_job(big, devices=("cuda:0", "cuda:1"))
    plans = hosts.open(0.0)
    hosts.release(plans[1])
    assert [actor.device for actor in later(there, hosts)] == ["cuda:1"]


def test_a_host_that_is_too_small_is_said_once_and_so_is_what_a_plan_has_to_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, big: dict[str, tuple[str, str]]
) -> None:
    there = Cluster(monkeypatch, tmp_path, ["busy", "joins", "large", "small"])
    for name, memory in {"busy": 64, "joins": 9, "large": 16, "small": 8}.items():
        tree = build(tmp_path / name, {0: [(0,), (1,)], 1: [(2,), (3,)]}, memory=dict.fromkeys((0, 1), memory * GIB))
        there.machines[name] = read_topology(tree)
    there.hosts = ["busy", "large", "small"]
    there.held = {"busy": (0, 1, 2, 3)}
    hosts = there.hosts_of_a_job(big, target=20 * GIB)
    assert [each.target.node for each in hosts.open(0.0)] == ["large"]
    fits, less = "target 21.47 GB a replica does not fit", "a smaller precision needs less"
    assert there.said == [
        f"note: spread over a socket: {fits} node 0, which has 17.18 GB",
        f"note: small (10.0.0.1, small) is not used: {fits} the machine, which has 17.18 GB, "
        f"0.30 GB of it for Ray and the driver; {less}",
    ]
    there.said.clear()
    there.hosts.append("joins")
    for _ in range(6):
        there.now += 10.0
        hosts._step()
    assert joined(hosts) == []
    there.held.clear()
    there.now += 10.0
    hosts._step()
    assert joined(hosts) == ["busy", "busy"]
    assert there.said == [
        f"note: joins (10.0.0.1, joins) is not used: {fits} the machine, which has 19.33 GB, "
        f"0.30 GB of it for Ray and the driver; {less}",
        "busy (10.0.0.1, busy) has joined the job",
    ]


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
