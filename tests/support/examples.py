"""What the fast set tries of a test: a sixth of the examples of a property, and some of the combinations of parameters."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence

ALL = "OUTRIDER_ALL_EXAMPLES" in os.environ


def examples(count: int) -> int:
    return count if ALL else -(-count // 6)


def diagonal(places: Mapping[str, int], lists: Iterable[str | Sequence[str]]) -> int:
    """The sum of a test's places in its lists of parameters. ``lists`` has the names of each, as parametrize takes them:
    parameters that are given together have one place."""
    names = [[name.strip() for name in each.split(",")] if isinstance(each, str) else list(each) for each in lists]
    others = {name for _, *rest in names for name in rest}
    return sum(place for name, place in places.items() if name not in others)
