"""The rules of speculation, as pure functions: which candidates are accepted, and how many are worth asking for."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import accumulate, chain, islice, pairwise
from math import inf, prod
from operator import neg

MOST_CANDIDATES = 16
# Candidates that are found rather than made cost nothing but their place in a pass.
MOST_FOUND = 32
# Found candidates are verified where they are expected to gain so much: two measurements of one pass differ by nearly that.
LEAST_GAIN = 1.02
# Sizes of a pass that are weighed against each other.
MOST_SIZES = 48
# Runners-up of a row in a round, and the least chance that one must have, however cheap another token in the pass seems.
MOST_RUNNERS_UP = 2
LEAST_RUNNER_UP = 0.02
# A runner-up's queries read the row's keys and values once more. Behind more tokens than this that is not looked into.
LONGEST_WITH_RUNNERS_UP = 2048
# A new row is believed to accept this share of its candidates, with the weight of this many observations.
PRIOR_ACCEPTANCE = 0.7
PRIOR_WEIGHT = 4.0
# Older rounds count for less, so that a row which changes its subject is noticed within a few dozen candidates.
MEMORY = 0.97
# A round counts for so many candidates at most.
MOST_WEIGHT = 4
# All rows together change more slowly.
LONG_MEMORY = 0.995


def accepted(candidates: Sequence[int], chosen: Sequence[int]) -> int:
    """How many candidates hold, where ``chosen[i]`` is the target's own choice in place of candidate i."""
    for count, (candidate, choice) in enumerate(zip(candidates, chosen, strict=False)):
        if candidate != choice:
            return count
    return min(len(candidates), len(chosen))


class Acceptance:
    """A row's estimate of the chance that a candidate holds, given that those before it did."""

    def __init__(self, prior: float = PRIOR_ACCEPTANCE, weight: float = PRIOR_WEIGHT, memory: float = MEMORY) -> None:
        self._held = prior * weight
        self._tried = weight
        self._memory = memory

    @property
    def chance(self) -> float:
        return self._held / self._tried

    def observe(self, proposed: int, held: int) -> None:
        """Candidates after the first miss were never put to the test, so they say nothing.

        A long run of hits is one easy stretch of text, so it counts for no more than a few candidates.
        """
        tried = min(proposed, held + 1)
        if not tried:
            return
        weight = min(tried, MOST_WEIGHT)
        faded = self._memory**weight
        self._held = self._held * faded + held / tried * weight
        self._tried = self._tried * faded + weight


class Survival:
    """How far into a proposal candidates hold, by their position in it, over many rows.

    Text has easy stretches and hard ones, so one chance for all positions would promise too much of long proposals. A
    position of which little is known is believed to be like all others.
    """

    def __init__(self, most: int = MOST_CANDIDATES) -> None:
        self._held = [0.0] * most
        self._tried = [0.0] * most
        self._found = 0
        self._turns = 0

    def find(self, turns: int, found: int) -> None:
        """So many rows had candidates, and runners-up brought them so many tokens."""
        self._turns += turns
        self._found += found

    def observe(self, proposed: int, held: int) -> None:
        for position in range(min(proposed, held + 1, len(self._held))):
            self._tried[position] += 1.0
            self._held[position] += position < held

    @property
    def chance(self) -> float:
        """That a candidate holds, given that those before it did, whatever its position."""
        return (sum(self._held) + PRIOR_ACCEPTANCE * PRIOR_WEIGHT) / (sum(self._tried) + PRIOR_WEIGHT)

    def expected_tokens(self, candidates: int) -> float:
        """How many tokens a round commits on average."""
        usual, reach, tokens = self.chance, 1.0, 1.0
        for position in range(candidates):
            # Positions beyond those that are counted are like the last of them.
            index = min(position, len(self._held) - 1)
            reach *= (self._held[index] + usual * PRIOR_WEIGHT) / (self._tried[index] + PRIOR_WEIGHT)
            tokens += reach
        return tokens + self._found / self._turns if candidates and self._turns else tokens


def expected_tokens(chance: float, candidates: int) -> float:
    """How many tokens a round commits on average: the accepted candidates and the target's own token."""
    return candidates + 1.0 if chance >= 1.0 else (1.0 - chance ** (candidates + 1)) / (1.0 - chance)


class LayoutKind(StrEnum):
    """When a layout's target and draft work: in turns, or at the same time, the draft running ahead."""

    TURNS = "turns"
    AHEAD = "ahead"


@dataclass(frozen=True, slots=True)
class DraftCost:
    """What candidates cost: seconds of one draft step for the rows together, and of asking at all (the hop).

    ``read`` is what a draft takes for each token of a text that it does not know yet. A draft that makes all candidates in
    one pass takes ``one_pass[i]`` seconds for i + 1 of each row, whatever a step is.
    """

    step: float
    hop: float = 0.0
    read: float = 0.0
    one_pass: Sequence[float] = ()

    def seconds(self, count: int) -> float:
        """Of the draft's own passes, for so many candidates of each row."""
        if count and self.one_pass:
            return self.one_pass[min(count, len(self.one_pass)) - 1]
        return count * self.step


def round_seconds(kind: LayoutKind, verify: float, draft_cost: DraftCost, count: int, hit: float) -> float:
    """One round with ``count`` candidates a row; ``hit`` is the chance that all of them are accepted."""
    if count == 0:
        return verify
    draft = draft_cost.hop + draft_cost.seconds(count)
    match kind:
        case LayoutKind.TURNS:
            return verify + draft
        case LayoutKind.AHEAD:
            # After a miss the draft starts over, once it is through with the step under way. After a hit it has been at
            # work on the next candidates, and the token between the two sets, for as long as the pass took.
            missed = draft + draft_cost.step / 2
            held = draft_cost.hop + max(0.0, (count + 1) * draft_cost.step - verify)
            return verify + (1.0 - hit) * missed + hit * held


@dataclass(frozen=True, slots=True)
class CandidateRequest:
    """How many candidates each row is to be asked for, and when it is no use to go on.

    Call reach_i the chance that a row's next candidate and all before it hold. The candidate is worth verifying while
    reach_i >= ``least_reach``; another step of the draft, one for all rows that go on, while
    sum(reach_i - least_reach) >= ``least_sum`` tokens. ``gain`` is how many seconds less a token is expected to take than
    without candidates. A row's first runner-up is worth verifying where its chance exceeds the first of
    ``runner_up_chances``, its second where it exceeds the second.

    ``found`` are the rows, by their places here, whose candidates are found in texts instead, with the reach of each.
    """

    counts: list[int]
    least_reach: float = 0.0
    least_sum: float = 0.0
    gain: float = 0.0
    runner_up_chances: tuple[float, ...] = ()
    found: Mapping[int, Sequence[float]] = field(default_factory=dict)


def best_request(
    chances: Sequence[float],
    verify_seconds: Callable[[int], float],
    draft_cost: DraftCost,
    kind: LayoutKind = LayoutKind.TURNS,
    most: int = MOST_CANDIDATES,
) -> CandidateRequest:
    """The request that lets the batch commit the most tokens a second; counts of 0 where none pays.

    ``verify_seconds`` is the cost of a pass over that many tokens. First the best number for all alike; then rows give up
    those candidates whose chance to be of use is worth less than the time that it takes to verify them.
    """
    rows = len(chances)
    if not rows:
        return CandidateRequest([])
    rates: list[float] = []
    for rate, bound in islice(expected_rates(chances, verify_seconds, draft_cost, kind), most + 1):
        rates.append(rate)
        if bound < max(rates):
            break
    best = max(range(len(rates)), key=rates.__getitem__)
    if best == 0:
        return CandidateRequest([0] * rows)
    verifying = max(0.0, verify_seconds(rows * (best + 1)) - verify_seconds(rows)) / (rows * best)
    # One pass cannot be left half way.
    drafting = draft_cost.step if kind is LayoutKind.TURNS and not draft_cost.one_pass else 0.0
    least_reach = min(0.9, rates[best] * verifying)
    counts = [best] if rows == 1 else [_worthwhile(chance, least_reach, best) for chance in chances]
    return CandidateRequest(counts, least_reach, rates[best] * drafting, 1.0 / rates[0] - 1.0 / rates[best])


def worth_verifying(reaches: Sequence[Sequence[float]], verify_seconds: Callable[[int], float]) -> list[int]:
    """How many of each row's candidates to verify, where they are known already and so are their reaches.

    Those of a row fall, so the likeliest of all rows together are a beginning of each row's.
    """
    rows = len(reaches)
    every = sorted(chain.from_iterable(reaches), reverse=True)
    tokens = list(accumulate(every, initial=float(rows)))
    sizes = range(0, len(tokens), max(1, -(-len(every) // MOST_SIZES)))
    rates = [tokens[size] / verify_seconds(rows + size) for size in sizes]
    best = max(range(len(sizes)), key=rates.__getitem__)
    if rates[best] < LEAST_GAIN * rates[0]:
        return [0] * rows
    least = every[sizes[best] - 1]
    return [bisect_right(each, -least, key=neg) for each in reaches]


def expected_rates(
    chances: Sequence[float],
    verify_seconds: Callable[[int], float],
    draft_cost: DraftCost,
    kind: LayoutKind = LayoutKind.TURNS,
) -> Iterator[tuple[float, float]]:
    """Tokens a second of rows that are all asked for 0, 1, 2 candidates and so on, each with what no larger number exceeds.

    The bound takes for granted that more candidates do not take less time.
    """
    rows, every, hit = len(chances), prod(chances), 1.0
    reaches, tokens = [1.0] * rows, float(rows)
    # What all further candidates of a row would bring, for each that it has reached.
    beyond = [chance / (1.0 - chance) if chance < 1.0 else inf for chance in chances]
    for count in range(MOST_CANDIDATES + 1):
        seconds = round_seconds(kind, verify_seconds(rows * (count + 1)), draft_cost, count, hit)
        still = sum(reach * more for reach, more in zip(reaches, beyond, strict=True))
        # Without candidates nothing is paid for the draft, and running ahead may take less time than one candidate alone.
        yield tokens / seconds, (tokens + still) / seconds if count and kind is LayoutKind.TURNS else inf
        reaches = [reach * chance for reach, chance in zip(reaches, chances, strict=True)]
        tokens += sum(reaches)
        hit *= every


def runner_up_chances(rate: float, rows: int, verify: Sequence[float]) -> tuple[float, ...]:
    """From which chance on a first runner-up of each row is worth verifying, a second and so on.

    Else the rows gain ``rate`` tokens a second; ``verify`` are the seconds of a pass without a runner-up, with one a row, …
    """
    found, least = [], LEAST_RUNNER_UP
    for before, after in pairwise(verify):
        least = max(least, (after - before) / rows * rate)
        found.append(least)
    return tuple(found)


class RunnerUpGains:
    """How many runners-up a row has in a round with candidates, and how many tokens they bring it."""

    def __init__(self) -> None:
        self._turns = PRIOR_WEIGHT
        self._tried = self._found = 0.0

    @property
    def tried(self) -> float:
        return self._tried / self._turns

    @property
    def found(self) -> float:
        return self._found / self._turns

    def observe(self, turns: int, tried: int, found: int) -> None:
        """So many rows had candidates, and all of them together so many runners-up."""
        faded = LONG_MEMORY**turns
        self._turns = self._turns * faded + turns
        self._tried = self._tried * faded + tried
        self._found = self._found * faded + found


def _worthwhile(chance: float, worth: float, most: int) -> int:
    """The number of candidates whose chance to be accepted, with all before them, is above ``worth``."""
    count, reach = 0, chance
    while count < most and reach > worth:
        count += 1
        reach *= chance
    return count


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
        """In this round asking paid."""
        self._pause, self._rounds = self._first, 0

    def due(self, cost: float) -> bool:
        """Whether to try with one candidate in this round, in which asking does not pay; it costs so many plain rounds."""
        self._rounds += 1
        if self._rounds < max(self._pause, min(self._longest, cost / self._most_share)):
            return False
        self._rounds = 0
        self._pause = min(2 * self._pause, self._longest)
        return True
