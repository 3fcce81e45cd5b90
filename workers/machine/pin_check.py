"""The pinning that a worker really has (affinity, memory policy, pages), read from the kernel inside the worker."""

from __future__ import annotations

import ctypes
import os
import re
import socket
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
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
    policy, nodes = memory_policy(proc)
    selector = "ONEAPI_DEVICE_SELECTOR" if pin.device.startswith("xpu") else "CUDA_VISIBLE_DEVICES"
    weight_pages: Counter[int] = Counter()
    for address, length in weights:
        weight_pages.update(nodes_of(address, length))
    found = PinningReport(
        pid=os.getpid(),
        host=socket.gethostname(),
        level=launch.level,
        asked=pin,
        cores=tuple(sorted(_cores(frozenset(pin.cores), proc))),
        memory_policy=policy,
        memory_nodes=nodes,
        threads=_openmp_threads(),
        kernel_threads=kernel_threads,
        libraries=_preloaded(launch.environment.get("LD_PRELOAD", "").split(":"), proc),
        visible_devices=os.environ.get(selector),
        pages=pages_by_node(proc),
        weight_pages=dict(sorted(weight_pages.items())),
        differences=(),
        warnings=launch.warnings,
    )
    strays = _threads_outside(frozenset(pin.cores), proc)
    return replace(found, differences=(*_of_cores(found, strays), *_of_environment(found, launch), *_of_memory(found)))


def _of_cores(found: PinningReport, strays: int) -> Iterator[str]:
    """How the cores differ from what was asked for. ``strays``: threads of the process that may run on others."""
    pin = found.asked
    if found.cores != tuple(sorted(pin.cores)):
        yield f"asked for cores {_list(pin.cores)}, got {_list(found.cores)}"
    elif strays:
        yield f"{strays} threads of the process may run outside cores {_list(pin.cores)}"
    for pool, count in (("OpenMP", found.threads), ("the kernels", found.kernel_threads)):
        if count is not None and count != pin.threads:
            yield f"asked for {pin.threads} threads, {pool} got {count}"


def _of_environment(found: PinningReport, launch: Launch) -> Iterator[str]:
    pin = found.asked
    asked = set(filter(None, launch.environment.get("LD_PRELOAD", "").split(":")))
    for library in sorted(asked - set(found.libraries)):
        yield f"asked for {library} to be preloaded, it is not"
    if pin.device.startswith("cuda") and found.visible_devices != pin.device_selector:
        yield f"asked for CUDA device {pin.device_selector}, CUDA_VISIBLE_DEVICES is {found.visible_devices}"


def _of_memory(found: PinningReport) -> Iterator[str]:
    nodes = found.asked.memory_nodes
    if not nodes:
        return
    if found.memory_policy != "bind" or found.memory_nodes != tuple(sorted(nodes)):
        got = f"{found.memory_policy} on node {_list(found.memory_nodes)}" if found.memory_nodes else found.memory_policy
        yield f"asked for memory bound to node {_list(nodes)}, got {got}"
    outside = {node: size for node, size in found.pages.items() if node not in nodes}
    size, whole = sum(outside.values()), sum(found.pages.values())
    if size > max(STRAY_BYTES, STRAY_SHARE * whole):
        yield f"{size / 1e9:.2f} GB of {whole / 1e9:.2f} GB lie on node {_list(outside)}"
    astray = {node: count for node, count in found.weight_pages.items() if node not in nodes}
    count, total = sum(astray.values()), sum(found.weight_pages.values())
    if count > STRAY_SHARE * total:
        yield f"{count / total:.0%} of the weights' pages lie on node {_list(astray)}"


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
