"""The Ray under a job: one of our own on this machine for as long as the job runs, or a cluster that is there already."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from typing import Any
from urllib.parse import urlsplit

from outrider.runner.guard import refuse_open
from outrider.runner.ray_loss import Descendants, Head, Lost, abandon, ended, own_servers
from outrider.workers.errors import JobError, UsageError, first_line

# Where, which name, and what stands there instead.
Change = tuple[Any, str, Any]

OBJECT_STORE_BYTES = 256 << 20
# Ray otherwise starts a process a core before any is asked for; ours are started by command lines of their own.
NONE_IN_ADVANCE = {"RAY_enable_worker_prestart": "0", "RAY_prestart_worker_first_driver": "0"}
# Any free port for the agent: Ray's usual one is for the job server of a cluster on this host, which would go without.
SMALL = {"no_monitor": True, "include_log_monitor": False, "dashboard_agent_listen_port": 0}
# What Ray's metrics agent is made of; the plain package comes without.
METRICS_AGENT = ("aiohttp", "opentelemetry", "prometheus_client")


@contextmanager
def local_ray(cores: int, resources: dict[str, float], metrics_port: int | None = None) -> Iterator[Lost]:
    """An embedded Ray on the loopback address, open only to who has this process's token; and whether it is still there."""
    if metrics_port is not None and not all(find_spec(module) for module in METRICS_AGENT):
        raise UsageError("--metrics-port: Ray's metrics agent is not installed; pip install 'ray[default]' brings it")
    os.environ["RAY_AUTH_MODE"] = "token"
    os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    os.environ.update(NONE_IN_ADVANCE)
    _quiet()
    import ray

    with Descendants() as descendants:
        try:
            _start(ray, cores, resources, metrics_port)
        except KeyboardInterrupt:
            # Half started, it cannot end what it has started.
            descendants.end()
            abandon(ray)
            raise
        servers = own_servers(ray)
        try:
            yield lambda: ended(servers)
        finally:
            if ended(servers):
                descendants.end()
                abandon(ray)
            else:
                ray.shutdown()


def _start(ray: Any, cores: int, resources: dict[str, float], metrics_port: int | None) -> None:
    try:
        with _changed(*_small_and_on_loopback(ray), *_quiet_and_tame(ray)):
            ray.init(
                # Without this, RAY_ADDRESS in the environment would send us to somebody else's cluster.
                address="local",
                num_cpus=cores,
                resources=resources,
                include_dashboard=False,
                log_to_driver=False,
                configure_logging=False,
                logging_level="ERROR",
                object_store_memory=OBJECT_STORE_BYTES,
                _node_ip_address="127.0.0.1",
                _metrics_export_port=metrics_port,
            )
    except Exception as error:  # of a node that does not come up in time Ray says nothing more special
        raise JobError(f"Ray could not be started on this machine: {first_line(error)}") from error


def _small_and_on_loopback(ray: Any) -> list[Change]:
    """Ray takes the loopback address for the host's outward one, and then listens on every interface. And it starts an
    autoscaler, a dashboard's server and a collector of logs, which take half of the time of a start, for nobody.
    """
    services, parameter, node = ray._private.services, ray._private.parameter, ray._private.node

    def no_dashboard(node: Any, *, include_dashboard: bool | None, raise_on_failure: bool) -> None:
        node._webui_url = ""

    return [
        (services, "resolve_ip_for_localhost", lambda host: host),
        (parameter, "RayParams", partial(parameter.RayParams, **SMALL)),
        (node.Node, "start_api_server", no_dashboard),
    ]


def _quiet_and_tame(ray: Any) -> list[Change]:
    """Ray prints on our standard output, which programs may read, what we say in words of our own; and takes over what is
    to be done when the process is asked to end.
    """
    return [
        (ray._private.worker, "listen_error_messages", lambda worker, threads_stopped: None),
        (ray._private.utils, "set_sigterm_handler", lambda handler: None),
    ]


@contextmanager
def _changed(*wished: Change) -> Iterator[None]:
    """While Ray starts: what it has no options for. A Ray that is built otherwise inside starts with all of it."""
    changes = [(where, name, change) for where, name, change in wished if hasattr(where, name)]
    before = [(where, name, getattr(where, name)) for where, name, _ in changes]
    for where, name, change in changes:
        setattr(where, name, change)
    try:
        yield
    finally:
        for where, name, kept in before:
            setattr(where, name, kept)


@contextmanager
def joined_ray(address: str) -> Iterator[Head]:
    """A cluster that runs already: ``auto`` is the one that this host is part of. The token is in place already."""
    if "://" in address:
        raise UsageError(
            f"--address: {urlsplit(address).scheme}:// is not joined from outside; run on one of the cluster's hosts with "
            "--address auto, or use outrider submit"
        )
    _quiet()
    import ray
    from ray.exceptions import RayError

    try:
        with _changed(*_quiet_and_tame(ray)):
            ray.init(address=address, log_to_driver=False, configure_logging=False, logging_level="ERROR")
    except (RuntimeError, ValueError, OSError, RayError) as error:
        raise JobError(f"--address: the cluster at {address} cannot be joined: {first_line(error)}") from error
    here = ray.get_runtime_context()
    [own] = [node for node in ray.nodes() if node["NodeID"] == here.get_node_id()]
    head = Head(here.gcs_address, own=(own["NodeManagerAddress"], own["NodeManagerPort"]))
    try:
        refuse_open(head.address)
        with head:
            yield head
    finally:
        if head.lost() is None and head.answers():
            ray.shutdown()
        else:
            abandon(ray)


def _quiet() -> None:
    # Ray otherwise hides accelerators from actors that claim none, with a warning at every start.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    # Nothing of ours reports home.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
