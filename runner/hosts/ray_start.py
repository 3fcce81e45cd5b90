"""The Ray of a job: one of our own on this machine while the job runs, or an existing cluster."""

from __future__ import annotations

import errno
import os
import re
import secrets
import socket
import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlsplit

import psutil

from outrider.runner.hosts.auth import refuse_unauthenticated
from outrider.runner.hosts.head_watch import SILENCE_SECONDS, Head
from outrider.runner.hosts.limits import OBJECT_STORE_BYTES, check_limits
from outrider.runner.hosts.listeners import beyond_loopback
from outrider.runner.hosts.port_check import answers_within, host_and_port
from outrider.runner.hosts.ray_processes import Descendants, abandon
from outrider.runner.hosts.ray_watch import Lost, OwnRay
from outrider.runner.process_exit import take_back_signals
from outrider.workers import ray_compat
from outrider.workers.errors import JobError, RayLostError, RayUnsupportedError, UsageError, first_line
from outrider.workers.machine import private_folder

LOOPBACK = "127.0.0.1"
# Errors of an interface that is down or has no address.
NO_NETWORK = (errno.ENETUNREACH, errno.ENETDOWN, errno.EHOSTUNREACH, errno.EADDRNOTAVAIL)
LOOPBACK_SECONDS = 5.0
NO_METRICS = {"RAY_enable_metrics_collection": "0"}
# Otherwise Ray starts a worker per core in advance; our actors have command lines of their own and cannot use them.
NONE_IN_ADVANCE = {"RAY_enable_worker_prestart": "0", "RAY_prestart_worker_first_driver": "0"}
# Ray's control server keeps an account of the last 100,000 calls of actors, which nobody reads here: 300 MB after an hour.
NO_ACCOUNT_OF_CALLS = {"RAY_task_events_report_interval_ms": "0"}
# Of each of its logs, of which some grow by 40 MB a day, Ray keeps six times 512 MB otherwise: much for a /tmp in memory.
SHORT_LOGS = {"RAY_ROTATION_MAX_BYTES": str(4 << 20), "RAY_ROTATION_BACKUP_COUNT": "1"}
# Set by `ray job submit`: the working directory and packages of a job, which only that cluster has.
OF_A_SUBMITTED_JOB = "RAY_JOB_CONFIG_JSON_ENV_VAR"
# Part of Ray's messages about servers that have not come up in time.
LATE = "timed out"
# Packages of Ray's metrics agent, which plain `ray` does not install.
METRICS_AGENT = ("aiohttp", "opentelemetry", "prometheus_client")


@contextmanager
def local_ray(
    cores: int,
    resources: dict[str, float],
    metrics_port: int | None = None,
    patience: float = SILENCE_SECONDS,
    actors: int = 1,
) -> Iterator[Lost]:
    """An embedded Ray on the loopback address, guarded by a token of this process; yields a function that tells its loss.

    It is lost when it has not answered for ``patience`` seconds. ``actors``: the number of actors that will run in it.
    """
    if metrics_port is not None and not all(find_spec(module) for module in METRICS_AGENT):
        raise UsageError("--metrics-port: Ray's metrics agent is not installed; pip install 'ray[default]' brings it")
    _check_own_paths()
    check_limits(actors)
    _check_loopback()
    os.environ["RAY_AUTH_MODE"] = "token"
    os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    os.environ.update(NONE_IN_ADVANCE)
    for name, value in (NO_ACCOUNT_OF_CALLS | SHORT_LOGS).items():
        os.environ.setdefault(name, value)
    if metrics_port is None:
        # Ray's metrics port needs no token, so it is off by default.
        os.environ.update(NO_METRICS)
    _quiet()
    # Remove what killed runs have left in the private folder; again at the end, since this run's processes are killed too.
    private_folder.sweep()
    with ExitStack() as stack:
        stack.callback(private_folder.sweep)
        folder = stack.enter_context(private_folder.held_folder(ray_compat.longest_below_folder()))
        descendants = stack.enter_context(Descendants())
        try:
            node, ports = _start(folder, cores, resources, metrics_port)
            if (why := _listens_beyond_loopback(descendants)) is not None:
                raise JobError(f"{why}: Ray was stopped again")
        except BaseException:
            # A Ray that has started in part does not end its own processes.
            descendants.end()
            abandon()
            raise
        own = OwnRay(node, ports, partial(_listens_beyond_loopback, descendants), min(patience, SILENCE_SECONDS))
        try:
            with own:
                yield own.lost
        finally:
            if own.lost() is None:
                import ray

                ray.shutdown()
                descendants.end()
            else:
                descendants.end()
                abandon()


def _check_own_paths() -> None:
    """Refuse an environment whose path Ray misreads: it would wait minutes for servers that it starts by command lines."""
    ray = find_spec("ray")
    for path in (sys.executable, "" if ray is None or ray.origin is None else ray.origin):
        # It puts a path with a space in double quotes, within which both are read as they are.
        if re.search(r"['\\]", path) and not re.search(r"\s", path):
            raise JobError(
                f"Ray cannot be started from {path}, since it misreads an apostrophe or a backslash in a path: install "
                "outrider into an environment whose path has none"
            )


def _check_loopback() -> None:
    """Refuse a machine whose loopback interface is down: Ray would wait minutes for its own servers."""
    try:
        with socket.create_server((LOOPBACK, 0)) as listener:
            socket.create_connection(listener.getsockname(), LOOPBACK_SECONDS).close()
    except OSError as error:
        if error.errno in NO_NETWORK:
            raise JobError(f"this machine's loopback interface is down ({error.strerror}): ip link set lo up") from None
        # Other errors (too many open files, say) are reported later with more detail.


def _start(
    folder: Path, cores: int, resources: dict[str, float], metrics_port: int | None
) -> tuple[ray_compat.Node, dict[str, tuple[str, int]]]:
    import ray

    changes = [ray_compat.APART, ray_compat.LOOPBACK, ray_compat.SMALLER, ray_compat.NO_DASHBOARD]
    changes += [ray_compat.OWN_LIBRARIES, ray_compat.COMMAND_LINE, *ray_compat.QUIET]
    if metrics_port is None:
        changes.append(ray_compat.NO_METRICS)
    try:
        with ray_compat.replaced(*changes), _private_files():
            os.environ.pop(OF_A_SUBMITTED_JOB, None)
            ray.init(
                # Otherwise RAY_ADDRESS in the environment would make Ray join that cluster.
                address="local",
                num_cpus=cores,
                resources=resources,
                include_dashboard=False,
                log_to_driver=False,
                configure_logging=False,
                logging_level="ERROR",
                object_store_memory=OBJECT_STORE_BYTES,
                _node_ip_address=LOOPBACK,
                _metrics_export_port=metrics_port,
                _temp_dir=str(folder),
            )
        take_back_signals()
        # Ray makes it accessible to all users.
        folder.chmod(0o700)
        [node] = ray.nodes()
        address = ray.get_runtime_context().gcs_address
        ports = {"gcs_server": int(address.rpartition(":")[2]), "raylet": int(node["NodeManagerPort"])}
        return ray_compat.own_node(), {name: (LOOPBACK, port) for name, port in ports.items()}
    except RayUnsupportedError:
        raise
    except Exception as error:  # Ray raises no more specific error for a node that does not come up in time
        # On a busy machine its half minute may not be enough: as RayLostError the start is tried again.
        kind = RayLostError if LATE in str(error).lower() else JobError
        raise kind(f"Ray could not be started on this machine: {first_line(error).rstrip('.')}") from error


@contextmanager
def _private_files() -> Iterator[None]:
    """The umask that Ray's processes inherit, so that their files are private; this process's own is restored."""
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)


def _listens_beyond_loopback(descendants: Descendants) -> str | None:
    """Why this Ray is not used, if any of its sockets listens beyond loopback (checked in /proc, whatever was asked)."""
    found = beyond_loopback(process.pid for process in descendants.left())
    if not found:
        return None
    where = ", ".join(sorted({address for _, address in found}))
    return f"Ray {version('ray')} listens beyond the loopback address although it was told not to (at {where})"


@contextmanager
def joined_ray(address: str, patience: float = SILENCE_SECONDS) -> Iterator[Head]:
    """Join an existing cluster; ``auto``: the one that this host is part of. The token must be set (``require_token``)."""
    if "://" in address:
        raise UsageError(
            f"--address: {urlsplit(address).scheme}:// is not joined from outside; run on one of the cluster's hosts with "
            "--address auto, or use outrider submit"
        )
    _quiet()
    if address == "auto":
        asked = os.environ.get("RAY_ADDRESS", "")
        address = asked if asked not in ("", "auto") else own_cluster(_processes())
    try:
        head_at = host_and_port(address)
    except ValueError:
        raise UsageError(f'--address: "{address}" is not HOST:PORT, such as 10.0.0.1:6379, the port of the head') from None
    # Checked here, since Ray would wait for minutes.
    if not answers_within(head_at, patience):
        raise JobError(
            f"--address: no answer from {address} for {patience:g} s; is the cluster up, and is that its head's port?"
        )
    import ray
    from ray.exceptions import RayError

    try:
        with ray_compat.replaced(ray_compat.OWN_LIBRARIES, ray_compat.COMMAND_LINE, *ray_compat.QUIET):
            ray.init(address=address, log_to_driver=False, configure_logging=False, logging_level="ERROR")
        take_back_signals()
    except (RuntimeError, ValueError, OSError, RayError) as error:
        raise JobError(f"--address: the cluster at {address} cannot be joined: {first_line(error)}") from error
    here = ray.get_runtime_context()
    [own] = [node for node in ray.nodes() if node["NodeID"] == here.get_node_id()]
    head = Head(here.gcs_address, own=(own["NodeManagerAddress"], own["NodeManagerPort"]))
    try:
        refuse_unauthenticated(head.address)
        with head:
            yield head
    finally:
        if head.lost() is None and head.answers():
            ray.shutdown()
        else:
            abandon()


def own_cluster(processes: Iterable[tuple[int, list[str]]]) -> str:
    """The address of the cluster that a raylet of this user, or of root, on this host belongs to.

    ``processes``: user and command line. Ray itself would also believe other users' processes and
    /tmp/ray/ray_current_cluster, which any user can write; the server at that address would get the token.
    """
    found = set()
    for user, command in processes:
        address, session = ray_compat.control_server_of(command), ray_compat.session_folder_of(command)
        if user not in (0, os.getuid()) or address is None or session is None:
            continue
        # The embedded Ray of another job is left out.
        if not private_folder.is_held_folder(session.parent):
            found.add(address)
    if len(found) != 1:
        what = f"several run on this host, at {', '.join(sorted(found))}" if found else "no Ray of yours runs on this host"
        raise JobError(f"--address auto: {what}; give the address of the cluster's head, such as --address HOST:6379")
    return found.pop()


def _processes() -> Iterator[tuple[int, list[str]]]:
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            yield process.uids().real, process.cmdline()


def _quiet() -> None:
    # Otherwise Ray hides accelerators from actors that claim none, with a warning at every start.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    # No usage statistics are sent.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
