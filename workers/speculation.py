"""The rules of speculation, as pure functions: which candidates are accepted, and how many are worth asking for."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

# Seconds of one pass, or an array of them to compare several choices at once.
Values = float | NDArray[np.float64]
MOST_CANDIDATES = 16
# Runners-up of a row in a round, and the least chance that one must have, however cheap another token in the pass seems.
MOST_RUNNERS_UP = 2
LEAST_RUNNER_UP = 0.02
# A runner-up's queries read the row's keys and values once more, so rows with longer contexts than this get none.
LONGEST_WITH_RUNNERS_UP = 2048
# The prior of a row's acceptance: this share of its candidates, with the weight of this many observations.
PRIOR_ACCEPTANCE = 0.7
PRIOR_WEIGHT = 4.0
# The factor by which each later candidate reduces the weight of earlier ones (an exponential moving average), so that a row
# which changes its subject is noticed within a few dozen candidates.
DECAY = 0.97
# A round counts for this many candidates at most.
MOST_WEIGHT = 4
# The same for statistics over all rows, which change more slowly.
SLOW_DECAY = 0.995
# Of ``_ForecastRatio``: the weight of its prior in tokens, its decay for each forecast token, and its decay for each token
# of a round of the other kind (with or without the draft), which adds no observation.
FORECAST_PRIOR = 64.0
FORECAST_DECAY = 0.998
FORECAST_DECAY_ELSEWHERE = 0.9999
# An upper confidence bound is this many standard deviations above what was seen.
BOUND_DEVIATIONS = 2.0
# The counts of a position are halved when they reach this, so that they follow a job whose text changes.
MOST_OBSERVATIONS = 1024.0


def accepted(candidates: Sequence[int], chosen: Sequence[int]) -> int:
    """How many candidates are accepted, where ``chosen[i]`` is the target's own choice in place of candidate i."""
    for count, (candidate, choice) in enumerate(zip(candidates, chosen, strict=False)):
        if candidate != choice:
            return count
    return min(len(candidates), len(chosen))


class Acceptance:
    """A row's estimate of the chance that a candidate is accepted, given that those before it were."""

    def __init__(self, prior: float = PRIOR_ACCEPTANCE, weight: float = PRIOR_WEIGHT, decay: float = DECAY) -> None:
        self._accepted = prior * weight
        self._tried = weight
        self._decay = decay

    @property
    def chance(self) -> float:
        return self._accepted / self._tried

    def observe(self, proposed: int, accepted: int) -> None:
        """Count a round's candidates, except those after the first miss, which were not tested.

        A long run of hits is one easy stretch of text, so a round counts as MOST_WEIGHT candidates at most.
        """
        tried = min(proposed, accepted + 1)
        if not tried:
            return
        weight = min(tried, MOST_WEIGHT)
        faded = self._decay**weight
        self._accepted = self._accepted * faded + accepted / tried * weight
        self._tried = self._tried * faded + weight


class Survival:
    """How far into a proposal candidates are accepted, by their position in it, over many rows.

    Text has easy stretches and hard ones, so one chance for all positions would promise too much of long proposals. A
    position with few observations is taken to be like all others.
    """

    def __init__(self, most: int = MOST_CANDIDATES) -> None:
        self._accepted = [0.0] * most
        self._tried = [0.0] * most
        self._runners_up = 0
        self._row_rounds = 0

    def observe_runners_up(self, row_rounds: int, accepted: int) -> None:
        """Count a round in which ``row_rounds`` rows had candidates, and ``accepted`` runners-up were accepted."""
        self._row_rounds += row_rounds
        self._runners_up += accepted

    def observe(self, proposed: int, accepted: int) -> None:
        for position in range(min(proposed, accepted + 1, len(self._accepted))):
            self._tried[position] += 1.0
            self._accepted[position] += position < accepted

    @property
    def chance(self) -> float:
        """That a candidate is accepted, given that those before it were, whatever its position."""
        return (sum(self._accepted) + PRIOR_ACCEPTANCE * PRIOR_WEIGHT) / (sum(self._tried) + PRIOR_WEIGHT)

    def expected_tokens(self, candidates: int) -> float:
        """How many tokens a round commits on average."""
        usual, reach, tokens = self.chance, 1.0, 1.0
        for position in range(candidates):
            # Positions beyond those that are counted are like the last of them.
            index = min(position, len(self._accepted) - 1)
            reach *= (self._accepted[index] + usual * PRIOR_WEIGHT) / (self._tried[index] + PRIOR_WEIGHT)
            tokens += reach
        return tokens + self._runners_up / self._row_rounds if candidates and self._row_rounds else tokens


def expected_tokens(chance: float, candidates: int) -> float:
    """How many tokens a round commits on average: 1 + chance + chance² + … + chance^candidates."""
    return candidates + 1.0 if chance >= 1.0 else (1.0 - chance ** (candidates + 1)) / (1.0 - chance)


class LayoutKind(StrEnum):
    """When a draft drafts: while the target waits for it, or while the target verifies.

    Overlapped, it goes on as if all the candidates under verification were accepted (it drafts ahead). On shared cores they
    work one after the other; on split cores most drafts overlap (``runner/planning/layouts.py``).
    """

    SEQUENTIAL = "sequential"
    OVERLAPPED = "overlapped"


@dataclass(frozen=True, slots=True)
class DraftCost:
    """Seconds of drafting: ``step`` of one draft step for all rows together, ``hop`` of a request whatever it asks for.

    ``read`` is the prefill of one token that the draft has not seen, ``row`` what a step saves for each row that no longer
    takes part. A parallel draft takes ``one_pass[i]`` for i + 1 candidates of each row, whatever ``step`` is. ``rows`` is
    the number of rows that ``step`` was measured with, where that differs from the number that was asked about; 0 where
    nothing has been measured yet.
    """

    step: float
    hop: float = 0.0
    read: float = 0.0
    row: float = 0.0
    one_pass: Sequence[float] = ()
    rows: int | None = None

    def seconds(self, count: int) -> float:
        """Seconds of the draft's passes for this many candidates of each row."""
        if count and self.one_pass:
            return self.one_pass[min(count, len(self.one_pass)) - 1]
        return count * self.step

    def of_rows(self, rows: int, pass_seconds: Callable[[int], float]) -> DraftCost:
        """With fewer rows measured, a step costs step * pass_seconds(rows) / pass_seconds(self.rows)."""
        if not self.rows or self.rows >= rows:
            return self
        more = pass_seconds(rows) / pass_seconds(self.rows)
        return replace(self, step=self.step * more, one_pass=tuple(each * more for each in self.one_pass))


def round_seconds(
    kind: LayoutKind, verify: Values, draft_cost: DraftCost, count: int, hit: float, absent: Values = 0.0
) -> Values:
    """One round with at most ``count`` candidates a row; ``hit`` is the chance that all of them are accepted.

    ``absent`` counts the steps that rows take no part in, over all rows.
    """
    if count == 0:
        return verify
    draft = draft_cost.hop + draft_cost.seconds(count) - absent * draft_cost.row
    match kind:
        case LayoutKind.SEQUENTIAL:
            return verify + draft
        case LayoutKind.OVERLAPPED:
            # After a miss the draft starts over, once its current step is done (half a step on average). After a hit it has
            # drafted the next candidates, and the token between the two sets, for as long as the pass took.
            wrong = draft + draft_cost.step / 2
            right = draft_cost.hop + np.maximum(0.0, draft_cost.seconds(count + 1) - verify)
            return verify + (1.0 - hit) * wrong + hit * right


@dataclass(frozen=True, slots=True)
class CandidateRequest:
    """How many candidates to ask for of each row, and when the draft should stop.

    Call reach_i the chance that a row's next candidate and all before it are accepted. It is worth verifying while
    reach_i >= ``least_reach``; another step of the draft, one for all rows that go on, while
    sum(reach_i - least_reach) >= ``least_sum`` tokens. ``gain`` is how many seconds less a token is expected to take than
    without candidates. A row's first runner-up is worth verifying where its chance exceeds the first of
    ``runner_up_chances``, its second where it exceeds the second. In all the rows should gain ``rate`` a second.

    ``found`` maps the indices of rows whose candidates are found in texts instead to the reach of each candidate.
    """

    counts: list[int]
    least_reach: float = 0.0
    least_sum: float = 0.0
    gain: float = 0.0
    runner_up_chances: tuple[float, ...] = ()
    rate: float = 0.0
    found: Mapping[int, Sequence[float]] = field(default_factory=dict)


def runner_up_chances(rate: float, rows: int, verify: Sequence[float]) -> tuple[float, ...]:
    """The least chance at which a first runner-up of each row is worth verifying, a second and so on:
    (verify[n + 1] - verify[n]) / rows * rate.

    ``rate`` is how many tokens a second all rows gain without; ``verify[n]`` the seconds of a pass with n runners-up a row.
    """
    found, least = [], LEAST_RUNNER_UP
    for before, after in pairwise(verify):
        least = max(least, (after - before) / rows * rate)
        found.append(least)
    return tuple(found)


class PositionChances:
    """The chance that a candidate is accepted, given that those before it were, by its position, in all rows.

    A draft is mostly sure of its first candidates or does not send them, and text has easy stretches and hard ones: one
    chance for all positions would be too high for some of them.
    """

    def __init__(self) -> None:
        self._accepted = [PRIOR_ACCEPTANCE * PRIOR_WEIGHT] * MOST_CANDIDATES
        self._tried = [PRIOR_WEIGHT] * MOST_CANDIDATES

    def observe(self, proposed: int, accepted: int) -> None:
        for position in range(min(proposed, accepted + 1, MOST_CANDIDATES)):
            self._accepted[position] += position < accepted
            self._tried[position] += 1.0
            if self._tried[position] >= MOST_OBSERVATIONS:
                self._accepted[position] /= 2.0
                self._tried[position] /= 2.0

    @property
    def chances(self) -> list[float]:
        """A position with few observations is taken to be like the one before."""
        found, before = [], PRIOR_ACCEPTANCE
        for accepted, tried in zip(self._accepted, self._tried, strict=True):
            before = (accepted + (before - PRIOR_ACCEPTANCE) * PRIOR_WEIGHT) / tried
            found.append(before)
        return found

    def upper_bounds(self, reaches: Sequence[float]) -> list[float]:
        """Upper confidence bounds of these reaches, wider where a position has few observations."""
        bounds, before, bound = [], 1.0, 1.0
        for reach, tried in zip(reaches, self._tried, strict=False):
            chance = reach / before if before else 0.0
            bound *= min(1.0, chance + BOUND_DEVIATIONS * math.sqrt(chance * (1.0 - chance) / tried))
            bounds.append(bound)
            before = reach
        return bounds


class TokensPerChoice:
    """Tokens that a row under a grammar writes for each choice: that token, and those that the grammar forces after it."""

    def __init__(self) -> None:
        self._choices = self._tokens = PRIOR_WEIGHT

    @property
    def usual(self) -> float:
        return self._tokens / self._choices

    def observe(self, choices: int, tokens: int) -> None:
        faded = SLOW_DECAY**choices
        self._choices = self._choices * faded + choices
        self._tokens = self._tokens * faded + max(choices, tokens)


class RunnerUpGains:
    """How many runners-up a row has in a round with candidates, and how many of them are accepted."""

    def __init__(self) -> None:
        self._row_rounds = PRIOR_WEIGHT
        self._tried = self._accepted = 0.0

    @property
    def tried(self) -> float:
        return self._tried / self._row_rounds

    @property
    def accepted(self) -> float:
        return self._accepted / self._row_rounds

    def observe(self, row_rounds: int, tried: int, accepted: int) -> None:
        """Count a round: ``row_rounds`` rows had candidates, and of ``tried`` runners-up ``accepted`` were accepted."""
        faded = SLOW_DECAY**row_rounds
        self._row_rounds = self._row_rounds * faded + row_rounds
        self._tried = self._tried * faded + tried
        self._accepted = self._accepted * faded + accepted


class _ForecastRatio:
    """The rate (tokens a second) of recent rounds, divided by the rate that was forecast for them."""

    def __init__(self) -> None:
        # Tokens that were gained, and those that would have been at the forecast rate.
        self._gained = self._forecast = 0.0

    def ratio(self, prior: float = 1.0) -> float:
        return (FORECAST_PRIOR * prior + self._gained) / (FORECAST_PRIOR + self._forecast)

    def observe(self, tokens: int, seconds: float, forecast_tokens: float, forecast_seconds: float) -> None:
        self.fade(FORECAST_DECAY**forecast_tokens)
        self._gained += tokens
        # An interruption counts as no more than a round that took twice as long.
        self._forecast += forecast_tokens * min(2.0, seconds / forecast_seconds)

    def fade(self, share: float) -> None:
        self._gained *= share
        self._forecast *= share


class Trust:
    """The correction of forecasts for rounds with the draft: their ratio of actual to forecast rate, divided by the same
    ratio of rounds without it.

    It is mostly below 1, since acceptance is only observed for candidates that the draft was sure enough to send, and costs
    only for the rows that it was asked about.
    """

    def __init__(self) -> None:
        self._asking, self._others = _ForecastRatio(), _ForecastRatio()

    @property
    def share(self) -> float:
        others = self._others.ratio()
        return self._asking.ratio(others) / others

    def observe(self, asked: bool, tokens: int, seconds: float, forecast_tokens: float, forecast_seconds: float) -> None:
        kind = self._asking if asked else self._others
        kind.observe(tokens, seconds, forecast_tokens, forecast_seconds)
        if not asked:
            # Text and costs may have changed since the draft was last asked.
            self._asking.fade(FORECAST_DECAY_ELSEWHERE**tokens)


class DecisionBackoff:
    """When to decide again whether asking the draft pays. The decision itself takes time, and asking that did not pay in
    one round hardly pays in the next, so the pauses double, up to ``longest`` rounds.
    """

    def __init__(self, longest: int = 8) -> None:
        self._longest = longest
        self.reset()

    def reset(self) -> None:
        """Decide again in the next round."""
        self._pause = self._left = 0

    def due(self) -> bool:
        self._left -= 1
        return self._left < 0

    def decided(self, pays: bool) -> None:
        self._pause = 0 if pays else min(self._longest, max(1, 2 * self._pause))
        self._left = self._pause


class Probing:
    """When to ask although it does not seem to pay: costs and rows change, and nothing is learned without asking.

    The pauses double, so that a draft which never pays costs less and less, and never more than a small share.
    """

    def __init__(self, first: int = 32, longest: int = 1024, most_share: float = 0.01) -> None:
        self._first = first
        self._longest = longest
        self._most_share = most_share
        self._pause = first
        self._rounds = 0

    def asked(self) -> None:
        """Asking paid in this round."""
        self._pause, self._rounds = self._first, 0

    def due(self, cost: float) -> bool:
        """Whether to ask for one candidate in this round although it does not pay; ``cost`` is in plain rounds."""
        self._rounds += 1
        if self._rounds < max(self._pause, min(self._longest, cost / self._most_share)):
            return False
        self._rounds = 0
        self._pause = min(2 * self._pause, self._longest)
        return True
