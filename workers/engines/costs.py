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

# Numbers of tokens. The first few decide between plain rounds and few candidates; the others are measured if time allows.
FIRST_POINTS = (1, 4, 8, 16)
POINTS = (*FIRST_POINTS, 2, 6, 12, 32, 64, 128)
REPEATS = 3
BUDGET_SECONDS = 0.4
PREFIX = 32
# A row number that no job uses.
PROBE_ROW = -1
# For a mixture of experts, passes over one repeated token are measured as well.
REPEATED_POINTS = (4, 8, 16)
# The share of a new observation in a point's running mean.
FRESH = 0.1
# The share by which the other points follow the two that a pass refreshes.
FOLLOWING = 0.02
# ``Recent.usual`` is taken over this many values.
RECENT = 9
# Of ``ContextCost``: the length of its moving averages in passes, and the weight of its prior in passes whose contexts
# differed by this many tokens a row. The prior is needed because a machine that slows down while all rows grow looks the
# same.
PASSES_OF_CONTEXT = 500
PRIOR_PASSES, PRIOR_TOKENS = 20, 64


class ContextCost:
    """``seconds`` that each token in the caches of a pass's rows adds to the pass.

    The slope of a regression line: seconds / usual against context / usual, where ``usual`` is what a pass over as many
    tokens took at first, so that passes of all sizes have the same weight. ``prior`` is the slope before any observation.
    """

    def __init__(self, prior: float = 0.0) -> None:
        self._prior = prior
        self._passes = 0.0
        self._mean_x = self._mean_y = math.nan
        self._covariance = self._variance = self._prior_weight = 0.0

    @property
    def seconds(self) -> float:
        if not self._passes:
            return self._prior
        return max(0.0, self._covariance + self._prior_weight * self._prior) / (self._variance + self._prior_weight)

    def anew(self) -> ContextCost:
        """For other values of ``usual``: the means start anew, the slope stays."""
        fresh = copy(self)
        fresh._mean_x = fresh._mean_y = math.nan
        return fresh

    def observe(self, rows: int, context: int, usual: float, seconds: float) -> None:
        """A pass took ``seconds``, at first ``usual``; its ``rows`` have ``context`` tokens in their caches."""
        x, y = context / usual, seconds / usual
        if math.isnan(self._mean_x):
            self._mean_x, self._mean_y = x, y
            return
        self._passes = min(self._passes + 1.0, PASSES_OF_CONTEXT)
        share, dx, dy = 1.0 / self._passes, x - self._mean_x, y - self._mean_y
        self._mean_x += share * dx
        self._mean_y += share * dy
        self._covariance += share * ((1.0 - share) * dx * dy - self._covariance)
        self._variance += share * ((1.0 - share) * dx * dx - self._variance)
        self._prior_weight = share * PRIOR_PASSES * (rows * PRIOR_TOKENS / usual) ** 2


class CostCurve:
    """Seconds of a pass over a number of tokens, linear between measured points and beyond the last.

    For a mixture of experts the points are those of unrelated tokens, and ``sharing`` corrects for tokens of texts, which
    need fewer experts. ``context`` adds the cost of the tokens in the caches of a pass's rows.
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
        """This curve with new ``points``; old points outside their range are scaled as the nearest one changed."""
        if not points:
            return self
        first, last = min(points), max(points)
        below = {count: self(count) * points[first] / self(first) for count in self._counts if count < first}
        above = {count: self(count) * points[last] / self(last) for count in self._counts if count > last}
        return type(self)(rising({**below, **points, **above}), self.sharing, self.context.anew())

    def snapshot(self) -> CostCurve:
        """A copy that later passes do not change, except for the experts that texts need (shared with this one)."""
        return type(self)(self.points, self.sharing, self.context.anew())

    def sharing_like(self, other: CostCurve) -> CostCurve:
        """This curve with the expert statistics of ``other``, a curve for other cores: they do not depend on cores."""
        return type(self)(self.points, other.sharing, self.context.anew())

    def record(self) -> dict[str, object]:
        """For job.json: the expert statistics of a mixture of experts."""
        return {} if self.sharing is None else {"experts": self.sharing.record(self._counts)}

    def __call__(self, tokens: int, context: int = 0) -> float:
        seconds = self._interpolated(self._seconds, tokens)
        if self.sharing is not None:
            seconds *= self.sharing.factor(tokens, self.sharing.needs(tokens))
        return seconds + context * self.context.seconds

    def observe_pass(self, shares: Sequence[int], seconds: float, experts: int = 0, context: int = 0) -> None:
        """Refresh the points with a pass over ``shares[i]`` tokens of row i, which read this many experts.

        ``context`` is how many tokens these rows had in their caches before.
        """
        tokens = sum(shares)
        if self.sharing is not None and experts:
            self.sharing.needs.observe(shares, experts)
            seconds /= self.sharing.factor(tokens, experts)
        self._extend_to(tokens)
        now, of_context = self._interpolated(self._seconds, tokens), context * self.context.seconds
        if tokens <= self._counts[-1]:
            # An interruption counts as no more than a pass that took twice as long.
            most = 2.0 * (now + of_context)
            self.context.observe(len(shares), context, self._interpolated(self._at_start, tokens), min(most, seconds))
        self.observe(tokens, max(now / 2, seconds - of_context))

    def _interpolated(self, seconds: Sequence[float], tokens: int) -> float:
        counts = self._counts
        if len(counts) == 1:
            return seconds[0]
        right = self._right_of(tokens)
        share = (tokens - counts[right - 1]) / (counts[right] - counts[right - 1])
        return max(seconds[0] / 2, seconds[right - 1] + share * (seconds[right] - seconds[right - 1]))

    def observe(self, tokens: int, seconds: float) -> None:
        """Move the two points next to ``tokens`` towards what a pass took, the nearer one more.

        A machine slows down and recovers as a whole, so all other points follow slowly. Otherwise those that no pass visits
        would stay as they were in the worst second.
        """
        counts = self._counts
        if tokens > counts[-1]:
            return
        # An interruption counts as no more than a pass that took twice as long.
        now = self._interpolated(self._seconds, tokens)
        excess = min(1.0, seconds / now - 1.0)
        slower = (1.0 + excess) * now / self._interpolated(self._at_start, tokens)
        right = self._right_of(tokens)
        share = (tokens - counts[right - 1]) / (counts[right] - counts[right - 1]) if len(counts) > 1 else 0.0
        self._seconds[right - 1] *= 1.0 + FRESH * (1.0 - share) * excess
        if len(counts) > 1:
            self._seconds[right] *= 1.0 + FRESH * share * excess
        moved = {right} if share == 1.0 else {right - 1, right}
        for index, start in enumerate(self._at_start):
            if index not in moved:
                self._seconds[index] += FOLLOWING * (start * slower - self._seconds[index])

    def _extend_to(self, tokens: int) -> None:
        """Extrapolate points up to this many tokens, where there was no time to measure passes of that size."""
        counts = self._counts
        if len(counts) == 1 or tokens <= counts[-1]:
            return
        for count in sorted(POINTS):
            if counts[-1] < min(count, tokens):
                self._seconds.append(self._interpolated(self._seconds, count))
                self._at_start.append(self._interpolated(self._at_start, count))
                counts.append(count)

    def _right_of(self, tokens: int) -> int:
        return min(max(bisect_left(self._counts, tokens), 1), max(1, len(self._counts) - 1))


class Recent:
    """The lower quartile of the last few values, by number of rows; a number not seen yet takes that of the nearest.

    Not the mean: a first call takes many times as long as the next, and a disturbed second must not make a draft look
    expensive for long, since a draft that looks expensive is hardly asked, and so hardly measured again.
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
        """The nearest number of rows that was observed; None before any was."""
        return min(self._values, key=lambda count: abs(count - rows), default=None)

    def __call__(self, rows: int) -> float | None:
        nearest = self.nearest(rows)
        return None if nearest is None else _usual(self._values[nearest])

    def of_a_row(self, rows: int) -> float:
        """What one row adds: the slope between the nearest and the smallest number of rows observed; 0 with one number."""
        most, fewest = self.nearest(rows), min(self._values, default=None)
        if most is None or fewest is None or most == fewest:
            return 0.0
        value = _usual(self._values[most])
        return min(max(0.0, (value - _usual(self._values[fewest])) / (most - fewest)), value / most)


def _usual(values: Collection[float]) -> float:
    return sorted(values)[(len(values) - 1) // 4]


class _UnrelatedTokens:
    """Unrelated tokens, new ones for each pass: a mixture of experts reads the experts that its tokens need, and those of
    the last pass would be in the processor's caches. Tokens of texts need fewer experts (``expert_costs``)."""

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
    """By number of tokens: the fewest seconds of a pass, and how many experts each pass read, for unrelated tokens and for
    one repeated token."""

    unrelated: dict[int, float] = field(default_factory=dict)
    repeated: dict[int, float] = field(default_factory=dict)
    read_unrelated: dict[int, list[int]] = field(default_factory=dict)
    read_repeated: dict[int, list[int]] = field(default_factory=dict)

    def sharing(self, engine: Engine) -> ExpertSharing | None:
        if engine.mixture is None:
            return None
        needs = ExpertNeeds(engine.mixture.routers)
        for count, reads in self.read_unrelated.items():
            for read in reads:
                needs.observe([count], read)
        each = expert_seconds(
            _seconds_and_reads(self.unrelated, self.read_unrelated), _seconds_and_reads(self.repeated, self.read_repeated)
        )
        return ExpertSharing(engine.mixture.routers, needs, CostCurve(rising(self.unrelated)), each)


def measure(engine: Engine, seconds: float = BUDGET_SECONDS, only: Sequence[int] = ()) -> CostCurve:
    """Feed a probe row passes of several sizes: each once, and again as long as the time lasts; the fastest counts.

    With ``only``, passes of these sizes, once each; sharing of experts is not measured.
    """
    if only:
        return CostCurve(rising(_passes(engine, 0.0, only, 1).unrelated))
    measured = _passes(engine, seconds, POINTS, PREFIX)
    points = rising(measured.unrelated)
    # The prior: keys and values are read at the same rate as weights.
    return CostCurve(points, measured.sharing(engine), ContextCost(engine.context_share * min(points.values())))


def rising(points: Mapping[int, float]) -> dict[int, float]:
    """min(points[n] for n >= count): no pass takes longer than one over more tokens, unless it was disturbed."""
    least, found = math.inf, {}
    for count in sorted(points, reverse=True):
        least = found[count] = min(least, points[count])
    return found


def _seconds_and_reads(seconds: Mapping[int, float], read: Mapping[int, Sequence[int]]) -> dict[int, tuple[float, float]]:
    return {count: (each, fmean(read[count])) for count, each in seconds.items()}


def _passes(engine: Engine, seconds: float, sizes: Sequence[int], prefix: int) -> _Measured:
    deadline = time.perf_counter() + seconds
    measured = _Measured()
    engine.open(PROBE_ROW, Sampling(), prefix)
    try:
        prefix = min(prefix, engine.context // 2)
        unrelated = _UnrelatedTokens(engine.vocabulary)
        engine.feed([Feed(PROBE_ROW, unrelated.take(prefix), 0)])

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
                one(unrelated.take(count), measured.unrelated, measured.read_unrelated)
                if engine.mixture is not None and sizes is POINTS and count in REPEATED_POINTS:
                    one(unrelated.repeat(count), measured.repeated, measured.read_repeated)
    finally:
        engine.close(PROBE_ROW)
    return measured
