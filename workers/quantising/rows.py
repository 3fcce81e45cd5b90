"""Work on shares of a matrix's rows, side by side.

What is done a column at a time is too little for torch to share out among its threads by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

# Of fewer rows a column's work is less than what it costs to ask for it.
LEAST_ROWS = 512

T = TypeVar("T")


def by_rows(rows: int, work: Callable[[slice], T]) -> list[T]:
    """What ``work`` makes of each share, in order: as many as torch has threads, each on one of them."""
    threads = torch.get_num_threads()
    shares = min(threads, rows // LEAST_ROWS)
    if shares < 2:
        return [work(slice(0, rows))]

    def on_one_thread(first: int) -> T:
        torch.set_num_threads(1)
        with torch.inference_mode():
            return work(slice(rows * first // shares, rows * (first + 1) // shares))

    try:
        with ThreadPoolExecutor(shares) as pool:
            return list(pool.map(on_one_thread, range(shares)))
    finally:
        torch.set_num_threads(threads)
