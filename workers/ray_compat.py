"""All that outrider uses of Ray beyond its public interface; each part is looked up before it is used.

Where a Ray lacks a part, RayUnsupportedError names it. The job ends with that sentence where its safety depends on the
part; where only its speed does (shared memory between target and draft), the caller falls back and says so.
"""

from __future__ import annotations

import atexit
import importlib
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from outrider.workers.errors import RayUnsupportedError, first_line

# As pyproject.toml says it. The tests run with both ends of it.
OLDEST, BELOW = "2.52", "2.61"
# The longest paths of sockets below Ray's folder: the session's name, which ends with a process id, and these.
LONGEST_PID = 4194304
SOCKETS = ("sockets/plasma_store", "sockets/raylet")
# The names of the control server and of a raylet in Ray's table of processes.
SERVERS = ("gcs_server", "raylet")
# The autoscaler and the log collector take a third of a start's time and are of no use here. The agent takes any free port:
# Ray's usual one is left to the job server of a cluster on this host.
SMALL = {"no_monitor": True, "include_log_monitor": False, "dashboard_agent_listen_port": 0}


class Replacement(NamedTuple):
    """A function or class of Ray that is replaced by ``make(original)`` while Ray starts; ``purpose`` is for the error."""

    module: str
    name: str
    purpose: str
    make: Callable[[Any], Any]


def find(module: str, name: str, purpose: str) -> Any:
    """A function or class of Ray, or an error that says what it is needed for."""
    try:
        found: Any = importlib.import_module(module)
        for step in name.split("."):
            found = getattr(found, step)
    except (ImportError, AttributeError) as error:
        raise _unsupported(f"{module}.{name}", purpose) from error
    return found


def _unsupported(part: str, purpose: str) -> RayUnsupportedError:
    import ray

    return RayUnsupportedError(
        f"Ray {ray.__version__} has no {part}, which outrider needs {purpose}: install one that it knows, "
        f"pip install 'ray>={OLDEST},<{BELOW}'"
    )


# Ray replaces the loopback address by the host's own, and then listens on every interface.
LOOPBACK = Replacement(
    "ray._private.services",
    "resolve_ip_for_localhost",
    "to keep a local Ray on the loopback address",
    lambda _: lambda host: host,
)
SMALLER = Replacement(
    "ray._private.parameter", "RayParams", "to start no more than a job uses", lambda found: partial(found, **SMALL)
)


def _no_dashboard(node: Any, *_: Any, **__: Any) -> None:
    node._webui_url = ""


NO_DASHBOARD = Replacement("ray._private.node", "Node.start_api_server", "to start no dashboard", lambda _: _no_dashboard)
# As if the packages for metrics were not installed: anybody who reaches their port could read them, without a token.
NO_METRICS = Replacement(
    "ray._private.utils",
    "get_dashboard_dependency_error",
    "to keep the metrics of a local Ray from other users",
    lambda _: lambda: "outrider has asked for none",
)
# Ray prints workers' errors on the standard output, which programs may read, though outrider reports them itself; and it
# replaces the handler of SIGTERM.
QUIET = (
    Replacement(
        "ray._private.worker",
        "listen_error_messages",
        "to keep its words off the standard output",
        lambda _: lambda worker, threads_stopped: None,
    ),
    Replacement("ray._private.utils", "set_sigterm_handler", "to end in its own way", lambda _: lambda handler: None),
)


def _without_the_drivers_folders(serialize: Callable[[Any], bytes]) -> Callable[[Any], bytes]:
    def serialized(job: Any) -> bytes:
        if not isinstance(getattr(job, "_py_driver_sys_path", None), list):
            raise _unsupported("ray.job_config.JobConfig._py_driver_sys_path", OWN_LIBRARIES.purpose)
        job._py_driver_sys_path.clear()
        return serialize(job)

    return serialized


# Ray puts the driver's working directory and its program's folder first on its workers' sys.path: with a file numpy.py
# there no worker came up. What workers import is installed, on this machine and on a cluster's hosts.
OWN_LIBRARIES = Replacement(
    "ray.job_config",
    "JobConfig._serialize",
    "to keep files of the working directory from being taken for libraries",
    _without_the_drivers_folders,
)


def _in_utf8(command_line: Callable[[], str]) -> Callable[[], str]:
    return lambda: command_line().encode(errors="backslashreplace").decode()


# Ray records the driver's command line, and does not start where that is not UTF-8; a path in it may not be.
COMMAND_LINE = Replacement(
    "ray._private.utils", "get_entrypoint_name", "to start with a path that is not UTF-8 on the command line", _in_utf8
)


# A signal to the whole process group (from timeout or a service manager) would end Ray before the unfinished rows are
# saved, or while it starts, which then waits for half a minute. Ray ends with the process that has started it anyway.
APART = Replacement(
    "ray._private.services",
    "ConsolePopen",
    "to keep its servers out of what the program's process group is asked",
    lambda found: partial(found, start_new_session=True),
)


@contextmanager
def replaced(*replacements: Replacement) -> Iterator[None]:
    """Apply these replacements while Ray starts, for what it has no options. An error where one of the parts is missing."""
    found = []
    for replacement in replacements:
        owner, _, name = f"{replacement.module}.{replacement.name}".rpartition(".")
        before = find(replacement.module, replacement.name, replacement.purpose)
        owner_name = replacement.name.rpartition(".")[0]
        holder = find(replacement.module, owner_name, replacement.purpose) if owner_name else None
        found.append((holder or importlib.import_module(owner), name, before, replacement))
    for holder, name, before, replacement in found:
        setattr(holder, name, replacement.make(before))
    try:
        yield
    finally:
        for holder, name, before, _ in found:
            setattr(holder, name, before)


def longest_below_folder() -> int:
    """How many bytes a socket's path has at most below Ray's folder (``--temp-dir``)."""
    session = f"session_{datetime.now():%Y-%m-%d_%H-%M-%S_%f}_{LONGEST_PID}"
    return max(len(f"{session}/{name}") for name in SOCKETS)


class Node(NamedTuple):
    """What ``ray.init`` has started here: the processes by name, the session's folder, and the raylet's sockets."""

    processes: Mapping[str, Sequence[subprocess.Popen[bytes]]]
    session: Path
    sockets: tuple[Path, ...]


def own_node() -> Node:
    purpose = "to notice that Ray has died"
    node = find("ray._private.worker", "_global_node", purpose)
    try:
        processes = {name: [each.process for each in node.all_processes[name]] for name in SERVERS}
        sockets = (Path(node.plasma_store_socket_name), Path(node.raylet_socket_name))
        session = Path(node.get_session_dir_path())
    except (AttributeError, KeyError) as error:
        raise _unsupported(f"ray._private.worker._global_node: {first_line(error)}", purpose) from error
    return Node(processes, session, sockets)


def session_folder() -> Path:
    """The session's folder, on this host, of the Ray that this process is connected to."""
    node = find("ray._private.worker", "_global_node", "to look at its folder")
    try:
        return Path(node.get_session_dir_path())
    except AttributeError as error:
        raise _unsupported("ray._private.worker._global_node.get_session_dir_path", "to look at its folder") from error


def session_folder_of(command: Sequence[str]) -> Path | None:
    """The session's folder of the raylet with this command line; None where it is no raylet."""
    found = _option_of_raylet(command, "--session_dir=")
    return Path(found) if found else None


def control_server_of(command: Sequence[str]) -> str | None:
    """The address that a raylet with this command line belongs to; None where it is no raylet."""
    return _option_of_raylet(command, "--gcs-address=")


def _option_of_raylet(command: Sequence[str], option: str) -> str | None:
    if not command or Path(command[0]).name != "raylet":
        return None
    return next((word.removeprefix(option) for word in command if word.startswith(option)), None)


def forget_at_exit() -> None:
    """Keep Ray from waiting for its servers when this process ends."""
    if "ray" not in sys.modules:
        return
    atexit.unregister(find("ray._private.worker", "shutdown", "to end without waiting for a Ray that is lost"))


def answers_anybody(address: str) -> bool:
    """Whether a control server accepts a client without a token. Needs a process of its own: Ray reads its settings
    once."""
    client = find("ray._raylet", "GcsClient", "to see whether a cluster wants a token")
    from ray.exceptions import AuthenticationError

    try:
        client(address=address)
    except AuthenticationError:
        return False
    except Exception as error:
        if "auth" in str(error).lower():
            return False
        raise
    return True


class Channels(NamedTuple):
    """Ray's mutable objects in shared memory, alpha in Ray: ``open`` is the class of a channel of several slots."""

    open: Any
    packed: Any
    core: Any


def channels() -> Channels:
    """RayUnsupportedError where this Ray lacks a part of them."""
    purpose = "to pass requests through shared memory"
    channel = find("ray.experimental.channel.shared_memory_channel", "BufferedSharedMemoryChannel", purpose)
    packed = find("ray._private.serialization", "RawSerializedObject", purpose)
    core = find("ray._private.worker", "global_worker.core_worker", purpose)
    for name in ("experimental_channel_put_serialized", "get_objects"):
        if not hasattr(core, name):
            raise _unsupported(f"core_worker.{name}", purpose)
    return Channels(channel, packed, core)


class Buffers:
    """One direction of a pipe: the slots of a channel in turn, read and written by the functions below Ray's classes.

    Ray's classes check all slots each time and serialize bytes like any value, which takes a hundredth of a round. The
    channel has to be registered already.
    """

    def __init__(self, channel: Any) -> None:
        parts = channels()
        self._packed, self._core = parts.packed, parts.core
        purpose = "to pass requests through shared memory"
        try:
            self._written = deque(place._writer_ref for place in channel._buffers)
            self._read = deque([place._local_reader_ref] for place in channel._buffers)
        except AttributeError as error:
            raise _unsupported(f"BufferedSharedMemoryChannel: {first_line(error)}", purpose) from error
        self._channel = channel  # kept alive: the slots end with it

    def write(self, piece: bytes, timeout: float) -> None:
        self._core.experimental_channel_put_serialized(self._packed(piece), self._written[0], 1, int(1000.0 * timeout))
        self._written.rotate(-1)

    def read(self, timeout: float) -> bytes:
        # The slot may be written again once the object that get_objects returns is released.
        piece: bytes = self._core.get_objects(self._read[0], int(1000.0 * timeout))[0][0].to_pybytes()
        self._read.rotate(-1)
        return piece
