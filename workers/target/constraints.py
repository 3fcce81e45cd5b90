"""Rows whose answers must be something: which candidates of theirs can hold, and which tokens each choice may take.

The masks of a pass depend on nothing but what is fed, so they are made beside the pass: the engine waits for them where it
chooses. A few cheap ones are made before it, since to wake a thread takes longer.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from threading import Lock

from outrider.workers.constraints.matching import Matching
from outrider.workers.engines.engine import Feed, FeedMasks, PassMasks
from outrider.workers.target.live_row import LiveRow
from outrider.workers.target.proposers import Proposal

# What is forced behind a row's last candidate is fed along, though it is not certain that it will be reached.
MOST_BEHIND = 8
# What is certain waits for no candidate.
MOST_CERTAIN = 64
# The kernels have the cores meanwhile.
CORES_A_THREAD, MOST_THREADS = 4, 8
# What masks take may change from one place of a text to the next by a hundred times.
AT_ONCE_SECONDS, WEIGHT = 1e-3, 0.2


def fitting(live: LiveRow, proposal: Proposal, room: int) -> Proposal:
    """Of a row's candidates those that its constraint allows, and what is forced before, between and behind them.

    Runners-up are left out: the choice behind one would need a mask of its own.
    """
    matching = live.matching
    if matching is None:
        return proposal
    start, taken = len(matching), 0
    for candidate in proposal.tokens:
        if matching.forced and candidate != matching.forced[0]:
            break
        if not matching.take(candidate):
            break
        taken += 1
    most = min(room, max(MOST_CERTAIN if not taken else 0, taken + MOST_BEHIND))
    while matching.forced and len(matching) - start < most:
        matching.take(matching.forced[0])
    tokens = matching.tokens[start : start + room]
    matching.back(start)
    matching.mend()
    return proposal._replace(tokens=list(tokens), runners_up=())


class MaskMaker:
    """Makes the masks of a pass, many of them in threads: one, or a few where the process has many cores."""

    def __init__(self, vocabulary: int) -> None:
        self._words = -(-vocabulary // 32)
        self._threads: ThreadPoolExecutor | None = None
        self._shares = 1
        self._making: list[Future[float]] = []
        # How many are in the making, and what one has usually taken.
        self._count = 0
        self._usual = 0.0

    def begin(self, rows: Sequence[LiveRow], feeds: Sequence[Feed]) -> list[Feed]:
        """The feeds with their masks, which are in the making from now on. ``finish`` comes before the rows go on."""
        wanted = [
            (live.matching, feed)
            for live, feed in zip(rows, feeds, strict=True)
            if live.matching is not None and feed.choose
        ]
        if not wanted:
            return list(feeds)
        masks = PassMasks(sum(feed.choose for _, feed in wanted), self._words)
        first, begun, jobs = 0, {}, []
        for matching, feed in wanted:
            begun[feed.row] = replace(feed, masks=FeedMasks(masks, first))
            jobs.append((matching, feed.tokens[len(feed.tokens) - feed.choose + 1 :], first))
            first += feed.choose
        self._count = first
        if self._usual * first <= AT_ONCE_SECONDS:
            self._observe(_fill(jobs, masks, _Countdown(1, masks.made)))
            return [begun.get(feed.row, feed) for feed in feeds]
        if self._threads is None:
            self._shares = max(1, min(MOST_THREADS, len(_all_cores()) // CORES_A_THREAD))
            self._threads = ThreadPoolExecutor(self._shares, "masks", _on_all_cores)
        shares = [share for at in range(self._shares) if (share := jobs[at :: self._shares])]
        left = _Countdown(len(shares), masks.made)
        self._making = [self._threads.submit(_fill, share, masks, left) for share in shares]
        return [begun.get(feed.row, feed) for feed in feeds]

    def finish(self) -> None:
        making, self._making = self._making, []
        if making:
            wait(making)
            self._observe(sum(each.result() for each in making))

    def _observe(self, seconds: float) -> None:
        self._usual += (seconds / self._count - self._usual) * WEIGHT


class _Countdown:
    """Calls ``then`` when all shares are done."""

    def __init__(self, shares: int, then: Callable[[], None]) -> None:
        self._left = shares
        self._then = then
        self._lock = Lock()

    def done(self) -> None:
        with self._lock:
            self._left -= 1
            last = not self._left
        if last:
            self._then()


def _all_cores() -> set[int]:
    return os.sched_getaffinity(os.getpid())


def _on_all_cores() -> None:
    """The thread that leads the rounds is kept to the engine's first core, and these began as it is."""
    os.sched_setaffinity(0, _all_cores())


def _fill(jobs: Sequence[tuple[Matching, Sequence[int], int]], masks: PassMasks, left: _Countdown) -> float:
    """Of each row the masks before its candidates, between and behind them. What cannot be reached allows nothing.

    The seconds of the processor that it took.
    """
    started = time.thread_time()
    try:
        for matching, candidates, first in jobs:
            start = len(matching)
            matching.fill(masks.words[first])
            for index, candidate in enumerate(candidates, start=first + 1):
                if not matching.take(candidate):
                    break
                matching.fill(masks.words[index])
            matching.back(start)
    finally:
        left.done()
    return time.thread_time() - started
