"""The driver's interface to hosts (``Hosts``), and its implementation for this machine alone."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Protocol

from outrider.runner.hosts.host_report import answer_sign_of_life
from outrider.runner.hosts.ray_start import local_ray
from outrider.runner.hosts.ray_watch import Lost
from outrider.runner.planning.free_cores import plan_on_free_cores
from outrider.runner.planning.placement_request import ModelSizes, PlacementRequest
from outrider.runner.planning.replica_plan import ReplicaPlan, ReplicaTemplate, booked, probed_here
from outrider.runner.planning.topology import Topology, ray_resources, read_topology
from outrider.workers.errors import CoresHeldError, PlacementError

# While replicas wait for cores, free ones are looked for this often: each look reads the topology, several files a CPU.
LOOK_AGAIN_SECONDS = 1.0


class Hosts(Protocol):
    """Called at every turn of the driver's loop, so only ``gone``, called after a death, may block."""

    def lost(self) -> str | None:
        """Why Ray can no longer be used; None while it can."""
        ...

    def new_replica_plans(self, unplaced: int) -> list[ReplicaPlan]:
        """Plans on cores that have become free, for the ``unplaced`` replicas or for new ones."""
        ...

    def gone(self, plan: ReplicaPlan) -> bool:
        """Whether the host of this replica has left."""
        ...

    def sign_of_life(self, plan: ReplicaPlan) -> Any | None:
        """A future that succeeds if the replica's host is alive and fails if not; None if the host cannot be lost."""
        ...

    def release(self, plan: ReplicaPlan) -> None:
        """The replica has ended: its cores are free for other plans."""
        ...

    def host(self, plan: ReplicaPlan) -> str:
        """The host's name in messages."""
        ...


class LocalHost:
    """This machine: no host joins or leaves, and a replica that lost its cores to another run gets others if some are free.

    ``plans``: all current plans. New plans avoid their cores, also those that a starting process has not leased yet.
    """

    def __init__(
        self,
        plan_anew: Callable[[int], list[ReplicaPlan]],
        lost: Lost,
        sign_of_life: Callable[[], Any],
        plans: list[ReplicaPlan] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._plan_anew = plan_anew
        self.lost = lost
        self._sign_of_life = sign_of_life
        self._plans = [] if plans is None else plans
        self._clock = clock
        # How many replicas free cores were last looked for, and when.
        self._looked_for, self._looked_at = 0, 0.0

    def new_replica_plans(self, unplaced: int) -> list[ReplicaPlan]:
        now = self._clock()
        if not unplaced or (unplaced == self._looked_for and now - self._looked_at < LOOK_AGAIN_SECONDS):
            return []
        found = self._plan_anew(unplaced)
        # Where cores were found there may be more.
        self._looked_for, self._looked_at = 0 if found else unplaced, now
        self._plans += found
        return found

    def gone(self, plan: ReplicaPlan) -> bool:
        return False

    def sign_of_life(self, plan: ReplicaPlan) -> Any | None:
        # A raylet that is dying ends its processes first, as a host does.
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
    """Start a Ray of our own on this machine and plan the first replicas; the request depends on the number of cores."""
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
        """The machine without the cores and memory of this run's plans and the core left to Ray. (Other runs' leases are
        subtracted by ``plan_on_free_cores``.)"""
        machine = read_topology()
        taken = set() if share else {lease for plan in current for lease in plan.leases}
        planned_cores = sum(str(core.identity) in taken for core in machine.cores)
        spared = {str(core.identity) for core in made.spared}
        return replace(machine.less(booked(current)).without(taken | spared), planned_cores=planned_cores)

    def plan_anew(unplaced: int) -> list[ReplicaPlan]:
        """Plans for as many of the unplaced replicas as fit; without --replicas each gets a unit of its own."""
        machine_left = left()
        numbers = [None] if wanted.replicas is None else range(unplaced, 0, -1)
        for number in numbers:
            request = replace(wanted, replicas=number, devices_left=True)
            try:
                found = plan_on_free_cores(sizes, request, 0.0, lambda _: None, lambda: machine_left, share=share)
            except (PlacementError, CoresHeldError):
                continue
            return replica_template.replicas(found, probed_here())[:unplaced]
        return []

    actors = sum(2 if plan.draft is not None else 1 for plan in plans)
    with local_ray(len(machine.usable_cores), ray_resources(machine), metrics_port, start_deadline, actors) as lost:
        # Ray reads its settings when it is first imported, so nothing that imports it may come before it starts.
        from outrider.runner.hosts import ray_nodes as nodes

        yield LocalHost(plan_anew, lost, lambda: nodes.start(answer_sign_of_life, nodes.own()), current), plans
