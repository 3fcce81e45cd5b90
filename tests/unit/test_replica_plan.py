"""Replica plans: each host's paths of the models, and the resources that Ray is asked for."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from sysfs_trees import build

from outrider.runner.planning.placement import plan
from outrider.runner.planning.placement_request import ModelSizes, PlacementRequest
from outrider.runner.planning.replica_plan import ReplicaPlan, ReplicaTemplate, loaded_bytes
from outrider.runner.planning.topology import read_topology
from outrider.workers.machine.pinning import Launch
from outrider.workers.messages import ModelSpec, ReplicaSpec
from outrider.workers.models.model_info import ModelInfo, read_model_info

TARGET = ModelSpec("/here/big", "native", "w8a8", states=(1,))
HEAD = ModelSpec("/here/head", "native", "w8a8", target="/here/big")
THERE = {"/here/big": "/there/big", "/here/head": "/there/head"}


def replica(folder: Path, there: dict[str, str] | None, share: bool = False) -> ReplicaPlan:
    """Of a target and its head, on a host of two cores."""
    machine = read_topology(build(folder, {0: [(0,), (1,)]}))
    made = plan([machine], ModelSizes(1000, 10), PlacementRequest(layout="shared"))
    template = ReplicaTemplate(TARGET, HEAD, ReplicaSpec(batch=1, draft_tokens=2), share_cores=share)
    paths = None if there is None else {machine.host: there}
    [replica_plan] = template.replicas(made, lambda host, pin: Launch(pin, "affinity", (), "python3"), paths)
    return replica_plan


@pytest.mark.parametrize(("there", "folder"), [(None, "/here"), (THERE, "/there")])
def test_a_head_reads_its_target_where_that_lies_on_its_host(
    tmp_path: Path, there: dict[str, str] | None, folder: str
) -> None:
    made = replica(tmp_path, there)
    assert made.draft is not None
    assert (made.target.model.path, made.target.model.target) == (f"{folder}/big", "")
    assert (made.draft.model.path, made.draft.model.target) == (f"{folder}/head", f"{folder}/big")


def test_ray_counts_no_cores_that_runs_share(tmp_path: Path) -> None:
    """The Ray of a cluster is one for all runs: what the first is counted, the second would wait for without end."""
    assert replica(tmp_path / "alone", None).target.options({})["resources"] == {"numa0": 2.0}
    shared = replica(tmp_path / "shared", None, share=True).target
    assert shared.options({})["resources"] == {}
    assert (shared.placement.leases, shared.placement.shared) == (("0", "1"), True)


@pytest.mark.parametrize(
    ("lookup", "suffix", "name"),
    [(False, False, "plain"), (False, True, "no draft model"), (True, False, "no draft model")],
)
def test_without_a_draft_model_no_layout_shares_cores(tmp_path: Path, lookup: bool, suffix: bool, name: str) -> None:
    made = plan([read_topology(build(tmp_path, {0: [(0,), (1,)]}))], ModelSizes(1000), PlacementRequest())
    spec = ReplicaSpec(batch=1, draft_tokens=None, model=False, lookup=lookup, suffix=suffix)
    template = ReplicaTemplate(TARGET, None, spec, movable=True)
    [replica_plan] = template.replicas(made, lambda host, pin: Launch(pin, "affinity", (), "python3"))
    assert [each.name for each in replica_plan.replica_spec.layouts] == [name]


def stored(folder: Path, declared: str, **tensors: np.ndarray) -> ModelInfo:
    folder.mkdir()
    config = {"model_type": "llama", "vocab_size": 100, "max_position_embeddings": 64, "dtype": declared}
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return read_model_info(str(folder), by_headers=True)


@pytest.mark.parametrize("declared", ["float16", "float32"])
def test_a_model_is_as_large_as_its_tensors_say_whatever_its_configuration_does(tmp_path: Path, declared: str) -> None:
    for kind in (np.float16, np.float32):
        model = stored(tmp_path / np.dtype(kind).name, declared, weight=np.zeros((100, 1000), kind))
        assert [loaded_bytes(model, precision) for precision in ("fp32", "bf16", "w4a8")] == [400_000, 200_000, 60_000]
    mixed = stored(tmp_path / "mixed", declared, norm=np.zeros(1000, np.float32), weight=np.zeros((100, 1000), np.float16))
    assert loaded_bytes(mixed, "bf16") == 202_000


def test_what_may_be_codes_is_counted_by_its_bytes(tmp_path: Path) -> None:
    model = stored(tmp_path / "codes", "float32", scale=np.zeros(1000, np.float32), weight=np.zeros((100, 1000), np.uint8))
    assert model.numbers is None
    assert loaded_bytes(model, "fp32") == model.weight_bytes
