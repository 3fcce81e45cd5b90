"""Plans the actors of one replica on shared cores without core leases, since a benchmark has the machine to itself."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from outrider.runner.planning.placement import plan
from outrider.runner.planning.placement_request import ModelSizes, PlacementRequest
from outrider.runner.planning.replica_plan import ActorPlan, ReplicaPlan, ReplicaTemplate, probed_here
from outrider.runner.planning.topology import Topology
from outrider.workers.messages import ModelSpec, ReplicaSpec
from outrider.workers.models.mask_token import mask_token_of
from outrider.workers.models.model_info import read_model_info


def unleased_replica(
    machine: Topology, target: str, draft: str, precision: str, serve: ReplicaSpec, cache_precision: str = "auto"
) -> ReplicaPlan:
    sizes = ModelSizes(read_model_info(target).weight_bytes, read_model_info(draft).weight_bytes)
    made = plan([machine], sizes, PlacementRequest(replicas=1, layout="shared"))
    mask_token = mask_token_of(Path(draft))
    draft_model = ModelSpec(draft, "native", precision, small_cache=True, mask_token=mask_token)
    target_model = ModelSpec(target, "native", precision, cache_precision=cache_precision)
    template = ReplicaTemplate(target_model, draft_model, serve, movable=True)
    [found] = template.replicas(made, probed_here())
    assert found.draft is not None
    return replace(found, target=_unleased(found.target), draft=_unleased(found.draft))


def _unleased(actor: ActorPlan) -> ActorPlan:
    return replace(actor, placement=replace(actor.placement, leases=()))
