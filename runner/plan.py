"""What a replica is to be made of: models, seats, and starts that have been tried out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

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


def plan_replicas(made: Plan, target: ModelSpec, draft: ModelSpec | None, serve: ServeSpec) -> list[ReplicaPlan]:
    """Each replica's actors with their models and their places; each distinct start is tried out once."""
    launches: dict[Pin, Launch] = {}

    def actor(replica: int, role: str, model: ModelSpec) -> ActorPlan:
        planned = made.actor(replica, role)
        assert planned is not None, f"the plan seats no {role} for replica {replica}"
        pin = planned.pin
        launch = launches.get(pin) or launches.setdefault(pin, probe(pin))
        placed = replace(model, device=pin.local_device, threads=pin.threads, cores=pin.cores)
        return ActorPlan(placed, planned, Seat(launch, planned.leases))

    return [
        ReplicaPlan(actor(replica, "target", target), None if draft is None else actor(replica, "draft", draft), serve)
        for replica in range(made.replicas)
    ]


def loaded_bytes(card: ModelCard, precision: str) -> int:
    """About how much memory a model takes once loaded."""
    return int(card.weight_bytes * WEIGHT_BYTES.get(precision, 4.0) / DECLARED_BYTES.get(card.dtype, 4.0))
