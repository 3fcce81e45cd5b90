"""The timeline of one process: slices of what it did when, kept until somebody fetches them."""

from __future__ import annotations

import threading

from outrider.workers.messages import Slice, Trace

# Fetched about once a second; a process that nobody fetches from keeps no more than this.
MOST_SLICES = 20_000


class Timeline:
    """Slices of one thread of work. Times are those of ``time.perf_counter``, which all processes of a host share.

    Different threads may add and fetch. When it is full, new slices are dropped and counted.
    """

    def __init__(self, most: int = MOST_SLICES) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._slices: list[Slice] = []
        self._dropped = 0

    def add(self, name: str, started: float, ended: float, rows: int = 0, tokens: int = 0) -> None:
        slice_ = Slice(name, round(started * 1e9), round(ended * 1e9), rows, tokens)
        with self._lock:
            if len(self._slices) < self._most:
                self._slices.append(slice_)
            else:
                self._dropped += 1

    def fetch(self) -> Trace:
        """Everything since the last fetch."""
        with self._lock:
            trace = Trace(tuple(self._slices), self._dropped)
            self._slices, self._dropped = [], 0
        return trace
