"""How fast memory can be read: the yardstick of every forward pass that is bound by its weights."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

from outrider.kernels import native

# More than any last-level cache that these machines have.
BYTES = 2 << 30


class Stream:
    """A buffer that all threads read together, a part each."""

    def __init__(self, threads: int, size: int = BYTES) -> None:
        self.threads = threads
        self._memory = native.Memory(size)
        # Written, or every page would be the one page of zeros.
        self._memory.array[:] = 1
        self._address = self._memory.array.ctypes.data
        self._part = size // threads
        self._pool = ThreadPoolExecutor(threads)

    def gigabytes_a_second(self) -> float:
        """Of one reading of the whole buffer."""
        started = time.perf_counter()
        parts = [(self._address + index * self._part, self._part) for index in range(self.threads)]
        list(self._pool.map(lambda part: native.stream_read(*part), parts))
        return self._part * self.threads / (time.perf_counter() - started) / 1e9
