"""What tokens of a mixture of experts spare a pass by needing the same experts: pure, from what passes read and took.

A router that takes ``chosen`` of ``experts`` for each of n tokens that have nothing in common takes

    experts * (1 - (1 - chosen / experts) ** n)

of them. Tokens of one text have much in common, so n of them count for fewer: for n ** exponent. Exponents are learned from
the passes, by how many tokens a row has in one. With experts that are read so much cheaper,

    seconds(tokens) = apart_seconds(tokens) * (1 - reading * (1 - needed / needed_apart))

where ``apart`` are tokens with nothing in common, of which passes are measured, and ``reading`` is the share of such a pass
that goes by how many experts it reads.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate

from outrider.workers.engines.engine import Router

# The share of a new observation in an exponent's running mean.
FRESH = 0.1
# An exponent is at most that of tokens that avoid each other's experts.
MOST_EXPONENT = 1.25
# A pass that needs nearly all experts does not say of how many tokens that came.
MOST_NEEDED = 0.98
# Something else always remains.
MOST_READING = 0.95
HALVINGS = 24


class ExpertNeeds:
    """How many experts a pass needs, over all layers, by how many tokens of how many rows it has."""

    def __init__(self, routers: Sequence[Router]) -> None:
        self._kinds = [(kind.experts, kind.chosen, layers) for kind, layers in Counter(routers).items()]
        self.experts = sum(router.experts for router in routers)
        self.a_token = sum(router.chosen for router in routers)
        self.rows = 1
        # By powers of two: what n tokens of a row count for, and one token each of n rows.
        self._in_a_row: dict[int, float] = {}
        self._by_rows: dict[int, float] = {}

    def __call__(self, tokens: int) -> float:
        """Of a pass over so many tokens of as many rows as the latest one had, shared out evenly."""
        rows = min(self.rows, tokens)
        return self._of(_power(self._by_rows, rows) * _power(self._in_a_row, tokens / rows))

    def observe(self, shares: Sequence[int], read: int) -> None:
        """A pass had so many tokens of each row, and read so many experts."""
        self.rows = len(shares)
        if sum(shares) < 2 or not self.a_token <= read <= MOST_NEEDED * self.experts:
            return
        counted = self._tokens_behind(read)
        if max(shares) < 2:
            _learn(self._by_rows, self.rows, math.log(counted) / math.log(self.rows))
            return
        # What all rows' tokens come to beside each other, and the exponent that makes them that.
        wanted = counted * self.rows / _power(self._by_rows, self.rows)
        exponent = _between(0.0, MOST_EXPONENT, wanted, lambda exponent: sum(share**exponent for share in shares))
        _learn(self._in_a_row, _usual_size(shares), exponent)

    def _of(self, counted: float) -> float:
        return math.fsum(
            layers * experts * (1.0 - math.pow(1.0 - chosen / experts, counted)) for experts, chosen, layers in self._kinds
        )

    def _tokens_behind(self, read: int) -> float:
        """How many tokens with nothing in common would need so many experts."""
        return _between(1.0, float(self.experts), read, self._of)


class ExpertSharing:
    """By what factor a pass takes less than one over as many tokens that have nothing in common.

    ``apart`` and ``apart_seconds`` are such a pass's needs and seconds, ``expert_seconds`` what it takes for each expert.
    """

    def __init__(
        self,
        routers: Sequence[Router],
        apart: ExpertNeeds,
        apart_seconds: Callable[[int], float],
        expert_seconds: float,
    ) -> None:
        self.needs = ExpertNeeds(routers)
        self._apart = apart
        self._apart_seconds = apart_seconds
        self._expert_seconds = expert_seconds

    def reading(self, tokens: int) -> float:
        """The share of a pass over tokens with nothing in common that goes by how many experts it reads."""
        return min(MOST_READING, self._expert_seconds * self._apart(tokens) / self._apart_seconds(tokens))

    def factor(self, tokens: int, needed: float) -> float:
        return 1.0 - self.reading(tokens) * (1.0 - needed / self._apart(tokens))

    def record(self, sizes: Sequence[int]) -> dict[str, object]:
        """For job.json: experts of all layers, of a token, of passes over so many tokens of the rows at work."""
        needs = self.needs
        return {
            "experts": needs.experts,
            "a_token": needs.a_token,
            "rows": needs.rows,
            "needed": {size: round(needs(size), 1) for size in sizes},
            "needed_apart": {size: round(self._apart(size), 1) for size in sizes},
            "reading": {size: round(self.reading(size), 3) for size in sizes},
        }


def expert_seconds(apart: Mapping[int, tuple[float, float]], alike: Mapping[int, tuple[float, float]]) -> float:
    """What a pass takes for each expert, from (seconds, experts read) of passes over tokens with nothing in common and over
    as many of one kind: by least squares over their differences, and never less than nothing."""
    pairs = [(apart[size][0] - alike[size][0], apart[size][1] - alike[size][1]) for size in alike if size in apart]
    squares = sum(read * read for _, read in pairs)
    return max(0.0, sum(seconds * read for seconds, read in pairs) / squares) if squares else 0.0


def _usual_size(shares: Sequence[int]) -> float:
    """Of the row that a token has on average, as the exponent sees it."""
    return math.exp(sum(share * math.log(share) for share in shares) / sum(shares))


def _learn(exponents: dict[int, float], size: float, exponent: float) -> None:
    knot = max(1, round(math.log2(size)))
    exponent = min(exponent, MOST_EXPONENT)
    before = exponents.get(knot)
    exponents[knot] = exponent if before is None else before + FRESH * (exponent - before)


def _power(exponents: Mapping[int, float], size: float) -> float:
    """What ``size`` tokens count for: never less than fewer of them, and between powers of two in proportion.

    A power of two that was not seen yet is like the nearest that was; at first tokens have nothing in common.
    """
    if size <= 1.0 or not exponents:
        return size
    log = math.log2(size)
    last = max(1, math.ceil(log))
    nearest = [exponents[min(exponents, key=lambda seen: abs(seen - knot))] for knot in range(1, last + 1)]
    logs = [0.0, *accumulate((knot * exponent for knot, exponent in enumerate(nearest, 1)), max)]
    below = logs[last - 1]
    return float(2.0 ** (below + (logs[last] - below) * (log - last + 1)))


def _between(low: float, high: float, wanted: float, rising: Callable[[float], float]) -> float:
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if rising(middle) > wanted else (middle, high)
    return (low + high) / 2
