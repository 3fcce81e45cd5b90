"""Plans of replicas: the models, placement and tested launch command of each actor."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import outrider
from outrider.runner.planning.free_cores import ray_options
from outrider.runner.planning.layouts import layouts_of
from outrider.runner.planning.placement import Plan, PlannedActor
from outrider.workers.machine.pinning import Launch, Pin, probe
from outrider.workers.messages import ActorPlacement, ModelSpec, ReplicaSpec
from outrider.workers.models.model_info import ModelInfo
from outrider.workers.models.model_memory import ModelMemory
from outrider.workers.precisions import arithmetic

# Bytes per weight by our precision, and (DECLARED_BYTES) by a checkpoint's dtype.
WEIGHT_BYTES = {"fp32": 4.0, "bf16": 2.0, "fp16": 2.0, "w8a8": 1.1, "w8af32": 1.1, "w4a8": 0.6, "w4abf16": 0.6}
# Memory of a quantised checkpoint relative to its files: codes are kept as they are, its embedding may not be.
KEPT = 1.25
OF_FLOATS = ("fp32", "bf16", "fp16")
DECLARED_BYTES = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0}


@dataclass(frozen=True, slots=True)
class ActorPlan:
    """One process: its model, and where it runs."""

    model: ModelSpec
    actor: PlannedActor
    placement: ActorPlacement
    # The Ray node that it must start on; None if there is only one.
    node: str | None = None

    def options(self, variables: Mapping[str, str]) -> dict[str, Any]:
        """For ``ActorClass.options``."""
        options = ray_options(self.actor, self.placement.launch, variables)
        if self.placement.shared:
            # Shared cores are guarded by leases only: Ray's count would keep a second run out of them.
            options["resources"] = {}
        return options


@dataclass(frozen=True, slots=True)
class ReplicaPlan:
    target: ActorPlan
    draft: ActorPlan | None
    replica_spec: ReplicaSpec

    @property
    def leases(self) -> tuple[str, ...]:
        return self.target.placement.leases + (self.draft.placement.leases if self.draft is not None else ())

    def is_where(self, other: ReplicaPlan) -> bool:
        """Whether both plans have the same actors in the same place; their batches may differ."""
        return (self.target, self.draft) == (other.target, other.draft)


@dataclass(frozen=True, slots=True)
class ReplicaTemplate:
    """What all replicas of a job have in common.

    ``movable``: the layout is chosen while the job runs. ``rows``: the pending rows of the job; 0 if unknown.
    """

    target: ModelSpec
    draft: ModelSpec | None
    replica_spec: ReplicaSpec
    movable: bool = False
    share_cores: bool = False
    rows: int = 0

    def replicas(
        self, made: Plan, launches: Callable[[str, Pin], Launch], paths: Mapping[str, Mapping[str, str]] | None = None
    ) -> list[ReplicaPlan]:
        """The replicas of a plan. ``launches``: the launch command that works for a pin on a host.

        ``paths``, in a cluster: for each Ray node, the paths there of the driver's model directories.
        """

        def actor(replica: int, role: str, model: ModelSpec) -> ActorPlan:
            planned = made.actor(replica, role)
            assert planned is not None, f"the plan has no {role} for replica {replica}"
            pin = planned.pin
            node = planned.host if paths is not None else None
            # The spec of a head names a second directory, its target's.
            path, target = (
                given if paths is None or not given else paths[planned.host][given] for given in (model.path, model.target)
            )
            placed = replace(model, path=path, target=target, device=pin.local_device, threads=pin.threads, cores=pin.cores)
            placement = ActorPlacement(launches(planned.host, pin), planned.leases, shared=self.share_cores)
            return ActorPlan(placed, planned, placement, node)

        def replica_plan(replica: int) -> ReplicaPlan:
            target = actor(replica, "target", self.target)
            draft = None if self.draft is None else actor(replica, "draft", self.draft)
            parallel = self.draft is not None and self.draft.mask_token is not None
            texts = self.replica_spec.lookup or self.replica_spec.suffix
            layouts = layouts_of(target.actor, None if draft is None else draft.actor, self.movable, parallel, texts)
            models = f"{self.target}|{self.draft}|{self.replica_spec}"
            key = f"{outrider.__version__}|{models}|{len(target.actor.cores)} cores of {made.replicas}"
            rows = -(-self.rows // made.replicas)
            return ReplicaPlan(target, draft, replace(self.replica_spec, layouts=layouts, memory_key=key, rows=rows))

        return [replica_plan(replica) for replica in range(made.replicas)]


def booked(plans: Iterable[ReplicaPlan]) -> Counter[int]:
    """The bytes of each NUMA node's memory that these replicas are planned with."""
    total: Counter[int] = Counter()
    for each in plans:
        for actor in (each.target, each.draft):
            total.update({} if actor is None else actor.actor.memory)
    return total


def probed_here() -> Callable[[str, Pin], Launch]:
    """Launch commands on this machine; each distinct pin is probed once."""
    return cache(lambda host, pin: probe(pin))


def memory_by_files(model_info: ModelInfo, precision: str) -> ModelMemory:
    """The memory of a model, estimated from its files."""
    token = (model_info.cached_numbers or 0) * WEIGHT_BYTES.get(precision if precision in OF_FLOATS else "fp32", 4.0)
    return ModelMemory(loaded_bytes(model_info, precision), token=int(token))


def loaded_bytes(model_info: ModelInfo, precision: str) -> int:
    """The estimated bytes of a model's weights once loaded."""
    if model_info.made_for:
        # A checkpoint that is made for bf16 has fp8 codes, one byte each.
        codes = "w8af32" if model_info.made_for == "bf16" else model_info.made_for
        dequantised = precision in OF_FLOATS and precision != model_info.made_for
        return int(model_info.weight_bytes * KEPT * (WEIGHT_BYTES[precision] / WEIGHT_BYTES[codes] if dequantised else 1.0))
    numbers = model_info.numbers or model_info.weight_bytes / DECLARED_BYTES.get(model_info.dtype, 4.0)
    return int(numbers * WEIGHT_BYTES.get(arithmetic(precision), 4.0))
