"""The peak of the processor's arithmetic: the other yardstick beside stream.py's.

    python benchmarks/peaks.py

Compiles peaks.c for this machine (a C compiler is needed) and runs it on all threads at once.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path

from stream import threads_on

SOURCE = Path(__file__).with_name("peaks.c")
# About 20 ms for a measurement: long enough for the clock, short enough to be done between passes.
TURNS = 2_000_000
AMX_TURNS = 100_000


def compiled(source: Path) -> ctypes.CDLL:
    """The C file, compiled for this machine."""
    with tempfile.TemporaryDirectory() as folder:
        built = Path(folder) / "compiled.so"
        options = ("-O2", "-march=native", "-shared", "-fPIC")
        subprocess.run([os.environ.get("CC", "cc"), *options, str(source), "-o", str(built)], check=True)
        return ctypes.CDLL(str(built))


class Peaks:
    def __init__(self, cores: Sequence[int]) -> None:
        self.threads = len(cores)
        self._pool = threads_on(cores)

    def fma_gflops(self) -> float:
        """fp32 operations; a product and a sum count as two."""
        return 2 * self._rate(self._library.fma_products, TURNS)

    def int8_gmacs(self) -> float:
        """int8 multiply-accumulates on the faster unit, vectors or tiles.

        Without VNNI these are for codes of up to four bits; codes of eight bits take two.
        """
        return max(self._rate(self._library.int8_products, TURNS), self._rate(self._library.amx_products, AMX_TURNS))

    def bf16_gmacs(self) -> float:
        """bf16 multiply-accumulates in fp32; a tile does half as many as of int8."""
        return max(self._rate(self._library.bf16_products, TURNS), self._rate(self._library.amx_products, AMX_TURNS) / 2)

    def _rate(self, function: Callable[[int, ctypes.Array[ctypes.c_char]], int], turns: int) -> float:
        def one(_: int) -> int:
            return function(turns, ctypes.create_string_buffer(64))

        started = time.perf_counter()
        done = sum(self._pool.map(one, range(self.threads)))
        return done / (time.perf_counter() - started) / 1e9

    @cached_property
    def _library(self) -> ctypes.CDLL:
        library = compiled(SOURCE)
        for name in ("fma_products", "int8_products", "bf16_products", "amx_products"):
            getattr(library, name).argtypes = (ctypes.c_int64, ctypes.c_void_p)
            getattr(library, name).restype = ctypes.c_int64
        return library


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    cores = sorted(os.sched_getaffinity(0))
    peaks = Peaks(cores)
    gflops, gmacs = (sorted(measure() for _ in range(20)) for measure in (peaks.fma_gflops, peaks.int8_gmacs))
    print(f"{len(cores)} threads, fp32: best {gflops[-1]:.0f} GFLOP/s, median {gflops[10]:.0f}")
    print(f"{len(cores)} threads, int8: best {gmacs[-1]:.0f} GMAC/s, median {gmacs[10]:.0f}")


if __name__ == "__main__":
    main()
