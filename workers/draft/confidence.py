"""How sure a draft may be of its own guess, calibrated by what became of earlier ones with a similar margin.

A draft's margin (its best score over the second best, noise included) says how clear its choice was. How often the target
makes the same choice at that margin is a fact of the pair and the text, so it is counted, not assumed.
"""

from __future__ import annotations

from bisect import bisect_right

from outrider.workers.engines.engine import StopRule

# A guess falls between two of these margins, in units of the scores' own (nats).
BOUNDS = (0.1, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0)
# What is believed of each span before anything is known, with the weight of this many observations.
PRIOR = (0.4, 0.45, 0.5, 0.55, 0.6, 0.65, 0.7, 0.8, 0.85, 0.9, 0.95, 0.97)
PRIOR_WEIGHT = 8.0
# The counts are halved when they reach this, so that a table follows a job whose text changes.
MOST_OBSERVATIONS = 2048.0
# The share of missed guesses for which the runner-up is accepted, before anything is known.
PRIOR_RUNNER_UP = 0.5
# A row is believed to be like all others with the weight of this many misses.
DOUBT_WEIGHT = 2.0
# Older guesses of a row count for less.
DOUBT_DECAY = 0.97
# No row is doubted more than that.
LEAST_CHANCE = 0.02


class Confidence:
    """Counts by the margin's span, and what follows from them."""

    def __init__(self) -> None:
        self._accepted = [chance * PRIOR_WEIGHT for chance in PRIOR]
        self._tried = [PRIOR_WEIGHT] * len(PRIOR)
        self._usual = list(PRIOR)
        # Always what is believed now: it holds the list itself.
        self._stop_rule = StopRule(BOUNDS, self._usual, LEAST_CHANCE)

    def stop_rule(self, least_reach: float = 0.0, least_sum: float = 0.0) -> StopRule:
        """What is believed now, for rows that stop below this reach, or together below this sum."""
        return StopRule(BOUNDS, self._usual, LEAST_CHANCE, least_reach, least_sum)

    def chance(self, margin: float, miss_factor: float = 1.0) -> float:
        """The chance that the target takes a guess with this margin, given that it took those before it."""
        return self._stop_rule.chance(margin, miss_factor)

    def learn(self, margin: float, accepted: bool) -> None:
        span = bisect_right(BOUNDS, margin)
        self._accepted[span] += accepted
        self._tried[span] += 1.0
        self._usual[span] = self._accepted[span] / self._tried[span]
        if self._tried[span] >= MOST_OBSERVATIONS:
            self._accepted[span] /= 2.0
            self._tried[span] /= 2.0


class RunnerUpShare:
    """How often the runner-up is accepted where a guess missed: much the same share, however clear the guess was."""

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
    """How much oftener a row's guesses miss than their margins predict.

    The table is of all rows together: where the draft knows a row well it would stop too early, elsewhere too late.
    """

    def __init__(self) -> None:
        self._missed = self._foretold = DOUBT_WEIGHT

    @property
    def factor(self) -> float:
        """How many times as often a guess misses here as in all rows together."""
        return self._missed / self._foretold

    def learn(self, usual: float, accepted: bool) -> None:
        self._missed = DOUBT_WEIGHT + (self._missed - DOUBT_WEIGHT) * DOUBT_DECAY + (not accepted)
        self._foretold = DOUBT_WEIGHT + (self._foretold - DOUBT_WEIGHT) * DOUBT_DECAY + 1.0 - usual
