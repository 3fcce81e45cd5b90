"""What each host of a cluster says of itself: asked by a task that runs there, in the outrider that is installed there."""

from __future__ import annotations

import hashlib
import os
import platform
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import outrider
from outrider.runner.planning.topology import Topology, read_topology
from outrider.workers import ray_compat
from outrider.workers.errors import ModelError
from outrider.workers.machine.core_leases import Holder, default_folder, holders
from outrider.workers.machine.pinning import Launch, Pin, probe
from outrider.workers.machine.private_folder import open_to_others

# What may decide a bit of a result on the hf engine.
LIBRARIES = ("torch", "transformers")


@dataclass(frozen=True, slots=True)
class FoundModel:
    """Where a model lies on a host, and a digest of it; ``problem`` says why it is of no use there."""

    path: str = ""
    digest: str = ""
    problem: str = ""


@dataclass(frozen=True, slots=True)
class HostReport:
    """``identity`` is the same for all Ray nodes that hold their leases in the same folder: they share their cores.

    ``models`` are told later than the rest.
    """

    hostname: str
    identity: str
    topology: Topology
    held: dict[str, Holder]
    versions: dict[str, str]
    instruction_set: str
    models: dict[str, FoundModel] = field(default_factory=dict)
    # Ray's folder there, if other users of the host can get into it.
    open_folder: str = ""


def look(shared: bool) -> HostReport:
    """Runs on the host, and is quick."""
    return HostReport(
        hostname=socket.gethostname(),
        identity=_identity(),
        topology=read_topology(),
        held=holders(shared=shared),
        versions={**own_versions(), "python": platform.python_version(), **_libraries()},
        instruction_set=_instruction_set(),
        open_folder=open_ray_folder(),
    )


def find_models(names: Sequence[str]) -> dict[str, FoundModel]:
    """Runs on the host: reads every byte of models that nothing remembers.

    Nothing is fetched from a hub here: a hundred hosts would all fetch the same.
    """
    os.environ["HF_HUB_OFFLINE"] = "1"
    return {name: _find(name) for name in names}


def alive() -> None:
    """Runs on the host, if it is there."""


def try_out(pins: Sequence[Pin]) -> list[Launch]:
    """Runs on the host: the best start for each pin that works there."""
    return [probe(pin) for pin in pins]


def open_ray_folder() -> str:
    """The folder of the Ray that this process is connected to, if other users can get into it; else nothing."""
    session = ray_compat.session_folder()
    return str(session.parent) if open_to_others(session) else ""


def about_open_folder(folder: str) -> tuple[str, str]:
    """What it means, and what mends it at once and for good."""
    return (
        f"Ray's folder {folder} is open to other users of the host, who can read its logs, and remove what a job needs",
        f'chmod 700 {folder}, and later ray start --temp-dir="$(outrider topology --ray-folder)" (cluster.yaml does)',
    )


def labels_of(topology: Topology, is_this_machine: bool) -> dict[str, str]:
    """What a host says of itself beyond its resources, for people who look at Ray's nodes.

    A saved /sys does not tell which instruction set its machine has.
    """
    with_cores = [node for node in topology.nodes if node.cores]
    labels = {
        "outrider/sockets": str(len(topology.sockets)),
        # Some virtual machines say that each of a node's CPUs is a socket.
        "outrider/nodes-per-socket": str(max(1, len(with_cores) // max(1, len(topology.sockets)))),
    }
    return labels | ({"outrider/instruction-set": _instruction_set()} if is_this_machine else {})


def _identity() -> str:
    """The kernel that runs here, and the file system that the leases lie on: containers may have one of their own."""
    folder = default_folder().stat()
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{boot}:{folder.st_dev}:{folder.st_ino}"


def own_versions() -> dict[str, str]:
    """Which outrider this is. Builds of one version may differ, so its code is digested, too."""
    return {"outrider": outrider.__version__, "build": _build()}


@cache
def _build() -> str:
    package = Path(outrider.__file__).parent
    files = {path.relative_to(package).as_posix(): path for path in sources(package)}
    # Each host may have compiled the same kernels for itself.
    total = hashlib.sha256(_kernel_sources().encode())
    for name, path in sorted(files.items()):
        total.update(f"{name} {hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return total.hexdigest()


def sources(package: Path) -> Iterator[Path]:
    """Its Python sources, also behind the links of an editable install."""
    for folder, _, names in os.walk(package, followlinks=True):
        yield from (Path(folder, name) for name in names if name.endswith(".py"))


def _kernel_sources() -> str:
    from outrider.kernels import library

    try:
        return library.sources()
    except library.KernelsUnavailable:
        return "none"


def _find(name: str) -> FoundModel:
    from outrider.workers.models.model_info import read_model_info

    try:
        model_info = read_model_info(name)
    except ModelError as error:
        return FoundModel(problem=str(error))
    return FoundModel(model_info.path, model_info.digest)


def _libraries() -> dict[str, str]:
    found = {}
    for name in LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "none"
    return found


def _instruction_set() -> str:
    from outrider.kernels import library

    try:
        return library.float_instruction_set()
    except (library.KernelsUnavailable, library.KernelError):
        return "none"
