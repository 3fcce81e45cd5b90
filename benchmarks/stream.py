"""Measures how fast memory can be read, which bounds every forward pass that is limited by reading weights.

python benchmarks/stream.py
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from outrider.kernels import packer

# Larger than any last-level cache.
BYTES = 2 << 30
# Threads claim pieces of this size, so that a thread that is held up does not hold up the others.
PIECE = 16 << 20
# Streams per thread; the faster number depends on the processor.
WAYS = (1, 2)


def threads_on(cores: Sequence[int]) -> ThreadPoolExecutor:
    """A pool with a thread pinned to each core: the system may leave two threads on one core for seconds."""
    left = iter(cores)
    return ThreadPoolExecutor(len(cores), initializer=lambda: os.sched_setaffinity(0, {next(left)}))


class Stream:
    """A buffer that threads, one on each core, read in pieces."""

    def __init__(self, cores: Sequence[int], size: int = BYTES) -> None:
        self.threads = len(cores)
        self.size = size // PIECE * PIECE
        self._memory = packer.Memory(self.size)
        # Written, since unwritten pages all map to the one page of zeros.
        self._memory.array[:] = 1
        self._address = self._memory.array.ctypes.data
        self._pool = threads_on(cores)

    def gigabytes_a_second(self) -> float:
        """The faster of reading the whole buffer as one stream a thread and as two."""
        return max(map(self.one_way, WAYS))

    def one_way(self, streams: int) -> float:
        pieces = iter(range(0, self.size, PIECE))

        def read(_: int) -> None:
            # Threads may share the iterator: the interpreter's lock makes ``next`` atomic.
            for offset in pieces:
                packer.stream_read(self._address + offset, PIECE, streams)

        started = time.perf_counter()
        list(self._pool.map(read, range(self.threads)))
        return self.size / (time.perf_counter() - started) / 1e9


def main() -> None:
    """The best of many readings, for docs and for comparing readers."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    cores = sorted(os.sched_getaffinity(0))
    stream = Stream(cores)
    turns = [[stream.one_way(streams) for streams in WAYS] for _ in range(20)]
    for streams, rates in zip(WAYS, map(sorted, zip(*turns, strict=True)), strict=True):
        print(f"{len(cores)} threads, {streams} stream(s) each: best {rates[-1]:.1f} GB/s, median {rates[10]:.1f}")


if __name__ == "__main__":
    main()
