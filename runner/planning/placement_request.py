"""The input of a plan: the memory that the models need, and the user's options about placement."""

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
    """Bytes of one replica: weights, keys and values (kv), working memory of its processes (room), and kept answers.

    ``draft`` is None without a draft actor, 0 if it holds no model (lookup). ``int8_cache``: whether the target's keys and
    values could take 8 bits. ``target_pairs``, ``draft_pairs``: further memory on hosts whose kernels multiply pairs of
    channels (avx512pairs).
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
        """The sizes on a host whose kernels multiply codes with such scales in pairs."""
        target, draft = self.target_pairs.on(in_pairs), self.draft_pairs.on(in_pairs)
        return replace(self, target_room=self.target_room + target, draft_room=self.draft_room + draft)

    @property
    def of_target(self) -> int:
        return self.target + self.target_kv + self.target_room + self.answers

    @property
    def beside_device(self) -> tuple[int, int]:
        """The host memory of target and draft when their models are on an accelerator."""
        return self.target_room + self.answers, self.draft_room

    @property
    def of_draft(self) -> int:
        return (self.draft or 0) + self.draft_kv + self.draft_room


@dataclass(frozen=True, slots=True)
class PlacementRequest:
    """``per="auto"``: a node if a replica fits one, else a socket, else the machine.

    Each accelerator in ``devices`` gets one replica, target and draft; a ``cpu`` after them keeps the drafts on the CPU,
    one before them the targets. ``cuda`` means every CUDA device. ``devices_left``: use those of the devices that are free
    (a run that plans further replicas holds the others itself).
    """

    per: Per = "auto"
    replicas: int | None = None
    draft_cores: int | None = None
    layout: Layout = "auto"
    devices: tuple[str, ...] = ()
    devices_left: bool = False


def on_accelerator(devices: tuple[str, ...]) -> tuple[bool, bool]:
    """Whether the target, and whether the draft, is on an accelerator; the first device is the target's."""
    some = any(device != "cpu" for device in devices)
    target = some and devices[0] != "cpu"
    return target, some and (not target or "cpu" not in devices)


def check(sizes: ModelSizes, request: PlacementRequest) -> None:
    """Refuse requests that no machine could grant."""
    if request.draft_cores is not None and request.layout == "shared":
        raise PlacementError("--draft-cores gives the draft cores of its own, --layout shared gives it none: leave out one")
    if min(sizes.target, sizes.draft or 0, sizes.target_kv, sizes.draft_kv) < 0:
        raise PlacementError("the size of a model or of its cache cannot be negative")
