"""Plans for machines of every shape: invariants at random, examples, and refusals."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sysfs_trees import GIB, build, laptop

from examples import examples
from outrider.kernels.program import Scales
from outrider.runner.options.values import Layout
from outrider.runner.planning.accelerators import Accelerator
from outrider.runner.planning.placement import Plan, PlannedActor, plan
from outrider.runner.planning.placement_request import PER, ModelSizes, PlacementRequest
from outrider.runner.planning.topology import Core, Node, Topology, read_topology
from outrider.workers.errors import PlacementError
from outrider.workers.models.model_memory import PairsMemory

GB = 10**9


def machine(
    nodes: list[list[tuple[int, ...]]],
    memory: list[int | None] | None = None,
    sockets: list[int] | None = None,
    host: str = "host",
    accelerators: tuple[Accelerator, ...] = (),
    allowed: set[int] | None = None,
    limit: int | None = None,
    quota: float | None = None,
) -> Topology:
    def core(cpus: tuple[int, ...], node: int) -> Core:
        return Core(cpus, tuple(cpu for cpu in cpus if allowed is None or cpu in allowed), node, socket[node])

    socket = sockets or [0] * len(nodes)
    sizes = memory or [64 * GB] * len(nodes)
    return Topology(
        host,
        tuple(
            Node(number, socket[number], tuple(core(each, number) for each in group), sizes[number], True, {})
            for number, group in enumerate(nodes)
        ),
        accelerators,
        limit,
        quota,
    )


def flat(count: int, first: int = 0) -> list[tuple[int, ...]]:
    return [(cpu,) for cpu in range(first, first + count)]


@st.composite
def machines(draw: st.DrawFn) -> Topology:
    nodes: list[list[tuple[int, ...]]] = []
    first = 0
    for _ in range(draw(st.integers(1, 5))):
        cores = []
        for _ in range(draw(st.integers(0, 12))):
            width = draw(st.sampled_from([1, 1, 2, 4]))
            cores.append(tuple(range(first, first + width)))
            first += width
        nodes.append(cores)
    memory = draw(st.lists(st.sampled_from([0, 2 * GB, 8 * GB, 64 * GB, None]), min_size=len(nodes), max_size=len(nodes)))
    sockets = [number // 2 for number in range(len(nodes))]
    allowed = draw(st.none() | st.sets(st.integers(0, max(first, 1))))
    limit = draw(st.none() | st.integers(GB, 100 * GB))
    model_infos = tuple(Accelerator(f"cuda:{index}", "", node, str(index)) for index, node in enumerate([0, None]))
    quota = draw(st.none() | st.floats(0.5, 16))
    return machine(nodes, memory, sockets, accelerators=model_infos, allowed=allowed, limit=limit, quota=quota)


requests = st.builds(
    PlacementRequest,
    per=st.sampled_from(PER),
    replicas=st.none() | st.integers(1, 6),
    draft_cores=st.none() | st.integers(1, 4),
    layout=st.sampled_from(get_args(Layout)),
    devices=st.sampled_from([(), ("cpu",), ("cuda:0", "cpu"), ("cuda",), ("cuda:1", "cuda:0", "cpu"), ("cpu", "cuda:0")]),
)
sizes = st.builds(
    ModelSizes,
    target=st.integers(0, 40 * GB),
    draft=st.none() | st.integers(0, 4 * GB),
    target_kv=st.integers(0, 4 * GB),
    draft_kv=st.integers(0, GB),
)


@settings(deadline=None, derandomize=True, max_examples=examples(200))
@given(st.lists(machines(), min_size=1, max_size=2), sizes, requests)
def test_no_plan_does_what_none_may(drawn: list[Topology], size: ModelSizes, asked: PlacementRequest) -> None:
    hosts = [Topology(f"host{i}", *_rest(host)) for i, host in enumerate(drawn)]
    try:
        made = plan(hosts, size, asked)
    except PlacementError as refusal:
        assert "\n" not in str(refusal)
        return
    assert made == plan(hosts, size, asked)
    check(hosts, made)
    if asked.replicas is not None:
        assert made.replicas == asked.replicas


def _rest(host: Topology) -> tuple[Any, ...]:
    return host.nodes, host.accelerators, host.memory_limit_bytes, host.cpu_quota, host.warnings


def check(hosts: list[Topology], made: Plan) -> None:
    """Everything that holds for any plan."""
    assert made.actors
    by_host = {host.host: host for host in hosts}
    owner: dict[tuple[str, int], int] = {}
    claimed: Counter[tuple[str, str]] = Counter()
    used: Counter[tuple[str, int]] = Counter()
    leases: Counter[tuple[str, str]] = Counter()
    for actor in made.actors:
        host = by_host[actor.host]
        firsts = {core.allowed[0]: core for core in host.usable_cores}
        assert actor.cores, "an actor without a core"
        assert set(actor.cores) <= firsts.keys(), "outside what is allowed, or a second sibling"
        assert len(set(actor.cores)) == len(actor.cores) == actor.threads
        for cpu in actor.cores:
            assert owner.setdefault((actor.host, cpu), actor.replica) == actor.replica, "two replicas on a core"
        assert actor.memory_nodes
        assert actor.pin.cores == actor.cores
        assert set(actor.memory) <= set(actor.memory_nodes) <= {node.id for node in host.nodes}
        used.update({(actor.host, node): size for node, size in actor.memory.items()})
        claimed.update({(actor.host, name): count for name, count in actor.resources.items()})
        leases.update((actor.host, lease) for lease in actor.leases)
    assert all(count == 1 for count in leases.values()), "a lease that two actors need"
    for host in hosts:
        for node in host.nodes:
            assert node.memory_bytes is None or used[host.host, node.id] <= node.memory_bytes
            assert claimed[host.host, f"numa{node.id}"] <= len(node.usable_cores)
        total = sum(size for (name, _), size in used.items() if name == host.host)
        assert host.memory_limit_bytes is None or total <= host.memory_limit_bytes
        assert claimed[host.host, "GPU"] <= len(host.accelerators)
    for replica in {actor.replica for actor in made.actors}:
        target, draft = made.actor(replica, "target"), made.actor(replica, "draft")
        assert target is not None
        if draft is not None:
            assert draft.host == target.host
            shared, overlap = draft.cores == target.cores, set(draft.cores) & set(target.cores)
            assert shared or not overlap


def roles(made: Plan, replica: int = 0) -> tuple[PlannedActor, PlannedActor]:
    target, draft = made.actor(replica, "target"), made.actor(replica, "draft")
    assert target is not None
    assert draft is not None
    return target, draft


def test_two_replicas_on_a_machine_of_two_cores() -> None:
    made = plan([machine([flat(2)])], ModelSizes(GB, GB // 10), PlacementRequest(per="machine", replicas=2))
    assert [(actor.role, actor.replica, actor.cores) for actor in made.actors] == [
        ("target", 0, (0,)),
        ("draft", 0, (0,)),
        ("target", 1, (1,)),
        ("draft", 1, (1,)),
    ]


def test_one_allowed_core_still_works() -> None:
    made = plan([machine([flat(2)], allowed={1})], ModelSizes(GB, GB // 10), PlacementRequest())
    assert {actor.cores for actor in made.actors} == {(1,)}


def test_sapphire_rapids_by_node_socket_and_machine(xeon: Path) -> None:
    host = read_topology(xeon)
    small = ModelSizes(4 * GB, GB // 10)
    made = plan([host], small, PlacementRequest(per="node"))
    check([host], made)
    assert made.replicas == 8
    target, draft = roles(made, 1)
    assert draft.cores == (14,)
    assert target.cores == tuple(range(15, 28))
    assert target.memory_nodes == draft.memory_nodes == (1,)
    assert target.resources == {"numa1": 13.0}
    # One core of the machine is left for Ray and the driver.
    assert sum(len(actor.cores) for actor in made.actors) == 111

    made = plan([host], small, PlacementRequest(per="socket"))
    assert made.replicas == 2
    assert roles(made, 1)[0].memory_nodes == (4, 5, 6, 7)
    assert plan([host], small, PlacementRequest(per="machine")).replicas == 1


def test_what_does_not_fit_a_node_is_refused_with_the_sum_or_spread_where_asked(xeon: Path) -> None:
    host = read_topology(xeon)
    big = ModelSizes(140 * GB, GB, 10 * GB)
    with pytest.raises(PlacementError) as refusal:
        plan([host], big, PlacementRequest(per="node"))
    assert "target 140.00 GB + draft 1.00 GB + KV cache 10.00 GB = 151.00 GB" in str(refusal.value)
    assert "68.72 GB" in str(refusal.value)
    assert "--per socket" in str(refusal.value)
    made = plan([host], big, PlacementRequest(per="socket"))
    check([host], made)
    assert roles(made)[0].memory_nodes == (0, 1, 2, 3)
    # Unasked, the smallest unit that holds it is taken, and said.
    made = plan([host], big, PlacementRequest())
    assert made.replicas == 2
    assert made.notes[0].startswith("spread over a socket: target 140.00 GB")
    # Flat HBM is memory too, once the socket's own is full.
    made = plan([host], ModelSizes(300 * GB), PlacementRequest(per="socket"))
    target = made.actor(0, "target")
    assert target is not None
    assert target.memory_nodes == (0, 1, 2, 3, 8, 9)
    with pytest.raises(PlacementError, match=r"does not fit the machine, which has 687\.19 GB"):
        plan([host], ModelSizes(1000 * GB), PlacementRequest())


def test_a_node_without_memory_takes_the_nearest(tmp_path: Path) -> None:
    distances = {0: [10, 21, 13, 28], 1: [21, 10, 28, 13], 2: [13, 28, 10, 28], 3: [28, 13, 28, 10]}
    memory = {0: 0, 1: 0, 2: 32 * GIB, 3: 32 * GIB}
    tree = build(tmp_path, {0: flat(4), 1: flat(4, 4), 2: [], 3: []}, {0: 0, 1: 1, 2: 0, 3: 1}, memory, distances)
    made = plan([read_topology(tree)], ModelSizes(4 * GB), PlacementRequest(per="node"))
    assert [actor.memory_nodes for actor in made.actors] == [(2,), (3,)]


def test_memory_of_another_kind_is_left_alone(tmp_path: Path) -> None:
    """On NVLink POWER the memory of the GPUs shows as nodes, at distance 80."""
    tree = build(tmp_path, {0: flat(4), 255: []}, None, {0: 8 * GIB, 255: 16 * GIB}, {0: [10, 80], 255: [80, 10]})
    with pytest.raises(PlacementError, match="does not fit"):
        plan([read_topology(tree)], ModelSizes(12 * GB), PlacementRequest(per="machine"))


def test_siblings_stay_idle(tmp_path: Path) -> None:
    made = plan([read_topology(laptop(tmp_path))], ModelSizes(GB, GB // 10), PlacementRequest())
    target, draft = roles(made)
    # Core (0, 1) is Ray's.
    assert draft.cores == (2,)
    assert target.cores == (4, 6, *range(8, 16))


@pytest.mark.parametrize(
    ("layout", "draft_cores", "count", "expected"),
    [
        ("auto", None, 1, (1, 1)),
        ("auto", None, 2, (1, 1)),
        ("auto", None, 4, (3, 1)),
        ("split", None, 2, (1, 1)),
        ("shared", None, 6, (6, 6)),
        ("auto", 2, 6, (4, 2)),
        ("auto", None, 33, (28, 4)),
    ],
)
def test_layouts(layout: Layout, draft_cores: int | None, count: int, expected: tuple[int, int]) -> None:
    made = plan(
        [machine([flat(count)])], ModelSizes(GB, GB // 10), PlacementRequest(layout=layout, draft_cores=draft_cores)
    )
    target, draft = roles(made)
    assert (len(target.cores), len(draft.cores)) == expected


def test_the_draft_sits_on_a_node_that_the_target_has_too() -> None:
    made = plan([machine([flat(1), flat(6, 1)])], ModelSizes(GB, GB // 10), PlacementRequest(per="machine"))
    target, draft = roles(made)
    assert draft.cores == (1,)
    assert target.cores == (0, 2, 3, 4, 5, 6)


def test_without_a_draft_the_target_has_all_cores() -> None:
    made = plan([machine([flat(4)])], ModelSizes(GB), PlacementRequest())
    assert [(actor.role, actor.cores) for actor in made.actors] == [("target", (0, 1, 2, 3))]


def test_replicas_of_a_machine_keep_to_nodes() -> None:
    host = machine([flat(4), flat(4, 4)])
    made = plan([host], ModelSizes(GB), PlacementRequest(per="machine", replicas=2))
    assert [(actor.cores, actor.memory_nodes) for actor in made.actors] == [((1, 2, 3), (0,)), ((4, 5, 6, 7), (1,))]


def test_a_quota_bounds_the_cores() -> None:
    made = plan([machine([flat(64)], quota=3.5)], ModelSizes(GB), PlacementRequest())
    assert sum(actor.threads for actor in made.actors) == 3


def test_the_core_that_is_left_to_ray_is_told_and_a_plan_anew_leaves_no_other() -> None:
    host = machine([flat(4), flat(5, 4)])
    made = plan([host], ModelSizes(GB), PlacementRequest())
    assert [core.identity for core in made.spared] == [4], "of the largest node"
    again = plan([replace(host.without({"4"}), planned_cores=0)], ModelSizes(GB), PlacementRequest())
    assert again.spared == ()
    assert [actor.cores for actor in again.actors] == [actor.cores for actor in made.actors]
    assert plan([host.without({"4", "5"})], ModelSizes(GB), PlacementRequest()).spared == ()


@pytest.mark.parametrize(("quota", "threads"), [(6.5, 4), (3.0, 1)])
def test_cores_that_are_planned_on_already_count_towards_the_quota(quota: float, threads: int) -> None:
    host = replace(machine([flat(64)], quota=quota), planned_cores=2)
    made = plan([host], ModelSizes(GB), PlacementRequest())
    assert sum(actor.threads for actor in made.actors) == threads


@pytest.mark.parametrize("quota", [0.5, 1.5, 2.0])
@pytest.mark.parametrize("replicas", [None, 1])
def test_a_quota_that_is_used_up_has_room_for_none(quota: float, replicas: int | None) -> None:
    host = replace(machine([flat(64)], quota=quota), planned_cores=2)
    with pytest.raises(PlacementError, match="no core is free"):
        plan([host], ModelSizes(GB), PlacementRequest(replicas=replicas))


def test_a_containers_memory_limit_counts() -> None:
    with pytest.raises(PlacementError, match=r"does not fit the memory limit of this container or cgroup, 2\.00 GB"):
        plan([machine([flat(2)], limit=2 * GB)], ModelSizes(3 * GB), PlacementRequest())
    with pytest.raises(PlacementError, match=r"does not fit the memory limit of this container or cgroup, 0\.20 GB"):
        plan([machine([flat(2)], limit=GB // 5)], ModelSizes(3 * GB), PlacementRequest())
    with pytest.raises(PlacementError, match=r"does not fit the machine, which has 2\.00 GB"):
        plan([machine([flat(2)], [2 * GB], limit=4 * GB)], ModelSizes(3 * GB), PlacementRequest())


def test_replicas_go_round_the_hosts() -> None:
    hosts = [machine([flat(2)], host=name) for name in ("a", "b")]
    made = plan(hosts, ModelSizes(GB), PlacementRequest())
    assert [actor.host for actor in made.actors] == ["a", "b"]


def test_a_cpu_draft_takes_the_accelerators_own_node() -> None:
    model_info = Accelerator("cuda:0", "0000:3a:00.0", 1, "0")
    host = machine([flat(4), flat(4, 4)], accelerators=(model_info,))
    made = plan([host], ModelSizes(100 * GB, GB), PlacementRequest(devices=("cuda:0", "cpu")))
    check([host], made)
    target, draft = roles(made)
    assert (target.device, draft.device) == ("cuda:0", "cpu")
    assert set(target.cores) | set(draft.cores) == {4, 5, 6, 7}
    assert len(draft.cores) == 3
    assert draft.memory_nodes == (1,)
    assert target.resources == {"numa1": 1.0, "GPU": 1.0}
    assert target.leases == (str(target.cores[0]), "cuda-0")


def test_every_accelerator_carries_a_replica() -> None:
    model_infos = tuple(Accelerator(f"cuda:{index}", "", index // 2, str(index)) for index in range(4))
    host = machine([flat(4), flat(4, 4)], accelerators=model_infos)
    made = plan([host], ModelSizes(100 * GB, GB), PlacementRequest(devices=("cuda",)))
    check([host], made)
    assert [actor.device for actor in made.actors] == [f"cuda:{index // 2}" for index in range(8)]
    assert all(actor.resources["GPU"] == 0.5 for actor in made.actors)


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        (PlacementRequest(replicas=3), "3 replicas need 3 cores, there are 2"),
        (PlacementRequest(draft_cores=2), "--draft-cores 2 leaves the target none of the 2 cores"),
        (PlacementRequest(draft_cores=1, layout="shared"), "leave out one"),
        (PlacementRequest(replicas=2, layout="split"), "one core, which cannot be split"),
        (PlacementRequest(devices=("cuda:3",)), 'device "cuda:3" is not there; this machine has cpu'),
    ],
)
def test_impossible_wishes_are_refused_in_a_sentence(asked: PlacementRequest, sentence: str) -> None:
    with pytest.raises(PlacementError, match=sentence):
        plan([machine([flat(2)])], ModelSizes(GB, GB // 10), asked)


def test_eight_cores_leave_one_and_the_refusal_says_so() -> None:
    with pytest.raises(PlacementError, match=r"there are 7 \(1 of 8 left for Ray"):
        plan([machine([flat(8)])], ModelSizes(GB), PlacementRequest(replicas=8))


@pytest.mark.parametrize(
    ("sizes", "sum_", "advice"),
    [
        (
            ModelSizes(GB, target_kv=2 * GB, answers=GB),
            "target 1.00 GB + KV cache 2.00 GB + answers kept 1.00 GB = 4.00 GB",
            "; a smaller precision or a smaller --batch or --cache-precision int8 or a smaller --answer-tokens needs less",
        ),
        (
            ModelSizes(GB // 10, target_kv=3 * GB, int8_cache=False),
            "target 0.10 GB + KV cache 3.00 GB = 3.10 GB",
            "; a smaller --batch needs less",
        ),
    ],
)
def test_a_refusal_names_what_takes_a_good_part_and_what_needs_less(sizes: ModelSizes, sum_: str, advice: str) -> None:
    with pytest.raises(PlacementError) as caught:
        plan([machine([flat(2)], limit=2 * GB)], sizes, PlacementRequest())
    assert str(caught.value).startswith(sum_)
    assert str(caught.value).endswith(advice)


def test_replicas_beyond_the_memory_are_refused() -> None:
    with pytest.raises(PlacementError, match="of which 2 fit this machine, not 3"):
        plan([machine([flat(4)], [10 * GB])], ModelSizes(4 * GB), PlacementRequest(replicas=3))


def test_cores_held_by_others_are_not_planned() -> None:
    host = machine([flat(2)])
    assert plan([host.without({"0"})], ModelSizes(GB), PlacementRequest()).actors[0].cores == (1,)
    with pytest.raises(PlacementError, match="held by other runs"):
        plan([host.without({"0", "1"})], ModelSizes(GB), PlacementRequest())


@pytest.mark.slow
def test_hundreds_of_nodes_are_planned_at_once() -> None:
    nodes: list[list[tuple[int, ...]]] = [[(node * 8 + core,) for core in range(8)] for node in range(256)]
    host = machine(nodes, sockets=[node // 4 for node in range(256)])
    for per in PER[1:]:
        made = plan([host], ModelSizes(GB, GB // 10), PlacementRequest(per=per))
        check([host], made)
        assert made.replicas == {"node": 256, "socket": 64, "machine": 1}[per]


def test_devices_held_by_others_are_not_planned() -> None:
    model_infos = tuple(Accelerator(f"cuda:{index}", "", 0, str(index + 2)) for index in range(2))
    host = machine([flat(4)], accelerators=model_infos).without({"cuda-2"})
    assert plan([host], ModelSizes(GB), PlacementRequest(devices=("cuda",))).actors[0].device == "cuda:1"


def test_a_plan_made_anew_takes_those_of_the_named_devices_that_are_left() -> None:
    cards = tuple(Accelerator(f"cuda:{index}", "", 0, str(index)) for index in range(3))
    host = machine([flat(4)], accelerators=cards)
    request = PlacementRequest(devices=("cuda:0", "cuda:2", "cpu"), replicas=1)
    taken = host.without({"cuda-0"})
    with pytest.raises(PlacementError, match='device "cuda:0" is not there'):
        plan([taken], ModelSizes(GB), request)
    anew = replace(request, devices_left=True)
    assert [actor.device for actor in plan([taken], ModelSizes(GB), anew).actors] == ["cuda:2"]
    with pytest.raises(PlacementError, match="none of --devices cuda:0,cuda:2,cpu is free"):
        plan([host.without({"cuda-0", "cuda-2"})], ModelSizes(GB), anew)


def test_memory_that_is_spoken_for_is_not_planned_and_moves_no_replica_to_another_nodes() -> None:
    host = machine([flat(2), flat(2, 2)], [10 * GB, 10 * GB], limit=19 * GB).less({0: 12 * GB, 1: 4 * GB})
    assert [node.memory_bytes for node in host.nodes] == [1, 6 * GB]
    assert host.memory_limit_bytes == 3 * GB
    [actor] = plan([host], ModelSizes(2 * GB), PlacementRequest(per="node")).actors
    assert (actor.cores, actor.memory_nodes) == ((2, 3), (1,))
    unknown = machine([flat(2)], [None]).less({0: GB})
    assert (unknown.nodes[0].memory_bytes, unknown.memory_limit_bytes) == (None, None)


def test_a_lone_core_is_no_seat_for_a_pair_where_others_have_two() -> None:
    uneven = machine([flat(2), flat(1, 2)])
    made = plan([uneven], ModelSizes(GB, GB // 10), PlacementRequest(per="node"))
    assert [actor.cores for actor in made.actors] == [(1,), (0,)]
    assert plan([uneven], ModelSizes(GB), PlacementRequest(per="node")).replicas == 2
    assert plan([uneven], ModelSizes(GB, GB // 10), PlacementRequest(per="node", layout="shared")).replicas == 2
    [target, draft] = plan([machine([flat(1)])], ModelSizes(GB, GB // 10), PlacementRequest(per="node")).actors
    assert target.cores == draft.cores == (0,)


def test_devices_are_the_targets_first_and_the_drafts_behind_it(xeon: Path) -> None:
    model_info = Accelerator("cuda:0", "0000:3a:00.0", 1, "0")
    host = replace(read_topology(xeon), accelerators=(model_info,))
    for devices, wanted in (
        (("cpu", "cuda:0"), ("cpu", "cuda:0")),
        (("cuda:0", "cpu"), ("cuda:0", "cpu")),
        (("cuda:0",), ("cuda:0", "cuda:0")),
        (("cpu",), ("cpu", "cpu")),
    ):
        made = plan([host], ModelSizes(100 * GB, GB), PlacementRequest(devices=devices, replicas=1))
        target, draft = made.actor(0, "target"), made.actor(0, "draft")
        assert target is not None and draft is not None
        assert (target.device, draft.device) == wanted
        on_card = [actor for actor in (target, draft) if actor.device != "cpu"]
        assert sum(actor.resources.get("GPU", 0.0) for actor in (target, draft)) == (1.0 if on_card else 0.0)
        assert [actor.leases.count("cuda-0") for actor in on_card] == [1, 0][: len(on_card)]
    made = plan([host], ModelSizes(100 * GB, GB), PlacementRequest(devices=("cpu", "cuda:0"), replicas=1))
    target, draft = made.actor(0, "target"), made.actor(0, "draft")
    assert target is not None and draft is not None
    assert len(target.cores) > len(draft.cores) == 1, "a card needs a core to feed it, the rest is the target's"
    assert (sum(target.memory.values()), sum(draft.memory.values())) == (100 * GB, 0)


def test_a_devices_memory_is_booked_and_bounds_what_it_is_given() -> None:
    model_info = Accelerator("cuda:0", "0000:3a:00.0", 0, "0", 80 * GB)
    host = machine([flat(4)], accelerators=(model_info,))
    with pytest.raises(PlacementError, match=r"replica 0 needs 801.00 GB on cuda:0, which has 80.00 GB"):
        plan([host], ModelSizes(800 * GB, GB), PlacementRequest(devices=("cuda:0",)))
    made = plan([host], ModelSizes(60 * GB, GB, target_kv=3 * GB), PlacementRequest(devices=("cuda:0",)))
    assert [actor.device_bytes for actor in made.actors] == [63 * GB, GB]
    assert all(not actor.memory for actor in made.actors)


def test_processes_beside_a_device_take_memory_of_their_host() -> None:
    """Of a target's answers are kept there, too; what is on the device is not counted twice."""
    card = Accelerator("cuda:0", "0000:3a:00.0", 0, "0", 80 * GB)
    host = machine([flat(4)], [10 * GB], accelerators=(card,))
    sizes = ModelSizes(60 * GB, GB, target_room=4 * 10**8, draft_room=10**8, answers=GB // 2)
    for devices, taken in ((("cuda:0",), (9 * 10**8, 10**8)), (("cuda:0", "cpu"), (9 * 10**8, GB + 10**8))):
        made = plan([host], sizes, PlacementRequest(devices=devices))
        assert tuple(sum(actor.memory.values()) for actor in made.actors) == taken
    small = machine([flat(4)], [GB], accelerators=(card,))
    with pytest.raises(PlacementError, match=r"replica 0 needs 1.00 GB on the machine, 0.70 GB are left there"):
        plan([small], sizes, PlacementRequest(devices=("cuda:0",)))


def test_products_in_pairs_are_counted_on_hosts_that_make_them() -> None:
    """The same replica fits one of two hosts of the same memory, and the other books it with what it takes there."""
    sizes = ModelSizes(8 * GB, GB, target_pairs=PairsMemory(words=GB), draft_pairs=PairsMemory(words=GB // 2))
    roomy, tight = (machine([flat(4)], [memory], host=host) for host, memory in (("roomy", 12 * GB), ("tight", 10 * GB)))
    made = plan([roomy, tight], sizes, PlacementRequest())
    assert {actor.host for actor in made.actors} == {"roomy", "tight"}
    in_pairs = [replace(host, in_pairs=frozenset({Scales.WORDS})) for host in (roomy, tight)]
    made = plan(in_pairs, sizes, PlacementRequest())
    assert [(actor.host, sum(actor.memory.values())) for actor in made.actors] == [
        ("roomy", 9 * GB),
        ("roomy", 3 * GB // 2),
    ]
    with pytest.raises(PlacementError, match=r"processes 1.50 GB = 10.50 GB a replica does not fit"):
        plan(in_pairs[1:], sizes, PlacementRequest())
