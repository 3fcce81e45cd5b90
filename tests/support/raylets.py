"""A Ray cluster of several raylets on this machine, with a token. It has its own process, since a process reads Ray's
settings once.

Run as a program, this file keeps the cluster and executes commands from its standard input.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil

from outrider.runner.hosts.ray_start import NONE_IN_ADVANCE

START_SECONDS = 60
# A dead raylet, whose port refuses at once, is noticed within two seconds instead of twenty. A living one may take a minute
# to answer, as it may need on a busy machine.
QUICK = {"health_check_period_ms": 500, "health_check_failure_threshold": 3, "health_check_timeout_ms": 60_000}


class Raylets:
    """``address`` is for --address; ``environment`` has the token for processes that join the cluster."""

    def __init__(
        self, count: int, cores: int = 1, token: str | None = None, head_cores: int = 0, dashboard: bool = False
    ) -> None:
        self.token = secrets.token_hex(32) if token is None else token
        self.environment = {**os.environ, "HF_HUB_OFFLINE": "1", "RAY_USAGE_STATS_ENABLED": "0", **NONE_IN_ADVANCE}
        if self.token:
            self.environment |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": self.token}
        else:
            self.environment |= {"RAY_AUTH_MODE": "disabled"}
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(head_cores), str(_free_port() if dashboard else 0)],
            env=self.environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        answer = self._answer()
        self.address: str = answer["address"]
        self.session = Path(answer["session"])
        self.dashboard: str = answer["dashboard"]
        self.nodes: list[str] = []
        for _ in range(count):
            self.add(cores)

    def add(self, cores: int = 1) -> str:
        """Adds a raylet that declares this many cores of NUMA node 0, and returns its number."""
        node = str(self._tell(do="add", cores=cores)["node"])
        self.nodes.append(node)
        return node

    def kill(self, node: str) -> None:
        """Like a power cut of a host: SIGKILL to the raylet and to all processes that it started."""
        self._tell(do="kill", node=node)
        self.nodes.remove(node)

    def kill_head(self, only: str = "") -> None:
        """Like a power cut of the head, after which the cluster's servers do not answer. ``only``: kill one server only."""
        self._tell(do="kill head", only=only)

    @property
    def control_server(self) -> psutil.Process:
        keeper = psutil.Process(self._process.pid)
        [found] = [child for child in keeper.children(recursive=True) if child.name() == "gcs_server"]
        return found

    def _tell(self, **command: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                return dict(json.loads(line))
        raise AssertionError("the process that keeps the raylets has died")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(timeout=START_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def keep(head_cores: int, dashboard_port: int) -> None:
    import ray
    from ray.cluster_utils import Cluster

    def say(**answer: Any) -> None:
        print(json.dumps(answer), flush=True)

    def end(servers: Sequence[Any]) -> None:
        for started in servers:
            server = psutil.Process(started.process.pid)
            for victim in (server, *server.children(recursive=True)):
                victim.kill()

    def resources(cores: int) -> dict[str, float]:
        return {"numa0": float(cores)} if cores else {}

    common: dict[str, Any] = {"num_cpus": 0, "object_store_memory": 80 << 20}
    cluster = Cluster(
        initialize_head=True,
        head_node_args={
            **common,
            "resources": resources(head_cores),
            "include_dashboard": bool(dashboard_port),
            "dashboard_port": dashboard_port,
            "_system_config": QUICK,
        },
    )
    say(
        address=cluster.address,
        session=cluster.head_node.get_session_dir_path(),
        dashboard=f"http://127.0.0.1:{dashboard_port}",
    )
    nodes: dict[str, Any] = {}
    for line in sys.stdin:
        command = json.loads(line)
        if command["do"] == "add":
            node = cluster.add_node(**common, resources=resources(command["cores"]))
            nodes[node.node_id] = node
            say(node=node.node_id)
        elif command["do"] == "kill":
            node = nodes.pop(command["node"])
            end(node.all_processes["raylet"])
            cluster.remove_node(node, allow_graceful=False)
            say(done=True)
        elif command["do"] == "kill head":
            servers = cluster.head_node.all_processes
            end([started for kind, each in servers.items() for started in each if command["only"] in ("", kind)])
            say(done=True)
    cluster.shutdown()
    ray.shutdown()


if __name__ == "__main__":
    keep(int(sys.argv[1]), int(sys.argv[2]))
