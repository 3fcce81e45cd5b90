"""Placement: from topology, model sizes and a request to cores, memory nodes, devices and resources of each actor.

Pure and deterministic. A request that cannot be granted is refused in one sentence with the sum of what it needs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from outrider.runner.planning.accelerators import Accelerator
from outrider.runner.planning.placement_request import PER, ModelSizes, PlacementRequest, check, on_accelerator
from outrider.runner.planning.topology import Core, Topology
from outrider.runner.planning.units import (
    HOST_BYTES,
    FreeMemory,
    Unit,
    divide,
    memory_of,
    spared_core,
    units,
    working_cores,
)
from outrider.workers.errors import PlacementError
from outrider.workers.machine.pinning import Pin

# With layout "auto" the draft gets cores of its own from this many cores on.
CORES_TO_SPLIT = 2
# By default one core in this many is the draft's.
TARGET_CORES_A_DRAFT_CORE = 8
# A refusal advises on parts that are at least 1/NOTABLE of the memory needed.
NOTABLE = 8


@dataclass(frozen=True, slots=True)
class PlannedActor:
    """One process. ``cores``: CPU numbers, one per physical core; ``leases``: names of the cores and devices to lease.

    ``memory``: planned bytes by NUMA node; ``resources``: its Ray resources.
    """

    role: str
    replica: int
    host: str
    cores: tuple[int, ...]
    memory_nodes: tuple[int, ...]
    threads: int
    device: str
    device_selector: str
    resources: dict[str, float]
    leases: tuple[str, ...]
    memory: dict[int, int]
    device_bytes: int = 0

    @property
    def pin(self) -> Pin:
        return Pin(self.cores, self.memory_nodes, self.threads, self.device, self.device_selector)


@dataclass(frozen=True, slots=True)
class Plan:
    """``spared``: the cores that are left to Ray and the driver, at most one per host."""

    actors: tuple[PlannedActor, ...]
    notes: tuple[str, ...] = ()
    spared: tuple[Core, ...] = ()

    @property
    def replicas(self) -> int:
        return len({actor.replica for actor in self.actors})

    def actor(self, replica: int, role: str) -> PlannedActor | None:
        return next((actor for actor in self.actors if (actor.replica, actor.role) == (replica, role)), None)


@dataclass(frozen=True, slots=True)
class _Assignment:
    """One replica's cores before they are divided between target and draft."""

    unit: Unit
    cores: tuple[Core, ...]
    accelerator: Accelerator | None = None
    notes: list[str] = field(default_factory=list)


def plan(hosts: Sequence[Topology], sizes: ModelSizes, request: PlacementRequest) -> Plan:
    """Cores and memory for every actor, on one host or several."""
    check(sizes, request)
    # Also when a run plans further replicas and holds all cores itself; then the refusal is not shown, and it waits.
    if not any(working_cores(host) for host in hosts):
        raise PlacementError("no core is free: all that this process may use are held by other runs")
    accelerators = _chosen_accelerators(hosts, request)
    kinds = PER[1:] if request.per == "auto" else (request.per,)
    refusals: list[PlacementError] = []
    for per in kinds:
        # The advice after the semicolon is left out, since it is followed here.
        notes = [f"spread over a {per}: {str(refusals[0]).partition(';')[0]}"] if refusals else []
        try:
            if accelerators:
                assignments = _assign_accelerators(accelerators, per)
            else:
                assignments = _assign_cpus(hosts, sizes, per, request)
            return _divide(hosts, assignments, sizes, request, notes)
        except PlacementError as refusal:
            refusals.append(refusal)
    # The refusal of the widest unit, which has the most memory.
    raise refusals[-1]


def _chosen_accelerators(hosts: Sequence[Topology], request: PlacementRequest) -> list[tuple[Topology, Accelerator]]:
    """The accelerators of ``--devices``, in that order; empty if the targets run on the CPU."""
    chosen: list[tuple[Topology, Accelerator]] = []
    named = [device for device in request.devices if device != "cpu"]
    for device in named:
        matching = [(host, each) for host in hosts for each in host.accelerators if device in (each.name, each.kind)]
        if not matching and not request.devices_left:
            if refused := next((host.accelerators_refused for host in hosts if host.accelerators_refused), ""):
                raise PlacementError(refused)
            present = sorted({each.name for host in hosts for each in host.accelerators})
            raise PlacementError(f'device "{device}" is not there; this machine has {", ".join([*present, "cpu"])}')
        chosen += [pair for pair in matching if pair not in chosen]
    if named and not chosen:
        raise PlacementError(f"none of --devices {','.join(request.devices)} is free")
    if chosen and request.replicas is not None:
        if request.replicas > len(chosen):
            raise PlacementError(
                f"{request.replicas} replicas need {request.replicas} accelerators, --devices names {len(chosen)}"
            )
        chosen = chosen[: request.replicas]
    return chosen


def _assign_cpus(hosts: Sequence[Topology], sizes: ModelSizes, per: str, request: PlacementRequest) -> list[_Assignment]:
    """Deal replicas out to units in turn, one per unit and turn, as long as a unit has a free core and the memory."""
    everywhere = [unit for host in hosts for unit in units(host, per)]
    if sizes.draft is not None and request.replicas is None and request.layout == "auto":
        # A pair on a single core would lag behind the others, so such units are used only if there are no others.
        everywhere = [unit for unit in everywhere if len(unit.cores) >= CORES_TO_SPLIT] or everywhere
    free_memory = FreeMemory.of(hosts)
    counts = [0] * len(everywhere)
    wanted = request.replicas
    cores = sum(len(unit.cores) for unit in everywhere)
    if wanted is not None and wanted > cores:
        spared = sum(len(host.usable_cores) for host in hosts) - cores
        kept = f" ({spared} of {cores + spared} left for Ray and the driver, or beyond the CPU quota)" if spared else ""
        raise PlacementError(f"{wanted} replicas need {wanted} cores, there are {cores}{kept}: ask for fewer --replicas")
    while wanted is None or sum(counts) < wanted:
        before = sum(counts)
        for index, unit in enumerate(everywhere):
            room, need = free_memory.room(unit.topology.host, unit.memory + unit.extra), _need(sizes, unit.topology)
            if sum(counts) == wanted or counts[index] == len(unit.cores) or (room is not None and need > room):
                continue
            free_memory.take(unit.topology.host, unit.memory + unit.extra, need)
            counts[index] += 1
        if sum(counts) == before:
            raise PlacementError(_too_big(hosts, everywhere, sizes, before, wanted))
        if wanted is None:
            break
    assignments = []
    for unit, count in zip(everywhere, counts, strict=True):
        assignments += [_Assignment(unit, part) for part in (divide(unit.cores, count) if count else [])]
    return assignments


def _need(sizes: ModelSizes, host: Topology) -> int:
    on_host = sizes.on(host.in_pairs)
    return on_host.of_target + on_host.of_draft


def _too_big(
    hosts: Sequence[Topology], everywhere: Sequence[Unit], sizes: ModelSizes, placed: int, wanted: int | None
) -> str:
    fresh = FreeMemory.of(hosts)
    rooms = [(fresh.room(unit.topology.host, unit.memory + unit.extra) or 0, unit) for unit in everywhere]
    room, roomiest = max(rooms, key=lambda pair: pair[0])
    sizes, need = sizes.on(roomiest.topology.in_pairs), _need(sizes, roomiest.topology)
    parts = [f"target {_bytes(sizes.target)}"]
    if sizes.draft is not None:
        parts.append(f"draft {_bytes(sizes.draft)}")
    if cache := sizes.target_kv + sizes.draft_kv:
        parts.append(f"KV cache {_bytes(cache)}")
    if sizes.answers:
        parts.append(f"answers kept {_bytes(sizes.answers)}")
    if room_to_work := sizes.target_room + sizes.draft_room:
        parts.append(f"processes {_bytes(room_to_work)}")
    total = f"{' + '.join(parts)}{f' = {_bytes(need)}' if len(parts) > 1 else ''} a replica"
    if placed:
        fit = "fits" if placed == 1 else "fit"
        where = "this machine" if len(hosts) == 1 else "these hosts"
        return f"{total}, of which {placed} {fit} {where}, not {wanted}: ask for fewer --replicas"
    smaller = _smaller(sizes, need)
    host = roomiest.topology.host
    kept = ""
    if room == fresh.limits[host]:
        room += HOST_BYTES
        kept = f", {_bytes(HOST_BYTES)} of it for Ray and the driver"
    limit = roomiest.topology.memory_limit_bytes
    if limit is not None and (room == limit or limit < HOST_BYTES):
        return f"{total} does not fit the memory limit of this container or cgroup, {_bytes(limit)}{kept}{smaller}"
    wider = {"node": "; spread it with --per socket or --per machine", "sock": "; spread it with --per machine"}
    hint = wider.get(roomiest.name[:4], smaller)
    return f"{total} does not fit {roomiest.name}, which has {_bytes(room)}{kept}{hint}"


def _smaller(sizes: ModelSizes, need: int) -> str:
    """Advice on what would need less memory, for parts that are a notable share of the need."""
    part = need / NOTABLE
    ways = []
    if sizes.target + (sizes.draft or 0) >= part:
        ways.append("a smaller precision")
    if sizes.target_kv + sizes.draft_kv >= part:
        ways.append("a smaller --batch" + (" or --cache-precision int8" if sizes.int8_cache else ""))
    if sizes.answers >= part:
        ways.append("a smaller --answer-tokens")
    if sizes.draft is not None and sizes.of_draft >= part:
        ways.append("--draft none")
    return f"; {' or '.join(ways)} needs less" if ways else ""


def _assign_accelerators(accelerators: Sequence[tuple[Topology, Accelerator]], per: str) -> list[_Assignment]:
    """Put each accelerator's replica on the unit nearest to it, divided among the accelerators there."""
    by_unit: dict[tuple[str, str], tuple[Unit, list[Accelerator]]] = {}
    for host, accelerator in accelerators:
        candidates = units(host, per)
        if not candidates:
            raise PlacementError(f"{accelerator.name} on {host.host} needs a core to feed it, and none is free there")
        unit = min(candidates, key=lambda each: _distance(host, accelerator, each))
        by_unit.setdefault((host.host, unit.name), (unit, []))[1].append(accelerator)
    assignments = {}
    for unit, group in by_unit.values():
        if len(group) > len(unit.cores):
            raise PlacementError(f"{len(group)} accelerators on {unit.name} need a core each, it has {len(unit.cores)}")
        for accelerator, part in zip(group, divide(unit.cores, len(group)), strict=True):
            assignments[unit.topology.host, accelerator.name] = _Assignment(unit, part, accelerator)
    return [assignments[host.host, accelerator.name] for host, accelerator in accelerators]


def _distance(host: Topology, accelerator: Accelerator, unit: Unit) -> tuple[int, int]:
    nodes = {core.node for core in unit.cores}
    if accelerator.node is None:
        return 0, min(nodes)
    home = host.node(accelerator.node)
    return min(home.distance(host.node(node)) for node in nodes), min(nodes)


def _divide(
    hosts: Sequence[Topology],
    assignments: Sequence[_Assignment],
    sizes: ModelSizes,
    request: PlacementRequest,
    notes: list[str],
) -> Plan:
    """Divide each replica's cores between target and draft, and book the memory."""
    free_memory = FreeMemory.of(hosts)
    actors: list[PlannedActor] = []
    for replica, assignment in enumerate(assignments):
        needs = _needs(assignment, replica, sizes, request)
        _check_device_memory(assignment.accelerator, replica, needs)
        need = sum(each.memory for each in needs)
        nodes = _memory_nodes(assignment, free_memory, need)
        host = assignment.unit.topology.host
        room = free_memory.room(host, nodes)
        if room is not None and need > room:
            raise PlacementError(
                f"replica {replica} needs {_bytes(need)} on {assignment.unit.name}, {_bytes(room)} are left there"
            )
        for each in needs:
            accelerator = assignment.accelerator if each.device != "cpu" else None
            actors.append(
                PlannedActor(
                    role=each.role,
                    replica=replica,
                    host=host,
                    cores=tuple(core.allowed[0] for core in each.cores),
                    memory_nodes=nodes,
                    threads=len(each.cores),
                    device=each.device,
                    device_selector=accelerator.selector if accelerator else "",
                    resources=_resources(each, needs),
                    leases=_leases(each, needs, accelerator),
                    memory=free_memory.take(host, nodes, each.memory),
                    device_bytes=each.device_memory,
                )
            )
    spared = (spared_core(host) for host in hosts)
    return Plan(tuple(actors), tuple(notes), tuple(core for core in spared if core is not None))


@dataclass(frozen=True, slots=True)
class _Needs:
    """What an actor needs. ``memory``: bytes on the host; ``device_memory``: bytes on its accelerator.

    ``claimed``: the cores that it leases. On cores that draft and target share only the target leases them.
    """

    role: str
    device: str
    cores: tuple[Core, ...]
    claimed: tuple[Core, ...]
    memory: int
    device_memory: int


def _needs(assignment: _Assignment, replica: int, sizes: ModelSizes, request: PlacementRequest) -> list[_Needs]:
    """The needs of a replica's target and, if there is one, of its draft."""
    on_host = sizes.on(assignment.unit.topology.in_pairs)
    target_device, draft_device = "cpu", "cpu"
    if assignment.accelerator is not None:
        target_device, draft_device = (
            assignment.accelerator.name if its else "cpu" for its in on_accelerator(request.devices)
        )
    target_cores, draft_cores = _parts(assignment, replica, sizes, request, target_device, draft_device)
    target_beside, draft_beside = sizes.beside_device
    needs = [
        _Needs("target", "cpu", target_cores, target_cores, on_host.of_target, 0)
        if target_device == "cpu"
        else _Needs("target", target_device, target_cores, target_cores, target_beside, sizes.target + sizes.target_kv)
    ]
    if sizes.draft is not None:
        claimed = () if draft_cores == target_cores else draft_cores
        needs.append(
            _Needs("draft", "cpu", draft_cores, claimed, on_host.of_draft, 0)
            if draft_device == "cpu"
            else _Needs("draft", draft_device, draft_cores, claimed, draft_beside, sizes.draft + sizes.draft_kv)
        )
    return needs


def _check_device_memory(accelerator: Accelerator | None, replica: int, needs: Sequence[_Needs]) -> None:
    if accelerator is None or accelerator.memory_bytes is None:
        return
    need = sum(each.device_memory for each in needs)
    if need > accelerator.memory_bytes:
        raise PlacementError(
            f"replica {replica} needs {_bytes(need)} on {accelerator.name}, which has {_bytes(accelerator.memory_bytes)}; "
            "a smaller precision needs less"
        )


def _resources(actor: _Needs, needs: Sequence[_Needs]) -> dict[str, float]:
    """The actor's Ray resources: one ``numaN`` a leased core, and a GPU, of which target and draft may have half each."""
    resources: dict[str, float] = {
        f"numa{node}": float(count) for node, count in Counter(core.node for core in actor.claimed).items()
    }
    if actor.device != "cpu":
        resources["GPU"] = 1.0 / sum(each.device == actor.device for each in needs)
    return resources


def _leases(actor: _Needs, needs: Sequence[_Needs], accelerator: Accelerator | None) -> tuple[str, ...]:
    """Names of the cores and of the accelerator that the actor leases; of two actors on one the first leases it."""
    leases = [str(core.identity) for core in actor.claimed]
    if accelerator is not None and actor is next(each for each in needs if each.device != "cpu"):
        leases.append(accelerator.lease)
    return tuple(leases)


def _memory_nodes(assignment: _Assignment, free_memory: FreeMemory, need: int) -> tuple[int, ...]:
    """The memory nodes of the replica's own cores, and further ones of its unit only if those are too small."""
    host = assignment.unit.topology
    homes = {core.node for core in assignment.cores}
    nodes = memory_of(host, [node for node in host.nodes if node.id in homes])
    for more in (assignment.unit.memory, assignment.unit.extra):
        for node in more:
            room = free_memory.room(host.host, nodes)
            if room is None or room >= need:
                return nodes
            nodes = tuple(dict.fromkeys((*nodes, node)))
    return nodes


def _parts(
    assignment: _Assignment,
    replica: int,
    sizes: ModelSizes,
    request: PlacementRequest,
    target_device: str,
    draft_device: str,
) -> tuple[tuple[Core, ...], tuple[Core, ...]]:
    """The cores of target and draft. The draft's come from the replica's largest node, where the target has some too."""
    cores = assignment.cores
    if sizes.draft is None:
        return (cores if target_device == "cpu" else cores[:1]), ()
    asked = request.draft_cores
    split = request.layout == "split" or asked is not None
    if assignment.accelerator is None:
        split = split or (request.layout == "auto" and len(cores) >= CORES_TO_SPLIT)
        default = max(1, len(cores) // TARGET_CORES_A_DRAFT_CORE)
    else:
        # A target on an accelerator needs one core; the others are the draft's if it runs on the CPU.
        split = split or (request.layout == "auto" and len(cores) >= 2)
        default = len(cores) - 1 if draft_device == "cpu" else 1
    if not split:
        shared = cores if "cpu" in (target_device, draft_device) else cores[:1]
        return shared, shared
    if len(cores) < 2:
        raise PlacementError(
            f"replica {replica} has one core, which cannot be split between target and draft: use --layout shared"
        )
    count = default if asked is None else asked
    if count >= len(cores):
        raise PlacementError(
            f"--draft-cores {count} leaves the target none of the {len(cores)} cores of replica {replica}: ask for fewer"
        )
    sizes_of_nodes = Counter(core.node for core in cores)
    by_room = sorted(cores, key=lambda core: (-sizes_of_nodes[core.node], core.node))
    draft = tuple(by_room[:count])
    rest = tuple(core for core in cores if core not in draft)
    return (rest if target_device == "cpu" else tuple(by_room[count : count + 1])), draft


def _bytes(size: int) -> str:
    return f"{size / 1e9:.2f} GB" if size >= 1e7 else f"{size / 1e6:.2f} MB"
