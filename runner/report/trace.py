"""``--trace``: a timeline of all processes, as a Chrome trace that Perfetto opens (ui.perfetto.dev, or chrome://tracing).

Every replica is a process with one track for its target and one for its draft; the driver has a track of its own.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

from outrider.workers.errors import UsageError
from outrider.workers.messages import Trace

# About 60 MB, which Perfetto opens within seconds. Later slices are only counted.
MOST_SLICES = 500_000
# The driver's own events (deaths, say) have a limit of their own.
MOST_EVENTS = 100_000
DRIVER = 1
TRACKS = {"target": 1, "draft": 2}
# The meaning of a slice's tokens.
TOKENS = {
    "decide": "candidates wanted",
    "ask": "candidates asked for",
    "waiting for draft": "candidates",
    "propose": "candidates",
    "verify": "tokens fed",
    "commit": "tokens committed",
}
OFFSET_TRIES = 5


class TraceFile:
    """Written while the job runs, so that memory does not grow. Without a path nothing is kept."""

    def __init__(self, path: Path | None, most_slices: int = MOST_SLICES, most_events: int = MOST_EVENTS) -> None:
        self.path = path
        self.enabled = path is not None
        self._slices_left = most_slices
        self._events_left = most_events
        self._slices = self._cut = self._dropped = 0
        self._zero = time.perf_counter_ns()
        self._offsets: dict[tuple[int, str], int] = {}
        self._replicas: set[int] = set()
        self._stream: TextIO | None = None
        # Why the file ends early.
        self._broken: str | None = None
        if path is not None:
            try:
                self._stream = path.open("w", encoding="utf-8")
                self._stream.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
            except OSError as error:
                raise UsageError(f"--trace: {path} cannot be written: {error.strerror}") from None
            self._name(DRIVER, 1, "driver", "driver")

    def align(self, replica: int, role: str, ask: Callable[[], float]) -> None:
        """Measure the offset of an actor's clock (0 on the same host)."""
        if self.enabled:
            self._offsets[replica, role] = clock_offset(ask)

    def actor(self, replica: int, role: str, trace: Trace) -> None:
        """Write new slices of an actor."""
        if not self.enabled:
            return
        self._announce(replica)
        self._dropped += trace.dropped
        offset = self._offsets.get((replica, role), 0) + self._zero
        for one in trace.slices:
            if not self._slices_left:
                self._cut += 1
                continue
            self._slices_left -= 1
            self._slices += 1
            args = {"rows": one.rows} if one.rows else {}
            if one.name in TOKENS:
                args[TOKENS[one.name]] = one.tokens
            self._write(
                {
                    "name": one.name,
                    "ph": "X",
                    "pid": _process(replica),
                    "tid": TRACKS[role],
                    "ts": (one.started - offset) / 1000,
                    "dur": (one.ended - one.started) / 1000,
                    "args": args,
                }
            )

    def event(self, name: str, replica: int | None = None, role: str = "", **args: Any) -> None:
        """Write an event of the driver at this moment; with a role it is drawn on that actor's track."""
        if not self.enabled or not self._events_left:
            return
        self._events_left -= 1
        place = {"pid": DRIVER, "tid": 1}
        if replica is not None:
            args = {"replica": replica, **args}
        if replica is not None and role:
            self._announce(replica)
            place = {"pid": _process(replica), "tid": TRACKS[role]}
        moment = (time.perf_counter_ns() - self._zero) / 1000
        self._write({"name": name, "ph": "i", "s": "p" if role else "t", **place, "ts": moment, "args": args})

    def close(self) -> str | None:
        """End the file; a sentence about where it is, or what it lacks."""
        if self._stream is None:
            return None if self._broken is None else f"{self.path} ends early: {self._broken}"
        lost = {"cut": self._cut, "dropped": self._dropped}
        seconds = (time.perf_counter_ns() - self._zero) / 1e9
        # Every other event ends with a comma, so one more closes the list.
        last = json.dumps({"name": "end", "ph": "i", "s": "t", "pid": DRIVER, "tid": 1, "ts": seconds * 1e6, "args": lost})
        stream, self._stream = self._stream, None
        try:
            with stream:
                stream.write(f'{last}\n], "otherData": {json.dumps({"slices": self._slices, **lost})}}}\n')
        except OSError as error:
            return f"{self.path} ends early: {error.strerror}"
        if self._cut or self._dropped:
            return (
                f"{self.path} holds the first {self._slices:,} slices; {self._cut:,} later ones were cut, "
                f"{self._dropped:,} were dropped where they arose"
            )
        return f"{self.path} holds {self._slices:,} slices; open it at ui.perfetto.dev"

    def set_aside(self) -> str | None:
        """Rename the file before the same job begins anew with another one; a sentence if that fails."""
        if self.path is None:
            return None
        numbered = (self.path.with_stem(f"{self.path.stem}.{number}") for number in itertools.count(1))
        kept = next(path for path in numbered if not path.exists())
        try:
            self.path.rename(kept)
        except OSError as error:
            return f"what {self.path} holds until now will be lost: {error.strerror}"
        self.path = kept
        return None

    def _announce(self, replica: int) -> None:
        if replica not in self._replicas:
            self._replicas.add(replica)
            for role, track in TRACKS.items():
                self._name(_process(replica), track, f"replica {replica}", role)

    def _name(self, process: int, track: int, process_name: str, track_name: str) -> None:
        for kind, value in (
            ("process_name", {"name": process_name}),
            ("process_sort_index", {"sort_index": process}),
            ("thread_name", {"name": track_name}),
            ("thread_sort_index", {"sort_index": track}),
        ):
            self._write({"name": kind, "ph": "M", "pid": process, "tid": track, "args": value})

    def _write(self, event: dict[str, Any]) -> None:
        """Write an event. On a full disk tracing stops, not the job, and ``close`` says so."""
        if self._stream is None:
            return
        try:
            self._stream.write(json.dumps(event) + ",\n")
        except OSError as error:
            self._broken, self.enabled = error.strerror or str(error), False
            stream, self._stream = self._stream, None
            with suppress(OSError):  # there is no room for its buffer either
                stream.close()


def _process(replica: int) -> int:
    return DRIVER + 1 + replica


def clock_offset(ask: Callable[[], float], tries: int = OFFSET_TRIES) -> int:
    """The offset of another process's clock in nanoseconds, by the fastest of a few exchanges.

    0 if the offset is within the exchange's own time, as it is on the same host.
    """
    best, offset = float("inf"), 0.0
    for _ in range(tries):
        before = time.perf_counter()
        other = ask()
        after = time.perf_counter()
        if after - before < best:
            best, offset = after - before, other - (before + after) / 2
    return 0 if abs(offset) <= best / 2 else round(offset * 1e9)
