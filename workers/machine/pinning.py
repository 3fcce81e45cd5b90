"""How an actor's process is started on its cores and memory: the numactl command line and the environment, both tried out.

Ray starts an actor's process under ``runtime_env={"py_executable": ...}`` and waits for ever if that line is bad, so
``probe`` runs it on the host beforehand and falls back step by step: memory bound, memory preferred, cores only, and at
last nothing but ``sched_setaffinity`` in the worker. What was got is read back by ``outrider.workers.machine.pin_check``.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from outrider.workers.errors import PlacementError, WorkerError

LARGEST_ID = 1 << 16
PROBE_SECONDS = 20.0
# The usual settings for Xeons. BLOCKTIME lets threads sleep soon after their work, so that draft and target can share
# cores.
OPENMP_SETTINGS = {"KMP_AFFINITY": "granularity=fine,compact,1,0", "KMP_BLOCKTIME": "1"}
PRELOADS = {
    "tcmalloc": ("libtcmalloc.so", "libtcmalloc.so.4", "libtcmalloc_minimal.so", "libtcmalloc_minimal.so.4"),
    "libiomp5": ("libiomp5.so",),
}
LIBRARY_FOLDERS = (
    "/usr/local/lib",
    "/usr/lib/*-linux-gnu",
    "/usr/lib64",
    "/usr/lib",
    "/opt/intel/oneapi/compiler/latest/lib",
    "/opt/intel/oneapi/compiler/latest/linux/compiler/lib/intel64_lin",
)
NO_NUMACTL = (
    "numactl is not installed (apt-get install numactl): cores and memory are set by the worker itself, memory where "
    "there is libnuma and the kernel allows it"
)


@dataclass(frozen=True, slots=True)
class Pin:
    """Where one actor is to run. ``device_selector`` is the physical number of an accelerator, for its environment."""

    cores: tuple[int, ...]
    memory_nodes: tuple[int, ...]
    threads: int
    device: str = "cpu"
    device_selector: str = ""

    def __post_init__(self) -> None:
        # These go into a command line that a shell reads, so anything but an integer is refused.
        numbers = (*self.cores, *self.memory_nodes, self.threads)
        if not all(type(number) is int and 0 <= number < LARGEST_ID for number in numbers):
            raise PlacementError(f"cores, memory nodes and threads must be numbers from 0 to {LARGEST_ID - 1}: {numbers}")
        if not self.cores or not self.threads:
            raise PlacementError("an actor needs at least one core and one thread")
        if not re.fullmatch(r"cpu|(cuda|xpu):\d{1,4}", self.device) or not re.fullmatch(r"\d{0,4}", self.device_selector):
            raise PlacementError(f'a device is cpu, cuda:<number> or xpu:<number>, got "{self.device}"')

    @property
    def local_device(self) -> str:
        """torch's name of the device inside the worker, which sees no other."""
        return self.device if self.device == "cpu" else f"{self.device.partition(':')[0]}:0"


@dataclass(frozen=True, slots=True)
class Launch:
    """A command line that was tried out. ``level`` is membind, preferred, cores or affinity; for the last, ``line`` is
    empty."""

    pin: Pin
    level: str
    line: tuple[str, ...]
    python: str
    environment: dict[str, str] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()

    @property
    def command(self) -> str:
        return shlex.join((*self.line, self.python))

    def runtime_env(self, variables: Mapping[str, str] | None = None) -> dict[str, Any]:
        """For ``Actor.options(runtime_env=...)``; the pinning's variables replace those of ``variables``."""
        return {"env_vars": {**(variables or {}), **self.environment}, "py_executable": self.command}

    def not_up(self, who: str, seconds: float) -> WorkerError:
        """The error for an actor that missed its deadline; it quotes the command line, which is the likeliest cause."""
        return WorkerError(f"{who} is not up after {seconds:g} s; it was started with: {self.command}")


Runner = Callable[[Sequence[str], dict[str, str]], str | None]


def probe(pin: Pin, run: Runner | None = None) -> Launch:
    """The best start that works on this host. Must run on the host (in a cluster: in a task placed there)."""
    attempt = run or _attempt
    warnings: list[str] = []
    preloads = _working_preloads(attempt, warnings)
    environment = environment_of(pin, preloads)
    asked = os.environ.get("OMP_NUM_THREADS")
    # Ray sets it for its own tasks, where a cluster's hosts try this out.
    if asked is not None and asked != str(pin.threads) and "RAY_RAYLET_PID" not in os.environ:
        warnings.append(
            f"OMP_NUM_THREADS={asked} is replaced by {pin.threads}: a process has a thread for each of its cores"
        )
    true = shutil.which("true") or "/bin/true"
    numactl = shutil.which("numactl")
    level = "affinity"
    line: tuple[str, ...] = ()
    refusals = []
    if numactl is None:
        warnings.append(NO_NUMACTL)
    else:
        for name, options in ladder(pin):
            refusal = attempt((numactl, *options, true), environment)
            if refusal is None:
                level, line = name, (numactl, *options)
                break
            refusals.append(f"numactl {shlex.join(options)}: {refusal}")
    if refusals:
        got = {
            "preferred": f"memory is preferred on node {pin.memory_nodes[0] if pin.memory_nodes else 0}, not bound",
            "cores": "cores are bound, memory is not",
            "affinity": "cores are set by the worker itself, and memory where the kernel allows it",
        }[level]
        warnings.append(f"{got} ({refusals[0]})")
    return Launch(pin, level, line, sys.executable, environment, tuple(warnings))


def ladder(pin: Pin) -> Iterator[tuple[str, tuple[str, ...]]]:
    """numactl's options, the strictest first."""
    cores = f"--physcpubind={','.join(map(str, pin.cores))}"
    if pin.memory_nodes:
        yield "membind", (cores, f"--membind={','.join(map(str, pin.memory_nodes))}")
        yield "preferred", (cores, f"--preferred={pin.memory_nodes[0]}")
    yield "cores", (cores,)


def environment_of(pin: Pin, preloads: Sequence[str]) -> dict[str, str]:
    # What a user has set is left as it is; but the number of threads is that of the cores that the plan gives.
    environment = {"OMP_NUM_THREADS": str(pin.threads)}
    environment |= {name: os.environ.get(name, value) for name, value in OPENMP_SETTINGS.items()}
    inherited = os.environ.get("LD_PRELOAD", "").replace(":", " ").split()
    if preloads:
        environment["LD_PRELOAD"] = ":".join(dict.fromkeys((*preloads, *inherited)))
    kind = pin.device.partition(":")[0]
    if kind == "cuda":
        # Ray would choose a device itself; the plan has chosen the one that is near the cores.
        environment |= {
            "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
            "CUDA_VISIBLE_DEVICES": pin.device_selector,
            "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1",
        }
    elif kind == "xpu":
        environment |= {
            "ONEAPI_DEVICE_SELECTOR": f"level_zero:{pin.device_selector}",
            "RAY_EXPERIMENTAL_NOSET_ONEAPI_DEVICE_SELECTOR": "1",
        }
    return environment


def find_library(name: str) -> str | None:
    """The file of a library of ``PRELOADS``: the environment's own first, then the system's."""
    conda = os.environ.get("CONDA_PREFIX")
    own = [Path(sys.prefix) / "lib", *([Path(conda) / "lib"] if conda else [])]
    system = [folder for pattern in LIBRARY_FOLDERS for folder in sorted(Path("/").glob(pattern.lstrip("/")))]
    for folder in (*own, *system):
        for file in PRELOADS[name]:
            # The loader splits LD_PRELOAD at blanks and colons, so such a path cannot be given to it.
            if (folder / file).is_file() and not re.search(r"[\s:]", str(folder)):
                return str(folder / file)
    return None


def _working_preloads(attempt: Runner, warnings: list[str]) -> list[str]:
    working = []
    for name in PRELOADS:
        path = find_library(name)
        if path is None:
            continue
        refusal = attempt((shutil.which("true") or "/bin/true",), {"LD_PRELOAD": path})
        if refusal is None:
            working.append(path)
        else:
            warnings.append(f"{name} is not preloaded: {refusal}")
    return working


def _attempt(command: Sequence[str], environment: dict[str, str]) -> str | None:
    """Run a command that does nothing; None where it succeeds, else the first line of its error."""
    try:
        done = subprocess.run(
            command, env=os.environ | environment, capture_output=True, text=True, timeout=PROBE_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as failure:
        return str(failure)
    complaints = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    # The loader only warns about a library that it cannot preload, and goes on without.
    broken = [line for line in complaints if "cannot be preloaded" in line]
    if done.returncode == 0 and not broken:
        return None
    return (broken or complaints or [f"exit code {done.returncode}"])[0]
