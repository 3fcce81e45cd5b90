"""Which candidates share the next pass: those of all rows, ranked by the chance that they are reached, as many as pay.

A pass has room for some tokens more than one of each row until it costs more, so what matters is the candidate, not the
row that it belongs to. A row's reaches fall (reach_i is the chance that its candidate i and all before it are accepted), so
the first so many of the ranking are a beginning of each row's. What a pass costs by its tokens is no convex curve, since
products are computed in tiles: every size is weighed, also those behind one that does not pay.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from math import prod

import numpy as np
from numpy.typing import NDArray

from outrider.workers.speculation import MOST_CANDIDATES, CandidateRequest, DraftCost, LayoutKind, round_seconds

# Seconds of a pass over so many tokens: all that is asked of a target's costs here.
PassSeconds = Callable[[int], float]
# Of each row the chances that its candidates are accepted, each with all before it; 0 where there is none, or nothing.
Reaches = Sequence[Sequence[float]]
# More slots than this are not looked into: no pass has so much room.
MOST_SLOTS = 512
# Sizes up to this are weighed one by one, beyond it in steps of a quarter, the passes between them by the straight line.
ONE_BY_ONE = 16
# Candidates that are found rather than made are verified where they are expected to gain so much: two measurements of one
# pass differ by nearly that.
LEAST_GAIN = 1.02
# A candidate that is likelier than this to be accepted is verified whatever a slot costs.
MOST_LEAST_REACH = 0.9
NO_DRAFT = DraftCost(0.0)


@dataclass(frozen=True, slots=True)
class Filled:
    """How many candidates of each row share the pass, what the round with it should take and bring, and without any.

    ``slot_seconds`` is what a slot that is filled takes on average.
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
    depth: int | None = None,
    gains: Reaches | None = None,
) -> Filled:
    """What lets the batch commit the most tokens a second. A pass without candidates feeds ``fed`` tokens, or one a row.

    A candidate brings what its chance is, or ``gains``. A draft makes its candidates step by step, one for all rows that go
    on, so each number of steps is weighed with what fills the pass best from so many; with ``depth`` that number is given,
    and 0 is what is known already and takes none.
    """
    rows = len(reaches)
    fed = fed or rows
    if rows == 1 and (depth == 0 or (depth is None and kind is LayoutKind.SEQUENTIAL)):
        return _fill_one(reaches[0], (gains or reaches)[0], pass_seconds, None if depth == 0 else draft_cost, fed)
    table = side_by_side(reaches)
    columns = table.shape[1]
    # By position, then by row: of equals in a row the first comes first.
    flat = table.T.ravel()
    order = np.argsort(-flat, kind="stable")[: min(np.count_nonzero(flat), max(MOST_SLOTS, rows))]
    seconds_by_slots = np.array(_seconds_by_slots(pass_seconds, fed, len(order)))
    plain = Filled([0] * rows, float(rows), float(seconds_by_slots[0]), rows / float(seconds_by_slots[0]))
    if not len(order):
        return plain
    ranked, positions = flat[order], order // rows
    depths = range(1, int(positions.max()) + 2) if depth is None else (depth,)
    taken = positions < np.array(depths if depth is None else [columns])[:, None]
    slots = np.cumsum(taken, axis=1)
    gained = ranked if gains is None else side_by_side(gains).T.ravel()[order]
    tokens = rows + np.cumsum(np.where(taken, gained, 0.0), axis=1)
    seconds = seconds_by_slots[slots]
    if kind is LayoutKind.SEQUENTIAL:
        # The draft's time comes on top, whatever the pass takes.
        seconds += np.array([float(round_seconds(kind, 0.0, draft_cost, each, 0.0, rows * each)) for each in depths])[
            :, None
        ]
        if draft_cost.row and depth is None:
            seconds += draft_cost.row * slots
    else:
        for at, each in enumerate(depths):
            hit = float(np.prod(table[:, each - 1])) if each else 1.0
            seconds[at] = round_seconds(kind, seconds[at], draft_cost, each, hit, rows * each - slots[at])
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


def _fill_one(
    reaches: Sequence[float],
    gains: Sequence[float],
    pass_seconds: PassSeconds,
    draft_cost: DraftCost | None,
    fed: int,
) -> Filled:
    """``fill_slots`` of a row alone, whose draft works in sequence with the target, or whose candidates are known already.

    Behind a pass nothing of Python is in the processor's caches any more, and what works on arrays takes several times as
    long as this.
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
    """What to ask a draft for, by what is to be expected of its candidates; counts of 0 where none pays.

    ``trust`` is how far forecasts of asking have come true so far (``speculation.Trust``).
    """
    filled = fill_slots(reaches, pass_seconds, draft_cost, kind, fed)
    if not any(filled.counts) or filled.rate * trust <= filled.plain_rate:
        return CandidateRequest([0] * len(filled.counts))
    # One pass cannot be left half way.
    drafting = draft_cost.step if kind is LayoutKind.SEQUENTIAL and not draft_cost.one_pass else 0.0
    least_reach, least_sum = min(MOST_LEAST_REACH, filled.rate * filled.slot_seconds), filled.rate * drafting
    if drafting and len(reaches) == 1:
        # What the next step makes is as likely as what there is and one candidate more: chance * reach has to be worth the
        # step and its slot. Of many rows, whose chances differ, this gained nothing.
        least_sum = (least_sum + least_reach) / _usual_chance(reaches[0], filled.counts[0]) - least_reach
    return CandidateRequest(filled.counts, least_reach, least_sum, 1.0 / filled.plain_rate - 1.0 / (filled.rate * trust))


def _usual_chance(reaches: Sequence[float], count: int) -> float:
    """That one of a row's first so many candidates is accepted, given that those before it were, on average."""
    accepted = float(sum(reaches[:count]))
    return accepted / (1.0 + accepted - float(reaches[count - 1]))


def worth_verifying(reaches: Reaches, pass_seconds: PassSeconds, fed: int = 0) -> list[int]:
    """How many of each row's candidates to verify, where they are known already; none where they gain too little."""
    filled = fill_slots(reaches, pass_seconds, fed=fed, depth=0)
    return filled.counts if filled.rate >= LEAST_GAIN * filled.plain_rate else [0] * len(reaches)


def expected_hits(reaches: Reaches, counts: Sequence[int]) -> tuple[float, float]:
    """How many of so many candidates of each row are accepted on average, and the chance that all of them are.

    Candidates beyond those whose reach is known count as if they never were accepted.
    """
    taken = [row[:count] for row, count in zip(reaches, counts, strict=True)]
    return float(sum(map(sum, taken))), float(prod(row[-1] for row in taken if len(row)))


def side_by_side(rows: Reaches) -> NDArray[np.float64]:
    """Rows of any length, filled up with zeros."""
    reaches = np.zeros((len(rows), max(map(len, rows), default=0)))
    for row, each in zip(reaches, rows, strict=True):
        row[: len(each)] = each
    return reaches


def deepest(rows: int) -> int:
    """How many candidates of each row are looked into."""
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
