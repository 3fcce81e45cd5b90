"""The driver and its places: hosts that leave and join, cores that others hold, replicas that compute otherwise."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from driver_fakes import PLAN, PLANNED, FakeReplicas, Future, driver, fill, install_fakes
from ray.exceptions import RayActorError, RayTaskError

from outrider.runner.driving import lifecycle
from outrider.runner.driving.schedule import MOST_ATTEMPTS
from outrider.runner.hosts import this_machine
from outrider.runner.hosts.this_machine import LocalHost
from outrider.runner.job.journal import Counts, Journal
from outrider.runner.job.requests import MOST_SAMPLES
from outrider.runner.planning import free_cores
from outrider.runner.planning.accelerators import Accelerator
from outrider.runner.planning.placement_request import ModelSizes, PlacementRequest
from outrider.runner.planning.replica_plan import ReplicaPlan, ReplicaTemplate
from outrider.runner.planning.topology import Core, Node, Topology
from outrider.runner.report.counters import JobCounters
from outrider.runner.report.display import progress_line
from outrider.workers.errors import JobChangedError, JobError, LeaseError
from outrider.workers.machine.core_leases import Holder
from outrider.workers.machine.pinning import Launch
from outrider.workers.messages import ModelSpec, ReplicaSpec


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> FakeReplicas:
    return install_fakes(monkeypatch)


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    return Journal(tmp_path / "job.db")


@pytest.fixture(autouse=True)
def no_pause_between_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(this_machine, "LOOK_AGAIN_SECONDS", 0.0)


class NoEvent:
    """Stands for the drain's event, and counts the waits."""

    def __init__(self) -> None:
        self.waits = 0

    def is_set(self) -> bool:
        return False

    def wait(self, seconds: float) -> bool:
        self.waits += 1
        return False


def test_a_replica_without_cores_waits_for_some(fakes: FakeReplicas, journal: Journal) -> None:
    """It neither spins nor counts as dead."""
    fill(journal, 5)
    fakes.dies_at_start[0] = RayTaskError("load", "Traceback", LeaseError("core 1 is held by process 5"))
    asked: list[int] = []
    told: list[str] = []

    def plan_anew(unplaced: int) -> list[ReplicaPlan]:
        asked.append(unplaced)
        if len(asked) < 4:
            return []
        fakes.dies_at_start.clear()
        return [PLAN]

    def show(counters: JobCounters) -> None:
        told.append(progress_line(counters).partition(":")[0])

    made = driver(journal, hosts=LocalHost(plan_anew, lambda: None, lambda: None), show=show)
    made._drain = event = NoEvent()  # type: ignore[assignment]
    made.run()
    assert event.waits >= 2
    assert asked == [1] * 4
    assert made.counters.target_deaths == 0
    assert journal.counts() == Counts(5, 5, 0)
    assert list(dict.fromkeys(told)) == ["waiting for cores", "loading models", "running"]


def test_free_cores_are_looked_for_once_in_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop may turn a hundred times a second, and each look reads the topology of the machine."""
    monkeypatch.setattr(this_machine, "LOOK_AGAIN_SECONDS", 1.0)
    asked: list[int] = []
    answers = [[], [PLAN], [], [], []]

    def plan_anew(unplaced: int) -> list[ReplicaPlan]:
        asked.append(unplaced)
        return answers.pop(0)

    now = 100.0
    hosts = LocalHost(plan_anew, lambda: None, lambda: None, clock=lambda: now)
    assert hosts.new_replica_plans(2) == hosts.new_replica_plans(2) == []
    assert asked == [2]
    now += 1.0
    assert hosts.new_replica_plans(2) == [PLAN]
    assert hosts.new_replica_plans(1) == [], "found some: there may be more"
    assert hosts.new_replica_plans(1) == [] and hosts.new_replica_plans(0) == []
    assert asked == [2, 2, 1]
    assert hosts.new_replica_plans(3) == [], "further replicas have lost theirs"
    assert asked == [2, 2, 1, 3]


class Moving:
    """A cluster of one host after the other: each leaves when its target dies, and the next one joins."""

    def __init__(self, plans: list[ReplicaPlan]) -> None:
        self.plans = plans
        self.left: list[ReplicaPlan] = []
        self.released: list[ReplicaPlan] = []

    def lost(self) -> str | None:
        return None

    def new_replica_plans(self, unplaced: int) -> list[ReplicaPlan]:
        return [self.plans.pop()] if unplaced and self.plans else []

    def gone(self, plan: ReplicaPlan) -> bool:
        return plan in self.left

    def sign_of_life(self, plan: ReplicaPlan) -> Any:
        return None

    def release(self, plan: ReplicaPlan) -> None:
        self.released.append(plan)

    def host(self, plan: ReplicaPlan) -> str:
        return plan.target.actor.host


def on(host: str) -> ReplicaPlan:
    return replace(PLAN, target=replace(PLAN.target, actor=replace(PLANNED, host=host)))


def test_a_host_that_leaves_takes_no_row_with_it_and_blames_none(fakes: FakeReplicas, journal: Journal) -> None:
    fill(journal, 40)
    hosts = Moving([on(f"host {number}") for number in range(6)])
    made = driver(journal, hosts=hosts)
    made._drain = NoEvent()  # type: ignore[assignment]
    turns = count()

    def leave() -> None:
        # Row 0 is under way each time, more often than a row may see its replica die.
        leaving = next(turns) < 2 * MOST_ATTEMPTS - 1
        fakes.poison = {row.key // MOST_SAMPLES for row in made._replicas[0].rows} if leaving else set()  # type: ignore[attr-defined]
        hosts.left = [made._replicas[0].plan] if fakes.poison else []

    fakes.after_harvest = leave
    made.run()
    assert len(hosts.released) >= MOST_ATTEMPTS
    assert journal.counts() == Counts(40, 40, 0)
    assert made.counters.target_deaths == 0
    assert sum(made.record.rows_by_host.values()) == 40


def test_a_host_that_joins_gets_rows(fakes: FakeReplicas, journal: Journal) -> None:
    fill(journal, 400)
    joining = [on("new")]

    class Growing(Moving):
        def new_replica_plans(self, unplaced: int) -> list[ReplicaPlan]:
            return [joining.pop()] if joining else []

    made = driver(journal, hosts=Growing([]))
    made.run()
    assert set(made.record.rows_by_host) == {"here", "new"}
    assert journal.counts() == Counts(400, 400, 0)


def test_a_job_without_any_place_gives_up_in_the_end(fakes: FakeReplicas, journal: Journal) -> None:
    fill(journal, 5)
    fakes.dies_at_start[0] = RayTaskError("load", "Traceback", LeaseError("core 1 is held by process 5"))
    made = driver(journal, patience=-1.0)
    made._drain = NoEvent()  # type: ignore[assignment]
    with pytest.raises(JobError, match="no replica has had cores for"):
        made.run()


def test_a_replica_that_computes_otherwise_is_left_out(fakes: FakeReplicas, journal: Journal) -> None:
    fill(journal, 50)
    paths = count()

    def agree(path: dict[str, str]) -> None:
        if next(paths) == 1:
            raise JobChangedError("instruction_set: avx512 then, avx2 now")

    made = driver(journal, replicas=2, agree_on_path=agree)
    made.run()
    assert journal.counts() == Counts(50, 50, 0)
    assert any("is not used: instruction_set: avx512 then" in note for note in made.counters.notes)


@pytest.mark.parametrize(("sign", "host_lives"), [("comes", True), ("breaks", False), ("is never seen", True)])
def test_a_death_is_blamed_only_where_the_host_lives_on(
    fakes: FakeReplicas, journal: Journal, monkeypatch: pytest.MonkeyPatch, sign: str, host_lives: bool
) -> None:
    fill(journal, 20)
    if sign == "is never seen":
        monkeypatch.setattr(lifecycle, "SIGN_SECONDS", 0.0)

    class Doubted(Moving):
        def sign_of_life(self, plan: ReplicaPlan) -> Any:
            return Future(lambda: RayActorError() if sign == "breaks" else None, ready=sign != "is never seen")

    made = driver(journal, hosts=Doubted([on("next")]))
    made._drain = NoEvent()  # type: ignore[assignment]
    deaths = count()

    def die_once() -> None:
        fakes.poison = {row.key // MOST_SAMPLES for row in made._replicas[0].rows} if next(deaths) == 1 else set()  # type: ignore[attr-defined]

    fakes.after_harvest = die_once
    made.run()
    assert journal.counts() == Counts(20, 20, 0)
    assert made.counters.target_deaths == host_lives
    assert set(made.record.rows_by_host) == ({"here"} if host_lives else {"here", "next"})


def test_a_target_whose_weights_have_changed_is_left_out_and_alone_ends_the_job(
    fakes: FakeReplicas, journal: Journal
) -> None:
    """Half of the rows by another model must be impossible, so it is not tried again either."""
    fill(journal, 6)
    changed = JobChangedError("the files of /models/tiny have changed since this run looked at them")
    fakes.dies_at_start[1] = RayTaskError("load", "Traceback", changed)
    made = driver(journal, replicas=2)
    made.run()
    assert journal.counts() == Counts(6, 6, 0)
    assert fakes.starts.count(1) == 1
    assert any(
        "replica 1 on here is not used: the files of /models/tiny have changed" in note for note in made.counters.notes
    )


def test_a_target_that_comes_up_again_with_other_weights_ends_the_job(fakes: FakeReplicas, journal: Journal) -> None:
    fill(journal, 6)

    def die_once() -> None:
        """After the first rows, and what starts in its place finds other files."""
        if journal.counts().done and not fakes.poison:
            fakes.poison = set(range(6))
            fakes.dies_at_start[0] = RayTaskError("load", "Traceback", JobChangedError("the files have changed"))

    fakes.after_harvest = die_once
    with pytest.raises(JobChangedError, match="the files have changed"):
        driver(journal, batch=1).run()
    assert 0 < journal.counts().done < 6
    assert fakes.starts == [0, 0]


CORES = 16
TWO_NODES = Topology(
    "here",
    tuple(
        Node(
            node,
            node,
            tuple(Core((core,), (core,), node, node) for core in range(node * CORES, (node + 1) * CORES)),
            128 << 30,
            True,
            {},
        )
        for node in range(2)
    ),
)
TEMPLATE = ReplicaTemplate(ModelSpec("/models/tiny", "native", "bf16"), None, ReplicaSpec(batch=4, draft_tokens=0))


def one_node(cores: int, **options: Any) -> Topology:
    return Topology("here", (replace(TWO_NODES.nodes[0], cores=TWO_NODES.cores[:cores]),), **options)


def hold(monkeypatch: pytest.MonkeyPatch, cores: Iterable[int]) -> None:
    """Other runs hold these, and no others."""
    held = {str(core): Holder(str(core), 4711) for core in cores}
    monkeypatch.setattr(free_cores, "holders", lambda shared: held)


@contextmanager
def replicas_here(
    monkeypatch: pytest.MonkeyPatch,
    machine: Topology,
    replicas: int | None,
    held: Iterable[int] = (),
    devices: tuple[str, ...] = (),
    **options: Any,
) -> Iterator[tuple[LocalHost, list[ReplicaPlan]]]:
    """A run on a machine of which other runs hold some cores."""

    actors = list[int]()

    @contextmanager
    def no_ray(cores: int, resources: object, metrics_port: object, patience: float, count: int) -> Iterator[Any]:
        actors.append(count)
        yield lambda: None

    monkeypatch.setattr(this_machine, "local_ray", no_ray)
    monkeypatch.setattr(this_machine, "read_topology", lambda: machine)
    monkeypatch.setattr(this_machine, "probed_here", lambda: lambda host, pin: Launch(pin, "affinity", (), "python3"))
    hold(monkeypatch, held)
    template = replace(TEMPLATE, **options)
    request = PlacementRequest(replicas=replicas, devices=devices)
    asked = (ModelSizes(10 << 30), lambda cores: request, 0.0, lambda said: None, None, 300.0)
    with this_machine.local_host(template, *asked) as found:
        assert actors == [len(found[1]) * (1 if template.draft is None else 2)]
        yield found


@contextmanager
def two_replicas_here(monkeypatch: pytest.MonkeyPatch, **options: Any) -> Iterator[tuple[LocalHost, list[ReplicaPlan]]]:
    """One on each node of a machine of which nobody holds anything."""
    with replicas_here(monkeypatch, TWO_NODES, None, **options) as (hosts, plans):
        assert [plan.target.actor.cores[0] // CORES for plan in plans] == [0, 1]
        yield hosts, plans


def cores_of(plan: ReplicaPlan) -> set[int]:
    return set(plan.target.actor.cores)


def cores_of_all(plans: list[ReplicaPlan]) -> list[tuple[int, ...]]:
    return [plan.target.actor.cores for plan in plans]


def test_replicas_that_wait_for_cores_are_given_different_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first has not started on its own when the second asks, so no lease tells of them yet."""
    with two_replicas_here(monkeypatch) as (hosts, plans):
        for plan in plans:
            hosts.release(plan)
        hold(monkeypatch, range(2 * CORES))
        assert hosts.new_replica_plans(2) == []
        hold(monkeypatch, range(CORES, 2 * CORES))
        [first] = hosts.new_replica_plans(2)
        assert cores_of(first) == cores_of(plans[0]), "one has the whole node, as nobody asked for two on it"
        hold(monkeypatch, ())
        [second] = hosts.new_replica_plans(1)
        assert cores_of(second) == cores_of(plans[1])
        assert hosts.new_replica_plans(0) == []
        hosts.release(first)
        [again] = hosts.new_replica_plans(1)
        assert cores_of(again) == cores_of(first)


def test_replicas_that_wait_for_cores_of_one_node_share_them_out(monkeypatch: pytest.MonkeyPatch) -> None:
    with replicas_here(monkeypatch, one_node(CORES), replicas=2) as (hosts, plans):
        planned = cores_of_all(plans)
        assert planned == [tuple(range(1, 8)), tuple(range(8, 16))]
        for plan in list(plans):
            hosts.release(plan)
        hold(monkeypatch, range(CORES))
        assert hosts.new_replica_plans(2) == []
        hold(monkeypatch, ())
        assert cores_of_all(hosts.new_replica_plans(2)) == planned
        assert hosts.new_replica_plans(1) == [], "all of them are planned on"


def test_as_many_replicas_as_there_are_cores_for_are_placed_and_the_others_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    with replicas_here(monkeypatch, one_node(4), replicas=3) as (hosts, plans):
        for plan in list(plans):
            hosts.release(plan)
        hold(monkeypatch, (0, 1))
        assert cores_of_all(hosts.new_replica_plans(3)) == [(2,), (3,)]
        assert hosts.new_replica_plans(1) == []
        hold(monkeypatch, ())
        assert cores_of_all(hosts.new_replica_plans(1)) == [(0, 1)]


def test_a_replica_gets_other_cores_within_the_quota(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not only the first of the machine, which the quota alone would take and another run holds."""
    machine = one_node(CORES, cpu_quota=4.5)
    with replicas_here(monkeypatch, machine, replicas=2, held=range(5)) as (hosts, plans):
        assert cores_of_all(plans) == [(6, 7), (8, 9)]
        # One that works on fewer rows at once by now is the same.
        hosts.release(replace(plans[1], replica_spec=replace(plans[1].replica_spec, batch=1)))
        hold(monkeypatch, [*range(5), 8, 9])
        assert cores_of_all(hosts.new_replica_plans(1)) == [(10, 11)], "neither Ray's core, nor more than the quota"
        assert hosts.new_replica_plans(1) == [], "the quota is used up"


def test_a_quota_that_is_used_up_gives_nothing_where_nobody_named_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    with replicas_here(monkeypatch, replace(TWO_NODES, cpu_quota=1.5), None) as (hosts, plans):
        assert cores_of_all(plans) == [(1,)]
        assert hosts.new_replica_plans(1) == []


def test_a_core_is_left_to_ray_only_where_the_first_plan_left_one(monkeypatch: pytest.MonkeyPatch) -> None:
    with replicas_here(monkeypatch, one_node(10), replicas=2, held=range(6, 10)) as (hosts, plans):
        assert cores_of_all(plans) == [(0, 1, 2), (3, 4, 5)]
        hosts.release(plans[0])
        assert cores_of_all(hosts.new_replica_plans(1)) == [(0, 1, 2)]


def test_a_replica_without_cores_is_not_given_those_of_one_that_is_being_started(monkeypatch: pytest.MonkeyPatch) -> None:
    with two_replicas_here(monkeypatch) as (hosts, plans):
        hosts.release(plans[1])
        [plan] = hosts.new_replica_plans(1)
        assert cores_of(plan) == cores_of(plans[1]), "all: one of the first node is left to Ray"


def test_a_replica_that_lost_its_cores_is_not_given_memory_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cores of a node are free that has room for one alone: what is missing comes from the other node."""
    [roomy, other] = TWO_NODES.nodes
    machine = replace(TWO_NODES, nodes=(replace(roomy, memory_bytes=15 << 30), other))
    with replicas_here(monkeypatch, machine, replicas=2, held=range(8, CORES)) as (hosts, plans):
        assert [plan.target.actor.memory_nodes for plan in plans] == [(0,), (1,)]
        hosts.release(plans[1])
        hold(monkeypatch, range(CORES, 2 * CORES))
        [plan] = hosts.new_replica_plans(1)
        assert (plan.target.actor.cores, plan.target.actor.memory_nodes) == (tuple(range(8, CORES)), (0, 1))
        assert plan.target.actor.memory == {0: 5 << 30, 1: 5 << 30}


def test_a_replica_that_lost_its_card_gets_it_again_beside_others(monkeypatch: pytest.MonkeyPatch) -> None:
    cards = tuple(Accelerator(f"cuda:{index}", "", index, str(index)) for index in range(2))
    machine = replace(TWO_NODES, accelerators=cards)
    with replicas_here(monkeypatch, machine, None, devices=("cuda:0", "cuda:1")) as (hosts, plans):
        assert [plan.target.actor.device for plan in plans] == ["cuda:0", "cuda:1"]
        hosts.release(plans[1])
        monkeypatch.setattr(free_cores, "holders", lambda shared: {"cuda-1": Holder("cuda-1", 4711)})
        assert hosts.new_replica_plans(1) == []
        hold(monkeypatch, ())
        [plan] = hosts.new_replica_plans(1)
        assert plan.target.actor.device == "cuda:1"


def test_replicas_that_share_cores_may_be_given_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    with two_replicas_here(monkeypatch, share_cores=True) as (hosts, plans):
        hosts.release(plans[0])
        hold(monkeypatch, range(CORES))
        [plan] = hosts.new_replica_plans(1)
        assert cores_of(plan) == cores_of(plans[1])
