"""Jobs over several raylets: hosts that are there, that die, that join, and that are not to be trusted."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from command_line import (
    children_titled,
    described,
    finish,
    known,
    outrider,
    rows_done,
    start,
    stop,
    targets_standing_still,
    wait_for,
    wait_for_rows,
)
from raylets import Raylets

from outrider.runner.hosts.head_watch import Head
from outrider.workers.models.model_info import POCKET, find

pytestmark = pytest.mark.slow

# No draft, since a start costs the most; one row at a time, so that a job of few tokens takes a while.
TARGET = "ray::TargetActor"
NOBODY = ("127.0.0.1", 0)
PLAIN = ("--draft", "none", "--batch", "1")


def run(
    raylets: Raylets, rows: Path, job: Path, *options: object, environment: dict[str, str] | None = None
) -> subprocess.Popen[str]:
    """The rows on these raylets, by somebody who has the token."""
    words = ("run", rows, "-o", job, "--address", raylets.address, *options)
    return start(*words, environment=raylets.environment if environment is None else environment)


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows enough that a host can come and go under way, on a busy machine too."""
    return written(tmp_path_factory.mktemp("rows") / "rows.jsonl", 60)


def written(file: Path, rows: int) -> Path:
    lines = ({"id": f"r{number}", "prompt": f"def f{number}(x):", "max_tokens": 150, "seed": 1} for number in range(rows))
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


@pytest.fixture(scope="module")
def undisturbed(rows: Path) -> bytes:
    """The same rows on this machine alone."""
    job = rows.parent / "undisturbed"
    done = outrider("run", rows, "-o", job, "--draft", "none")
    assert done.returncode == 0, done.stderr
    return (job / "results.jsonl").read_bytes()


@pytest.fixture(scope="module")
def pair() -> Iterator[Raylets]:
    with Raylets(2) as raylets:
        yield raylets


def test_a_job_runs_on_two_hosts_and_keeps_the_token_to_itself(
    pair: Raylets, rows: Path, undisturbed: bytes, tmp_path: Path
) -> None:
    output = finish(run(pair, rows, tmp_path / "job", *PLAIN))
    assert (tmp_path / "job/results.jsonl").read_bytes() == undisturbed
    told = described(tmp_path / "job")
    assert {each["node"] for each in told["pinning"]} == set(pair.nodes)
    cores = [tuple(each["cores"]) for each in told["pinning"]]
    assert len(set(cores)) == len(cores) == 2, "two raylets of one machine must not share a core"
    assert len(told["rows_by_host"]) == 2
    ray_nodes = [tmp_path / "job", pair.session]
    written = [path for ray_node in ray_nodes for path in ray_node.rglob("*") if path.is_file() and not path.is_symlink()]
    assert any(path.suffix in (".log", ".out") for path in written)
    # Where Ray puts itself.
    assert f"Ray's folder {pair.session.parent} is open to other users of the host" in output
    assert pair.token not in output
    assert [path for path in written if pair.token.encode() in path.read_bytes()] == []


def test_a_host_that_dies_takes_no_row_with_it_and_one_that_joins_gets_some(
    pair: Raylets, rows: Path, undisturbed: bytes, tmp_path: Path
) -> None:
    job = tmp_path / "job"
    process = run(pair, rows, job, *PLAIN)
    wait_for_rows(process, job, 4)
    pair.kill(pair.nodes[0])
    wait_for(process, lambda: len(children_titled(os.getpid(), TARGET)) == 1, "end of that host's target")
    with targets_standing_still(os.getpid()):
        joined = pair.add()
        wait_for(process, lambda: len(children_titled(os.getpid(), TARGET)) == 2, "target on the new host")
    output = finish(process)
    assert (job / "results.jsonl").read_bytes() == undisturbed
    told = described(job)
    assert told["summary"]["target_deaths"] == 0, "a host that leaves is nobody's fault"
    assert "has left: its rows go elsewhere" in output
    assert "has joined the job" in output
    assert joined in {each["node"] for each in told["pinning"]}
    assert any(joined[:6] in host for host in told["rows_by_host"]), told["rows_by_host"]


def test_four_hosts_share_two_cores_when_asked(pair: Raylets, rows: Path, undisturbed: bytes, tmp_path: Path) -> None:
    while len(pair.nodes) < 4:
        pair.add()
    job = tmp_path / "job"
    process = run(pair, rows, job, "--share-cores", "--replicas", "4", *PLAIN)
    wait_for(process, lambda: len(known(job, "pinning") or ()) == 4, "replica on each of four hosts")
    pair.kill(pair.nodes[1])
    output = finish(process)
    assert (job / "results.jsonl").read_bytes() == undisturbed
    told = described(job)
    assert len({each["node"] for each in told["pinning"]}) == 4, output
    assert told["summary"]["target_deaths"] == 0


def test_a_job_whose_head_dies_goes_on_with_the_other_hosts(rows: Path, undisturbed: bytes, tmp_path: Path) -> None:
    with Raylets(1, head_cores=1) as raylets:
        job = tmp_path / "job"
        process = run(raylets, rows, job, *PLAIN)
        wait_for(process, lambda: len(known(job, "pinning") or ()) == 2, "replica on each of two hosts")
        # What is left is done before the head has been silent for too long, on a slow machine too.
        wait_for_rows(process, job, 44)
        raylets.kill_head()
        finish(process)
    assert (job / "results.jsonl").read_bytes() == undisturbed
    assert described(job)["summary"]["target_deaths"] == 0


def test_a_head_that_was_stopped_does_not_answer_who_knocks(pair: Raylets) -> None:
    head = Head(pair.address, own=NOBODY)
    assert head.answers()
    stop(pair.control_server)
    try:
        assert not head.answers() and head.silent
    finally:
        pair.control_server.resume()
    assert head.answers() and not head.silent


def test_a_job_whose_own_raylet_dies_says_so_and_keeps_its_rows(tmp_path: Path) -> None:
    with Raylets(1, head_cores=1) as raylets:
        job = tmp_path / "job"
        # More than can be done before all of them stand still.
        process = run(raylets, written(tmp_path / "rows.jsonl", 1000), job, *PLAIN)
        wait_for(process, lambda: len(known(job, "pinning") or ()) == 2, "replica on each of two hosts")
        wait_for_rows(process, job, 4)
        # Else they might all be done before that is noticed.
        with targets_standing_still(os.getpid()):
            raylets.kill_head(only="raylet")
            output = finish(process, 1)
    assert "outrider: Ray on this host has died" in output
    assert "the same command goes on with them once it is there again" in output
    assert rows_done(job) >= 4


def test_without_the_token_nobody_joins(pair: Raylets, rows: Path, tmp_path: Path) -> None:
    nobody = {name: value for name, value in pair.environment.items() if name != "RAY_AUTH_TOKEN"} | {"HOME": str(tmp_path)}
    output = finish(run(pair, rows, tmp_path / "a", environment=nobody), 2)
    assert "there is no token for the cluster in" in output
    stranger = pair.environment | {"RAY_AUTH_TOKEN": "0" * 64}
    output = finish(run(pair, rows, tmp_path / "b", environment=stranger), 1)
    assert f"the cluster at {pair.address} cannot be joined" in output


def test_a_cluster_that_answers_to_anybody_is_refused(rows: Path, tmp_path: Path) -> None:
    with Raylets(0, token="", head_cores=1) as careless:
        mine = {**careless.environment, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "1" * 64}
        output = finish(run(careless, rows, tmp_path / "job", environment=mine), 1)
    assert "answers without a token" in output


def test_a_host_without_the_weights_is_named_before_the_job_starts(pair: Raylets, rows: Path, tmp_path: Path) -> None:
    hub = tmp_path / "hub/models--nobody--tiny"
    shutil.copytree(find(POCKET), hub / "snapshots/1")
    (hub / "refs").mkdir()
    (hub / "refs/main").write_text("1")
    # The driver finds the model in a cache that the raylets do not know.
    mine = pair.environment | {"HF_HUB_CACHE": str(tmp_path / "hub")}
    output = finish(run(pair, rows, tmp_path / "job", "-m", "nobody/tiny", "--draft", "none", environment=mine), 1)
    hosts = len(pair.nodes)
    assert f"{hosts} of {hosts} hosts cannot take part in this job:" in output
    assert output.count('lacks the weights: "nobody/tiny" is neither a directory nor in the local cache') == hosts
    assert "rows accepted; results will be in" in output
    assert rows_done(tmp_path / "job") == 0
