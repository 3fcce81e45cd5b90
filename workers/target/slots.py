"""Which candidates share the next pass: those of all rows, ranked by their reach, as many as pay.

reach_i is the chance that a row's candidate i and all before it are accepted. It falls with i, so the first n of the
ranking are a prefix of each row's candidates. The rate to maximise over n is

    (rows + sum of the n largest reaches) / (pass_seconds(fed + n) + seconds of drafting).

The cost of a pass is not convex in its number of tokens, since products are computed in tiles, so every n is tried.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from math import prod

import numpy as np
from numpy.typing import NDArray

from outrider.workers.speculation import MOST_CANDIDATES, CandidateRequest, DraftCost, LayoutKind, round_seconds

# Seconds of a pass by its number of tokens.
PassSeconds = Callable[[int], float]
# The reaches of each row's candidates; 0, or the end of the list, where there is no candidate.
Reaches = Sequence[Sequence[float]]
# The most slots that are considered.
MOST_SLOTS = 512
# Sizes up to this are computed one by one; beyond it in steps of a quarter, with linear interpolation.
ONE_BY_ONE = 16
# The least expected gain for which candidates found in texts are verified: two measurements of one pass differ by as much.
LEAST_GAIN = 1.02
# The largest threshold of reach: likelier candidates are verified whatever a slot costs.
MOST_LEAST_REACH = 0.9
NO_DRAFT = DraftCost(0.0)


@dataclass(frozen=True, slots=True)
class Filled:
    """How many candidates of each row share the pass, the expected ``tokens`` and ``seconds`` of the round, and the rate of
    a plain one. ``slot_seconds`` is the mean cost of a filled slot.
    """

    counts: list[int]
    tokens: float
    seconds: float
    plain_rate: float
    slot_seconds: float = 0.0

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


def fill_slots(
    reaches: Reaches,
    pass_seconds: PassSeconds,
    draft_cost: DraftCost = NO_DRAFT,
    kind: LayoutKind = LayoutKind.SEQUENTIAL,
    fed: int = 0,
    drafted: bool = True,
    gains: Reaches | None = None,
) -> Filled:
    """The filling with the most tokens a second. A pass without candidates feeds ``fed`` tokens (0: one for each row).

    A candidate's expected gain is its reach, or that of ``gains``. A draft makes its candidates in steps, each for all rows
    that go on, so the best filling is computed for each number of steps. Not ``drafted``: the candidates exist already.
    """
    rows = len(reaches)
    fed = fed or rows
    if rows == 1 and (not drafted or kind is LayoutKind.SEQUENTIAL):
        return _fill_one(reaches[0], (gains or reaches)[0], pass_seconds, draft_cost if drafted else None, fed)
    table = side_by_side(reaches)
    # Flattened by position, then by row: the stable sort keeps equal reaches of one row in their order.
    flat = table.T.ravel()
    order = np.argsort(-flat, kind="stable")[: min(np.count_nonzero(flat), max(MOST_SLOTS, rows))]
    seconds_by_slots = np.array(_seconds_by_slots(pass_seconds, fed, len(order)))
    plain = Filled([0] * rows, float(rows), float(seconds_by_slots[0]), rows / float(seconds_by_slots[0]))
    if not len(order):
        return plain
    ranked, positions = flat[order], order // rows
    # Numbers of draft steps, and with each of them which candidates there are.
    steps = range(1, int(positions.max()) + 2) if drafted else range(1)
    taken = positions < np.array(steps)[:, None] if drafted else np.ones((1, len(order)), bool)
    slots = np.cumsum(taken, axis=1)
    gained = ranked if gains is None else side_by_side(gains).T.ravel()[order]
    tokens = rows + np.cumsum(np.where(taken, gained, 0.0), axis=1)
    seconds = seconds_by_slots[slots]
    if drafted:
        _add_drafting(seconds, slots, steps, kind, draft_cost, table)
    rates = tokens / seconds
    best = int(np.argmax(rates))
    which, last = divmod(best, len(order))
    if rates[which, last] <= plain.rate:
        return plain
    chosen = order[: last + 1][taken[which, : last + 1]] % rows
    filled = int(slots[which, last])
    return Filled(
        np.bincount(chosen, minlength=rows).tolist(),
        float(tokens[which, last]),
        float(seconds[which, last]),
        plain.rate,
        max(0.0, float(seconds_by_slots[filled] - seconds_by_slots[0])) / filled,
    )


def _add_drafting(
    seconds: NDArray[np.float64],
    slots: NDArray[np.int64],
    steps: range,
    kind: LayoutKind,
    draft_cost: DraftCost,
    reaches: NDArray[np.float64],
) -> None:
    """Adds the draft's time to ``seconds`` [number of steps, candidates] of a pass; ``slots`` has their numbers."""
    rows = len(reaches)
    if kind is LayoutKind.SEQUENTIAL:
        drafting = [float(round_seconds(kind, 0.0, draft_cost, count, 0.0, rows * count)) for count in steps]
        seconds += np.array(drafting)[:, None]
        if draft_cost.row:
            seconds += draft_cost.row * slots
        return
    for at, count in enumerate(steps):
        hit = float(np.prod(reaches[:, count - 1]))
        seconds[at] = round_seconds(kind, seconds[at], draft_cost, count, hit, rows * count - slots[at])


def _fill_one(
    reaches: Sequence[float],
    gains: Sequence[float],
    pass_seconds: PassSeconds,
    draft_cost: DraftCost | None,
    fed: int,
) -> Filled:
    """``fill_slots`` for one row with a sequential draft, or with candidates that exist already, without arrays.

    After a pass the processor's caches hold nothing of Python, and NumPy's functions take several times as long as this.
    """
    most = next((at for at, reach in enumerate(reaches) if not reach), len(reaches))
    verify = _seconds_by_slots(pass_seconds, fed, most)
    best, tokens = Filled([0], 1.0, verify[0], 1.0 / verify[0]), 1.0
    best_rate = best.rate
    for slots in range(1, most + 1):
        tokens += gains[slots - 1]
        seconds = verify[slots] + (0.0 if draft_cost is None else draft_cost.hop + draft_cost.seconds(slots))
        if tokens / seconds > best_rate:
            slot_seconds = max(0.0, verify[slots] - verify[0]) / slots
            best = Filled([slots], float(tokens), seconds, best.plain_rate, slot_seconds)
            best_rate = best.rate
    return best


def best_request(
    reaches: Reaches,
    pass_seconds: PassSeconds,
    draft_cost: DraftCost,
    kind: LayoutKind = LayoutKind.SEQUENTIAL,
    fed: int = 0,
    trust: float = 1.0,
) -> CandidateRequest:
    """The request to a draft, by the expected reaches of its candidates; counts of 0 where none pays.

    ``trust`` corrects the forecast rate with candidates (``speculation.Trust``).
    """
    filled = fill_slots(reaches, pass_seconds, draft_cost, kind, fed)
    if not any(filled.counts) or filled.rate * trust <= filled.plain_rate:
        return CandidateRequest([0] * len(filled.counts))
    # The single pass of a parallel draft cannot be stopped early.
    drafting = draft_cost.step if kind is LayoutKind.SEQUENTIAL and not draft_cost.one_pass else 0.0
    least_reach, least_sum = min(MOST_LEAST_REACH, filled.rate * filled.slot_seconds), filled.rate * drafting
    if drafting and len(reaches) == 1:
        # The next step's candidate has the reach (usual chance) * reach, which has to be worth the step and its slot. With
        # several rows, whose chances differ, this gained nothing.
        least_sum = (least_sum + least_reach) / _usual_chance(reaches[0], filled.counts[0]) - least_reach
    return CandidateRequest(filled.counts, least_reach, least_sum, 1.0 / filled.plain_rate - 1.0 / (filled.rate * trust))


def _usual_chance(reaches: Sequence[float], count: int) -> float:
    """The mean chance that one of a row's first ``count`` candidates is accepted, given that those before it were."""
    accepted = float(sum(reaches[:count]))
    return accepted / (1.0 + accepted - float(reaches[count - 1]))


def worth_verifying(reaches: Reaches, pass_seconds: PassSeconds, fed: int = 0) -> list[int]:
    """How many of each row's existing candidates to verify; none where they gain too little."""
    filled = fill_slots(reaches, pass_seconds, fed=fed, drafted=False)
    return filled.counts if filled.rate >= LEAST_GAIN * filled.plain_rate else [0] * len(reaches)


def expected_hits(reaches: Reaches, counts: Sequence[int]) -> tuple[float, float]:
    """The expected number of accepted candidates among the first ``counts[i]`` of each row i, and the chance that all are.

    Candidates without a known reach count as never accepted.
    """
    taken = [row[:count] for row, count in zip(reaches, counts, strict=True)]
    return float(sum(map(sum, taken))), float(prod(row[-1] for row in taken if len(row)))


def side_by_side(rows: Reaches) -> NDArray[np.float64]:
    """The rows as one array, padded with zeros."""
    reaches = np.zeros((len(rows), max(map(len, rows), default=0)))
    for row, each in zip(reaches, rows, strict=True):
        row[: len(each)] = each
    return reaches


def deepest(rows: int) -> int:
    """How many candidates of each row are considered."""
    return max(1, min(MOST_CANDIDATES, MOST_SLOTS // max(1, rows)))


def _seconds_by_slots(pass_seconds: PassSeconds, fed: int, most: int) -> list[float]:
    sizes = _sizes(most)
    seconds = [pass_seconds(fed + size) for size in sizes]
    return seconds if len(sizes) > most else np.interp(np.arange(most + 1), sizes, seconds).tolist()


@cache
def _sizes(most: int) -> list[int]:
    sizes = list(range(min(most, ONE_BY_ONE) + 1))
    while sizes[-1] < most:
        sizes.append(min(most, sizes[-1] + sizes[-1] // 4))
    return sizes
