"""Constrained decoding on the target: which candidates a row's grammar allows, and the token mask of each choice.

The masks of a pass depend on nothing but what is fed, so they are made beside the pass: the engine waits for them where it
chooses. A few cheap ones are made before it, since to wake a thread takes longer.

Some masks take longer than what they are good for: amid a string of limited length nearly all tokens may come, and the
library walks through all of its vocabulary to say so. Such a place is left *open*: the choice is made among all tokens, and
stands where the constraint allows it, since the best of all is then the best of those that are allowed. Where it does not,
the next best are tried, and if none of a few is allowed the mask is made after all. So what is left open decides how long
a text takes, never the text.
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
from outrider.workers.target.live_row import Kind, LiveRow, kind_behind
from outrider.workers.target.proposers import Proposal

# What is forced behind a row's last candidate is fed along, though it is not certain that it will be reached.
MOST_BEHIND = 8
# What is certain waits for no candidate.
MOST_CERTAIN = 64
# The kernels have the cores meanwhile.
CORES_A_THREAD, MOST_THREADS = 4, 8
# What masks take may change from one place of a text to the next by a hundred times.
AT_ONCE_SECONDS, WEIGHT = 1e-3, 0.2
# Nor are masks left out that are so dear that the library may be about to give up at the next, which is that row's error.
MOST_OPEN_SECONDS = 5e-3
# A thread that makes masks takes a core of the pass's, and at each of its barriers the others wait for that one: 1 is all.
SHARE_OF_PASS = 1.0
# Kinds of places of which it is known what a mask takes: most jobs have a few.
MOST_KINDS = 1024
# Where nothing was forced, a string's first letter, say, is known by so many tokens before it.
TOKENS_AMID = 3
# How fast it is learned what refused choices take, and how fast that is forgotten while no place is open.
REFUSED_WEIGHT, FORGETTING = 0.02, 0.995


def fitting(live: LiveRow, proposal: Proposal, room: int) -> Proposal:
    """Of a row's candidates those that its constraint allows, and what is forced before, between and behind them.

    Runners-up are left out: the choice behind one would need a mask of its own.
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
    most = min(room, max(MOST_CERTAIN if not taken else 0, taken + MOST_BEHIND))
    while matching.forced and len(matching) - start < most:
        certain.append(len(matching) - start)
        matching.take(matching.forced[0])
    tokens = matching.tokens[start : start + room]
    matching.back(start)
    matching.mend()
    return proposal._replace(
        tokens=list(tokens), runners_up=(), certain=tuple(place for place in certain if place < len(tokens))
    )


def may_be_open(sampling: Sampling) -> bool:
    """Whether the best of all tokens, where it is allowed, is the best of those that are: not where shares of all count."""
    return sampling.greedy or (sampling.top_k <= 0 and sampling.top_p >= 1.0 and sampling.min_p <= 0.0)


class Rank(Protocol):
    """``Ranker.rank`` of one choice."""

    def __call__(self, count: int, mask: NDArray[np.uint32] | None = None, /) -> Sequence[int]: ...


# A row, its candidates, and where its masks begin.
_Job = tuple[LiveRow, Sequence[int], int]


class MaskMaker:
    """Makes the masks of a pass, many of them in threads: one, or a few where the process has many cores."""

    def __init__(self, engine: Engine) -> None:
        self._ranker = engine.ranker
        # The masks of a pass, and one: memory that is new to a process takes longer than what is written there.
        self._memory = np.empty((0, -(-engine.vocabulary // 32)), np.uint32)
        self._one = np.empty(self._memory.shape[1], np.uint32)
        self._threads: ThreadPoolExecutor | None = None
        self._shares = 1
        self._making: list[Future[float]] = []
        # How many are in the making, and what one has usually taken.
        self._count = 0
        self._usual = 0.0
        # Whether the best tokens of all choices of the pass will be known behind it.
        self._ranks = self._ranker is not None
        # What refused choices take, of each choice at an open place.
        self._refused = 0.0
        self._kinds: dict[Kind, float] = {}

    def begin(self, rows: Sequence[LiveRow], feeds: Sequence[Feed]) -> list[Feed]:
        """The feeds with their masks, which are in the making from now on. ``finish`` comes before the rows go on."""
        wanted = [(live, feed) for live, feed in zip(rows, feeds, strict=True) if live.matching is not None and feed.choose]
        if not wanted:
            return list(feeds)
        masks = PassMasks(self._room(sum(feed.choose for _, feed in wanted)))
        fed = sum(len(feed.tokens) + len(feed.branches) for feed in feeds)
        self._ranks = self._ranker is not None and fed <= self._ranker.most_tokens
        first, begun, jobs, count = 0, {}, list[_Job](), 0
        for live, feed in wanted:
            count += 0 if self._is_open(live, live.kind) else feed.choose
            begun[feed.row] = replace(feed, masks=FeedMasks(masks, first))
            jobs.append((live, feed.tokens[len(feed.tokens) - feed.choose + 1 :], first))
            first += feed.choose
        self._count = count
        self._refused *= FORGETTING
        if self._usual * count <= AT_ONCE_SECONDS:
            self._observe(self._fill(jobs, masks, _Countdown(1, masks.made)))
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
            self._observe(sum(each.result() for each in making))

    def settle(
        self, live: LiveRow, candidates: Sequence[int], chosen: list[int], first: int, end_tokens: Collection[int]
    ) -> None:
        """Put right what a pass has chosen at the row's open places, as far as its candidates are accepted.

        ``first`` is the number of the first of them among the choices of the pass.
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
        matching.back(start)
        matching.mend()

    def _allowed(self, matching: Matching, token: int, rank: Rank, ends: Collection[int]) -> tuple[int, float]:
        """The best of the tokens that may come, where this is the best of all; -1 where none may. What a mask took, if any.

        An end is not believed, since a row has one spelling of it where nothing else may come: the mask has that.
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

    def _is_open(self, live: LiveRow, kind: Kind | None = None) -> bool:
        """Whether the row's next place is, by what the mask before it took, since places of one kind stand together.

        Behind what was forced, and where masks were seen to become dear, it is by what the mask of another row took there.
        """
        cost = live.mask_seconds
        if kind is not None:
            cost = live.mask_seconds = self._kinds.get(kind, 0.0)
        elif cost < LEAST_OPEN_SECONDS:
            cost = live.mask_seconds = self._kinds.get(self._kind_amid(live), cost)
        if not self._ranks or live.row.logprobs is not None or not may_be_open(live.row.sampling):
            return False
        return LEAST_OPEN_SECONDS <= cost <= MOST_OPEN_SECONDS and cost * SHARE_OF_PASS > self._refused

    def _learn(self, kind: Kind, seconds: float) -> None:
        """The first mask of a kind takes longer than the next: the library builds what they need when it is needed."""
        known = kind in self._kinds
        if not known and len(self._kinds) >= MOST_KINDS:
            self._kinds.clear()
        self._kinds[kind] = seconds if known else 0.0

    def _kind_amid(self, live: LiveRow) -> Kind:
        assert live.matching is not None
        return kind_behind(live.row.sampling.grammar, live.matching.last(TOKENS_AMID))

    def _fill(self, jobs: Sequence[_Job], masks: PassMasks, left: _Countdown) -> float:
        """Of each row the masks before its candidates, between and behind them. What cannot be reached allows nothing.

        The seconds of the processor that it took.
        """
        started = time.thread_time()
        try:
            for live, candidates, first in jobs:
                matching = live.matching
                assert matching is not None
                start = len(matching)
                live.open_choices, live.mask_costs = [], []
                self._fill_one(live, matching, masks.words[first], live.kind)
                reached, forced = first + 1, list[int]()
                for candidate in candidates:
                    forced = [*forced, candidate] if matching.forced else []
                    if not matching.take(candidate):
                        break
                    kind = kind_behind(live.row.sampling.grammar, forced) if forced and not matching.forced else None
                    self._fill_one(live, matching, masks.words[reached], kind)
                    reached += 1
                masks.words[reached : first + 1 + len(candidates)] = 0
                matching.back(start)
        finally:
            left.done()
        return time.thread_time() - started

    def _fill_one(self, live: LiveRow, matching: Matching, mask: NDArray[np.uint32], kind: Kind | None = None) -> None:
        """The next place's mask, or none. What is forced costs nothing to say, and says nothing of the place behind it."""
        is_open = False
        if matching.forced or matching.ended:
            matching.fill(mask)
            live.mask_seconds = 0.0
        elif self._is_open(live, kind):
            mask[:] = EVERYTHING
            is_open = True
        else:
            began, before = time.thread_time(), live.mask_seconds
            matching.fill(mask)
            live.mask_seconds = time.thread_time() - began
            if kind is None and before < LEAST_OPEN_SECONDS <= live.mask_seconds:
                kind = self._kind_amid(live)
            if kind is not None:
                self._learn(kind, live.mask_seconds)
        live.open_choices.append(is_open)
        live.mask_costs.append(live.mask_seconds)

    def _observe(self, seconds: float) -> None:
        if self._count:
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
