"""How many candidates to ask for, for which rows, and when: by the costs of passes and drafting, and by acceptance so
far."""

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

# The least miss rate (1 - acceptance) that is assumed.
LEAST_MISS = 0.01
# The prior of a row's acceptance is that of all rows, with the weight of this many misses. With less, a row that begins
# with two misses in a job of high acceptance would never be asked for candidates again.
NEW_ROW_MISSES = 2.0
# While the draft's costs are unknown it is asked about this many rows at most, since it has to read each of them.
FIRST_ROWS = 4
NOTHING: Reaches = ()


class AskingPolicy:
    """``draft_tokens`` is k where the user has fixed it; ``verify_seconds`` the cost of a pass by its number of tokens."""

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
        # Over all rows: the prior of a new one.
        self._acceptance = Acceptance(decay=speculation.SLOW_DECAY)
        self._positions = PositionChances()
        self._runner_up_gains = speculation.RunnerUpGains()
        self._tokens_per_choice = speculation.TokensPerChoice()
        self._trust = speculation.Trust()

    def request(self, rows: Sequence[LiveRow]) -> tuple[CandidateRequest, Forecast | None]:
        """The request for these rows, which have read their prompts, and the forecast of the round with it."""
        if not rows:
            return CandidateRequest([]), None
        draft_cost = self._proposer.draft_cost(len(rows))
        if draft_cost is not None:
            draft_cost = draft_cost.of_rows(len(rows), self.verify_seconds)
        # The target chooses one more token than it accepts, so a candidate for a row's last token would be wasted.
        room = [max(0, min(live.remaining - 1, self._context - len(live.tokens))) for live in rows]
        # draft_tokens == 0 (plain decoding) excludes candidates from texts, too.
        reaches = None if self._finder is None or self.draft_tokens == 0 else self._finder.find(rows)
        decides = self.draft_tokens is not None or self._backoff.due()
        drafted = NOTHING if draft_cost is None or self.draft_tokens == 0 or not decides else self._reaches(rows, room)
        wanted = self._wanted(rows, drafted, draft_cost if decides else None)
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
            wanted = replace(wanted, counts=self._to_common_depth(rows, wanted, draft_cost, room))
        if self.draft_tokens is None:
            wanted = replace(wanted, counts=self._with_forced(rows, wanted, room))
        return replace(wanted, runner_up_chances=chances, rate=forecast.rate), forecast

    def cut_to_slots(
        self, proposals: list[Proposal], pending: int, forecast: Forecast, constrained: Collection[int] = ()
    ) -> list[Proposal]:
        """The proposals, cut to those candidates that are worth their slot in a pass over ``pending`` other tokens.

        The reach of each is known by now, and the time of drafting is spent.
        """
        if self.draft_tokens is not None or sum(bool(proposal.reaches) for proposal in proposals) < 2:
            return proposals
        # Candidates without known reaches are all verified.
        fed = pending + sum(
            len(proposal.runners_up) + (0 if proposal.reaches else len(proposal.tokens)) for proposal in proposals
        )
        reaches = side_by_side([proposal.reaches for proposal in proposals])
        gains = reaches.copy()
        for at in constrained:
            # A forced token has the same reach as the one before it, and no gain of its own.
            gains[at, 1:][reaches[at, 1:] == reaches[at, :-1]] = 0.0

        def seconds(tokens: int) -> float:
            return self.verify_seconds(tokens, forecast.context) + forecast.drafting

        counts = fill_slots(reaches.tolist(), seconds, fed=fed, drafted=False, gains=gains.tolist()).counts
        return [
            _cut(proposal, count) if proposal.reaches else proposal
            for proposal, count in zip(proposals, counts, strict=True)
        ]

    def new_row_acceptance(self) -> Acceptance:
        chance = self._acceptance.chance
        return Acceptance(chance, NEW_ROW_MISSES / max(1.0 - chance, LEAST_MISS))

    def layout_changed(self) -> None:
        """Decide anew: asking may pay in another layout."""
        self._backoff.reset()
        self._trust = speculation.Trust()

    def observe_round(self, done: Round, asked: bool, seconds: float) -> None:
        """Compare a round with its forecast; ``asked``: the draft was asked."""
        if done.forecast is not None and done.steady:
            self._trust.observe(asked, done.gained, seconds, done.forecast.tokens, done.forecast.seconds)

    def observe_row(self, live: LiveRow, proposed: int, accepted: int) -> None:
        """A row had ``proposed`` candidates, of which ``accepted`` were accepted."""
        if proposed:
            live.acceptance.observe(proposed, accepted)
            self._acceptance.observe(proposed, accepted)
            self._positions.observe(proposed, accepted)

    def observe_forced(self, choices: int, tokens: int) -> None:
        """A row under a grammar has written ``tokens`` with ``choices``; the others were forced."""
        self._tokens_per_choice.observe(choices, tokens)

    def observe_runners_up(self, rows: int, tried: int, accepted: int) -> None:
        """Count the runners-up that were verified and accepted in a round in which ``rows`` had candidates."""
        self._runner_up_gains.observe(rows, tried, accepted)

    def _reaches(self, rows: Sequence[LiveRow], room: Sequence[int]) -> Reaches:
        """The expected reaches of a draft's candidates: reach_i = product over j <= i of (1 - factor * (1 - chance_j)).

        chance_j is the acceptance at position j in all rows, ``factor`` the row's miss rate over that of all rows.
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
            # With one row, a few misses would end the asking for hundreds of rounds, so upper confidence bounds decide.
            # With several rows there are soon enough observations.
            reaches = [self._positions.upper_bounds(reaches[0])]
            request = self._best_request(rows, reaches, draft_cost)
        wanted = {at for at, count in enumerate(request.counts) if count}
        taken = {at for at in wanted if self._pays_to_read(rows[at], request, draft_cost)}
        if draft_cost.rows == 0:
            taken = set(sorted(taken, key=lambda at: self._proposer.unread(rows[at]))[:FIRST_ROWS])
        if taken < wanted:
            # Decided again for the rows that are left, since a step's cost is shared by fewer.
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
        """Seconds of a pass by its tokens, where each candidate also feeds the tokens that are forced after it."""
        per_candidate, fed, seconds = self._tokens_per_candidate(rows), _fed(rows), self._seconds_with_context(rows)
        return seconds if per_candidate == 1.0 else lambda tokens: seconds(fed + round((tokens - fed) * per_candidate))

    def _seconds_with_context(self, rows: Sequence[LiveRow]) -> PassSeconds:
        return partial(self.verify_seconds, context=context_of(rows))

    def _tokens_per_candidate(self, rows: Sequence[LiveRow]) -> float:
        constrained = sum(live.matching is not None for live in rows)
        return 1.0 + constrained / len(rows) * (self._tokens_per_choice.usual - 1.0)

    def _with_forced(self, rows: Sequence[LiveRow], wanted: CandidateRequest, room: Sequence[int]) -> list[int]:
        """The draft's counts of choices as counts of tokens, which include forced ones."""
        usual = self._tokens_per_choice.usual
        return [
            count if at in wanted.found or rows[at].matching is None else min(room[at], math.ceil(count * usual))
            for at, count in enumerate(wanted.counts)
        ]

    def _to_common_depth(
        self, rows: Sequence[LiveRow], wanted: CandidateRequest, draft_cost: DraftCost, room: Sequence[int]
    ) -> list[int]:
        """The largest count, for every row that may have candidates: the draft's steps are made for all rows together.

        The draft knows the reach of each candidate and sends only those that are worth a slot, so which row gets the slots
        is decided there. A single row may go as deep as the draft is sure, since no other row waits for its steps.
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
        """Whether the draft stops drafting where a further candidate is too unlikely."""
        sequential = self.layout_kind is LayoutKind.SEQUENTIAL
        return sequential and self._proposer.knows_chances and not draft_cost.one_pass

    def _pays_to_read(self, live: LiveRow, request: CandidateRequest, draft_cost: DraftCost) -> bool:
        """Whether the gain over the rest of the row exceeds the draft's prefill: read * unread <= gain * remaining."""
        return draft_cost.read * self._proposer.unread(live) <= request.gain * live.remaining

    def _with_found(
        self,
        rows: Sequence[LiveRow],
        wanted: CandidateRequest,
        drafted: Reaches,
        found: Sequence[Sequence[float]],
        draft_cost: DraftCost | None,
    ) -> CandidateRequest:
        """Candidates found in texts compete with the draft's for the slots.

        Each row takes the source with the larger expected gain. The draft's steps cost the same for all rows that it is
        asked about, so this mixture is compared with a round of found candidates alone.
        """
        if not any(found):
            return wanted
        if self.draft_tokens is None:
            counts = worth_verifying(found, self._seconds_with_context(rows), _fed(rows))
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
            # The draft's time is added by ``_forecast``.
            counts = fill_slots(both, self._seconds_with_context(rows), fed=_fed(rows), drafted=False).counts
        else:
            counts = wanted.counts
        kept = {at: each for at, each in _taken(found, counts).items() if at in better}
        mixed = replace(wanted, counts=counts, found=kept)
        alone_rate, mixed_rate = (self._rate(rows, drafted, each, draft_cost) for each in (alone, mixed))
        return alone if alone_rate >= self._trust.share * mixed_rate else mixed

    def _rate(self, rows: Sequence[LiveRow], drafted: Reaches, wanted: CandidateRequest, draft_cost: DraftCost) -> float:
        return self._forecast(rows, drafted, wanted, draft_cost).rate

    def _probe(self, rows: Sequence[LiveRow], draft_cost: DraftCost) -> list[int]:
        """Zeros; now and then one candidate, for the row of which the draft has the fewest tokens to read."""
        unread = [self._proposer.unread(live) for live in rows]
        least = min(range(len(rows)), key=unread.__getitem__)
        plain, verified = map(self._seconds_with_context(rows), (len(rows), len(rows) + 1))
        cost = draft_cost.hop + draft_cost.seconds(1) + draft_cost.read * unread[least] + max(0.0, verified - plain)
        due = self._probing.due(cost / plain)
        return [int(due and index == least) for index in range(len(rows))]

    def _forecast(
        self, rows: Sequence[LiveRow], drafted: Reaches, wanted: CandidateRequest, draft_cost: DraftCost
    ) -> Forecast:
        """The expected seconds and tokens of the next round."""
        # The draft's counts: found candidates cost none of its time.
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
        """The least chances at which a first runner-up of each row, a second and so on are worth verifying."""
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
