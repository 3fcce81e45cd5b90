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


def best_count(
    chances: Sequence[float],
    verify_seconds: Callable[[int], float],
    draft_seconds: Callable[[int], float],
    most: int = MOST_CANDIDATES,
) -> int:
    """The number of candidates a row (0 for none) that commits the most tokens a second over the whole batch.

    ``verify_seconds`` is the cost of a pass over that many tokens, ``draft_seconds`` that of one draft step for that many
    rows (each further candidate is a further step).
    """
    rows = len(chances)
    rates = [
        sum(expected_tokens(chance, count) for chance in chances)
        / (verify_seconds(rows * (count + 1)) + count * draft_seconds(rows))
        for count in range(most + 1)
    ]
    return max(range(most + 1), key=rates.__getitem__)
