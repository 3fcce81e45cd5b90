"""The number of examples of a property test: the fast set tries a third of the stated number, the slow set all."""

from __future__ import annotations

import os

ALL = "OUTRIDER_ALL_EXAMPLES" in os.environ


def examples(count: int) -> int:
    return count if ALL else -(-count // 3)
