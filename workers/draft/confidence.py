"""The chance that the target accepts a draft's guess, calibrated on earlier guesses with a similar margin.

The margin of a guess is its score minus the second-best score, noise included. How often the target makes the same choice
at that margin depends on the pair of models and on the text, so it is counted.
"""

from __future__ import annotations

from bisect import bisect_right

from outrider.workers.engines.engine import StopRule

# The bounds of the intervals of margins, in the units of logits (nats).
BOUNDS = (0.1, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0)
# The prior chance in each interval, with the weight of this many observations.
PRIOR = (0.4, 0.45, 0.5, 0.55, 0.6, 0.65, 0.7, 0.8, 0.85, 0.9, 0.95, 0.97)
PRIOR_WEIGHT = 8.0
# The counts are halved when they reach this, so that a table follows a job whose text changes.
MOST_OBSERVATIONS = 2048.0
# The prior share of missed guesses whose runner-up is accepted.
PRIOR_RUNNER_UP = 0.5
# The prior of a row's miss factor, 1, has the weight of this many misses.
FACTOR_PRIOR_WEIGHT = 2.0
# By which the weight of a row's earlier guesses falls with each new one.
FACTOR_DECAY = 0.97
# No chance is taken to be smaller.
LEAST_CHANCE = 0.02


class Confidence:
    """Counts guesses, and those accepted, by the interval of their margin."""

    def __init__(self) -> None:
        self._accepted = [chance * PRIOR_WEIGHT for chance in PRIOR]
        self._tried = [PRIOR_WEIGHT] * len(PRIOR)
        self._usual = list(PRIOR)
        # It shares the list ``_usual``, so it is always up to date.
        self._stop_rule = StopRule(BOUNDS, self._usual, LEAST_CHANCE)

    def stop_rule(self, least_reach: float = 0.0, least_sum: float = 0.0) -> StopRule:
        """The rule by the current chances, with the thresholds of a request."""
        return StopRule(BOUNDS, self._usual, LEAST_CHANCE, least_reach, least_sum)

    def chance(self, margin: float, miss_factor: float = 1.0) -> float:
        """The chance that the target accepts a guess with this margin, given that it accepted those before it."""
        return self._stop_rule.chance(margin, miss_factor)

    def learn(self, margin: float, accepted: bool) -> None:
        interval = bisect_right(BOUNDS, margin)
        self._accepted[interval] += accepted
        self._tried[interval] += 1.0
        self._usual[interval] = self._accepted[interval] / self._tried[interval]
        if self._tried[interval] >= MOST_OBSERVATIONS:
            self._accepted[interval] /= 2.0
            self._tried[interval] /= 2.0


class RunnerUpShare:
    """How often the runner-up is accepted where a guess missed. The share hardly depends on the margin of the guess."""

    def __init__(self) -> None:
        self._accepted, self._missed = PRIOR_RUNNER_UP * PRIOR_WEIGHT, PRIOR_WEIGHT

    @property
    def share(self) -> float:
        return self._accepted / self._missed

    def learn(self, accepted: bool) -> None:
        self._accepted += accepted
        self._missed += 1.0
        if self._missed >= MOST_OBSERVATIONS:
            self._accepted /= 2.0
            self._missed /= 2.0


class MissFactor:
    """How many times as often a row's guesses miss as predicted by their margins.

    ``Confidence`` counts all rows together: alone it would stop too early in rows that suit the draft, elsewhere too late.
    """

    def __init__(self) -> None:
        self._missed = self._expected = FACTOR_PRIOR_WEIGHT

    @property
    def factor(self) -> float:
        """(misses of this row) / (misses expected by the chances of all rows)."""
        return self._missed / self._expected

    def learn(self, usual: float, accepted: bool) -> None:
        self._missed = FACTOR_PRIOR_WEIGHT + (self._missed - FACTOR_PRIOR_WEIGHT) * FACTOR_DECAY + (not accepted)
        self._expected = FACTOR_PRIOR_WEIGHT + (self._expected - FACTOR_PRIOR_WEIGHT) * FACTOR_DECAY + 1.0 - usual
