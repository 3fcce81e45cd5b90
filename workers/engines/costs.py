"""What a pass of an engine costs, measured: seconds against the number of tokens fed."""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from statistics import fmean

from outrider.workers.engines.engine import Engine, Feed
from outrider.workers.engines.expert_costs import ExpertNeeds, ExpertSharing, expert_seconds
from outrider.workers.messages import Sampling

# The first few decide between plain rounds and small numbers of candidates; the others are taken if time allows.
FIRST_POINTS = (1, 4, 8, 16)
POINTS = (*FIRST_POINTS, 2, 6, 12, 32, 64, 128)
REPEATS = 3
BUDGET_SECONDS = 0.4
PREFIX = 32
# A row number that no job uses.
PROBE_ROW = -1
# Of a mixture of experts passes over tokens of one kind are taken too.
ALIKE_POINTS = (4, 8, 16)
# The share of a new observation in a point's running mean.
FRESH = 0.1
# How fast the points that a pass says nothing of follow those that it does.
FOLLOWING = 0.02
# So many values decide what is usual.
RECENT = 9
# What a token of context adds is told from about so many passes. It is believed to be as at first with the weight of some
# whose rows differed by so many tokens: while all rows grow, a machine that becomes slower looks alike.
PASSES_OF_CONTEXT = 500
DOUBTFUL_PASSES, DOUBTFUL_TOKENS = 20, 64


class ContextCost:
    """What each token in the caches of a pass's rows adds to it: ``seconds``, by passes behind more and fewer of them.

    It is the slope of a straight line through what passes took, each in units of what one over as many tokens took at
    first, so that passes of all sizes count alike. ``believed`` is what it is taken for before that says anything.
    """

    def __init__(self, believed: float = 0.0) -> None:
        self._believed = believed
        self._passes = 0.0
        self._context = self._took = math.nan
        self._both = self._spread = self._doubt = 0.0

    @property
    def seconds(self) -> float:
        if not self._passes:
            return self._believed
        return max(0.0, self._both + self._doubt * self._believed) / (self._spread + self._doubt)

    def anew(self) -> ContextCost:
        """With other passes at first: what is known of the slope stays."""
        fresh = copy(self)
        fresh._context = fresh._took = math.nan
        return fresh

    def observe(self, rows: int, context: int, usual: float, seconds: float) -> None:
        """A pass over so many rows behind so many tokens took so many seconds, where ``usual`` are those at first."""
        x, y = context / usual, seconds / usual
        if math.isnan(self._context):
            self._context, self._took = x, y
            return
        self._passes = min(self._passes + 1.0, PASSES_OF_CONTEXT)
        share, dx, dy = 1.0 / self._passes, x - self._context, y - self._took
        self._context += share * dx
        self._took += share * dy
        self._both += share * ((1.0 - share) * dx * dy - self._both)
        self._spread += share * ((1.0 - share) * dx * dx - self._spread)
        self._doubt = share * DOUBTFUL_PASSES * (rows * DOUBTFUL_TOKENS / usual) ** 2


class CostCurve:
    """Seconds of a pass over a number of tokens, linear between measured points and beyond the last.

    Of a mixture of experts the points are for tokens that have nothing in common, and ``sharing`` says what those of texts
    need less. ``context`` says what comes on top for the tokens that its rows have in their caches.
    """

    def __init__(
        self, points: Mapping[int, float], sharing: ExpertSharing | None = None, context: ContextCost | None = None
    ) -> None:
        self.sharing = sharing
        self.context = context or ContextCost()
        self._counts = sorted(points)
        self._seconds = [points[count] for count in self._counts]
        self._at_start = list(self._seconds)

    @property
    def points(self) -> dict[int, float]:
        return dict(zip(self._counts, self._seconds, strict=True))

    def measured_anew(self, points: Mapping[int, float]) -> CostCurve:
        """With these points; those on either side of all of them are believed to have changed like the nearest one."""
        if not points:
            return self
        first, last = min(points), max(points)
        below = {count: self(count) * points[first] / self(first) for count in self._counts if count < first}
        above = {count: self(count) * points[last] / self(last) for count in self._counts if count > last}
        return type(self)(rising({**below, **points, **above}), self.sharing, self.context.anew())

    def as_now(self) -> CostCurve:
        """What passes to come take leaves this one as it is; which experts texts need is learned for both."""
        return type(self)(self.points, self.sharing, self.context.anew())

    def sharing_like(self, other: CostCurve) -> CostCurve:
        """On other cores, say: tokens need the same experts wherever they are fed."""
        return type(self)(self.points, other.sharing, self.context.anew())

    def record(self) -> dict[str, object]:
        """For job.json: what is known of the experts, where there are some."""
        return {} if self.sharing is None else {"experts": self.sharing.record(self._counts)}

    def __call__(self, tokens: int, context: int = 0) -> float:
        apart = self._between(self._seconds, tokens)
        if self.sharing is not None:
            apart *= self.sharing.factor(tokens, self.sharing.needs(tokens))
        return apart + context * self.context.seconds

    def observe_pass(self, shares: Sequence[int], seconds: float, experts: int = 0, context: int = 0) -> None:
        """Refresh the points with a pass over so many tokens of each row, which read so many experts.

        ``context`` are the tokens that these rows had in their caches before.
        """
        tokens = sum(shares)
        if self.sharing is not None and experts:
            self.sharing.needs.observe(shares, experts)
            seconds /= self.sharing.factor(tokens, experts)
        self._reach(tokens)
        now, behind = self._between(self._seconds, tokens), context * self.context.seconds
        if tokens <= self._counts[-1]:
            # An interruption counts as no more than a pass that took twice as long.
            most = 2.0 * (now + behind)
            self.context.observe(len(shares), context, self._between(self._at_start, tokens), min(most, seconds))
        self.observe(tokens, max(now / 2, seconds - behind))

    def _between(self, seconds: Sequence[float], tokens: int) -> float:
        counts = self._counts
        if len(counts) == 1:
            return seconds[0]
        right = self._right_of(tokens)
        share = (tokens - counts[right - 1]) / (counts[right] - counts[right - 1])
        return max(seconds[0] / 2, seconds[right - 1] + share * (seconds[right] - seconds[right - 1]))

    def observe(self, tokens: int, seconds: float) -> None:
        """Refresh the points on both sides with what a real pass took, the nearer one more.

        A machine slows down and recovers as a whole, so the points further off follow, slowly: those that no pass visits
        any more would else stay as they were in the worst second.
        """
        counts = self._counts
        if tokens > counts[-1]:
            return
        # An interruption counts as no more than a pass that took twice as long.
        now = self._between(self._seconds, tokens)
        excess = min(1.0, seconds / now - 1.0)
        slower = (1.0 + excess) * now / self._between(self._at_start, tokens)
        right = self._right_of(tokens)
        share = (tokens - counts[right - 1]) / (counts[right] - counts[right - 1]) if len(counts) > 1 else 0.0
        self._seconds[right - 1] *= 1.0 + FRESH * (1.0 - share) * excess
        if len(counts) > 1:
            self._seconds[right] *= 1.0 + FRESH * share * excess
        moved = {right} if share == 1.0 else {right - 1, right}
        for index, start in enumerate(self._at_start):
            if index not in moved:
                self._seconds[index] += FOLLOWING * (start * slower - self._seconds[index])

    def _reach(self, tokens: int) -> None:
        """There was no time to measure large passes: where one comes, the line goes on to a point of its size."""
        counts = self._counts
        if len(counts) == 1 or tokens <= counts[-1]:
            return
        for count in sorted(POINTS):
            if counts[-1] < min(count, tokens):
                self._seconds.append(self._between(self._seconds, count))
                self._at_start.append(self._between(self._at_start, count))
                counts.append(count)

    def _right_of(self, tokens: int) -> int:
        return min(max(bisect_left(self._counts, tokens), 1), max(1, len(self._counts) - 1))


class Recent:
    """What is usual among the last few values, by number of rows; a number not seen yet takes its nearest's.

    The lower quartile and not a mean: the first call of anything takes many times as long as the next, and a disturbed
    second must not make a draft look dear for long, since what looks dear is hardly asked and hardly measured again.
    """

    def __init__(self, most: int = RECENT) -> None:
        self._most = most
        self._values: dict[int, deque[float]] = {}

    @property
    def usual(self) -> dict[int, float]:
        return {rows: _usual(values) for rows, values in list(self._values.items())}

    def observe(self, rows: int, value: float) -> None:
        self._values.setdefault(rows, deque(maxlen=self._most)).append(value)

    def nearest(self, rows: int) -> int | None:
        """The number of rows among those seen; None before there are any."""
        return min(self._values, key=lambda count: abs(count - rows), default=None)

    def __call__(self, rows: int) -> float | None:
        nearest = self.nearest(rows)
        return None if nearest is None else _usual(self._values[nearest])

    def of_a_row(self, rows: int) -> float:
        """What one row of so many adds, by the fewest rows that were seen; 0 where it cannot be told."""
        most, fewest = self.nearest(rows), min(self._values, default=None)
        if most is None or fewest is None or most == fewest:
            return 0.0
        value = _usual(self._values[most])
        return min(max(0.0, (value - _usual(self._values[fewest])) / (most - fewest)), value / most)


def _usual(values: Collection[float]) -> float:
    return sorted(values)[(len(values) - 1) // 4]


class _Texts:
    """Tokens that have nothing in common: of a mixture of experts, the cost of a pass depends on how many of them its
    tokens need, and the same ones again would be in the processor's caches. Real texts need rather fewer
    (``expert_costs``)."""

    def __init__(self, vocabulary: int) -> None:
        self._vocabulary = vocabulary
        self._taken = 0

    def take(self, count: int) -> list[int]:
        numbers = range(self._taken, self._taken + count)
        self._taken += count
        # Consecutive numbers, spread over the vocabulary.
        return [(number * 2654435761 >> 7) % self._vocabulary for number in numbers]

    def repeat(self, count: int) -> list[int]:
        """One token again and again, another one each time."""
        return self.take(1) * count


@dataclass(slots=True)
class _Measured:
    """Of passes of one size: the fewest seconds, and how many experts they read, for each kind of tokens."""

    apart: dict[int, float] = field(default_factory=dict)
    alike: dict[int, float] = field(default_factory=dict)
    read_apart: dict[int, list[int]] = field(default_factory=dict)
    read_alike: dict[int, list[int]] = field(default_factory=dict)

    def sharing(self, engine: Engine) -> ExpertSharing | None:
        if engine.mixture is None:
            return None
        needs = ExpertNeeds(engine.mixture.routers)
        for count, reads in self.read_apart.items():
            for read in reads:
                needs.observe([count], read)
        each = expert_seconds(_both(self.apart, self.read_apart), _both(self.alike, self.read_alike))
        return ExpertSharing(engine.mixture.routers, needs, CostCurve(rising(self.apart)), each)


def measure(engine: Engine, seconds: float = BUDGET_SECONDS, only: Sequence[int] = ()) -> CostCurve:
    """Feed a probe row passes of several sizes: each once, and again as long as the time lasts; the fastest counts.

    With ``only``, passes of these sizes, once each; what texts share is not looked into.
    """
    if only:
        return CostCurve(rising(_passes(engine, 0.0, only, 1).apart))
    measured = _passes(engine, seconds, POINTS, PREFIX)
    points = rising(measured.apart)
    # Keys and values come in as fast as weights do.
    return CostCurve(points, measured.sharing(engine), ContextCost(engine.context_share * min(points.values())))


def rising(points: Mapping[int, float]) -> dict[int, float]:
    """With what must have been disturbed put right: no pass takes longer than one over more tokens."""
    least, found = math.inf, {}
    for count in sorted(points, reverse=True):
        least = found[count] = min(least, points[count])
    return found


def _both(seconds: Mapping[int, float], read: Mapping[int, Sequence[int]]) -> dict[int, tuple[float, float]]:
    return {count: (each, fmean(read[count])) for count, each in seconds.items()}


def _passes(engine: Engine, seconds: float, sizes: Sequence[int], prefix: int) -> _Measured:
    deadline = time.perf_counter() + seconds
    measured = _Measured()
    engine.open(PROBE_ROW, Sampling(), prefix)
    try:
        prefix = min(prefix, engine.context // 2)
        texts = _Texts(engine.vocabulary)
        engine.feed([Feed(PROBE_ROW, texts.take(prefix), 0)])

        def one(tokens: list[int], fewest: dict[int, float], read: dict[int, list[int]]) -> None:
            count = len(tokens)
            engine.truncate(PROBE_ROW, prefix)
            started = time.perf_counter()
            engine.feed([Feed(PROBE_ROW, tokens, count)])
            fewest[count] = min(fewest.get(count, math.inf), time.perf_counter() - started)
            read.setdefault(count, []).append(0 if engine.mixture is None else engine.mixture.read)

        for repeat in range(REPEATS):
            for count in sizes:
                beyond = prefix + count > engine.context
                needed = not repeat and (count in FIRST_POINTS or sizes is not POINTS)
                if beyond or (not needed and time.perf_counter() > deadline):
                    continue
                one(texts.take(count), measured.apart, measured.read_apart)
                if engine.mixture is not None and sizes is POINTS and count in ALIKE_POINTS:
                    one(texts.repeat(count), measured.alike, measured.read_alike)
    finally:
        engine.close(PROBE_ROW)
    return measured
