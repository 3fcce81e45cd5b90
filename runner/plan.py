"""What a replica is to be made of."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from outrider.workers.messages import ModelSpec, Seat, ServeSpec


@dataclass(frozen=True, slots=True)
class ActorPlan:
    """One process: its model, its place, and what Ray is asked for."""

    model: ModelSpec
    seat: Seat
    resources: dict[str, float] = field(default_factory=dict)

    def options(self, variables: dict[str, str]) -> dict[str, Any]:
        """For ``ActorClass.options``."""
        others = {name: amount for name, amount in self.resources.items() if name != "GPU"}
        runtime_env = self.seat.launch.runtime_env(variables)
        return {"runtime_env": runtime_env, "resources": others, "num_gpus": self.resources.get("GPU", 0.0)}


@dataclass(frozen=True, slots=True)
class ReplicaPlan:
    target: ActorPlan
    draft: ActorPlan | None
    serve: ServeSpec
