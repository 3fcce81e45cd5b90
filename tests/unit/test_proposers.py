"""Proposals from the row's own text, and the contest between text and model."""

from __future__ import annotations

from collections.abc import Sequence

from fakes import decode

from outrider.workers.engines.costs import CostCurve
from outrider.workers.messages import Row, Sampling
from outrider.workers.speculation import CandidateRequest, DraftCost
from outrider.workers.target.live_row import LiveRow
from outrider.workers.target.proposers import (
    NO_PROPOSAL,
    EitherProposer,
    LookupProposer,
    NoProposer,
    PendingProposals,
    Proposal,
    Source,
)
from outrider.workers.target.text_and_stop_strings import TextWriter

CURVE = CostCurve({1: 1.0, 16: 1.3})


def live(key: int, tokens: Sequence[int]) -> LiveRow:
    return LiveRow(Row(key, tuple(tokens[:2]), 500, Sampling()), list(tokens), TextWriter(decode, (), ()), 0.0)


class Model:
    """Proposes a fixed token, as often as asked."""

    knows_chances = False

    def __init__(self, token: int, draft_cost: DraftCost | None = DraftCost(0.05)) -> None:  # noqa: B008
        self.token, self.cost = token, draft_cost
        self.asked: list[int] = []
        self.forgotten: list[int] = []

    def ask(self, rows: Sequence[LiveRow], request: CandidateRequest) -> PendingProposals:
        self.asked += [row.row.key for row in rows]
        proposals = [Proposal((self.token,) * count, ((0, 3),)) for count in request.counts]
        return lambda: proposals

    def forget(self, key: int) -> None:
        self.forgotten.append(key)

    def draft_cost(self, rows: int) -> DraftCost | None:
        return self.cost

    def unread(self, live: LiveRow) -> int:
        return 0


def test_lookup_and_none() -> None:
    row = live(1, [1, 2, 3, 1, 2])
    lookup = LookupProposer()
    assert lookup.ask([row], CandidateRequest([2]))() == [Proposal((3, 1), source=Source.LOOKUP)]
    assert lookup.draft_cost(1) == DraftCost(0.0)
    lookup.forget(1)
    assert list(NoProposer().ask([row], CandidateRequest([2]))()) == [NO_PROPOSAL]
    assert NoProposer().draft_cost(1) is None


def continue_with(proposer: EitherProposer, row: LiveRow, tokens: Sequence[int], count: int = 3) -> list[Sequence[int]]:
    """The row goes on with these tokens, one or more a round, as far as they were guessed."""
    proposals = []
    for token in tokens:
        (proposal,) = proposer.ask([row], CandidateRequest([count]))()
        proposals.append(proposal.tokens)
        row.tokens.append(token)
    return proposals


def test_a_row_that_repeats_itself_is_taken_from_its_text() -> None:
    model = Model(9)
    proposer, row = EitherProposer(model, CURVE), live(1, [1, 2, 3, 4])
    proposals = continue_with(proposer, row, [1, 2, 3, 4] * 10)
    assert proposals[-1] == (4, 1, 2)
    asked = len(model.asked)
    continue_with(proposer, row, [1, 2, 3, 4] * 5)
    assert len(model.asked) == asked, "the model is left in peace"


def test_a_row_that_the_model_knows_better_is_taken_from_the_model() -> None:
    model = Model(7)
    proposer, row = EitherProposer(model, CURVE), live(1, [7, 1, 7, 2])
    proposals = continue_with(proposer, row, [7] * 3)
    assert proposals[0] == (7, 7, 7)
    # A text in which every 7 was followed by something else, and then no more.
    other = live(2, [7, 1, 7, 2, 7, 3, 7, 4, 7, 5, 7, 6, 7, 8])
    for _ in range(6):
        (proposal,) = proposer.ask([other], CandidateRequest([3]))()
        other.tokens.append(7)
    assert proposal == Proposal((7, 7, 7), ((0, 3),))


def test_without_a_model_the_text_remains() -> None:
    proposer, row = EitherProposer(Model(9, None), CURVE), live(1, [1, 2, 3, 1, 2])
    assert list(proposer.ask([row], CandidateRequest([2]))()) == [Proposal((3, 1), source=Source.LOOKUP)]
    assert proposer.draft_cost(1) == DraftCost(0.0)


def test_a_row_that_ended_leaves_all() -> None:
    model = Model(9)
    proposer, row = EitherProposer(model, CURVE), live(1, [1, 2, 3])
    proposer.ask([row], CandidateRequest([2]))()
    proposer.forget(1)
    assert model.forgotten == [1]
