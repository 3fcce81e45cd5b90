"""What a replica is to be made of: models, seats, and starts that have been tried out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import outrider
from outrider.runner.layouts import arrangements_of
from outrider.runner.placement import Plan, PlannedActor
from outrider.runner.seating import ray_options
from outrider.workers.messages import ModelSpec, Seat, ServeSpec
from outrider.workers.models.cards import ModelCard
from outrider.workers.pinning import Launch, Pin, probe

# Bytes of a weight by precision, and of one as a checkpoint declares it.
WEIGHT_BYTES = {"fp32": 4.0, "bf16": 2.0, "fp16": 2.0, "w8a8": 1.1, "w4a8": 0.6}
DECLARED_BYTES = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0}


@dataclass(frozen=True, slots=True)
class ActorPlan:
    """One process: its model, and its place."""

    model: ModelSpec
    actor: PlannedActor
    seat: Seat

    def options(self, variables: Mapping[str, str]) -> dict[str, Any]:
        """For ``ActorClass.options``."""
        return ray_options(self.actor, self.seat.launch, variables)


@dataclass(frozen=True, slots=True)
class ReplicaPlan:
    target: ActorPlan
    draft: ActorPlan | None
    serve: ServeSpec


def plan_replicas(
    made: Plan, target: ModelSpec, draft: ModelSpec | None, serve: ServeSpec, movable: bool
) -> list[ReplicaPlan]:
    """Each replica's actors with their models and their places; each distinct start is tried out once.

    ``movable`` leaves open how target and draft share the cores of their seat.
    """
    launches: dict[Pin, Launch] = {}

    def actor(replica: int, role: str, model: ModelSpec) -> ActorPlan:
        planned = made.actor(replica, role)
        assert planned is not None, f"the plan seats no {role} for replica {replica}"
        pin = planned.pin
        launch = launches.get(pin) or launches.setdefault(pin, probe(pin))
        placed = replace(model, device=pin.local_device, threads=pin.threads, cores=pin.cores)
        return ActorPlan(placed, planned, Seat(launch, planned.leases))

    def replica_plan(replica: int) -> ReplicaPlan:
        of_target = actor(replica, "target", target)
        of_draft = None if draft is None else actor(replica, "draft", draft)
        arrangements = arrangements_of(
            of_target.actor,
            None if of_draft is None else of_draft.actor,
            movable,
            serve.batch,
        )
        key = f"{outrider.__version__}|{target}|{draft}|{serve}|{len(of_target.actor.cores)} cores of {made.replicas}"
        return ReplicaPlan(of_target, of_draft, replace(serve, arrangements=arrangements, memory_key=key))

    return [replica_plan(replica) for replica in range(made.replicas)]


def loaded_bytes(card: ModelCard, precision: str) -> int:
    """About how much memory a model takes once loaded."""
    return int(card.weight_bytes * WEIGHT_BYTES.get(precision, 4.0) / DECLARED_BYTES.get(card.dtype, 4.0))
