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


class AskingPolicy:
    """``draft_tokens`` is k where the user has fixed it. ``verify_seconds`` is what passes cost, by their tokens."""

    def __init__(
        self, proposer: Proposer, verify_seconds: CostCurve, draft_tokens: int | None, context: int, runners_up: bool
    ) -> None:
        self.verify_seconds = verify_seconds
        self.draft_tokens = draft_tokens
        self.layout_kind = LayoutKind.TURNS
        self.runners_up = runners_up
        self._proposer = proposer
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
        wanted = self._wanted(rows, draft_cost)
        # The last token of a row is always the target's own, so a candidate for it would be wasted.
        counts = [
            max(0, min(count, live.remaining - 1, self._context - len(live.tokens)))
            for live, count in zip(rows, wanted.counts, strict=True)
        ]
        forecast = self._forecast(rows, counts, draft_cost or DraftCost(0.0))
        chances = self._runner_up_chances(rows, counts, forecast) if any(counts) else ()
        return replace(wanted, counts=counts, runner_up_chances=chances), forecast

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
        if not any(counts):
            return self._probe(rows, draft_cost)
        self._probing.asked()
        return replace(request, counts=counts)

    def _probe(self, rows: Sequence[LiveRow], draft_cost: DraftCost) -> CandidateRequest:
        """Nothing, or now and then one candidate for the row of which the draft knows the most."""
        unread = [self._proposer.unread(live) for live in rows]
        least = min(range(len(rows)), key=unread.__getitem__)
        plain, verified = self.verify_seconds(len(rows)), self.verify_seconds(len(rows) + 1)
        cost = draft_cost.hop + draft_cost.step + draft_cost.read * unread[least] + max(0.0, verified - plain)
        due = self._probing.due(cost / plain)
        return CandidateRequest([int(due and index == least) for index in range(len(rows))])

    def _forecast(self, rows: Sequence[LiveRow], counts: Sequence[int], draft_cost: DraftCost) -> Forecast:
        """What the next round should take and bring, by what is known of costs and chances."""
        chances = [live.acceptance.chance for live in rows]
        hit = math.prod(chance**count for chance, count in zip(chances, counts, strict=True))
        with_some = sum(map(bool, counts))
        fed = sum(live.pending for live in rows) + sum(counts) + round(with_some * self._runner_up_gains.tried)
        unread = sum(self._proposer.unread(live) for live, count in zip(rows, counts, strict=True) if count)
        return Forecast(
            speculation.round_seconds(self.layout_kind, self.verify_seconds(fed), draft_cost, max(counts), hit)
            + draft_cost.read * unread,
            sum(map(speculation.expected_tokens, chances, counts)) + with_some * self._runner_up_gains.found,
        )

    def _runner_up_chances(self, rows: Sequence[LiveRow], counts: Sequence[int], forecast: Forecast) -> tuple[float, ...]:
        """The chances from which on a first runner-up of each row, a second and so on are worth verifying."""
        if not self.runners_up:
            return ()
        fed = sum(live.pending for live in rows) + sum(counts)
        verify = [self.verify_seconds(fed + extra * len(rows)) for extra in range(speculation.MOST_RUNNERS_UP + 1)]
        return speculation.runner_up_chances(forecast.tokens / forecast.seconds, len(rows), verify)
