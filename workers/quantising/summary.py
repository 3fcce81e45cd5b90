"""The summary of a quantisation, in a module without torch, which the driver does not load."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class QuantiseSummary:
    """How many layers took each method, the bits of a quantised weight, scales included, the group, the bytes of all files,
    and how many of all experts got too few tokens (``few``), and were calibrated with additional ones."""

    methods: dict[str, int]
    bits: float
    group: int
    size: int
    few: int = 0
    experts: int = 0
