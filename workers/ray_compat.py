"""All that outrider uses of Ray beyond its public interface, in this one place, and looked for before it is used.

What the safety of a job depends on is refused where a Ray lacks it, with a sentence. What only its speed depends on (shared
memory between target and draft) is refused to the caller, who then goes another way and says so.
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
# The longest that Ray puts below its folder, of what is a socket: its session's name ends with a process's number.
LONGEST_PID = 4194304
SOCKETS = ("sockets/plasma_store", "sockets/raylet")
# What the control server and a raylet are called.
SERVERS = ("gcs_server", "raylet")
# An autoscaler and a collector of logs take a third of the time of a start, for nobody. And any free port for the agent:
# Ray's usual one is for the job server of a cluster on this host, which would go without.
SMALL = {"no_monitor": True, "include_log_monitor": False, "dashboard_agent_listen_port": 0}


class Change(NamedTuple):
    """A part of Ray's that is another one while it starts."""

    module: str
    name: str
    purpose: str
    make: Callable[[Any], Any]


def find(module: str, name: str, purpose: str) -> Any:
    """A part of Ray's, or an error that says what it is needed for."""
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


# Ray takes the loopback address for the host's outward one, and then listens on every interface.
LOOPBACK = Change(
    "ray._private.services",
    "resolve_ip_for_localhost",
    "to keep a local Ray on the loopback address",
    lambda _: lambda host: host,
)
SMALLER = Change(
    "ray._private.parameter", "RayParams", "to start no more than a job uses", lambda found: partial(found, **SMALL)
)


def _no_dashboard(node: Any, *_: Any, **__: Any) -> None:
    node._webui_url = ""


NO_DASHBOARD = Change("ray._private.node", "Node.start_api_server", "to start no dashboard", lambda _: _no_dashboard)
# As in a Ray that is installed without them. Its metrics are read by whoever reaches their port, with no token.
NO_METRICS = Change(
    "ray._private.utils",
    "get_dashboard_dependency_error",
    "to keep the metrics of a local Ray from other users",
    lambda _: lambda: "outrider has asked for none",
)
# Ray prints on our standard output, which programs may read, what we say in words of our own; and takes over what is to be
# done when the process is asked to end.
QUIET = (
    Change(
        "ray._private.worker",
        "listen_error_messages",
        "to keep its words off the standard output",
        lambda _: lambda worker, threads_stopped: None,
    ),
    Change("ray._private.utils", "set_sigterm_handler", "to end in its own way", lambda _: lambda handler: None),
)


def _without_the_drivers_folders(serialize: Callable[[Any], bytes]) -> Callable[[Any], bytes]:
    def serialized(job: Any) -> bytes:
        if not isinstance(getattr(job, "_py_driver_sys_path", None), list):
            raise _unsupported("ray.job_config.JobConfig._py_driver_sys_path", OWN_LIBRARIES.purpose)
        job._py_driver_sys_path.clear()
        return serialize(job)

    return serialized


# Ray has its workers look for modules in the driver's working directory first, and where its program lies: a file numpy.py
# there was numpy to them, and none of them came up. What ours need is installed, on this machine and on a cluster's hosts.
OWN_LIBRARIES = Change(
    "ray.job_config",
    "JobConfig._serialize",
    "to keep files of the working directory from being taken for libraries",
    _without_the_drivers_folders,
)


def _in_utf8(command_line: Callable[[], str]) -> Callable[[], str]:
    return lambda: command_line().encode(errors="backslashreplace").decode()


# Ray notes the driver's command line, and does not start where that is not UTF-8, as a path may be.
COMMAND_LINE = Change(
    "ray._private.utils", "get_entrypoint_name", "to start with a path that is not UTF-8 on the command line", _in_utf8
)


# Whoever ends a program asks its whole process group (timeout, a service manager): Ray would be gone before the rows under
# way had ended, or amid its start, which then waits half a minute for it. It ends with whoever has started it anyway.
APART = Change(
    "ray._private.services",
    "ConsolePopen",
    "to keep its servers out of what the program's process group is asked",
    lambda found: partial(found, start_new_session=True),
)


@contextmanager
def changed(*changes: Change) -> Iterator[None]:
    """While Ray starts: what it has no options for. Refused where one of the parts is missing."""
    places = []
    for change in changes:
        owner, _, name = f"{change.module}.{change.name}".rpartition(".")
        before = find(change.module, change.name, change.purpose)
        holder = find(change.module, change.name.rpartition(".")[0], change.purpose) if "." in change.name else None
        places.append((holder or importlib.import_module(owner), name, before, change))
    for holder, name, before, change in places:
        setattr(holder, name, change.make(before))
    try:
        yield
    finally:
        for holder, name, before, _ in places:
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
    """Of the Ray that this process is connected to, on this host."""
    node = find("ray._private.worker", "_global_node", "to look at its folder")
    try:
        return Path(node.get_session_dir_path())
    except AttributeError as error:
        raise _unsupported("ray._private.worker._global_node.get_session_dir_path", "to look at its folder") from error


def session_folder_of(command: Sequence[str]) -> Path | None:
    """Of a raylet with this command line; None where it is no raylet."""
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
    """Do not have Ray wait for its servers when this process ends. Interrupted amid its import, it is not there to wait."""
    if "ray" not in sys.modules:
        return
    atexit.unregister(find("ray._private.worker", "shutdown", "to let go of one that is lost"))


def answers_anybody(address: str) -> bool:
    """Whether a control server talks to one who has no token. In a process of its own: Ray reads its settings once."""
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
    """RayUnsupportedError where this Ray has none of them, or others."""
    purpose = "to pass requests through shared memory"
    channel = find("ray.experimental.channel.shared_memory_channel", "BufferedSharedMemoryChannel", purpose)
    packed = find("ray._private.serialization", "RawSerializedObject", purpose)
    core = find("ray._private.worker", "global_worker.core_worker", purpose)
    for name in ("experimental_channel_put_serialized", "get_objects"):
        if not hasattr(core, name):
            raise _unsupported(f"core_worker.{name}", purpose)
    return Channels(channel, packed, core)


class Buffers:
    """One direction of a pipe: the slots of a channel in turn, written and read by what is below its classes.

    Those look at all slots anew and pack bytes as they would any value, which of a round is a hundredth. The channel has
    to be registered already.
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
        self._channel = channel  # its end would be the slots' end

    def write(self, piece: bytes, timeout: float) -> None:
        self._core.experimental_channel_put_serialized(self._packed(piece), self._written[0], 1, int(1000.0 * timeout))
        self._written.rotate(-1)

    def read(self, timeout: float) -> bytes:
        # Once what was found is let go, the slot may be written again.
        piece: bytes = self._core.get_objects(self._read[0], int(1000.0 * timeout))[0][0].to_pybytes()
        self._read.rotate(-1)
        return piece
