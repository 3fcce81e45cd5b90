"""Constrained decoding on the target: which candidates a row's grammar allows, and the token mask of each choice.

The masks of a pass depend only on the tokens that are fed, so other threads compute them during the pass: the engine waits
for them before it chooses. A few cheap ones are computed before the pass, since waking a thread takes longer.

Some masks take longer than they are worth: within a string of limited length nearly all tokens are allowed, and llguidance
walks through all of its vocabulary to say so. Such a position is left *open*: the choice is made among all tokens. If the
grammar allows it, it is the best of the allowed tokens as well. If not, the next best are tried, and where none of a few is
allowed the mask is computed after all. So open positions change the time that a text takes, never the text.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from functools import partial
from itertools import takewhile
from threading import Lock
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from outrider.workers.constraints.matching import EVERYTHING, LEAST_OPEN_SECONDS, Matching
from outrider.workers.engines.engine import MOST_RANKED, Engine, Feed, FeedMasks, PassMasks
from outrider.workers.messages import Sampling
from outrider.workers.target.live_row import LiveRow, MaskKey, mask_key
from outrider.workers.target.proposers import Proposal

# This many tokens that the grammar forces after a row's last candidate are fed as well, though it may not be accepted.
MOST_FORCED_AFTER = 8
# This many forced tokens are fed where no candidate comes before them, since they are certain.
MOST_CERTAIN = 64
# Threads for masks: one for this many cores, since the kernels use these at the same time.
CORES_A_THREAD, MOST_THREADS = 4, 8
# Masks are computed before the pass if they should take less than this in all; the weight of a new observation of that
# time, which may change a hundredfold from one position to the next.
AT_ONCE_SECONDS, WEIGHT = 1e-3, 0.2
# Positions with more expensive masks than this are not left open: llguidance may be about to fail there, which must be that
# row's error.
MOST_OPEN_SECONDS = 5e-3
# The share of a mask's time that the pass loses: all of it, since the thread takes one core of the pass, and the others
# wait for that core at each barrier.
SHARE_OF_PASS = 1.0
# The cost of a mask is remembered for this many keys: most jobs have a few.
MOST_KEYS = 1024
# The length of a key where no token was forced before the position: it identifies the start of a string, say.
TOKENS_UNFORCED = 3
# The weight of a new observation of the cost of refused choices, and its decay in each pass without an open position.
REFUSED_WEIGHT, FORGETTING = 0.02, 0.995


def fitting(live: LiveRow, proposal: Proposal, room: int) -> Proposal:
    """The row's candidates up to the first that its grammar refuses, with the tokens that are forced before, between and
    after them.

    Runners-up are dropped: the choice after one would need a mask of its own.
    """
    matching = live.matching
    if matching is None:
        return proposal
    start, certain = len(matching), list[int]()
    for place, candidate in enumerate(proposal.tokens):
        forced = matching.forced
        if (forced and candidate != forced[0]) or not matching.take(candidate):
            break
        certain += [place] if forced else []
    taken = len(matching) - start
    most = min(room, max(MOST_CERTAIN if not taken else 0, taken + MOST_FORCED_AFTER))
    while matching.forced and len(matching) - start < most:
        certain.append(len(matching) - start)
        matching.take(matching.forced[0])
    tokens = matching.tokens[start : start + room]
    matching.truncate(start)
    matching.recover()
    return proposal._replace(
        tokens=list(tokens), runners_up=(), certain=tuple(place for place in certain if place < len(tokens))
    )


def may_be_open(sampling: Sampling) -> bool:
    """Whether the best of all tokens, if allowed, is the best of the allowed ones. Not with top-k, top-p and min-p, which
    depend on all tokens."""
    return sampling.greedy or (sampling.top_k <= 0 and sampling.top_p >= 1.0 and sampling.min_p <= 0.0)


class Rank(Protocol):
    """``Ranker.rank`` of one choice."""

    def __call__(self, count: int, mask: NDArray[np.uint32] | None = None, /) -> Sequence[int]: ...


# (row, its candidates, index of its first mask).
_Job = tuple[LiveRow, Sequence[int], int]


class MaskMaker:
    """Computes the masks of a pass: a few at once, many in one thread, or in several where the process has many cores."""

    def __init__(self, engine: Engine) -> None:
        self._ranker = engine.ranker
        # Memory for the masks of a pass, and for one more. It is reused, since the first touch of new memory takes longer
        # than writing a mask.
        self._memory = np.empty((0, -(-engine.vocabulary // 32)), np.uint32)
        self._one = np.empty(self._memory.shape[1], np.uint32)
        self._threads: ThreadPoolExecutor | None = None
        self._shares = 1
        self._making: list[Future[float]] = []
        # How many masks the current pass needs, and the usual seconds of one.
        self._count = 0
        self._seconds_a_mask = 0.0
        # Whether the engine can rank further tokens for all choices of the current pass.
        self._can_rank = self._ranker is not None
        # Seconds that refused choices cost, averaged over all choices at open positions.
        self._refused = 0.0
        self._seconds_by_key: dict[MaskKey, float] = {}

    def begin(self, rows: Sequence[LiveRow], feeds: Sequence[Feed]) -> list[Feed]:
        """The feeds with their masks, which are computed from now on. Call ``finish`` before the rows change."""
        wanted = [(live, feed) for live, feed in zip(rows, feeds, strict=True) if live.matching is not None and feed.choose]
        if not wanted:
            return list(feeds)
        masks = PassMasks(self._room(sum(feed.choose for _, feed in wanted)))
        fed = sum(len(feed.tokens) + len(feed.branches) for feed in feeds)
        self._can_rank = self._ranker is not None and fed <= self._ranker.most_tokens
        first, begun, jobs, count = 0, {}, list[_Job](), 0
        for live, feed in wanted:
            count += 0 if self._is_open(live, live.next_mask_key) else feed.choose
            begun[feed.row] = replace(feed, masks=FeedMasks(masks, first))
            jobs.append((live, feed.tokens[len(feed.tokens) - feed.choose + 1 :], first))
            first += feed.choose
        self._count = count
        self._refused *= FORGETTING
        if self._seconds_a_mask * count <= AT_ONCE_SECONDS:
            self._observe_pass(self._fill(jobs, masks, _Countdown(1, masks.made)))
            return [begun.get(feed.row, feed) for feed in feeds]
        if self._threads is None:
            self._shares = max(1, min(MOST_THREADS, len(_all_cores()) // CORES_A_THREAD))
            self._threads = ThreadPoolExecutor(self._shares, "masks", _on_all_cores)
        shares = [share for at in range(self._shares) if (share := jobs[at :: self._shares])]
        left = _Countdown(len(shares), masks.made)
        self._making = [self._threads.submit(self._fill, share, masks, left) for share in shares]
        return [begun.get(feed.row, feed) for feed in feeds]

    def finish(self) -> None:
        making, self._making = self._making, []
        if making:
            wait(making)
            self._observe_pass(sum(each.result() for each in making))

    def settle(
        self, live: LiveRow, candidates: Sequence[int], chosen: list[int], first: int, end_tokens: Collection[int]
    ) -> None:
        """Replace choices at the row's open positions that its grammar refuses, as far as its candidates are accepted.

        ``first`` is the index of the row's first choice among those of the pass.
        """
        matching, ranker = live.matching, self._ranker
        if matching is None or ranker is None or not any(live.open_choices):
            return
        own, start = live.row.sampling.end_tokens, len(matching)
        ends = end_tokens if own is None else own
        for index, is_open in enumerate(live.open_choices):
            if is_open:
                rank = partial(ranker.rank, first + index)
                chosen[index], mask_seconds = self._allowed(matching, chosen[index], rank, ends)
                live.mask_costs[index] = mask_seconds or live.mask_costs[index]
            if index == len(candidates) or chosen[index] != candidates[index] or not matching.take(chosen[index]):
                break
        matching.truncate(start)
        matching.recover()

    def _allowed(self, matching: Matching, token: int, rank: Rank, ends: Collection[int]) -> tuple[int, float]:
        """The best allowed token (-1: none), where ``token`` is the best of all; and the seconds of the mask, if one was
        needed.

        An end token always needs the mask: where nothing but the end is allowed, only one of the end tokens is.
        """
        if token not in ends and matching.allows(token):
            self._refused -= self._refused * REFUSED_WEIGHT
            return token, 0.0
        began, mask_seconds = time.perf_counter(), 0.0
        others = [] if token in ends else list(takewhile(lambda other: other not in ends, rank(MOST_RANKED)[1:]))
        best = next(filter(matching.allows, others), -1)
        if best < 0:
            filling = time.thread_time()
            matching.fill(self._one)
            mask_seconds = time.thread_time() - filling
            best = next(iter(rank(1, self._one)), -1)
        self._refused += (time.perf_counter() - began - self._refused) * REFUSED_WEIGHT
        return best, mask_seconds

    def _room(self, masks: int) -> NDArray[np.uint32]:
        if len(self._memory) < masks:
            self._memory = np.empty((masks, self._memory.shape[1]), np.uint32)
        return self._memory[:masks]

    def _is_open(self, live: LiveRow, key: MaskKey | None = None) -> bool:
        """Whether the row's next position is left open: by the cost of the mask before it, which is mostly alike.

        With a ``key`` (after forced tokens), and where the mask before was cheap, by the cost that was last seen for that
        key.
        """
        cost = live.mask_seconds
        if key is not None:
            cost = live.mask_seconds = self._seconds_by_key.get(key, 0.0)
        elif cost < LEAST_OPEN_SECONDS:
            cost = live.mask_seconds = self._seconds_by_key.get(self._unforced_key(live), cost)
        if not self._can_rank or live.row.logprobs is not None or not may_be_open(live.row.sampling):
            return False
        return LEAST_OPEN_SECONDS <= cost <= MOST_OPEN_SECONDS and cost * SHARE_OF_PASS > self._refused

    def _observe_mask(self, key: MaskKey, seconds: float) -> None:
        """Remember a mask's cost, but not that of a key's first mask, for which llguidance builds its tables."""
        known = key in self._seconds_by_key
        if not known and len(self._seconds_by_key) >= MOST_KEYS:
            self._seconds_by_key.clear()
        self._seconds_by_key[key] = seconds if known else 0.0

    def _unforced_key(self, live: LiveRow) -> MaskKey:
        assert live.matching is not None
        return mask_key(live.row.sampling.grammar, live.matching.last(TOKENS_UNFORCED))

    def _fill(self, jobs: Sequence[_Job], masks: PassMasks, left: _Countdown) -> float:
        """Compute each row's masks: before its first candidate and after each. Those after a refused candidate allow
        nothing.

        Returns the thread's CPU seconds.
        """
        started = time.thread_time()
        try:
            for live, candidates, first in jobs:
                matching = live.matching
                assert matching is not None
                start = len(matching)
                live.open_choices, live.mask_costs = [], []
                self._fill_one(live, matching, masks.words[first], live.next_mask_key)
                reached, forced = first + 1, list[int]()
                for candidate in candidates:
                    forced = [*forced, candidate] if matching.forced else []
                    if not matching.take(candidate):
                        break
                    key = mask_key(live.row.sampling.grammar, forced) if forced and not matching.forced else None
                    self._fill_one(live, matching, masks.words[reached], key)
                    reached += 1
                masks.words[reached : first + 1 + len(candidates)] = 0
                matching.truncate(start)
        finally:
            left.done()
        return time.thread_time() - started

    def _fill_one(self, live: LiveRow, matching: Matching, mask: NDArray[np.uint32], key: MaskKey | None = None) -> None:
        """Compute the mask of the next position, or leave it open. That of a forced token is free, and its cost says
        nothing of the next."""
        is_open = False
        if matching.forced or matching.ended:
            matching.fill(mask)
            live.mask_seconds = 0.0
        elif self._is_open(live, key):
            mask[:] = EVERYTHING
            is_open = True
        else:
            began, before = time.thread_time(), live.mask_seconds
            matching.fill(mask)
            live.mask_seconds = time.thread_time() - began
            if key is None and before < LEAST_OPEN_SECONDS <= live.mask_seconds:
                key = self._unforced_key(live)
            if key is not None:
                self._observe_mask(key, live.mask_seconds)
        live.open_choices.append(is_open)
        live.mask_costs.append(live.mask_seconds)

    def _observe_pass(self, seconds: float) -> None:
        if self._count:
            self._seconds_a_mask += (seconds / self._count - self._seconds_a_mask) * WEIGHT


class _Countdown:
    """Calls ``then`` after ``shares`` calls of ``done``."""

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
    """Undo the affinity that a new thread inherits from the verifying thread, which is pinned to the engine's first
    core."""
    os.sched_setaffinity(0, _all_cores())
