"""What a replica is to be made of: models, seats, and starts that have been tried out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import outrider
from outrider.runner.planning.free_cores import ray_options
from outrider.runner.planning.layout_candidates import arrangements_of
from outrider.runner.planning.placement import Plan, PlannedActor
from outrider.workers.machine.pinning import Launch, Pin, probe
from outrider.workers.messages import ModelSpec, Seat, ServeSpec
from outrider.workers.models.cards import ModelCard

# Bytes of a weight by precision, and of one as a checkpoint declares it.
WEIGHT_BYTES = {"fp32": 4.0, "bf16": 2.0, "fp16": 2.0, "w8a8": 1.1, "w4a8": 0.6}
DECLARED_BYTES = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0}


@dataclass(frozen=True, slots=True)
class ActorPlan:
    """One process: its model, and its place."""

    model: ModelSpec
    actor: PlannedActor
    seat: Seat
    # The Ray node that it must start on; None where there is but one.
    node: str | None = None

    def options(self, variables: Mapping[str, str]) -> dict[str, Any]:
        """For ``ActorClass.options``."""
        return ray_options(self.actor, self.seat.launch, variables)


@dataclass(frozen=True, slots=True)
class ReplicaPlan:
    target: ActorPlan
    draft: ActorPlan | None
    serve: ServeSpec

    @property
    def leases(self) -> tuple[str, ...]:
        return self.target.seat.leases + (self.draft.seat.leases if self.draft is not None else ())


@dataclass(frozen=True, slots=True)
class Blueprint:
    """What every replica of a job is made of, wherever it sits.

    ``movable`` leaves open how target and draft share the cores of their seat. ``rows`` are still to be done in all, as far
    as that is known.
    """

    target: ModelSpec
    draft: ModelSpec | None
    serve: ServeSpec
    movable: bool = False
    share_cores: bool = False
    rows: int = 0

    def replicas(
        self, made: Plan, launches: Callable[[str, Pin], Launch], paths: Mapping[str, Mapping[str, str]] | None = None
    ) -> list[ReplicaPlan]:
        """``launches`` gives the start that works for a pin on a host.

        In a cluster ``paths`` says, for each Ray node, where the driver's model directories lie there.
        """

        def actor(replica: int, role: str, model: ModelSpec) -> ActorPlan:
            planned = made.actor(replica, role)
            assert planned is not None, f"the plan seats no {role} for replica {replica}"
            pin = planned.pin
            node = planned.host if paths is not None else None
            path = paths[planned.host][model.path] if paths is not None else model.path
            placed = replace(model, path=path, device=pin.local_device, threads=pin.threads, cores=pin.cores)
            seat = Seat(launches(planned.host, pin), planned.leases, shared=self.share_cores)
            return ActorPlan(placed, planned, seat, node)

        def replica_plan(replica: int) -> ReplicaPlan:
            target = actor(replica, "target", self.target)
            draft = None if self.draft is None else actor(replica, "draft", self.draft)
            arrangements = arrangements_of(
                target.actor,
                None if draft is None else draft.actor,
                self.movable,
                self.serve.batch,
            )
            models = f"{self.target}|{self.draft}|{self.serve}"
            key = f"{outrider.__version__}|{models}|{len(target.actor.cores)} cores of {made.replicas}"
            rows = -(-self.rows // made.replicas)
            return ReplicaPlan(target, draft, replace(self.serve, arrangements=arrangements, memory_key=key, rows=rows))

        return [replica_plan(replica) for replica in range(made.replicas)]


def probed_here() -> Callable[[str, Pin], Launch]:
    """Starts on this machine; each distinct one is tried out once."""
    return cache(lambda host, pin: probe(pin))


def loaded_bytes(card: ModelCard, precision: str) -> int:
    """About how much memory a model takes once loaded."""
    return int(card.weight_bytes * WEIGHT_BYTES.get(precision, 4.0) / DECLARED_BYTES.get(card.dtype, 4.0))
