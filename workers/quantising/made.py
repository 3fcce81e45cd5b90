"""What the driver is told of a checkpoint that was made: it reads this without torch, which it goes without."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Made:
    """How many layers took which method, bits of a rounded weight, scales included, and how many of all experts were
    calibrated beyond the few tokens that were sent to them."""

    methods: dict[str, int]
    bits: float
    group: int
    size: int
    few: int = 0
    experts: int = 0
