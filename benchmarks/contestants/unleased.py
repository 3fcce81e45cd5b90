"""The actors of one replica on shared cores, which nobody has to give back: a benchmark has the machine to itself."""

from __future__ import annotations

from dataclasses import replace

from outrider.runner.planning.placement import plan
from outrider.runner.planning.placement_request import Sizes, Wishes
from outrider.runner.planning.replica_plan import ActorPlan, Blueprint, ReplicaPlan, probed_here
from outrider.runner.planning.topology import Topology
from outrider.workers.messages import ModelSpec, ServeSpec
from outrider.workers.models.cards import read_card


def unleased_replica(machine: Topology, target: str, draft: str, precision: str, serve: ServeSpec) -> ReplicaPlan:
    sizes = Sizes(read_card(target).weight_bytes, read_card(draft).weight_bytes)
    made = plan([machine], sizes, Wishes(replicas=1, layout="shared"))
    models = [ModelSpec(target, "native", precision), ModelSpec(draft, "native", precision, small_cache=True)]
    [found] = Blueprint(models[0], models[1], serve, movable=True).replicas(made, probed_here())
    assert found.draft is not None
    return replace(found, target=_unleased(found.target), draft=_unleased(found.draft))


def _unleased(actor: ActorPlan) -> ActorPlan:
    return replace(actor, seat=replace(actor.seat, leases=()))
