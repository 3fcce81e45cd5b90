"""The rules of speculation, as pure functions: which candidates are accepted, and how many are worth asking for."""

from __future__ import annotations

from collections.abc import Callable, Sequence

MOST_CANDIDATES = 16
# A new row is believed to accept this share of its candidates, with the weight of this many observations.
PRIOR_ACCEPTANCE = 0.7
PRIOR_WEIGHT = 4.0
# Older rounds count for less, so that a row which changes its subject is noticed within a few dozen candidates.
MEMORY = 0.97


def accepted(candidates: Sequence[int], chosen: Sequence[int]) -> int:
    """How many candidates hold, where ``chosen[i]`` is the target's own choice in place of candidate i."""
    for count, (candidate, choice) in enumerate(zip(candidates, chosen, strict=False)):
        if candidate != choice:
            return count
    return min(len(candidates), len(chosen))


class Acceptance:
    """A row's estimate of the chance that a candidate holds, given that those before it did."""

    def __init__(self) -> None:
        self._held = PRIOR_ACCEPTANCE * PRIOR_WEIGHT
        self._tried = PRIOR_WEIGHT

    @property
    def chance(self) -> float:
        return self._held / self._tried

    def observe(self, proposed: int, held: int) -> None:
        """Candidates after the first miss were never put to the test, so they say nothing."""
        tried = min(proposed, held + 1)
        self._held = self._held * MEMORY**tried + held
        self._tried = self._tried * MEMORY**tried + tried


def expected_tokens(chance: float, candidates: int) -> float:
    """How many tokens a round commits on average: the accepted candidates and the target's own token."""
    return candidates + 1.0 if chance >= 1.0 else (1.0 - chance ** (candidates + 1)) / (1.0 - chance)


def best_counts(
    chances: Sequence[float],
    verify_seconds: Callable[[int], float],
    step_seconds: float,
    most: int = MOST_CANDIDATES,
) -> list[int]:
    """How many candidates each row should ask for (0 for none), so that the batch commits the most tokens a second.

    ``verify_seconds`` is the cost of a pass over that many tokens, ``step_seconds`` that of one draft step for these rows
    (each further candidate is a further step). First the best number for all alike; then rows give up those candidates
    whose chance to be of use is worth less than the time it takes to verify them.
    """
    rows = len(chances)
    if not rows:
        return []
    seconds = [verify_seconds(rows * (count + 1)) + count * step_seconds for count in range(most + 1)]
    tokens = [sum(expected_tokens(chance, count) for chance in chances) for count in range(most + 1)]
    rates = [each / cost for each, cost in zip(tokens, seconds, strict=True)]
    best = max(range(most + 1), key=rates.__getitem__)
    if best == 0 or rows == 1:
        return [best] * rows
    seconds_a_token = (verify_seconds(rows * (best + 1)) - verify_seconds(rows)) / (rows * best)
    worth = rates[best] * max(0.0, seconds_a_token)
    return [_worthwhile(chance, worth, best) for chance in chances]


def _worthwhile(chance: float, worth: float, most: int) -> int:
    """The number of candidates whose chance to be accepted, with all before them, is above ``worth``."""
    count, reach = 0, chance
    while count < most and reach > worth:
        count += 1
        reach *= chance
    return count


class Probing:
    """When to ask although it does not seem to pay: costs and rows change, and nothing is learned without asking.

    The pauses double, so that a draft which never pays costs less and less.
    """

    def __init__(self, first: int = 32, longest: int = 1024) -> None:
        self._first = first
        self._longest = longest
        self._pause = first
        self._rounds = 0

    def due(self, asking: bool) -> bool:
        """Whether to try with one candidate in this round, in which asking does or does not pay."""
        if asking:
            self._pause, self._rounds = self._first, 0
            return False
        self._rounds += 1
        if self._rounds < self._pause:
            return False
        self._rounds = 0
        self._pause = min(2 * self._pause, self._longest)
        return True
