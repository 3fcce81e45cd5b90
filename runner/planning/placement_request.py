"""What is asked of a plan: how much the models need, and how a person wants them seated."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.workers.errors import PlacementError

PER = ("auto", "node", "socket", "machine")
LAYOUTS = ("auto", "split", "shared")


@dataclass(frozen=True, slots=True)
class Sizes:
    """Bytes of one replica. ``draft`` is None where there is no draft actor, 0 where it holds no model (lookup)."""

    target: int
    draft: int | None = None
    target_kv: int = 0
    draft_kv: int = 0


@dataclass(frozen=True, slots=True)
class Wishes:
    """``per="auto"`` is a node where a replica fits one, else a socket, else the machine.

    Each accelerator in ``devices`` carries one replica, target and draft; ``cpu`` behind them keeps the drafts off, and
    before them the targets. ``cuda`` alone stands for every CUDA device.
    """

    per: str = "auto"
    replicas: int | None = None
    draft_cores: int | None = None
    layout: str = "auto"
    devices: tuple[str, ...] = ()


def on_accelerator(devices: tuple[str, ...]) -> tuple[bool, bool]:
    """Whether target and draft are on an accelerator: the target is where ``devices`` begins."""
    some = any(device != "cpu" for device in devices)
    target = some and devices[0] != "cpu"
    return target, some and (not target or "cpu" not in devices)


def check(sizes: Sizes, wishes: Wishes) -> None:
    """Refuse what no machine could grant."""
    if wishes.per not in PER:
        raise PlacementError(f'--per must be one of {", ".join(PER)}, got "{wishes.per}"')
    if wishes.layout not in LAYOUTS:
        raise PlacementError(f'--layout must be one of {", ".join(LAYOUTS)}, got "{wishes.layout}"')
    for name, value in (("--replicas", wishes.replicas), ("--draft-cores", wishes.draft_cores)):
        if value is not None and value < 1:
            raise PlacementError(f"{name} must be at least 1, got {value}")
    if wishes.draft_cores is not None and wishes.layout == "shared":
        raise PlacementError("--draft-cores gives the draft cores of its own, --layout shared gives it none: leave out one")
    if min(sizes.target, sizes.draft or 0, sizes.target_kv, sizes.draft_kv) < 0:
        raise PlacementError("the size of a model or of its cache cannot be negative")
