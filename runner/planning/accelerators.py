"""CUDA and XPU devices from sysfs, with the NUMA node of each. Without torch, which the driver does not load."""

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
    """``name``: torch's name in this process (``cuda:0``); ``selector``: its entry in CUDA_VISIBLE_DEVICES.

    The numbers differ if that variable is already set. ``node`` and ``memory_bytes`` are None, and ``uuid`` is empty, if
    unknown.
    """

    name: str
    address: str
    node: int | None
    selector: str
    memory_bytes: int | None = None
    uuid: str = ""

    @property
    def lease(self) -> str:
        """The name of the physical device on its host: ``cuda:0`` may be different devices in two runs."""
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
    # -1 is common in virtual machines; the device's local CPUs may still tell the node.
    local = sysfs.read_set(device, "local_cpulist", "local_cpus") or frozenset()
    holders = [node for node, cpus in cpus_by_node.items() if cpus & local]
    candidates = holders or list(cpus_by_node)
    return candidates[0] if len(candidates) == 1 else None


def visible_here(
    accelerators: tuple[Accelerator, ...], dev: Path = Path("/dev"), proc: Path = Path("/proc")
) -> tuple[Accelerator, ...]:
    """The devices that this process can open, numbered as torch will number them.

    A container sees all devices of its host in sysfs, but has device files only for its own. If sysfs is hidden, the device
    files alone show the devices. An error if CUDA_VISIBLE_DEVICES names a device that cannot be identified.
    """
    files = sorted(int(path.name[6:]) for path in dev.glob("nvidia[0-9]*") if path.name[6:].isdecimal())
    cuda = [each for each in accelerators if each.kind == "cuda"]
    minors = [_minor(each, position, proc) for position, each in enumerate(cuda)]
    shown = [each for each, minor in zip(cuda, minors, strict=True) if minor in files]
    if files and not shown:
        shown = [Accelerator(f"cuda:{minor}", "", None, "") for minor in files]
    known = _from_nvidia_smi() if shown else {}
    for index, each in enumerate(shown):
        memory_bytes, uuid = known.get(each.address.lower(), (None, ""))
        shown[index] = replace(each, selector=str(index), memory_bytes=memory_bytes, uuid=uuid)
    shown = _chosen_by(os.environ.get("CUDA_VISIBLE_DEVICES"), shown)
    xpu = [each for each in accelerators if each.kind == "xpu"] if (dev / "dri").is_dir() else []
    return tuple(replace(each, name=f"{each.kind}:{index}") for group in (shown, xpu) for index, each in enumerate(group))


def _from_nvidia_smi() -> dict[str, tuple[int | None, str]]:
    """Memory and UUID of each CUDA device by its PCI address, which sysfs does not have; empty without nvidia-smi."""
    command = ["nvidia-smi", "--query-gpu=pci.bus_id,memory.total,uuid", "--format=csv,noheader,nounits"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=TOOL_SECONDS, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return {}
    found = {}
    for line in said.splitlines():
        address, megabytes, uuid = (word.strip() for word in f"{line},,".split(",")[:3])
        # nvidia-smi writes the PCI domain with eight digits, sysfs with four.
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
        # CUDA stops at the first unknown entry too.
        elif not word.isdecimal() or int(word) >= len(devices):
            break
        else:
            chosen.append(devices[int(word)])
    return chosen


def _by_uuid(word: str, devices: list[Accelerator]) -> Accelerator:
    """The device with this UUID or, as CUDA accepts it, an unambiguous prefix of one."""
    found = [each for each in devices if each.uuid.startswith(word)]
    if len(found) != 1:
        why = "is a part of a device" if word.startswith("MIG-") else "nvidia-smi tells of no device here"
        why = "fits several devices" if found else why
        raise PlacementError(
            f'CUDA_VISIBLE_DEVICES names "{word}" by UUID, which {why}; give numbers, such as CUDA_VISIBLE_DEVICES=0,1'
        )
    return found[0]
