"""From wishes to seats on this very machine: read it, plan around what other runs hold, and try every start out."""

from __future__ import annotations

import time
from collections.abc import Callable

from outrider.runner.config import JobSpec
from outrider.runner.holding import describe
from outrider.runner.placement import Plan, plan
from outrider.runner.topology import Topology, read_topology
from outrider.runner.wishes import Sizes, Wishes
from outrider.workers.errors import PlacementError
from outrider.workers.leases import holders
from outrider.workers.messages import Seat
from outrider.workers.models.cards import ModelCard
from outrider.workers.pinning import Launch, Pin, probe

POLL_SECONDS = 0.5
# Bytes of a weight by precision, and of one as a checkpoint declares it.
WEIGHT_BYTES = {"fp32": 4.0, "bf16": 2.0, "fp16": 2.0, "w8a8": 1.1, "w4a8": 0.6}
DECLARED_BYTES = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0}


def loaded_bytes(card: ModelCard, precision: str) -> int:
    """About how much memory a model takes once loaded."""
    return int(card.weight_bytes * WEIGHT_BYTES.get(precision, 4.0) / DECLARED_BYTES.get(card.dtype, 4.0))


def place(spec: JobSpec, sizes: Sizes, say: Callable[[str], None]) -> tuple[Topology, Plan]:
    """A plan on cores that are free now. Where other runs hold them all, wait for them, and say so once."""
    wishes = Wishes(
        per=spec.per,
        replicas=spec.replicas,
        draft_cores=spec.draft_cores,
        layout=spec.layout,
        devices=tuple(device.strip() for device in spec.devices.split(",") if device.strip()),
    )
    machine = read_topology()
    for warning in machine.warnings:
        say(f"note: {warning}")
    # A wish that this machine could not grant when idle is refused at once; only for the rest is it worth waiting.
    plan([machine], sizes, wishes)
    deadline = time.monotonic() + spec.wait_for_cores
    told = False
    while True:
        held = holders()
        try:
            made = plan([machine.without(held)], sizes, wishes)
        except PlacementError as refusal:
            if time.monotonic() >= deadline or not held:
                raise
            if not told:
                told = True
                say(f"waiting for cores ({refusal}): {describe(held)}")
            time.sleep(POLL_SECONDS)
            continue
        if held:
            say(f"other runs hold {len(held)} of this machine's cores; this one takes what is free")
        for note in made.notes:
            say(f"note: {note}")
        return machine, made


class Seats:
    """Seats for planned actors; each distinct start is tried out once."""

    def __init__(self, made: Plan) -> None:
        self._plan = made
        self._launches: dict[Pin, Launch] = {}

    def seat(self, replica: int, role: str) -> tuple[Seat, dict[str, float]]:
        actor = self._plan.actor(replica, role)
        if actor is None:
            raise PlacementError(f"the plan has no {role} for replica {replica}")
        launch = self._launches.get(actor.pin) or self._launches.setdefault(actor.pin, probe(actor.pin))
        return Seat(launch, actor.leases), actor.resources
