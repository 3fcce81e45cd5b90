"""The pinning that a worker really has (affinity, memory policy, pages), read from the kernel inside the worker."""

from __future__ import annotations

import ctypes
import os
import re
import socket
import sys
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from outrider.workers.machine.core_leases import claim
from outrider.workers.machine.pinning import Launch, Pin

POLICIES = {0: "default", 1: "preferred", 2: "bind", 3: "interleave", 4: "local", 5: "preferred-many"}
MASK_BITS = 1 << 12
# A few pages always lie elsewhere (the stack of a thread that was there before, the loader's own).
STRAY_SHARE = 0.05
STRAY_BYTES = 64 << 20
PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True)
class PinningReport:
    """The pinning that was asked for, and what the kernel reports; ``differences`` are one sentence each.

    ``threads`` are OpenMP's, ``kernel_threads`` those of the native kernels' pool. ``pages`` are bytes of this process's
    own memory by node; ``weight_pages`` are counts of sampled pages of the weights.
    """

    pid: int
    host: str
    level: str
    asked: Pin
    cores: tuple[int, ...]
    memory_policy: str
    memory_nodes: tuple[int, ...]
    threads: int | None
    kernel_threads: int | None
    libraries: tuple[str, ...]
    visible_devices: str | None
    pages: dict[int, int]
    weight_pages: dict[int, int]
    differences: tuple[str, ...]
    warnings: tuple[str, ...]

    def record(self) -> dict[str, Any]:
        """For job.json."""
        return asdict(self)


def pin_process(
    launch: Launch,
    leases: Iterable[str] = (),
    seconds: float = 0.0,
    proc: Path = Path("/proc/self"),
    shared: bool = False,
) -> PinningReport:
    """Called first in a worker: claims the leases of its cores, pins where numactl could not, and checks the result.

    The leases are held until the process ends. An error where one is not free within ``seconds``.
    """
    claim(leases, seconds, shared=shared)
    if launch.level == "affinity":
        _set_affinity(launch.pin.cores, proc)
        if launch.pin.memory_nodes:
            _bind_memory(launch.pin.memory_nodes)
    return check_pinning(launch, proc=proc)


def check_pinning(
    launch: Launch,
    weights: Iterable[tuple[int, int]] = (),
    kernel_threads: int | None = None,
    proc: Path = Path("/proc/self"),
) -> PinningReport:
    """Call again once the weights are loaded, with their buffers (address, bytes): before, few pages are allocated."""
    pin = launch.pin
    cores = tuple(sorted(_cores(frozenset(pin.cores), proc)))
    policy, nodes = memory_policy(proc)
    threads = _openmp_threads()
    libraries = _preloaded(launch.environment.get("LD_PRELOAD", "").split(":"), proc)
    devices = os.environ.get("ONEAPI_DEVICE_SELECTOR" if pin.device.startswith("xpu") else "CUDA_VISIBLE_DEVICES")
    pages = pages_by_node(proc)
    weight_pages: Counter[int] = Counter()
    for address, length in weights:
        weight_pages.update(nodes_of(address, length))

    differences = []
    if cores != tuple(sorted(pin.cores)):
        differences.append(f"asked for cores {_list(pin.cores)}, got {_list(cores)}")
    strays = _threads_outside(frozenset(pin.cores), proc)
    if strays and cores == tuple(sorted(pin.cores)):
        differences.append(f"{strays} threads of the process may run outside cores {_list(pin.cores)}")
    if pin.memory_nodes and (policy != "bind" or nodes != tuple(sorted(pin.memory_nodes))):
        got = f"{policy} on node {_list(nodes)}" if nodes else policy
        differences.append(f"asked for memory bound to node {_list(pin.memory_nodes)}, got {got}")
    for pool, count in (("OpenMP", threads), ("the kernels", kernel_threads)):
        if count is not None and count != pin.threads:
            differences.append(f"asked for {pin.threads} threads, {pool} got {count}")
    for library in sorted(set(filter(None, launch.environment.get("LD_PRELOAD", "").split(":"))) - set(libraries)):
        differences.append(f"asked for {library} to be preloaded, it is not")
    if pin.device.startswith("cuda") and devices != pin.device_selector:
        differences.append(f"asked for CUDA device {pin.device_selector}, CUDA_VISIBLE_DEVICES is {devices}")
    outside = sum(size for node, size in pages.items() if node not in pin.memory_nodes)
    if pin.memory_nodes and outside > max(STRAY_BYTES, STRAY_SHARE * sum(pages.values())):
        where = _list(node for node in pages if node not in pin.memory_nodes)
        differences.append(f"{outside / 1e9:.2f} GB of {sum(pages.values()) / 1e9:.2f} GB lie on node {where}")
    astray = sum(count for node, count in weight_pages.items() if node not in pin.memory_nodes)
    if pin.memory_nodes and astray > STRAY_SHARE * weight_pages.total():
        where = _list(node for node in weight_pages if node not in pin.memory_nodes)
        differences.append(f"{astray / weight_pages.total():.0%} of the weights' pages lie on node {where}")
    return PinningReport(
        pid=os.getpid(),
        host=socket.gethostname(),
        level=launch.level,
        asked=pin,
        cores=cores,
        memory_policy=policy,
        memory_nodes=nodes,
        threads=threads,
        kernel_threads=kernel_threads,
        libraries=libraries,
        visible_devices=devices,
        pages=pages,
        weight_pages=dict(sorted(weight_pages.items())),
        differences=tuple(differences),
        warnings=launch.warnings,
    )


def memory_policy(proc: Path = Path("/proc/self")) -> tuple[str, tuple[int, ...]]:
    """The policy of this process and its nodes, from libnuma; where that is missing, from the first line of numa_maps."""
    library = libnuma()
    if library is not None:
        mode = ctypes.c_int(-1)
        mask = (ctypes.c_ulong * (MASK_BITS // 64))()
        if library.get_mempolicy(ctypes.byref(mode), mask, ctypes.c_ulong(MASK_BITS), None, 0) == 0:
            value = sum(word << 64 * index for index, word in enumerate(mask))
            nodes = tuple(bit for bit in range(value.bit_length()) if value >> bit & 1)
            # The upper bits are flags (static, relative, balancing).
            return POLICIES.get(mode.value & 0xFF, "unknown"), nodes
    with suppress(OSError, IndexError):
        word = (proc / "numa_maps").read_text().split(maxsplit=2)[1]
        name, _, where = word.partition(":")
        name = name.partition("=")[0]
        return {"prefer": "preferred"}.get(name, name), _parse(where)
    return "unknown", ()


def libnuma() -> Any | None:
    """The library through py-libnuma, or directly; None where it is not installed."""
    try:
        # Raises AttributeError, not ImportError, where the Python side is there and the library is not.
        from numa import LIBNUMA

        return LIBNUMA
    except (ImportError, OSError, AttributeError):
        pass
    try:
        return ctypes.CDLL("libnuma.so.1")
    except OSError:
        return None


def pages_by_node(proc: Path = Path("/proc/self")) -> dict[int, int]:
    """Bytes of this process's own memory on each node, without mapped files: their pages belong to whoever came first."""
    total: Counter[int] = Counter()
    with suppress(OSError):
        for line in (proc / "numa_maps").read_text().splitlines():
            if " file=" in line:
                continue
            size = re.search(r"kernelpagesize_kB=(\d+)", line)
            for node, pages in re.findall(r" N(\d+)=(\d+)", line):
                total[int(node)] += int(pages) * (int(size[1]) * 1024 if size else PAGE)
    return dict(sorted(total.items()))


def nodes_of(address: int, length: int, samples: int = 256) -> dict[int, int]:
    """On which nodes a buffer's pages lie: how many of the sampled pages on each. Empty where the kernel does not tell."""
    library = libnuma()
    if library is None or length <= 0:
        return {}
    first = address // PAGE * PAGE
    count = max(1, min(samples, (address + length - first) // PAGE))
    step = max(1, (address + length - first) // PAGE // count) * PAGE
    pages = (ctypes.c_void_p * count)(*(first + index * step for index in range(count)))
    status = (ctypes.c_int * count)()
    if library.move_pages(0, ctypes.c_ulong(count), pages, None, status, 0) != 0:
        return {}
    # A negative number is an error: a page that was never touched.
    return dict(sorted(Counter(node for node in status if node >= 0).items()))


def move_threads(cores: Iterable[int]) -> None:
    """Keep every thread of this process to these cores of its own, from now on."""
    _set_affinity(cores, Path("/proc/self"))


def _set_affinity(cores: Iterable[int], proc: Path) -> None:
    """Every thread, since Ray has started some before us and new ones inherit from their parents."""
    allowed = set(cores)
    for task in (proc / "task").iterdir():
        # A thread may end meanwhile; a refusal shows in what is read back.
        with suppress(OSError, ValueError):
            os.sched_setaffinity(int(task.name), allowed)


def _bind_memory(nodes: Iterable[int]) -> None:
    """The same policy as numactl's, set from inside; a refusal shows in what is read back."""
    library = libnuma()
    if library is None:
        return
    value = sum(1 << node for node in nodes)
    mask = (ctypes.c_ulong * (MASK_BITS // 64))(*(value >> 64 * word & (1 << 64) - 1 for word in range(MASK_BITS // 64)))
    library.set_mempolicy(2, mask, ctypes.c_ulong(MASK_BITS))


def _openmp_threads() -> int | None:
    torch = sys.modules.get("torch")
    if torch is not None:
        return int(torch.get_num_threads())
    asked = os.environ.get("OMP_NUM_THREADS", "")
    return int(asked) if asked.isdecimal() else None


def _cores(asked: frozenset[int], proc: Path) -> set[int]:
    """The affinity of this thread; where the kernels have pinned it to one core, the union over all threads."""
    own = os.sched_getaffinity(0)
    return own.union(*_threads(proc)) & asked if own < asked else own


def _threads_outside(cores: frozenset[int], proc: Path) -> int:
    return sum(not each <= cores for each in _threads(proc))


def _threads(proc: Path) -> list[set[int]]:
    """The affinity of each thread of the process."""
    found = []
    with suppress(OSError):
        for task in (proc / "task").iterdir():
            with suppress(OSError):
                found.append(os.sched_getaffinity(int(task.name)))
    return found


def _preloaded(asked: Iterable[str], proc: Path) -> tuple[str, ...]:
    """Which of these files are mapped. The kernel shows resolved names, so both sides are resolved."""
    with suppress(OSError):
        mapped = {line.split(maxsplit=5)[-1] for line in (proc / "maps").read_text().splitlines() if "/" in line}
        return tuple(path for path in asked if path and str(Path(path).resolve()) in mapped)
    return ()


def _parse(text: str) -> tuple[int, ...]:
    members: set[int] = set()
    for first, last in re.findall(r"(\d+)(?:-(\d+))?", text):
        members.update(range(int(first), int(last or first) + 1))
    return tuple(sorted(members))


def _list(members: Iterable[int]) -> str:
    return ",".join(map(str, sorted(members)))
