"""Reports about hosts of a cluster, made by tasks that run there in the outrider that is installed there."""

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

# Libraries whose versions may change results of the hf engine.
LIBRARIES = ("torch", "transformers")


@dataclass(frozen=True, slots=True)
class FoundModel:
    """A model's path on a host and its digest; ``problem``: why it cannot be used there."""

    path: str = ""
    digest: str = ""
    problem: str = ""


@dataclass(frozen=True, slots=True)
class HostReport:
    """``identity``: the same for Ray nodes with the same folder of leases, which share their cores.

    ``models`` come with a second task.
    """

    hostname: str
    identity: str
    topology: Topology
    held: dict[str, Holder]
    versions: dict[str, str]
    instruction_set: str
    models: dict[str, FoundModel] = field(default_factory=dict)
    # Ray's folder there, if other users of the host can enter it.
    open_folder: str = ""


def report_host(shared: bool) -> HostReport:
    """Runs on the host: everything but the models, which takes no time."""
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
    """Runs on the host: paths and digests of models; reads all bytes of a model whose digest is not cached.

    Nothing is downloaded, since a hundred hosts would download the same.
    """
    os.environ["HF_HUB_OFFLINE"] = "1"
    return {name: _find(name) for name in names}


def answer_sign_of_life() -> None:
    """Runs on the host and does nothing; its result is the sign of life."""


def probe_pins(pins: Sequence[Pin]) -> list[Launch]:
    """Runs on the host: the best launch command that works there, for each pin."""
    return [probe(pin) for pin in pins]


def open_ray_folder() -> str:
    """The folder of the Ray that this process is connected to, if other users can enter it; else ""."""
    session = ray_compat.session_folder()
    return str(session.parent) if open_to_others(session) else ""


def about_open_folder(folder: str) -> tuple[str, str]:
    """What an open folder means, and the commands that close it."""
    return (
        f"Ray's folder {folder} is open to other users of the host, who can read its logs, and remove what a job needs",
        f'chmod 700 {folder}, and later ray start --temp-dir="$(outrider topology --ray-folder)" (cluster.yaml does)',
    )


def labels_of(topology: Topology, is_this_machine: bool) -> dict[str, str]:
    """A host's labels for ``ray start``, for people who look at Ray's nodes; a saved /sys has no instruction set."""
    with_cores = [node for node in topology.nodes if node.cores]
    labels = {
        "outrider/sockets": str(len(topology.sockets)),
        # Some virtual machines report each CPU of a node as a socket.
        "outrider/nodes-per-socket": str(max(1, len(with_cores) // max(1, len(topology.sockets)))),
    }
    return labels | ({"outrider/instruction-set": _instruction_set()} if is_this_machine else {})


def _identity() -> str:
    """The running kernel's boot id, and the folder of leases, which differs between containers on one host."""
    folder = default_folder().stat()
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{boot}:{folder.st_dev}:{folder.st_ino}"


def own_versions() -> dict[str, str]:
    """Version and digest of outrider's code, since builds of one version may differ."""
    return {"outrider": outrider.__version__, "build": _build()}


@cache
def _build() -> str:
    package = Path(outrider.__file__).parent
    files = {path.relative_to(package).as_posix(): path for path in sources(package)}
    # The kernels' sources, not the library: each host may have compiled its own.
    total = hashlib.sha256(_kernel_sources().encode())
    for name, path in sorted(files.items()):
        total.update(f"{name} {hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return total.hexdigest()


def sources(package: Path) -> Iterator[Path]:
    """The package's Python sources; symlinks are followed (editable installs)."""
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
