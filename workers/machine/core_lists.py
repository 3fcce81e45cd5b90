"""Sets of cores as the kernel writes them."""

from __future__ import annotations

from collections.abc import Iterable


def format_list(members: Iterable[int]) -> str:
    """A set as the kernel writes it: ``0-3,8``."""
    runs: list[list[int]] = []
    for member in sorted(set(members)):
        if runs and member == runs[-1][1] + 1:
            runs[-1][1] = member
        else:
            runs.append([member, member])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
