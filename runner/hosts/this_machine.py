"""Where replicas can sit, as it changes while a job runs; and the simplest case of it, this one machine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Protocol

from outrider.runner.hosts.host_report import alive
from outrider.runner.hosts.ray_start import local_ray
from outrider.runner.hosts.ray_watch import Lost
from outrider.runner.planning.free_cores import seat
from outrider.runner.planning.placement_request import Sizes, Wishes
from outrider.runner.planning.replica_plan import Blueprint, ReplicaPlan, probed_here
from outrider.runner.planning.topology import ray_resources, read_topology
from outrider.workers.errors import PlacementError


class Fleet(Protocol):
    """The driver asks it at every tick, so nothing in here waits; but ``gone``, asked when something has died, may."""

    def lost(self) -> str | None:
        """Why the Ray under all places can no longer be used; None while it can."""
        ...

    def seats(self, seatless: int) -> list[ReplicaPlan]:
        """Places that have become free, for so many replicas that have none, or for new ones."""
        ...

    def gone(self, plan: ReplicaPlan) -> bool:
        """Whether the host of this place has left."""
        ...

    def sign_of_life(self, plan: ReplicaPlan) -> Any | None:
        """A future that is kept if the host of this place is alive, and broken if not; None where that is no question."""
        ...

    def release(self, plan: ReplicaPlan) -> None:
        """The place is no longer used, and may be given again."""
        ...

    def host(self, plan: ReplicaPlan) -> str:
        """What people call the host."""
        ...


class OneHost:
    """This machine: nobody joins, nobody leaves, and a replica that lost its cores to another run looks for others."""

    def __init__(self, seat_anew: Callable[[], ReplicaPlan | None], lost: Lost, sign_of_life: Callable[[], Any]) -> None:
        self._seat_anew = seat_anew
        self.lost = lost
        self._sign_of_life = sign_of_life

    def seats(self, seatless: int) -> list[ReplicaPlan]:
        found = self._seat_anew() if seatless else None
        return [] if found is None else [found]

    def gone(self, plan: ReplicaPlan) -> bool:
        return False

    def sign_of_life(self, plan: ReplicaPlan) -> Any | None:
        # A raylet that goes down ends its processes first, as a host does.
        return self._sign_of_life()

    def release(self, plan: ReplicaPlan) -> None:
        pass

    def host(self, plan: ReplicaPlan) -> str:
        return plan.target.actor.host


@contextmanager
def one_host(
    blueprint: Blueprint,
    sizes: Sizes,
    wishes: Callable[[int], Wishes],
    seconds: float,
    say: Callable[[str], None],
    metrics_port: int | None,
    start_deadline: float,
) -> Iterator[tuple[OneHost, list[ReplicaPlan]]]:
    """A Ray of our own on this machine. ``wishes`` depend on how many cores there are."""
    machine = read_topology()
    wanted = wishes(len(machine.usable_cores))
    for warning in machine.warnings:
        say(f"note: {warning}")
    share = blueprint.share_cores
    made = seat(sizes, wanted, seconds, say, share=share)
    for note in made.notes:
        say(f"note: {note}")
    plans = blueprint.replicas(made, probed_here())

    def seat_anew() -> ReplicaPlan | None:
        try:
            again = seat(sizes, replace(wanted, replicas=1), 0.0, lambda _: None, share=share)
        except PlacementError:
            return None
        return blueprint.replicas(again, probed_here())[0]

    with local_ray(len(machine.usable_cores), ray_resources(machine), metrics_port, start_deadline) as lost:
        # Ray reads its settings when it is first imported, so nothing that imports it may come before it starts.
        from outrider.runner.hosts import ray_nodes as nodes

        yield OneHost(seat_anew, lost, lambda: nodes.start(alive, nodes.own())), plans
