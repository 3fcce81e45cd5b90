"""What is asked of a plan: how much the models need, and where a person wants them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import get_args

from outrider.kernels.program import Scales
from outrider.runner.options.values import Layout, Per
from outrider.workers.errors import PlacementError
from outrider.workers.models.model_memory import NO_PAIRS, PairsMemory

PER: tuple[Per, ...] = get_args(Per)


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """Bytes of one replica: weights, keys and values of its rows, room for its processes and their work, and answers kept.

    ``draft`` is None where there is no draft actor, 0 where it holds no model (lookup). ``int8_cache``: whether keys and
    values of the target could take 8 bits. ``target_pairs`` and ``draft_pairs`` are taken on hosts that multiply in pairs
    of channels, beside the rest.
    """

    target: int
    draft: int | None = None
    target_kv: int = 0
    draft_kv: int = 0
    target_room: int = 0
    draft_room: int = 0
    answers: int = 0
    int8_cache: bool = True
    target_pairs: PairsMemory = NO_PAIRS
    draft_pairs: PairsMemory = NO_PAIRS

    def on(self, in_pairs: frozenset[Scales]) -> ModelSizes:
        """On a host that multiplies codes with such scales in pairs."""
        target, draft = self.target_pairs.on(in_pairs), self.draft_pairs.on(in_pairs)
        return replace(self, target_room=self.target_room + target, draft_room=self.draft_room + draft)

    @property
    def of_target(self) -> int:
        return self.target + self.target_kv + self.target_room + self.answers

    @property
    def beside_device(self) -> tuple[int, int]:
        """What processes of target and draft take of their host's memory while their models are on an accelerator."""
        return self.target_room + self.answers, self.draft_room

    @property
    def of_draft(self) -> int:
        return (self.draft or 0) + self.draft_kv + self.draft_room


@dataclass(frozen=True, slots=True)
class PlacementRequest:
    """``per="auto"`` is a node where a replica fits one, else a socket, else the machine.

    Each accelerator in ``devices`` carries one replica, target and draft; ``cpu`` behind them keeps the drafts off, and
    before them the targets. ``cuda`` alone stands for every CUDA device. ``devices_left`` asks for those of the devices
    that are there: a run that plans anew holds some of them itself.
    """

    per: Per = "auto"
    replicas: int | None = None
    draft_cores: int | None = None
    layout: Layout = "auto"
    devices: tuple[str, ...] = ()
    devices_left: bool = False


def on_accelerator(devices: tuple[str, ...]) -> tuple[bool, bool]:
    """Whether target and draft are on an accelerator: the target is where ``devices`` begins."""
    some = any(device != "cpu" for device in devices)
    target = some and devices[0] != "cpu"
    return target, some and (not target or "cpu" not in devices)


def check(sizes: ModelSizes, request: PlacementRequest) -> None:
    """Refuse what no machine could grant."""
    if request.draft_cores is not None and request.layout == "shared":
        raise PlacementError("--draft-cores gives the draft cores of its own, --layout shared gives it none: leave out one")
    if min(sizes.target, sizes.draft or 0, sizes.target_kv, sizes.draft_kv) < 0:
        raise PlacementError("the size of a model or of its cache cannot be negative")
