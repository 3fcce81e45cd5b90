"""CUDA and XPU devices as PCI sees them, with the NUMA node each hangs on. No torch: the driver process has none."""

from __future__ import annotations

import os
import re
import subprocess
from dataclasses import dataclass, replace
from pathlib import Path

from outrider.runner.planning import sysfs
from outrider.workers.errors import PlacementError

VENDORS = {0x10DE: "cuda", 0x8086: "xpu"}
TOOL_SECONDS = 10.0
# VGA, 3D and other display controllers, and processing accelerators.
CLASSES = (0x0300, 0x0302, 0x0380, 0x1200)


@dataclass(frozen=True, slots=True)
class Accelerator:
    """``name`` is what torch calls it here (``cuda:0``), ``selector`` what CUDA_VISIBLE_DEVICES calls it.

    The two differ where that variable is set already. ``node`` and ``memory_bytes`` are None, and ``uuid`` is empty, where
    nobody says.
    """

    name: str
    address: str
    node: int | None
    selector: str
    memory_bytes: int | None = None
    uuid: str = ""

    @property
    def lease(self) -> str:
        """The physical device's name host-wide: two runs may call different devices ``cuda:0``."""
        return f"{self.kind}-{self.selector}"

    @property
    def kind(self) -> str:
        return self.name.partition(":")[0]

    @property
    def index(self) -> int:
        return int(self.name.partition(":")[2])


def read_accelerators(root: Path, cpus_by_node: dict[int, frozenset[int]]) -> tuple[Accelerator, ...]:
    """All devices of a sysfs tree, numbered in the order of their PCI addresses."""
    found: list[Accelerator] = []
    counts = dict.fromkeys(VENDORS.values(), 0)
    try:
        devices = sorted((root / "bus/pci/devices").iterdir())
    except OSError:
        return ()
    for device in devices:
        kind = VENDORS.get(sysfs.read_int(device / "vendor") or 0)
        if kind is None or (sysfs.read_int(device / "class") or 0) >> 8 not in CLASSES:
            continue
        index = counts[kind]
        found.append(Accelerator(f"{kind}:{index}", device.name, _node(device, cpus_by_node), str(index)))
        counts[kind] += 1
    return tuple(found)


def _node(device: Path, cpus_by_node: dict[int, frozenset[int]]) -> int | None:
    node = sysfs.read_int(device / "numa_node")
    if node in cpus_by_node:
        return node
    # -1 is common in virtual machines, and where the firmware is silent the bus may still name its CPUs.
    local = sysfs.read_set(device, "local_cpulist", "local_cpus") or frozenset()
    holders = [node for node, cpus in cpus_by_node.items() if cpus & local]
    candidates = holders or list(cpus_by_node)
    return candidates[0] if len(candidates) == 1 else None


def visible_here(
    accelerators: tuple[Accelerator, ...], dev: Path = Path("/dev"), proc: Path = Path("/proc")
) -> tuple[Accelerator, ...]:
    """Those that this process can open, numbered as torch will number them.

    A container sees every device of its host in sysfs, but has device files only for its own. Where sysfs is hidden
    instead, the device files alone show that there is something. Refused where CUDA_VISIBLE_DEVICES names what cannot be
    told apart.
    """
    files = sorted(int(path.name[6:]) for path in dev.glob("nvidia[0-9]*") if path.name[6:].isdecimal())
    cuda = [each for each in accelerators if each.kind == "cuda"]
    minors = [_minor(each, position, proc) for position, each in enumerate(cuda)]
    shown = [each for each, minor in zip(cuda, minors, strict=True) if minor in files]
    if files and not shown:
        shown = [Accelerator(f"cuda:{minor}", "", None, "") for minor in files]
    told = _told_by_the_driver() if shown else {}
    for index, each in enumerate(shown):
        memory_bytes, uuid = told.get(each.address.lower(), (None, ""))
        shown[index] = replace(each, selector=str(index), memory_bytes=memory_bytes, uuid=uuid)
    shown = _chosen_by(os.environ.get("CUDA_VISIBLE_DEVICES"), shown)
    xpu = [each for each in accelerators if each.kind == "xpu"] if (dev / "dri").is_dir() else []
    return tuple(replace(each, name=f"{each.kind}:{index}") for group in (shown, xpu) for index, each in enumerate(group))


def _told_by_the_driver() -> dict[str, tuple[int | None, str]]:
    """Bytes and UUID of each CUDA device by its PCI address, from the driver's own tool; sysfs does not tell."""
    command = ["nvidia-smi", "--query-gpu=pci.bus_id,memory.total,uuid", "--format=csv,noheader,nounits"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=TOOL_SECONDS, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return {}
    found = {}
    for line in said.splitlines():
        address, megabytes, uuid = (word.strip() for word in f"{line},,".split(",")[:3])
        # It writes the domain with eight digits, sysfs with four.
        found[address.lower()[-12:]] = (int(megabytes) << 20 if megabytes.isdecimal() else None, uuid)
    return found


def _minor(accelerator: Accelerator, position: int, proc: Path) -> int:
    text = sysfs.read_text(proc / "driver/nvidia/gpus" / accelerator.address / "information") or ""
    match = re.search(r"Device Minor:\s*(\d+)", text)
    return int(match[1]) if match else position


def _chosen_by(variable: str | None, devices: list[Accelerator]) -> list[Accelerator]:
    if variable is None or not devices:
        return devices
    chosen: list[Accelerator] = []
    for word in map(str.strip, variable.split(",")):
        if word.startswith(("GPU-", "MIG-")):
            chosen.append(_by_uuid(word, devices))
        # CUDA stops at the first entry that it does not know, and so do we.
        elif not word.isdecimal() or int(word) >= len(devices):
            break
        else:
            chosen.append(devices[int(word)])
    return chosen


def _by_uuid(word: str, devices: list[Accelerator]) -> Accelerator:
    """CUDA takes the beginning of a UUID as well, if it is one device's only."""
    found = [each for each in devices if each.uuid.startswith(word)]
    if len(found) != 1:
        why = "is a part of a device" if word.startswith("MIG-") else "nvidia-smi tells of no device here"
        why = "fits several devices" if found else why
        raise PlacementError(
            f'CUDA_VISIBLE_DEVICES names "{word}" by UUID, which {why}; give numbers, such as CUDA_VISIBLE_DEVICES=0,1'
        )
    return found[0]
