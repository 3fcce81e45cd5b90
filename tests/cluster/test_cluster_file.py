"""cluster.yaml, as Ray's own launcher reads it."""

from __future__ import annotations

import json
import re
import stat
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml
from built_once import CliRunner

from outrider.runner.cli.main import app
from outrider.workers.machine.private_folder import SOCKET_PATH_BYTES
from outrider.workers.ray_compat import longest_below_folder

FILE = Path(__file__).resolve().parents[2] / "cluster.yaml"
COMMANDS = ("setup_commands", "head_start_ray_commands", "worker_start_ray_commands")


@pytest.fixture
def config() -> dict[str, Any]:
    return dict(yaml.safe_load(FILE.read_text()))


def test_it_is_valid_for_rays_launcher(config: dict[str, Any]) -> None:
    from ray.autoscaler._private.util import prepare_config, validate_config

    prepared = prepare_config(config)
    validate_config(prepared)
    [kind] = prepared["available_node_types"].values()
    # All hosts are kept: an idle one is not taken away.
    assert kind["min_workers"] == kind["max_workers"] == len(config["provider"]["worker_ips"])
    with pytest.raises(Exception, match="colour"):
        validate_config({**prepared, "colour": 1})


def test_every_key_and_command_is_explained() -> None:
    lines = FILE.read_text().splitlines()
    for before, line in pairwise(lines):
        if re.match(r"  +\w[\w.~/]*: \S|\w+: \S| +- \S", line) and not re.match(r" +- \d+\.", line):
            assert before.strip().startswith("#"), f"not explained: {line}"


def test_a_wheel_replaces_another_build_of_its_version(config: dict[str, Any]) -> None:
    wheel = '"$(ls -t ~/.outrider/wheels/outrider-*.whl | head -n 1)'
    with_extras, alone = [command for command in config["setup_commands"] if "pip install" in command]
    assert with_extras == f'~/.outrider/venv/bin/pip install --quiet {wheel}[cluster]"'
    assert alone == f'~/.outrider/venv/bin/pip install --quiet --no-deps --force-reinstall {wheel}"'


def test_no_host_answers_without_the_token(config: dict[str, Any]) -> None:
    assert any("RAY_AUTH_MODE=token" in command for command in config["setup_commands"])
    for key in COMMANDS[1:]:
        assert all(command.startswith(". ~/.outrider/environment") for command in config[key])
    assert "~/.ray/auth_token" in config["file_mounts"]
    assert all("dashboard-host=127.0.0.1" in c for c in config["head_start_ray_commands"] if "--head" in c)


def test_rays_folder_is_closed_to_other_users(config: dict[str, Any]) -> None:
    for key in COMMANDS[1:]:
        [started] = [command for command in config[key] if "ray start" in command]
        assert '--temp-dir="$(outrider topology --ray-folder)"' in started and "umask 077" in started


def test_the_commands_that_it_calls_are_there() -> None:
    runner = CliRunner()
    folder = Path(runner.invoke(app, ["topology", "--ray-folder"]).stdout.strip())
    assert stat.S_IMODE(folder.stat().st_mode) == stat.S_IMODE(folder.parent.stat().st_mode) == 0o700
    assert len(str(folder)) + 1 + longest_below_folder() <= SOCKET_PATH_BYTES
    resources = json.loads(runner.invoke(app, ["topology", "--ray-resources"]).stdout)
    assert all(re.fullmatch(r"numa\d+", name) and cores >= 1 for name, cores in resources.items())
    labels = runner.invoke(app, ["topology", "--ray-labels"]).stdout.strip()
    assert re.fullmatch(r"outrider/sockets=\d+,outrider/nodes-per-socket=\d+,outrider/instruction-set=[\w.-]+", labels), (
        labels
    )
    from ray._private.label_utils import parse_node_labels_string

    assert len(parse_node_labels_string(labels)) == 3
