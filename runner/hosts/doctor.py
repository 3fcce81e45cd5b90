"""``outrider doctor``: checks of this machine's setup, each with a command that would improve it."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from outrider.runner.counted import counted
from outrider.runner.hosts.auth import has_token, token_file
from outrider.runner.hosts.host_report import about_open_folder
from outrider.runner.hosts.limits import LEAST_SHARED_BYTES, too_low
from outrider.runner.planning import sysfs
from outrider.runner.planning.allowance import available_bytes
from outrider.runner.planning.topology import Topology, read_topology
from outrider.workers import ray_compat
from outrider.workers.errors import OutriderError, UsageError
from outrider.workers.machine import core_leases as leases
from outrider.workers.machine import pin_check, pinning
from outrider.workers.machine.private_folder import open_to_others
from outrider.workers.models import ipex
from outrider.workers.models.packed_cache import cache_directory, chosen_limit

OK, BETTER, WRONG = "ok", "could be better", "wrong"
# Ray's object store is in /dev/shm; with less it falls back to the disk.
SHARED_MEMORY_BYTES = 1 << 30
# A smaller share of free memory is reported, since plans count on all of it.
MUCH_MEMORY = 0.5


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the output: subject, state, finding, and what to do about it ("" if nothing)."""

    name: str
    state: str
    found: str
    mend: str = ""


@dataclass(frozen=True, slots=True)
class MachineFiles:
    """The files that are read; tests use other ones."""

    topology: Topology
    sys: Path = Path("/sys")
    proc: Path = Path("/proc")
    shared_memory: Path = Path("/dev/shm")


def examine(files: MachineFiles | None = None) -> list[Check]:
    """Run all checks; a check that raises becomes a line that says so."""
    try:
        machine = files or MachineFiles(read_topology())
    except OutriderError as failure:
        return [Check("machine", WRONG, str(failure), "mount sysfs at /sys")]
    found = []
    for check in CHECKS:
        try:
            found += list(check(machine))
        except Exception as failure:
            name = check.__name__.strip("_").replace("_", " ")
            found.append(Check(name, BETTER, f"could not be looked at: {failure}"))
    return found


def _machine(files: MachineFiles) -> Iterator[Check]:
    machine = files.topology
    count = f"{len(machine.usable_cores)} of {len(machine.cores)} physical cores usable"
    count += f", {counted(len(machine.nodes), 'NUMA node')}"
    if machine.warnings:
        yield Check("machine", BETTER, f"{count}; {'; '.join(machine.warnings)}", "outrider topology")
    else:
        yield Check("machine", OK, count)


def _numactl(files: MachineFiles) -> Iterator[Check]:
    path = shutil.which("numactl")
    if path is None:
        yield Check("numactl", BETTER, "not installed: memory cannot be bound", "sudo apt-get install numactl")
        return
    core = files.topology.usable_cores[0]
    node = next((node.id for node in files.topology.nodes if node.has_memory), core.node)
    launch = pinning.probe(pinning.Pin((core.allowed[0],), (node,), 1))
    if launch.level == "membind":
        yield Check("numactl", OK, f"{path} binds cores and memory")
    else:
        mend = "docker run --cap-add SYS_NICE, or a seccomp profile that allows set_mempolicy"
        yield Check("numactl", BETTER, "; ".join(launch.warnings), mend)


def _libnuma(files: MachineFiles) -> Iterator[Check]:
    if pin_check.libnuma() is None:
        yield Check("libnuma", BETTER, "not installed: the memory policy cannot be proved", "sudo apt-get install libnuma1")
    elif importlib.util.find_spec("numa") is None:
        yield Check("libnuma", OK, "found (py-libnuma is not installed, and not needed)")
    else:
        yield Check("libnuma", OK, f"found, py-libnuma {importlib.metadata.version('py-libnuma')}")


def _preloads(files: MachineFiles) -> Iterator[Check]:
    mends = {
        "tcmalloc": "sudo apt-get install libtcmalloc-minimal4",
        "libiomp5": "pip install intel-openmp",
    }
    losses = {"tcmalloc": "allocation is slower with many threads", "libiomp5": "torch uses its own OpenMP"}
    for name, mend in mends.items():
        path = pinning.find_library(name)
        yield Check(name, OK, path) if path else Check(name, BETTER, f"not found: {losses[name]}", mend)


def _huge_pages(files: MachineFiles) -> Iterator[Check]:
    file = files.sys / "kernel/mm/transparent_hugepage/enabled"
    chosen = re.search(r"\[(\w+)\]", sysfs.read_text(file) or "")
    mend = "echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled"
    if chosen is None and file.parents[1].is_dir() and not file.parent.exists():
        yield Check("huge pages", BETTER, "this kernel has no transparent huge pages: more time goes into page tables")
    elif chosen is None:
        yield Check("huge pages", BETTER, f"not known: {file} cannot be read (a sandbox may hide it)")
    elif chosen[1] == "never":
        yield Check("huge pages", BETTER, "switched off: weights lie in pages of 4 KiB", mend)
    else:
        yield Check("huge pages", OK, f"transparent huge pages: {chosen[1]}")


def _governor(files: MachineFiles) -> Iterator[Check]:
    paths = sorted((files.sys / "devices/system/cpu").glob("cpu[0-9]*/cpufreq/scaling_governor"))
    governors = sorted({text for path in paths if (text := sysfs.read_text(path))})
    if not governors:
        yield Check("CPU governor", OK, "not ours to set (a virtual machine, or no frequency scaling)")
    elif governors == ["performance"]:
        yield Check("CPU governor", OK, "performance")
    else:
        yield Check("CPU governor", BETTER, ", ".join(governors), "sudo cpupower frequency-set -g performance")


def _siblings(files: MachineFiles) -> Iterator[Check]:
    width = max(len(core.cpus) for core in files.topology.cores)
    found = "one thread a core" if width == 1 else f"up to {width} threads a core; one is used, the others are left idle"
    yield Check("SMT", OK, found)


def _numa_balancing(files: MachineFiles) -> Iterator[Check]:
    if len(files.topology.nodes) > 1 and sysfs.read_int(files.proc / "sys/kernel/numa_balancing"):
        found = "on: the kernel keeps unmapping pages to see who uses them"
        yield Check("NUMA balancing", BETTER, found, "sudo sysctl kernel.numa_balancing=0")


def _container(files: MachineFiles) -> Iterator[Check]:
    machine = files.topology
    limits = []
    if len(machine.usable_cores) < len(machine.cores):
        cpus = sysfs.format_list(cpu for core in machine.usable_cores for cpu in core.allowed)
        limits.append(f"CPUs {cpus}")
    if machine.memory_limit_bytes is not None:
        limits.append(f"{machine.memory_limit_bytes / 1e9:.1f} GB of memory")
    if machine.cpu_quota is not None and machine.cpu_quota < len(machine.usable_cores):
        found = f"{machine.cpu_quota:g} CPUs' worth of time on {len(machine.usable_cores)} cores: threads get paused"
        yield Check("container", BETTER, found, "docker run --cpuset-cpus=..., instead of --cpus")
    elif limits:
        yield Check("container", OK, f"limited to {', '.join(limits)}")
    else:
        yield Check("container", OK, "no limits")


def _memory(files: MachineFiles) -> Iterator[Check]:
    total = sum(node.memory_bytes or 0 for node in files.topology.nodes)
    free = available_bytes(files.proc)
    if not total or free is None:
        yield Check("memory", BETTER, "the machine does not tell how much it has, or how much of it is free")
        return
    found = f"{free / 1e9:.1f} GB free of {total / 1e9:.1f}"
    if free < total * MUCH_MEMORY:
        yield Check("memory", BETTER, f"{found}: plans count on all of it", "end what uses the rest, or plan for less")
    else:
        yield Check("memory", OK, found)


def _shared_memory(files: MachineFiles) -> Iterator[Check]:
    if not files.shared_memory.is_dir():
        yield Check("shared memory", WRONG, f"{files.shared_memory} is missing", "sudo mount -t tmpfs tmpfs /dev/shm")
        return
    if not os.access(files.shared_memory, os.W_OK | os.X_OK):
        found = f"{files.shared_memory} cannot be written: no job can be started"
        yield Check("shared memory", WRONG, found, "sudo mount -o remount,rw,mode=1777 /dev/shm")
        return
    free = shutil.disk_usage(files.shared_memory).free
    if free < LEAST_SHARED_BYTES:
        found = f"{free >> 10:,} KiB free in {files.shared_memory}: a job's processes cannot start, or die"
        yield Check("shared memory", WRONG, found, "remove what lies there, or docker run --shm-size=4g")
        return
    state, mend = (OK, "") if free >= SHARED_MEMORY_BYTES else (BETTER, "docker run --shm-size=4g")
    yield Check("shared memory", state, f"{free / 1e9:.1f} GB free in {files.shared_memory}", mend)


def _limits(files: MachineFiles) -> Iterator[Check]:
    # A target and a draft.
    low = too_low(actors=2)
    if low is None:
        yield Check("limits", OK, "enough open files, address space and threads for a job")
    else:
        yield Check("limits", WRONG, low.sentence.partition("; ")[0], low.command)


def _packed_weights(files: MachineFiles) -> Iterator[Check]:
    try:
        folder, limit = cache_directory(), chosen_limit()
    except UsageError as refusal:  # OUTRIDER_CACHE or OUTRIDER_CACHE_GB says nothing that can be followed
        yield Check(
            "packed weights", WRONG, str(refusal), "export OUTRIDER_CACHE=/a/folder OUTRIDER_CACHE_GB=50, or unset both"
        )
        return
    if limit == 0:
        yield Check("packed weights", OK, "are not kept (OUTRIDER_CACHE_GB=0): each start packs them")
    elif not _can_be_made(folder):
        yield Check(
            "packed weights",
            BETTER,
            f"{folder} cannot be written: each start packs them",
            "export OUTRIDER_CACHE=/a/folder",
        )
    else:
        yield Check("packed weights", OK, f"kept in {folder}")


def _can_be_made(folder: Path) -> bool:
    """Whether files can be written into this folder, or it can be made."""
    try:
        there = next(each for each in (folder, *folder.parents) if each.exists())
    except OSError:  # too long a name, or within a folder of another user's
        return False
    return there.is_dir() and os.access(there, os.W_OK | os.X_OK)


def _core_leases(files: MachineFiles) -> Iterator[Check]:
    held = leases.holders()
    if held:
        yield Check("cores", BETTER, leases.describe(held.values()), "wait, or end those runs")
    else:
        yield Check("cores", OK, "none is held by another run")


def _kernels(files: MachineFiles) -> Iterator[Check]:
    from outrider.kernels import library

    mend = "pip install . in the checkout, with a C++ compiler at hand, or a wheel"
    path = library.library_path()
    if path is None:
        yield Check("kernels", BETTER, "not compiled: everything runs on the hf engine, slower", mend)
        return
    try:
        library.load()
    except library.KernelsUnavailable as failure:
        yield Check("kernels", WRONG, str(failure), mend)
        return
    try:
        running = f", running as {library.instruction_set()}"
    except library.KernelError as refusal:  # OUTRIDER_ISA names an instruction set that the library or machine lacks
        yield Check("kernels", WRONG, str(refusal), "unset OUTRIDER_ISA, or name one of those")
        return
    yield Check("kernels", OK, f"{path}{running}")


def _instruction_set(files: MachineFiles) -> Iterator[Check]:
    flags: set[str] = set()
    for line in (sysfs.read_text(files.proc / "cpuinfo") or "").splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            flags = set(value.split())
            break
    asked = os.environ.get("OUTRIDER_ISA")
    forced = f"; OUTRIDER_ISA asks for {asked}" if asked else ""
    # Best first; the fast kernels need at least AVX2 with FMA.
    steps = {
        "AMX": {"amx_bf16", "amx_int8"},
        "AVX-512 BF16": {"avx512_bf16"},
        "AVX-512 VNNI": {"avx512_vnni"},
        "AVX2": {"avx2", "fma"},
    }
    available = [name for name, needed in steps.items() if needed <= flags]
    if available:
        yield Check("instruction set", OK, f"{', '.join(available)}{forced}")
    else:
        yield Check("instruction set", BETTER, f"no AVX2 with FMA: the kernels run their generic version{forced}")


def _ray(files: MachineFiles) -> Iterator[Check]:
    mend = f"pip install 'ray>={ray_compat.OLDEST},<{ray_compat.BELOW}'"
    try:
        version = importlib.metadata.version("ray")
    except importlib.metadata.PackageNotFoundError:
        yield Check("Ray", WRONG, "not installed", mend)
        return
    if _numbers(version) < _numbers(ray_compat.OLDEST):
        yield Check("Ray", WRONG, f"{version} is too old", mend)
    elif _numbers(version) >= _numbers(ray_compat.BELOW):
        yield Check("Ray", WRONG, f"{version} is newer than what outrider was tried with", mend)
    else:
        yield Check("Ray", OK, version)
    token = bool(os.environ.get("RAY_AUTH_TOKEN")) or has_token(token_file())
    mode = os.environ.get("RAY_AUTH_MODE", "")
    if mode == "disabled":
        found = "RAY_AUTH_MODE=disabled: whoever reaches a cluster's port can run code"
        yield Check("Ray's auth", WRONG, found, "export RAY_AUTH_MODE=token")
    elif token:
        yield Check("Ray's auth", OK, "a token is set; local runs make their own")
    elif os.environ.get("RAY_AUTH_TOKEN_PATH"):
        found = f"RAY_AUTH_TOKEN_PATH names {token_file()}, which holds no token; a cluster (--address) needs one"
        yield Check("Ray's auth", BETTER, found, "outrider token")
    else:
        found = "local runs make their own token; a cluster (--address) needs one"
        yield Check("Ray's auth", OK, found, "outrider token")


def _ray_folders(files: MachineFiles) -> Iterator[Check]:
    """Permissions of the folder of each Ray on this host, as far as it can be seen; several nodes may share one."""
    yielded: list[Check] = []
    for command in sorted(files.proc.glob("[0-9]*/cmdline")):
        try:
            words = command.read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue
        session = ray_compat.session_folder_of(words)
        if session is None:
            continue
        try:
            closed = not open_to_others(session)
        except PermissionError:
            closed = True
        except OSError:  # that Ray has just ended
            continue
        if closed:
            found = Check("Ray's folder", OK, f"{session.parent} is closed to other users")
        else:
            found = Check("Ray's folder", WRONG, *about_open_folder(str(session.parent)))
        if found not in yielded:
            yielded.append(found)
            yield found


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])


def _ipex(files: MachineFiles) -> Iterator[Check]:
    # IPEX is archived upstream; lacking it is not a fault.
    installed, mismatch = ipex.version(), ipex.mismatch()
    if installed is None:
        yield Check("IPEX", OK, "not installed; neither engine needs it")
    elif mismatch:
        yield Check("IPEX", BETTER, f"not used: {mismatch}", "pip install 'outrider[ipex]' in an environment of its own")
    else:
        yield Check("IPEX", OK, f"{installed}: models of the hf engine go through it on the CPU, unless --no-ipex is given")


def _accelerators(files: MachineFiles) -> Iterator[Check]:
    devices = files.topology.accelerators
    if refused := files.topology.accelerators_refused:
        found, _, mend = refused.partition("; ")
        yield Check("accelerators", BETTER, found, mend)
        return
    if not devices:
        yield Check("accelerators", OK, "none; the CPU does it")
        return
    names = ", ".join(each.name if each.node is None else f"{each.name} on node {each.node}" for each in devices)
    version = importlib.metadata.version("torch")
    if version.endswith("+cpu"):
        mend = "install the build of torch for these devices in place of the one for CPUs"
        yield Check("accelerators", BETTER, f"{names}, but torch {version} cannot use them", mend)
    else:
        yield Check("accelerators", OK, f"{names}, torch {version}")


CHECKS: tuple[Callable[[MachineFiles], Iterator[Check]], ...] = (
    _machine,
    _siblings,
    _container,
    _numactl,
    _libnuma,
    _preloads,
    _huge_pages,
    _governor,
    _numa_balancing,
    _memory,
    _shared_memory,
    _limits,
    _packed_weights,
    _core_leases,
    _kernels,
    _instruction_set,
    _ray,
    _ray_folders,
    _ipex,
    _accelerators,
)
