"""Who is asked for how many candidates, and when: the slots of a pass, given by costs and by what was accepted so far."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from outrider.workers import speculation
from outrider.workers.engines.costs import CostCurve
from outrider.workers.speculation import (
    Acceptance,
    CandidateRequest,
    DraftCost,
    LayoutKind,
    PositionChances,
    round_seconds,
)
from outrider.workers.target.forecast import Forecast, Round
from outrider.workers.target.live_row import LiveRow, context_of
from outrider.workers.target.proposers import Proposal, Proposer
from outrider.workers.target.slots import (
    PassSeconds,
    Reaches,
    best_request,
    deepest,
    expected_hits,
    fill_slots,
    side_by_side,
    worth_verifying,
)
from outrider.workers.target.suffix_finder import SuffixFinder

# However seldom candidates miss, a row may be one of which they do.
LEAST_MISS = 0.01
# A row is believed to miss as often as all others with the weight of this many misses: after two in a row in a job whose
# candidates are mostly accepted it would else be asked for nothing any more, and show nothing better.
NEW_ROW_MISSES = 2.0
# What a draft takes is measured on so many rows, if there are more: it may have much to read for each.
FIRST_ROWS = 4
NOTHING: Reaches = ()


class AskingPolicy:
    """``draft_tokens`` is k where the user has fixed it. ``verify_seconds`` is what passes cost, by their tokens."""

    def __init__(
        self,
        proposer: Proposer,
        verify_seconds: CostCurve,
        draft_tokens: int | None,
        context: int,
        runners_up: bool,
        finder: SuffixFinder | None = None,
    ) -> None:
        self.verify_seconds = verify_seconds
        self.draft_tokens = draft_tokens
        self.layout_kind = LayoutKind.SEQUENTIAL
        self.runners_up = runners_up
        self._proposer = proposer
        self._finder = finder
        self._context = context
        self._probing = speculation.Probing()
        self._backoff = speculation.DecisionBackoff()
        # What a new row is believed to accept.
        self._acceptance = Acceptance(decay=speculation.SLOW_DECAY)
        self._positions = PositionChances()
        self._runner_up_gains = speculation.RunnerUpGains()
        self._tokens_a_choice = speculation.TokensAChoice()
        self._trust = speculation.Trust()

    def request(self, rows: Sequence[LiveRow]) -> tuple[CandidateRequest, Forecast | None]:
        """What these rows, past their prompts, are to be asked for, and what the round with it should take and bring."""
        if not rows:
            return CandidateRequest([]), None
        draft_cost = self._proposer.draft_cost(len(rows))
        if draft_cost is not None:
            draft_cost = draft_cost.of_rows(len(rows), self.verify_seconds)
        # The last token of a row is always the target's own, so a candidate for it would be wasted.
        room = [max(0, min(live.remaining - 1, self._context - len(live.tokens))) for live in rows]
        # A layout without candidates is without found ones too.
        reaches = None if self._finder is None or self.draft_tokens == 0 else self._finder.find(rows)
        looks = self.draft_tokens is not None or self._backoff.due()
        drafted = NOTHING if draft_cost is None or self.draft_tokens == 0 or not looks else self._reaches(rows, room)
        wanted = self._wanted(rows, drafted, draft_cost if looks else None)
        wanted = replace(wanted, counts=list(map(min, wanted.counts, room)))
        if reaches is not None:
            most = room if self.draft_tokens is None else [min(self.draft_tokens, each) for each in room]
            found = [each[:count] for each, count in zip(reaches, most, strict=True)]
            wanted = self._with_found(rows, wanted, drafted, found, draft_cost)
        if draft_cost is not None and self.draft_tokens is None and not any(wanted.counts):
            wanted = replace(wanted, counts=list(map(min, self._probe(rows, draft_cost), room)))
            drafted = self._reaches(rows, room) if any(wanted.counts) else drafted
        forecast = self._forecast(rows, drafted, wanted, draft_cost or DraftCost(0.0))
        chances = self._runner_up_chances(rows, wanted.counts, forecast) if any(wanted.counts) else ()
        if draft_cost is not None and draft_cost.rows != 0 and self.draft_tokens is None and wanted.gain:
            wanted = replace(wanted, counts=self._as_deep_as_any(rows, wanted, draft_cost, room))
        if self.draft_tokens is None:
            wanted = replace(wanted, counts=self._with_forced(rows, wanted, room))
        return replace(wanted, runner_up_chances=chances, rate=forecast.rate), forecast

    def filled(
        self, proposals: list[Proposal], pending: int, forecast: Forecast, constrained: Collection[int] = ()
    ) -> list[Proposal]:
        """What there is, cut down to those candidates that share the pass over so many other tokens.

        By now the chance of each is known, and the time that went into making them is spent.
        """
        if self.draft_tokens is not None or sum(bool(proposal.reaches) for proposal in proposals) < 2:
            return proposals
        # Candidates of which nobody knows how likely they are are verified.
        fed = pending + sum(
            len(proposal.runners_up) + (0 if proposal.reaches else len(proposal.tokens)) for proposal in proposals
        )
        reaches = side_by_side([proposal.reaches for proposal in proposals])
        gains = reaches.copy()
        for at in constrained:
            # What is forced is exactly as likely as what it comes behind.
            gains[at, 1:][reaches[at, 1:] == reaches[at, :-1]] = 0.0

        def seconds(tokens: int) -> float:
            return self.verify_seconds(tokens, forecast.context) + forecast.drafting

        counts = fill_slots(reaches.tolist(), seconds, fed=fed, depth=0, gains=gains.tolist()).counts
        return [
            _cut(proposal, count) if proposal.reaches else proposal
            for proposal, count in zip(proposals, counts, strict=True)
        ]

    def new_row_acceptance(self) -> Acceptance:
        chance = self._acceptance.chance
        return Acceptance(chance, NEW_ROW_MISSES / max(1.0 - chance, LEAST_MISS))

    def layout_changed(self) -> None:
        """In another layout what did not pay may do so."""
        self._backoff.reset()
        self._trust = speculation.Trust()

    def observe_round(self, done: Round, asked: bool, seconds: float) -> None:
        """What came of what was forecast; ``asked`` says whether the draft was."""
        if done.forecast is not None and done.steady:
            self._trust.observe(asked, done.gained, seconds, done.forecast.tokens, done.forecast.seconds)

    def observe_row(self, live: LiveRow, proposed: int, accepted: int) -> None:
        """So many of a row's candidates were accepted."""
        if proposed:
            live.acceptance.observe(proposed, accepted)
            self._acceptance.observe(proposed, accepted)
            self._positions.observe(proposed, accepted)

    def observe_forced(self, choices: int, tokens: int) -> None:
        """A row under a constraint has written so many tokens by so many choices."""
        self._tokens_a_choice.observe(choices, tokens)

    def observe_runners_up(self, rows: int, tried: int, accepted: int) -> None:
        """Of a round in which ``rows`` had candidates: runners-up that were tried, and those that were accepted."""
        self._runner_up_gains.observe(rows, tried, accepted)

    def _reaches(self, rows: Sequence[LiveRow], room: Sequence[int]) -> Reaches:
        """What is to be expected of a draft's candidates, each with all before it.

        A row's candidates miss so many times as often as those of all rows, whatever their position.
        """
        usual = max(1.0 - self._acceptance.chance, LEAST_MISS)
        if len(rows) == 1:
            factor, reach, row = (1.0 - rows[0].acceptance.chance) / usual, 1.0, []
            for chance in self._positions.chances[: room[0]]:
                reach *= max(0.0, 1.0 - factor * (1.0 - chance))
                row.append(reach)
            return [row]
        factors = np.array([(1.0 - live.acceptance.chance) / usual for live in rows])
        depth = deepest(len(rows))
        misses = 1.0 - np.array(self._positions.chances[:depth])
        reaches = np.cumprod(np.maximum(0.0, 1.0 - np.outer(factors, misses)), axis=1)
        reaches[np.arange(depth) >= np.array(room)[:, None]] = 0.0
        found: list[list[float]] = reaches.tolist()
        return found

    def _wanted(self, rows: Sequence[LiveRow], reaches: Reaches, draft_cost: DraftCost | None) -> CandidateRequest:
        if draft_cost is None:
            return CandidateRequest([0] * len(rows))
        if self.draft_tokens is not None:
            return CandidateRequest([self.draft_tokens] * len(rows))
        request = self._best_request(rows, reaches, draft_cost)
        if len(rows) == 1 and not any(request.counts):
            # A few misses would end the asking for hundreds of rounds. Rows side by side soon tell what a draft is worth.
            reaches = [self._positions.upper_bounds(reaches[0])]
            request = self._best_request(rows, reaches, draft_cost)
        wanted = {at for at, count in enumerate(request.counts) if count}
        taken = {at for at in wanted if self._pays_to_read(rows[at], request, draft_cost)}
        if draft_cost.rows == 0:
            taken = set(sorted(taken, key=lambda at: self._proposer.unread(rows[at]))[:FIRST_ROWS])
        if taken < wanted:
            # A step is made for those that are left.
            left = [each if at in taken else () for at, each in enumerate(reaches)]
            request = self._best_request(rows, left, draft_cost)
        asks = any(request.counts)
        self._backoff.decided(asks)
        if asks:
            self._probing.asked()
        return request

    def _best_request(self, rows: Sequence[LiveRow], reaches: Reaches, draft_cost: DraftCost) -> CandidateRequest:
        return best_request(reaches, self._pass_seconds(rows), draft_cost, self.layout_kind, _fed(rows), self._trust.share)

    def _pass_seconds(self, rows: Sequence[LiveRow]) -> PassSeconds:
        """Of a pass by its tokens, where each candidate brings along what is forced behind it."""
        width, fed, seconds = self._width(rows), _fed(rows), self._seconds_behind(rows)
        return seconds if width == 1.0 else lambda tokens: seconds(fed + round((tokens - fed) * width))

    def _seconds_behind(self, rows: Sequence[LiveRow]) -> PassSeconds:
        return partial(self.verify_seconds, context=context_of(rows))

    def _width(self, rows: Sequence[LiveRow]) -> float:
        constrained = sum(live.matching is not None for live in rows)
        return 1.0 + constrained / len(rows) * (self._tokens_a_choice.usual - 1.0)

    def _with_forced(self, rows: Sequence[LiveRow], wanted: CandidateRequest, room: Sequence[int]) -> list[int]:
        """Counts of tokens, where those of a draft have been of choices."""
        usual = self._tokens_a_choice.usual
        return [
            count if at in wanted.found or rows[at].matching is None else min(room[at], math.ceil(count * usual))
            for at, count in enumerate(wanted.counts)
        ]

    def _as_deep_as_any(
        self, rows: Sequence[LiveRow], wanted: CandidateRequest, draft_cost: DraftCost, room: Sequence[int]
    ) -> list[int]:
        """The draft's steps are made for all rows together, and it knows of each candidate how likely that one is.

        So every row may go as deep as any, and those that turn out likely enough get the slots, whoever's they are:
        the draft sends what is worth more than a slot costs. A row alone may go as deep as the draft is sure, since nobody
        waits for steps that are its own.
        """
        most = max((count for at, count in enumerate(wanted.counts) if at not in wanted.found), default=0)
        if most and len(rows) == 1 and rows[0].matching is None and self._stops_in_time(draft_cost):
            most = max(most, speculation.MOST_CANDIDATES)
        return [
            count
            if at in wanted.found or not most or not self._pays_to_read(rows[at], wanted, draft_cost)
            else min(most, room[at])
            for at, count in enumerate(wanted.counts)
        ]

    def _stops_in_time(self, draft_cost: DraftCost) -> bool:
        """Whether the draft makes a candidate only where the one before it is likely enough."""
        sequential = self.layout_kind is LayoutKind.SEQUENTIAL
        return sequential and self._proposer.knows_chances and not draft_cost.one_pass

    def _pays_to_read(self, live: LiveRow, request: CandidateRequest, draft_cost: DraftCost) -> bool:
        """A text that the draft has to read first has to pay for that in what is left of the row."""
        return draft_cost.read * self._proposer.unread(live) <= request.gain * live.remaining

    def _with_found(
        self,
        rows: Sequence[LiveRow],
        wanted: CandidateRequest,
        drafted: Reaches,
        found: Sequence[Sequence[float]],
        draft_cost: DraftCost | None,
    ) -> CandidateRequest:
        """Candidates that are found already compete for the same slots with those that are wanted of the draft.

        A row has the ones or the others, whichever promise more. The draft's steps are paid once for all rows that it is
        asked for, so rounds without it are weighed as a whole.
        """
        if not any(found):
            return wanted
        if self.draft_tokens is None:
            counts = worth_verifying(found, self._seconds_behind(rows), _fed(rows))
        else:
            counts = [len(each) for each in found]
        alone = replace(wanted, counts=counts, found=_taken(found, counts))
        if draft_cost is None or not any(wanted.counts):
            return alone
        made = [row[:count] for row, count in zip(drafted, wanted.counts, strict=True)]
        better = {at for at, each in enumerate(found) if each and sum(each) >= sum(made[at])}
        if self.draft_tokens is not None:
            counts = [len(found[at]) if at in better else count for at, count in enumerate(wanted.counts)]
        elif better:
            both = [found[at] if at in better else each for at, each in enumerate(made)]
            # What the draft is asked for, it takes its time for.
            counts = fill_slots(both, self._seconds_behind(rows), fed=_fed(rows), depth=0).counts
        else:
            counts = wanted.counts
        kept = {at: each for at, each in _taken(found, counts).items() if at in better}
        mixed = replace(wanted, counts=counts, found=kept)
        alone_rate, mixed_rate = (self._rate(rows, drafted, each, draft_cost) for each in (alone, mixed))
        return alone if alone_rate >= self._trust.share * mixed_rate else mixed

    def _rate(self, rows: Sequence[LiveRow], drafted: Reaches, wanted: CandidateRequest, draft_cost: DraftCost) -> float:
        return self._forecast(rows, drafted, wanted, draft_cost).rate

    def _probe(self, rows: Sequence[LiveRow], draft_cost: DraftCost) -> list[int]:
        """Nothing, or now and then one candidate for the row of which the draft knows the most."""
        unread = [self._proposer.unread(live) for live in rows]
        least = min(range(len(rows)), key=unread.__getitem__)
        plain, verified = map(self._seconds_behind(rows), (len(rows), len(rows) + 1))
        cost = draft_cost.hop + draft_cost.seconds(1) + draft_cost.read * unread[least] + max(0.0, verified - plain)
        due = self._probing.due(cost / plain)
        return [int(due and index == least) for index in range(len(rows))]

    def _forecast(
        self, rows: Sequence[LiveRow], drafted: Reaches, wanted: CandidateRequest, draft_cost: DraftCost
    ) -> Forecast:
        """What the next round should take and bring, by what is known of costs and chances."""
        # Of the draft alone: what is found costs none of its time.
        counts = [0 if at in wanted.found else count for at, count in enumerate(wanted.counts)]
        accepted, hit = expected_hits(drafted, counts) if any(counts) else (0.0, 1.0)
        with_some, most = sum(map(bool, counts)), max(counts)
        slots = sum(wanted.counts) + round(with_some * self._runner_up_gains.tried)
        unread = sum(self._proposer.unread(live) for live, count in zip(rows, counts, strict=True) if count)
        absent, verify = len(rows) * most - sum(counts), self._pass_seconds(rows)(_fed(rows) + slots)
        reading = draft_cost.read * unread
        seconds = float(round_seconds(self.layout_kind, verify, draft_cost, most, hit, absent)) + reading
        gained = len(rows) + accepted + sum(map(sum, wanted.found.values())) + with_some * self._runner_up_gains.accepted
        return Forecast(seconds, gained, seconds - verify, context_of(rows), reading)

    def _runner_up_chances(self, rows: Sequence[LiveRow], counts: Sequence[int], forecast: Forecast) -> tuple[float, ...]:
        """The chances from which on a first runner-up of each row, a second and so on are worth verifying."""
        if not self.runners_up:
            return ()
        fed = _fed(rows) + sum(counts)
        pass_seconds = self._pass_seconds(rows)
        verify = [pass_seconds(fed + extra * len(rows)) for extra in range(speculation.MOST_RUNNERS_UP + 1)]
        return speculation.runner_up_chances(forecast.tokens / forecast.seconds, len(rows), verify)


def _fed(rows: Sequence[LiveRow]) -> int:
    """The tokens of a pass without candidates."""
    return sum(live.pending for live in rows)


def _cut(proposal: Proposal, count: int) -> Proposal:
    if count >= len(proposal.tokens):
        return proposal
    runners_up = [(position, token) for position, token in proposal.runners_up if position < count]
    return proposal._replace(tokens=proposal.tokens[:count], runners_up=runners_up)


def _taken(found: Sequence[Sequence[float]], counts: Sequence[int]) -> dict[int, Sequence[float]]:
    return {at: each[:count] for at, (each, count) in enumerate(zip(found, counts, strict=True)) if count}
