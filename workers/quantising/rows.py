"""Work on the rows of a matrix in parallel.

Operations on one column are too small for torch to divide among its threads by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

# The least rows of a share: with fewer, calling an operation takes longer than the operation.
LEAST_ROWS = 512

T = TypeVar("T")


def by_rows(rows: int, work: Callable[[slice], T]) -> list[T]:
    """The results of ``work`` on each share of the rows, in order: as many shares as torch has threads, each on one
    thread."""
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
