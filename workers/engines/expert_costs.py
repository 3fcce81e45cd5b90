"""How much a pass of a mixture of experts saves because tokens of one text share experts. Pure.

A router that chooses ``chosen`` of ``experts`` for each of n unrelated tokens needs in all

    needed_unrelated(n) = experts * (1 - (1 - chosen / experts) ** n)

experts. Tokens of one text choose repeated, so n of them count as n ** exponent unrelated ones. Exponents are learned from
passes, by how many tokens a row has in one. The time of a pass is then

    seconds(n) = unrelated_seconds(n) * (1 - reading * (1 - needed / needed_unrelated))

where ``unrelated_seconds`` are measured with unrelated tokens, and ``reading`` is the share of such a pass that is
proportional to the number of experts that it reads.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate

from outrider.workers.engines.engine import Router

# The share of a new observation in an exponent's running mean.
FRESH = 0.1
# Above 1 tokens avoid each other's experts.
MOST_EXPONENT = 1.25
# A pass that needs nearly all experts does not tell how many unrelated tokens its tokens count as.
MOST_NEEDED = 0.98
# The largest share of reading in a pass: it always does something else as well.
MOST_READING = 0.95
# Of a bisection.
HALVINGS = 24


class ExpertNeeds:
    """How many experts a pass needs, over all layers, by its number of tokens and of rows."""

    def __init__(self, routers: Sequence[Router]) -> None:
        self._kinds = [(kind.experts, kind.chosen, layers) for kind, layers in Counter(routers).items()]
        self.experts = sum(router.experts for router in routers)
        self.a_token = sum(router.chosen for router in routers)
        self.rows = 1
        # Exponents at powers of two: of n tokens of one row, and of one token each of n rows.
        self._in_a_row: dict[int, float] = {}
        self._by_rows: dict[int, float] = {}

    def __call__(self, tokens: int) -> float:
        """The experts needed by this many tokens, divided evenly among as many rows as the latest pass had."""
        rows = min(self.rows, tokens)
        return self._of(_power(self._by_rows, rows) * _power(self._in_a_row, tokens / rows))

    def observe(self, shares: Sequence[int], read: int) -> None:
        """A pass over ``shares[i]`` tokens of row i read this many experts."""
        self.rows = len(shares)
        if sum(shares) < 2 or not self.a_token <= read <= MOST_NEEDED * self.experts:
            return
        counted = self._unrelated_tokens(read)
        if max(shares) < 2:
            _learn(self._by_rows, self.rows, math.log(counted) / math.log(self.rows))
            return
        # Solve sum(share ** exponent) = wanted for the exponent, with the effect of several rows taken out.
        wanted = counted * self.rows / _power(self._by_rows, self.rows)
        exponent = _bisected(0.0, MOST_EXPONENT, wanted, lambda exponent: sum(share**exponent for share in shares))
        _learn(self._in_a_row, _usual_size(shares), exponent)

    def _of(self, counted: float) -> float:
        return math.fsum(
            layers * experts * (1.0 - math.pow(1.0 - chosen / experts, counted)) for experts, chosen, layers in self._kinds
        )

    def _unrelated_tokens(self, read: int) -> float:
        """How many unrelated tokens would need this many experts: the inverse of ``_of``."""
        return _bisected(1.0, float(self.experts), read, self._of)


class ExpertSharing:
    """The ratio of a pass's time to that of a pass over as many unrelated tokens.

    ``unrelated`` and ``unrelated_seconds`` are the needs and the time of the latter, ``expert_seconds`` the time for each
    expert that is read.
    """

    def __init__(
        self,
        routers: Sequence[Router],
        unrelated: ExpertNeeds,
        unrelated_seconds: Callable[[int], float],
        expert_seconds: float,
    ) -> None:
        self.needs = ExpertNeeds(routers)
        self._unrelated = unrelated
        self._unrelated_seconds = unrelated_seconds
        self._expert_seconds = expert_seconds

    def reading(self, tokens: int) -> float:
        """The share of a pass over unrelated tokens that is proportional to the number of experts it reads."""
        return min(MOST_READING, self._expert_seconds * self._unrelated(tokens) / self._unrelated_seconds(tokens))

    def factor(self, tokens: int, needed: float) -> float:
        return 1.0 - self.reading(tokens) * (1.0 - needed / self._unrelated(tokens))

    def record(self, sizes: Sequence[int]) -> dict[str, object]:
        """For job.json: experts of all layers, of one token, and of passes over ``sizes`` tokens."""
        needs = self.needs
        return {
            "experts": needs.experts,
            "a_token": needs.a_token,
            "rows": needs.rows,
            "needed": {size: round(needs(size), 1) for size in sizes},
            "needed_apart": {size: round(self._unrelated(size), 1) for size in sizes},
            "reading": {size: round(self.reading(size), 3) for size in sizes},
        }


def expert_seconds(unrelated: Mapping[int, tuple[float, float]], repeated: Mapping[int, tuple[float, float]]) -> float:
    """The time of a pass for each expert, at least 0: a least-squares fit to the differences in (seconds, experts read)
    between passes over unrelated tokens and over as many repetitions of one token."""
    both = [(unrelated[size], repeated[size]) for size in repeated if size in unrelated]
    differences = [(left[0] - right[0], left[1] - right[1]) for left, right in both]
    squares = sum(read * read for _, read in differences)
    return max(0.0, sum(seconds * read for seconds, read in differences) / squares) if squares else 0.0


def _usual_size(shares: Sequence[int]) -> float:
    """The mean number of tokens of a token's row: the exponential of the mean logarithm."""
    return math.exp(sum(share * math.log(share) for share in shares) / sum(shares))


def _learn(exponents: dict[int, float], size: float, exponent: float) -> None:
    knot = max(1, round(math.log2(size)))
    exponent = min(exponent, MOST_EXPONENT)
    before = exponents.get(knot)
    exponents[knot] = exponent if before is None else before + FRESH * (exponent - before)


def _power(exponents: Mapping[int, float], size: float) -> float:
    """size ** exponent, with the exponent interpolated between powers of two, and never falling with ``size``.

    A power of two without an observation takes the exponent of the nearest one; without any, tokens are unrelated.
    """
    if size <= 1.0 or not exponents:
        return size
    log = math.log2(size)
    last = max(1, math.ceil(log))
    nearest = [exponents[min(exponents, key=lambda seen: abs(seen - knot))] for knot in range(1, last + 1)]
    logs = [0.0, *accumulate((knot * exponent for knot, exponent in enumerate(nearest, 1)), max)]
    below = logs[last - 1]
    return float(2.0 ** (below + (logs[last] - below) * (log - last + 1)))


def _bisected(low: float, high: float, wanted: float, rising: Callable[[float], float]) -> float:
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if rising(middle) > wanted else (middle, high)
    return (low + high) / 2
