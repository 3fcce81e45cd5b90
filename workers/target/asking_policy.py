"""Who is asked for how many candidates, and when: k, row by row, by costs and by what has held so far."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from outrider.workers import speculation
from outrider.workers.engines.costs import CostCurve
from outrider.workers.speculation import Acceptance, CandidateRequest, DraftCost, LayoutKind
from outrider.workers.target.forecast import Forecast
from outrider.workers.target.live_row import LiveRow
from outrider.workers.target.proposers import Proposer
from outrider.workers.target.suffix_finder import SuffixFinder


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
        self.layout_kind = LayoutKind.TURNS
        self.runners_up = runners_up
        self._proposer = proposer
        self._finder = finder
        self._context = context
        self._probing = speculation.Probing()
        # What a new row is believed to accept.
        self._acceptance = Acceptance(memory=speculation.LONG_MEMORY)
        self._runner_up_gains = speculation.RunnerUpGains()

    def request(self, rows: Sequence[LiveRow]) -> tuple[CandidateRequest, Forecast | None]:
        """What these rows, past their prompts, are to be asked for, and what the round with it should take and bring."""
        if not rows:
            return CandidateRequest([]), None
        draft_cost = self._proposer.draft_cost(len(rows))
        # The last token of a row is always the target's own, so a candidate for it would be wasted.
        room = [max(0, min(live.remaining - 1, self._context - len(live.tokens))) for live in rows]
        # A layout without candidates is without found ones too.
        reaches = None if self._finder is None or self.draft_tokens == 0 else self._finder.find(rows)
        wanted = self._wanted(rows, draft_cost)
        wanted = replace(wanted, counts=list(map(min, wanted.counts, room)))
        if reaches is not None:
            most = room if self.draft_tokens is None else [min(self.draft_tokens, each) for each in room]
            found = [each[:count] for each, count in zip(reaches, most, strict=True)]
            wanted = self._with_found(rows, wanted, found, draft_cost)
        if draft_cost is not None and self.draft_tokens is None and not any(wanted.counts):
            wanted = replace(wanted, counts=list(map(min, self._probe(rows, draft_cost), room)))
        forecast = self._forecast(rows, wanted, draft_cost or DraftCost(0.0))
        chances = self._runner_up_chances(rows, wanted.counts, forecast) if any(wanted.counts) else ()
        return replace(wanted, runner_up_chances=chances), forecast

    def belief_of_a_new_row(self) -> Acceptance:
        return Acceptance(self._acceptance.chance)

    def observe_row(self, live: LiveRow, proposed: int, held: int) -> None:
        """So many of a row's candidates have held."""
        if proposed:
            live.acceptance.observe(proposed, held)
            self._acceptance.observe(proposed, held)

    def observe_runners_up(self, rows: int, tried: int, found: int) -> None:
        """Of a round in which ``rows`` had candidates: runners-up that were tried, and those that brought a token."""
        self._runner_up_gains.observe(rows, tried, found)

    def _wanted(self, rows: Sequence[LiveRow], draft_cost: DraftCost | None) -> CandidateRequest:
        if draft_cost is None:
            return CandidateRequest([0] * len(rows))
        if self.draft_tokens is not None:
            return CandidateRequest([self.draft_tokens] * len(rows))
        chances = [live.acceptance.chance for live in rows]
        request = speculation.best_request(chances, self.verify_seconds, draft_cost, self.layout_kind)
        # A text that the draft has to read first has to pay for that in what is left of the row.
        counts = [
            count if count and draft_cost.read * self._proposer.unread(live) <= request.gain * live.remaining else 0
            for live, count in zip(rows, request.counts, strict=True)
        ]
        if any(counts):
            self._probing.asked()
        return replace(request, counts=counts)

    def _with_found(
        self,
        rows: Sequence[LiveRow],
        wanted: CandidateRequest,
        reaches: Sequence[Sequence[float]],
        draft_cost: DraftCost | None,
    ) -> CandidateRequest:
        """Candidates that are found already for those rows to which they promise more than what is wanted of the draft.

        The draft's steps are paid once for all rows that it is asked for, so rounds without it are weighed as a whole.
        """
        if self.draft_tokens is None:
            counts = speculation.worth_verifying(reaches, self.verify_seconds)
        else:
            counts = [len(each) for each in reaches]
        found = {index: each[:count] for index, (each, count) in enumerate(zip(reaches, counts, strict=True)) if count}
        alone = replace(wanted, counts=counts, found=found)
        if draft_cost is None or not any(wanted.counts):
            return alone
        better = {
            index: each
            for index, each in found.items()
            if sum(each) >= speculation.expected_tokens(rows[index].acceptance.chance, wanted.counts[index]) - 1.0
        }
        both = [len(better[index]) if index in better else count for index, count in enumerate(wanted.counts)]
        mixed = replace(wanted, counts=both, found=better)
        if self._rate(rows, alone, draft_cost) >= self._rate(rows, mixed, draft_cost):
            return alone
        return mixed

    def _rate(self, rows: Sequence[LiveRow], wanted: CandidateRequest, draft_cost: DraftCost) -> float:
        forecast = self._forecast(rows, wanted, draft_cost)
        return forecast.tokens / forecast.seconds

    def _probe(self, rows: Sequence[LiveRow], draft_cost: DraftCost) -> list[int]:
        """Nothing, or now and then one candidate for the row of which the draft knows the most."""
        unread = [self._proposer.unread(live) for live in rows]
        least = min(range(len(rows)), key=unread.__getitem__)
        plain, verified = self.verify_seconds(len(rows)), self.verify_seconds(len(rows) + 1)
        cost = draft_cost.hop + draft_cost.seconds(1) + draft_cost.read * unread[least] + max(0.0, verified - plain)
        due = self._probing.due(cost / plain)
        return [int(due and index == least) for index in range(len(rows))]

    def _forecast(self, rows: Sequence[LiveRow], wanted: CandidateRequest, draft_cost: DraftCost) -> Forecast:
        """What the next round should take and bring, by what is known of costs and chances."""
        chances = [live.acceptance.chance for live in rows]
        # Of the draft alone: what is found costs none of its time.
        counts = [0 if index in wanted.found else count for index, count in enumerate(wanted.counts)]
        hit = math.prod(chance**count for chance, count in zip(chances, counts, strict=True))
        with_some = sum(map(bool, counts))
        fed = sum(live.pending for live in rows) + sum(wanted.counts) + round(with_some * self._runner_up_gains.tried)
        unread = sum(self._proposer.unread(live) for live, count in zip(rows, counts, strict=True) if count)
        return Forecast(
            speculation.round_seconds(self.layout_kind, self.verify_seconds(fed), draft_cost, max(counts), hit)
            + draft_cost.read * unread,
            sum(map(speculation.expected_tokens, chances, counts))
            + sum(map(sum, wanted.found.values()))
            + with_some * self._runner_up_gains.found,
        )

    def _runner_up_chances(self, rows: Sequence[LiveRow], counts: Sequence[int], forecast: Forecast) -> tuple[float, ...]:
        """The chances from which on a first runner-up of each row, a second and so on are worth verifying."""
        if not self.runners_up:
            return ()
        fed = sum(live.pending for live in rows) + sum(counts)
        verify = [self.verify_seconds(fed + extra * len(rows)) for extra in range(speculation.MOST_RUNNERS_UP + 1)]
        return speculation.runner_up_chances(forecast.tokens / forecast.seconds, len(rows), verify)
