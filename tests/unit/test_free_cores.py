"""Runs that want the same cores: in simulation, and with live actors of Ray."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sysfs_trees import build

from outrider.runner.planning import free_cores
from outrider.runner.planning.free_cores import plan_on_free_cores, ray_options
from outrider.runner.planning.placement import Plan, plan
from outrider.runner.planning.placement_request import ModelSizes, PlacementRequest
from outrider.runner.planning.topology import ray_resources, read_topology
from outrider.workers.errors import CoresHeldError, PlacementError, WorkerError
from outrider.workers.machine.core_leases import Holder, claim, describe, holders
from outrider.workers.machine.pin_check import PinningReport
from outrider.workers.machine.pinning import Launch, Pin, probe

SMALL = ModelSizes(1000, 100)


@pytest.fixture
def others(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Holder]]:
    """What other runs hold, look after look; the last answer stays."""
    looks: list[dict[str, Holder]] = [{}]
    monkeypatch.setattr(free_cores, "holders", lambda shared: looks.pop(0) if len(looks) > 1 else looks[0])
    return looks


def planned(tmp_path: Path, request: PlacementRequest, seconds: float = 1000.0) -> tuple[Plan, list[str]]:
    tree = build(tmp_path, {0: [(0,), (1,)]})
    said: list[str] = []
    made = plan_on_free_cores(SMALL, request, seconds, said.append, lambda: read_topology(tree), lambda _: None)
    return made, said


def test_an_empty_machine_is_taken_without_a_word(tmp_path: Path, others: list[dict[str, Holder]]) -> None:
    made, said = planned(tmp_path, PlacementRequest())
    assert [actor.cores for actor in made.actors] == [(1,), (0,)]
    assert said == []


def test_what_is_free_is_taken_and_said(tmp_path: Path, others: list[dict[str, Holder]]) -> None:
    others[:] = [{"0": Holder("0", 77)}]
    made, said = planned(tmp_path, PlacementRequest())
    assert made.actors[0].cores == (1,)
    assert said == ["core 0 is held by process 77: this run takes what is free"]


def test_a_run_queues_for_cores_and_says_so_once(tmp_path: Path, others: list[dict[str, Holder]]) -> None:
    both = {"0": Holder("0", 77), "1": Holder("1", 77)}
    others[:] = [both, both, both, {}]
    made, said = planned(tmp_path, PlacementRequest(replicas=2))
    assert made.replicas == 2
    assert said == ["waiting: cores 0-1 are held by process 77"]


def test_holders_in_words() -> None:
    held = {name: Holder(name, pid) for name, pid in (("9", 5), ("8", 5), ("cuda-0", 5), ("3", 0))}
    assert describe(held.values()) == "core 3 is held by another process; cores 8-9 and cuda:0 are held by process 5"


def test_waiting_has_an_end(tmp_path: Path, others: list[dict[str, Holder]]) -> None:
    others[:] = [{"0": Holder("0", 77)}]
    with pytest.raises(
        CoresHeldError, match=r"held by process 77; without them: 2 replicas need 2 cores, there are 1"
    ) as held:
        planned(tmp_path, PlacementRequest(replicas=2), 0.0)
    assert held.value.exit_code == 1, "later the same command can run"


def test_what_could_never_be_is_not_waited_for(tmp_path: Path, others: list[dict[str, Holder]]) -> None:
    others[:] = [{"0": Holder("0", 77)}]
    with pytest.raises(PlacementError, match="there are 2") as never:
        planned(tmp_path, PlacementRequest(replicas=3))
    assert never.value.exit_code == 2


def test_what_ray_is_asked_for() -> None:
    made = plan([read_topology()], SMALL, PlacementRequest(replicas=1))
    options = ray_options(made.actors[0], Launch(made.actors[0].pin, "affinity", (), "python"), {"A": "1"})
    assert options["num_cpus"] == 0
    assert options["num_gpus"] == 0.0
    assert options["max_restarts"] == 0
    assert sum(options["resources"].values()) == len(made.actors[0].cores)
    assert options["runtime_env"]["env_vars"]["A"] == "1"


@pytest.fixture(scope="module")
def ray_here() -> Iterator[Any]:
    import ray

    resources = ray_resources(read_topology())
    ray.init(
        address="local",
        num_cpus=2,
        resources=resources,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
    )
    yield ray
    ray.shutdown()


def sitter() -> type:
    """An actor that does nothing but sit on its cores. Made here, so that Ray carries it whole: it cannot import a test."""

    class Sitter:
        def sit(self, launch: Launch, leases: tuple[str, ...]) -> PinningReport:
            from outrider.workers.machine.pin_check import pin_process

            return pin_process(launch, leases)

    return Sitter


@pytest.mark.slow
@pytest.mark.ray
def test_live_replicas_each_hold_a_core_of_their_own_until_they_are_killed(ray_here: Any) -> None:
    machine = read_topology()
    if len(machine.usable_cores) < 2 or holders():
        pytest.skip("two free cores are needed")
    made = plan([machine], ModelSizes(1000), PlacementRequest(per="machine", replicas=2))
    actors, found = [], []
    for actor in made.actors:
        launch = probe(actor.pin)
        handle = ray_here.remote(sitter()).options(**ray_options(actor, launch)).remote()
        actors.append(handle)
        found.append(ray_here.get(handle.sit.remote(launch, actor.leases), timeout=60.0))
    for actor, pinned in zip(made.actors, found, strict=True):
        lines = Path(f"/proc/{pinned.pid}/status").read_text().splitlines()
        status = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
        assert status["Cpus_allowed_list"] == ",".join(map(str, actor.cores))
        assert pinned.cores == actor.cores
    first, second = made.actors
    assert holders() == {
        **{lease: Holder(lease, found[0].pid) for lease in first.leases},
        **{lease: Holder(lease, found[1].pid) for lease in second.leases},
    }
    with pytest.raises(WorkerError, match=f"held by process {found[0].pid}"):
        claim(first.leases)
    os.kill(found[0].pid, signal.SIGKILL)
    with claim(first.leases, 30.0):
        assert holders(second.leases)


@pytest.mark.slow
@pytest.mark.ray
def test_a_second_actor_on_a_held_core_says_who_holds_it(ray_here: Any) -> None:
    core = read_topology().usable_cores[-1]
    launch = probe(Pin((core.allowed[0],), (core.node,), 1))
    with claim([str(core.identity)], 30.0):
        handle = ray_here.remote(sitter()).options(num_cpus=0, runtime_env=launch.runtime_env()).remote()
        with pytest.raises(WorkerError, match=f"held by process {os.getpid()}"):
            ray_here.get(handle.sit.remote(launch, (str(core.identity),)), timeout=60.0)
