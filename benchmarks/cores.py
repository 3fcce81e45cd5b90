"""How far cores are from each other: nanoseconds that a line of memory takes from one to another and back.

    python benchmarks/cores.py

Between cores that share a last-level cache it takes 50 to 100, between others several hundred. Those of a virtual machine
may be moved while it runs: what memory gives and what a pass takes change with it
(docs/lab/2026-11-26-cores-near-and-far.md). Compiles cores.c (a C compiler is needed).
"""

from __future__ import annotations

import argparse
import ctypes
import os
from collections.abc import Sequence
from functools import cached_property
from itertools import combinations
from pathlib import Path

from peaks import compiled
from stream import threads_on

SOURCE = Path(__file__).with_name("cores.c")
# About 0.1 ms if the cores share a cache, so that it can be measured between passes.
UNCOUNTED, TURNS = 200, 2000
LINE = 64


class Cores:
    def __init__(self, cores: Sequence[int]) -> None:
        self.cores = tuple(cores)

    def nanoseconds(self, one: int, other: int) -> float:
        # A cache line that holds nothing else, wherever the buffer begins.
        buffer = ctypes.create_string_buffer(2 * LINE)
        line = -ctypes.addressof(buffer) % LINE + ctypes.addressof(buffer)
        with threads_on((one, other)) as pool:
            both = [pool.submit(self._library.round_trips, line, number, UNCOUNTED, TURNS) for number in (0, 1)]
            return min(future.result() for future in both)

    def farthest(self) -> float:
        """The longest round trip between the first core and any other; 0 if there is no other."""
        first, *others = self.cores
        return max((self.nanoseconds(first, other) for other in others), default=0.0)

    @cached_property
    def _library(self) -> ctypes.CDLL:
        library = compiled(SOURCE)
        library.round_trips.argtypes = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)
        library.round_trips.restype = ctypes.c_double
        return library


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=21, help="that each pair is measured")
    asked = parser.parse_args()
    usable = sorted(os.sched_getaffinity(0))
    cores = Cores(usable)
    for one, other in combinations(usable, 2):
        times = sorted(cores.nanoseconds(one, other) for _ in range(asked.times))
        print(f"cores {one} and {other}: median {times[len(times) // 2]:.0f} ns, {times[0]:.0f} to {times[-1]:.0f}")


if __name__ == "__main__":
    main()
