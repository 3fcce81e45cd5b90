"""The hosts that replicas may run on, as they change while a job runs; and the simplest case, this one machine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Protocol

from outrider.runner.hosts.host_report import alive
from outrider.runner.hosts.ray_start import local_ray
from outrider.runner.hosts.ray_watch import Lost
from outrider.runner.planning.free_cores import plan_on_free_cores
from outrider.runner.planning.placement_request import ModelSizes, PlacementRequest
from outrider.runner.planning.replica_plan import ReplicaPlan, ReplicaTemplate, booked, probed_here
from outrider.runner.planning.topology import Topology, ray_resources, read_topology
from outrider.workers.errors import CoresHeldError, PlacementError


class Hosts(Protocol):
    """The driver asks it at every tick, so nothing in here waits; but ``gone``, asked when something has died, may."""

    def lost(self) -> str | None:
        """Why the Ray under all replicas can no longer be used; None while it can."""
        ...

    def new_replica_plans(self, unplaced: int) -> list[ReplicaPlan]:
        """Plans on cores that have become free, for so many ``unplaced`` replicas or for new ones."""
        ...

    def gone(self, plan: ReplicaPlan) -> bool:
        """Whether the host of this replica has left."""
        ...

    def sign_of_life(self, plan: ReplicaPlan) -> Any | None:
        """A future that is kept if the host of this replica is alive, and broken if not; None where that is no question."""
        ...

    def release(self, plan: ReplicaPlan) -> None:
        """The replica has ended: its cores may be planned on again."""
        ...

    def host(self, plan: ReplicaPlan) -> str:
        """What people call the host."""
        ...


class LocalHost:
    """This machine: nobody joins, nobody leaves, and a replica that lost its cores to another run looks for others.

    ``plans`` are those that are carried out, the first ones and others that have been made since. Whoever plans anew leaves
    their cores out: the processes that will hold them may be only starting.
    """

    def __init__(
        self,
        plan_anew: Callable[[int], list[ReplicaPlan]],
        lost: Lost,
        sign_of_life: Callable[[], Any],
        plans: list[ReplicaPlan] | None = None,
    ) -> None:
        self._plan_anew = plan_anew
        self.lost = lost
        self._sign_of_life = sign_of_life
        self._plans = [] if plans is None else plans

    def new_replica_plans(self, unplaced: int) -> list[ReplicaPlan]:
        found = self._plan_anew(unplaced) if unplaced else []
        self._plans += found
        return found

    def gone(self, plan: ReplicaPlan) -> bool:
        return False

    def sign_of_life(self, plan: ReplicaPlan) -> Any | None:
        # A raylet that goes down ends its processes first, as a host does.
        return self._sign_of_life()

    def release(self, plan: ReplicaPlan) -> None:
        self._plans[:] = [each for each in self._plans if not each.is_where(plan)]

    def host(self, plan: ReplicaPlan) -> str:
        return plan.target.actor.host


@contextmanager
def local_host(
    replica_template: ReplicaTemplate,
    sizes: ModelSizes,
    request_for_cores: Callable[[int], PlacementRequest],
    seconds: float,
    say: Callable[[str], None],
    metrics_port: int | None,
    start_deadline: float,
) -> Iterator[tuple[LocalHost, list[ReplicaPlan]]]:
    """A Ray of our own on this machine. The placement request depends on how many cores there are."""
    machine = read_topology()
    wanted = request_for_cores(len(machine.usable_cores))
    for warning in machine.warnings:
        say(f"note: {warning}")
    share = replica_template.share_cores
    made = plan_on_free_cores(sizes, wanted, seconds, say, lambda: machine, share=share)
    for note in made.notes:
        say(f"note: {note}")
    plans = replica_template.replicas(made, probed_here())
    current = list(plans)

    def left() -> Topology:
        """The machine without what this run has planned on already, or has left to Ray; what others hold is asked apart."""
        machine = read_topology()
        taken = set() if share else {lease for plan in current for lease in plan.leases}
        planned_cores = sum(str(core.identity) in taken for core in machine.cores)
        spared = {str(core.identity) for core in made.spared}
        return replace(machine.less(booked(current)).without(taken | spared), planned_cores=planned_cores)

    def plan_anew(unplaced: int) -> list[ReplicaPlan]:
        """For as many replicas as there is room for. Where nobody named a number, each has a unit to itself, as before."""
        there = left()
        numbers = [None] if wanted.replicas is None else range(unplaced, 0, -1)
        for number in numbers:
            request = replace(wanted, replicas=number, devices_left=True)
            try:
                again = plan_on_free_cores(sizes, request, 0.0, lambda _: None, lambda: there, share=share)
            except (PlacementError, CoresHeldError):
                continue
            return replica_template.replicas(again, probed_here())[:unplaced]
        return []

    actors = sum(2 if plan.draft is not None else 1 for plan in plans)
    with local_ray(len(machine.usable_cores), ray_resources(machine), metrics_port, start_deadline, actors) as lost:
        # Ray reads its settings when it is first imported, so nothing that imports it may come before it starts.
        from outrider.runner.hosts import ray_nodes as nodes

        yield LocalHost(plan_anew, lost, lambda: nodes.start(alive, nodes.own()), current), plans
