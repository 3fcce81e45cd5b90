"""The Ray under a job: one of our own on this machine for as long as the job runs, or a cluster that is there already."""

from __future__ import annotations

import errno
import os
import secrets
import socket
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlsplit

import psutil

from outrider.runner.hosts.auth import refuse_open
from outrider.runner.hosts.head_watch import SILENCE_SECONDS, Head
from outrider.runner.hosts.limits import OBJECT_STORE_BYTES, check_limits
from outrider.runner.hosts.listeners import beyond_loopback
from outrider.runner.hosts.port_check import answers_within, host_and_port
from outrider.runner.hosts.ray_processes import Descendants, abandon
from outrider.runner.hosts.ray_watch import Lost, OwnRay
from outrider.workers import ray_compat
from outrider.workers.errors import JobError, RayLostError, RayUnsupportedError, UsageError, first_line
from outrider.workers.machine import private_folder

LOOPBACK = "127.0.0.1"
# What the kernel says of an interface that is down, or has no address.
NO_NETWORK = (errno.ENETUNREACH, errno.ENETDOWN, errno.EHOSTUNREACH, errno.EADDRNOTAVAIL)
LOOPBACK_SECONDS = 5.0
NO_METRICS = {"RAY_enable_metrics_collection": "0"}
# Ray otherwise starts a process a core before any is asked for; ours are started by command lines of their own.
NONE_IN_ADVANCE = {"RAY_enable_worker_prestart": "0", "RAY_prestart_worker_first_driver": "0"}
# By it `ray job submit` asks its own cluster for a working directory and packages, which no other Ray has.
OF_A_SUBMITTED_JOB = "RAY_JOB_CONFIG_JSON_ENV_VAR"
# In what Ray says of parts of it that have not come up in time.
LATE = "timed out"
# What Ray's metrics agent is made of; the plain package comes without.
METRICS_AGENT = ("aiohttp", "opentelemetry", "prometheus_client")


@contextmanager
def local_ray(
    cores: int,
    resources: dict[str, float],
    metrics_port: int | None = None,
    patience: float = SILENCE_SECONDS,
    actors: int = 1,
) -> Iterator[Lost]:
    """An embedded Ray on the loopback address, open only to who has this process's token; and whether it is still there.

    One that has not answered for ``patience`` seconds is lost, and so is one that does not come up in time. So many
    ``actors`` will run in it.
    """
    if metrics_port is not None and not all(find_spec(module) for module in METRICS_AGENT):
        raise UsageError("--metrics-port: Ray's metrics agent is not installed; pip install 'ray[default]' brings it")
    check_limits(actors)
    _check_loopback()
    os.environ["RAY_AUTH_MODE"] = "token"
    os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    os.environ.update(NONE_IN_ADVANCE)
    if metrics_port is None:
        # Whoever reaches the port of the metrics reads them, with no token.
        os.environ.update(NO_METRICS)
    _quiet()
    # What an earlier run has left that was killed; and in the end what this one's processes have, which are killed too.
    private_folder.sweep()
    with ExitStack() as stack:
        stack.callback(private_folder.sweep)
        folder = stack.enter_context(private_folder.held_folder(ray_compat.longest_below_folder()))
        descendants = stack.enter_context(Descendants())
        try:
            node, ports = _start(folder, cores, resources, metrics_port)
            if (why := _heard_elsewhere(descendants)) is not None:
                raise JobError(f"{why}: it has been ended")
        except BaseException:
            # Half started, it cannot end what it has started.
            descendants.end()
            abandon()
            raise
        own = OwnRay(node, ports, partial(_heard_elsewhere, descendants), min(patience, SILENCE_SECONDS))
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


def _check_loopback() -> None:
    """Without it Ray waits for its own servers, for minutes, and then does not say why."""
    try:
        with socket.create_server((LOOPBACK, 0)) as listener:
            socket.create_connection(listener.getsockname(), LOOPBACK_SECONDS).close()
    except OSError as error:
        if error.errno in NO_NETWORK:
            raise JobError(f"this machine's loopback interface is down ({error.strerror}): ip link set lo up") from None
        # Of anything else, such as too many open files, whoever needs it says more.


def _start(
    folder: Path, cores: int, resources: dict[str, float], metrics_port: int | None
) -> tuple[ray_compat.Node, dict[str, tuple[str, int]]]:
    import ray

    changes = [ray_compat.APART, ray_compat.LOOPBACK, ray_compat.SMALLER, ray_compat.NO_DASHBOARD]
    changes += [ray_compat.OWN_LIBRARIES, ray_compat.COMMAND_LINE, *ray_compat.QUIET]
    if metrics_port is None:
        changes.append(ray_compat.NO_METRICS)
    try:
        with ray_compat.changed(*changes), _private_files():
            os.environ.pop(OF_A_SUBMITTED_JOB, None)
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
                _node_ip_address=LOOPBACK,
                _metrics_export_port=metrics_port,
                _temp_dir=str(folder),
            )
        # Ray opens it to all.
        folder.chmod(0o700)
        [node] = ray.nodes()
        address = ray.get_runtime_context().gcs_address
        ports = {"gcs_server": int(address.rpartition(":")[2]), "raylet": int(node["NodeManagerPort"])}
        return ray_compat.own_node(), {name: (LOOPBACK, port) for name, port in ports.items()}
    except RayUnsupportedError:
        raise
    except Exception as error:  # of a node that does not come up in time Ray says nothing more special
        # On a busy machine half a minute, for which it waits, may not be enough: another one may come up.
        kind = RayLostError if LATE in str(error).lower() else JobError
        raise kind(f"Ray could not be started on this machine: {first_line(error).rstrip('.')}") from error


@contextmanager
def _private_files() -> Iterator[None]:
    """Ray's processes make no files that others may read. They inherit it; this process makes its own as the user likes."""
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)


def _heard_elsewhere(descendants: Descendants) -> str | None:
    """Why a Ray is not used that other machines can reach: not what it was asked for counts, but what it does."""
    found = beyond_loopback(process.pid for process in descendants.left())
    if not found:
        return None
    where = ", ".join(sorted({address for _, address in found}))
    return f"Ray {version('ray')} listens beyond the loopback address although it was told not to (at {where})"


@contextmanager
def joined_ray(address: str, patience: float = SILENCE_SECONDS) -> Iterator[Head]:
    """A cluster that runs already: ``auto`` is the one that this host is part of. The token is in place already."""
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
    # Ray would wait for minutes.
    if not answers_within(head_at, patience):
        raise JobError(
            f"--address: nobody has answered at {address} for {patience:g} s; is the cluster up, and that its head's port?"
        )
    import ray
    from ray.exceptions import RayError

    try:
        with ray_compat.changed(ray_compat.OWN_LIBRARIES, ray_compat.COMMAND_LINE, *ray_compat.QUIET):
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
            abandon()


def own_cluster(processes: Iterable[tuple[int, list[str]]]) -> str:
    """The cluster that a raylet of this user, or of root, on this host is part of; processes are user and command line.

    Ray itself would take the word of any user's process, and of /tmp/ray/ray_current_cluster, which any user may have
    written: who answers at that address is told the token.
    """
    found = set()
    for user, command in processes:
        address, session = ray_compat.control_server_of(command), ray_compat.session_folder_of(command)
        if user not in (0, os.getuid()) or address is None or session is None:
            continue
        # Not the embedded Ray of another job.
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
    # Ray otherwise hides accelerators from actors that claim none, with a warning at every start.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    # Nothing of ours reports home.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
