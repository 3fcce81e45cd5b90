"""``ray up cluster.yaml`` for two hosts, over ssh, behind a token: what a new user does."""

from __future__ import annotations

import json
import os
import re
import stat
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from two_hosts import ADDRESSES, NAMES, TwoHosts, missing

pytestmark = pytest.mark.slow

FILE = Path(__file__).resolve().parents[2] / "cluster.yaml"
ROWS = 60
LOGS = "/tmp/outrider-0/ray/session_latest/logs"
CLUSTER_SECONDS = 150
SET_UP = ". ~/.outrider/environment"
# Told to look among the running ones: the address that Ray keeps in /tmp/ray may be that of another cluster.
JOIN = 'ray.init("auto", logging_level="ERROR")'
COUNT = f"{sys.executable} -c 'import ray; {JOIN}; print(len(ray.nodes()))' 2>/dev/null"


def rendered(hosts: TwoHosts) -> dict[str, Any]:
    """cluster.yaml with what a user changes; what is installed is this environment, which both hosts see."""
    config: dict[str, Any] = yaml.safe_load(FILE.read_text())
    config["cluster_name"] = f"outrider-{os.getpid()}"
    config["provider"] |= {"head_ip": ADDRESSES[0], "worker_ips": [ADDRESSES[1]]}
    config["auth"] = {"ssh_user": "root", "ssh_private_key": str(hosts.key)}
    del config["file_mounts"]["~/.outrider/wheels"]
    [written] = [command for command in config["setup_commands"] if "environment" in command]
    path = "%s/.outrider/venv/bin"
    assert path in written
    written = written.replace(path, str(hosts.bin)).replace(' "$HOME" >', " >")
    config["setup_commands"] = ["mkdir -p ~/.outrider", written]
    return config


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoHosts]:
    if why := missing():
        pytest.skip(why)
    folder = tmp_path_factory.mktemp("hosts")
    with TwoHosts(folder) as pair:
        made = pair.at_laptop("outrider", "token")
        assert made.returncode == 0, made.stderr
        file = folder / "cluster.yaml"
        file.write_text(yaml.safe_dump(rendered(pair)))
        up = pair.at_laptop("ray", "up", "--yes", "--no-config-cache", str(file), seconds=CLUSTER_SECONDS)
        assert up.returncode == 0, up.stdout + up.stderr
        assert (pair.laptop / ".ray/auth_token").read_text() not in up.stdout + up.stderr
        deadline = time.monotonic() + CLUSTER_SECONDS
        while pair.on(0, f"{SET_UP} && {COUNT}").stdout.split() != ["2"]:
            assert time.monotonic() < deadline, pair.on(0, f"tail -n 9 {LOGS}/monitor*").stdout
            time.sleep(1)
        yield pair


@pytest.fixture(scope="module")
def rows(hosts: TwoHosts) -> Path:
    file = hosts.folder / "rows.jsonl"
    lines = ({"id": f"r{number}", "prompt": f"def f{number}(x):", "max_tokens": 100, "seed": 1} for number in range(ROWS))
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def test_one_job_runs_on_both_hosts(hosts: TwoHosts, rows: Path) -> None:
    job = hosts.folder / "job"
    done = hosts.on(0, f"{SET_UP} && outrider run {rows} -o {job} --address auto --draft none --batch 1", CLUSTER_SECONDS)
    assert done.returncode == 0, done.stderr
    assert "open to other users" not in done.stderr
    told = json.loads((job / "job.json").read_text())
    assert told["summary"]["done"] == ROWS
    assert {each["host"] for each in told["pinning"]} == set(NAMES)
    assert len(told["rows_by_host"]) == 2, told["rows_by_host"]


def test_submitted_it_is_found_again(hosts: TwoHosts, rows: Path) -> None:
    job = hosts.folder / "submitted"
    done = hosts.on(0, f"{SET_UP} && outrider submit {rows} -o {job} --draft none --json --follow", CLUSTER_SECONDS)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[0])["job"] == str(job)
    listed = hosts.on(0, f"{SET_UP} && outrider list")
    assert re.search(rf"^outrider-submitted-\w+-1 +succeeded .* {job}$", listed.stdout, re.M), listed.stdout + listed.stderr
    assert len((job / "results.jsonl").read_text().splitlines()) == ROWS


def test_the_token_is_private_on_every_host(hosts: TwoHosts) -> None:
    files = [home / ".ray/auth_token" for home in (hosts.laptop, *hosts.homes)]
    assert [stat.S_IMODE(file.stat().st_mode) for file in files] == [0o600] * 3
    assert len({file.read_text() for file in files}) == 1
    token = files[0].read_bytes()
    logs = [path for home in hosts.homes for path in (home / "ray").rglob("*") if path.is_file() and not path.is_symlink()]
    assert len(logs) > 10
    assert [path for path in logs if token in path.read_bytes()] == []


def test_rays_folder_is_closed_to_other_users_on_every_host(hosts: TwoHosts) -> None:
    for host in range(2):
        said = hosts.on(host, f"{SET_UP} && outrider doctor")
        assert "/tmp/outrider-0/ray is closed to other users" in said.stdout, said.stdout + said.stderr


def test_without_the_token_nobody_gets_in(hosts: TwoHosts, rows: Path) -> None:
    bare = f"export PATH={hosts.bin}:$PATH HOME={hosts.folder}"
    run = f"outrider run {rows} -o {hosts.folder}/none --address {ADDRESSES[0]}:6379"
    without = hosts.on(0, f"{bare} && {run}")
    assert without.returncode == 2
    assert "there is no token for the cluster in" in without.stderr
    wrong = hosts.on(0, f"{bare} RAY_AUTH_TOKEN={'0' * 64} && {run}")
    assert wrong.returncode == 1
    assert "cannot be joined" in wrong.stderr
    submitted = hosts.on(0, f"{bare} && outrider submit {rows}")
    assert submitted.returncode == 2
    assert "there is no token" in submitted.stderr
