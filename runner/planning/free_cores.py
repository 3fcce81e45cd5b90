"""Plans on cores that no other run holds, and waits for held ones if need be."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from outrider.runner.planning.placement import Plan, PlannedActor, plan
from outrider.runner.planning.placement_request import ModelSizes, PlacementRequest
from outrider.runner.planning.topology import Topology, read_topology
from outrider.workers.errors import CoresHeldError, PlacementError
from outrider.workers.machine.core_leases import describe, holders
from outrider.workers.machine.pinning import Launch

POLL_SECONDS = 0.5


def plan_on_free_cores(
    sizes: ModelSizes,
    request: PlacementRequest,
    seconds: float,
    say: Callable[[str], None],
    read: Callable[[], Topology] = read_topology,
    sleep: Callable[[float], None] = time.sleep,
    share: bool = False,
) -> Plan:
    """A plan on this host's free cores. If it would fit the host but not its free cores, wait for ``seconds`` at most.

    ``share``: cores of runs with ``--share-cores`` count as free. A plan claims nothing: two runs may plan the same core;
    the second actor finds the core leased, and its driver plans anew.
    """
    machine = read()
    whole = plan([machine], sizes, request)
    deadline = time.monotonic() + seconds
    said = ""
    while True:
        held = holders(shared=share)
        try:
            found = plan([machine.without(held)], sizes, request) if held else whole
        except PlacementError as refusal:
            waiting = describe(held.values())
            if time.monotonic() >= deadline:
                raise CoresHeldError(f"{waiting}; without them: {refusal}") from None
            if waiting != said:
                say(f"waiting: {waiting}")
                said = waiting
            sleep(POLL_SECONDS)
            continue
        if held and found.actors != whole.actors:
            say(f"{describe(held.values())}: this run takes what is free")
        return found


def ray_options(actor: PlannedActor, launch: Launch, variables: Mapping[str, str] | None = None) -> dict[str, Any]:
    """The arguments of ``Actor.options``, without the node affinity of ``actor.host``.

    Ray's CPU count is not used (num_cpus=0), since it does not tell NUMA nodes apart.
    """
    resources = dict(actor.resources)
    return {
        "num_cpus": 0,
        "num_gpus": resources.pop("GPU", 0.0),
        "resources": resources,
        "runtime_env": launch.runtime_env(variables),
        "max_restarts": 0,
    }
