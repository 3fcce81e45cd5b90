"""Candidates from suffixes: which rows get them, the draft steps that they save, and the tokens that are stored."""

from __future__ import annotations

from collections.abc import Sequence

from fakes import decode

from outrider.workers.engines.costs import CostCurve
from outrider.workers.messages import Row, Sampling
from outrider.workers.speculation import Acceptance, CandidateRequest, DraftCost
from outrider.workers.target.asking_policy import AskingPolicy
from outrider.workers.target.live_row import LiveRow
from outrider.workers.target.proposers import NO_PROPOSAL, NoProposer, PendingProposals, Proposal, Source
from outrider.workers.target.suffix_finder import SuffixFinder, ask
from outrider.workers.target.text_and_stop_strings import TextWriter

# As of a model whose passes read its weights: sixteen tokens for little more than one.
CURVE = CostCurve({1: 1.0, 16: 1.3, 64: 3.0})
CHEAP = CostCurve({1: 1.0, 64: 1.2})
DEAR = CostCurve({1: 1.0, 64: 64.0})
SONG = tuple(range(10, 60))


def live(key: int, tokens: Sequence[int], prompt: int = 1, left: int = 400) -> LiveRow:
    row = Row(key, tuple(tokens[:prompt]), len(tokens) - prompt + left, Sampling())
    # The last token is fed with the next pass.
    return LiveRow(row, list(tokens), TextWriter(decode, (), ()), 0.0, cached=len(tokens) - 1)


class Model:
    """A draft that proposes a fixed token."""

    knows_chances = False

    def __init__(self, cost: DraftCost | None, unread: int = 0) -> None:
        self.cost = cost
        self.tokens_to_read = unread
        self.asked: list[int] = []

    def ask(self, rows: Sequence[LiveRow], request: CandidateRequest) -> PendingProposals:
        self.asked += [row.row.key for row in rows]
        proposals = [Proposal((7,) * count) for count in request.counts]
        return lambda: proposals

    def forget(self, key: int) -> None:
        pass

    def draft_cost(self, rows: int) -> DraftCost | None:
        return self.cost

    def unread(self, live: LiveRow) -> int:
        return self.tokens_to_read


def knowing(song: Sequence[int]) -> SuffixFinder:
    """A finder that has seen rows write this often enough to be sure."""
    finder = SuffixFinder(1 << 16)
    for key in range(1000, 1010):
        one = live(key, [1])
        for token in song:
            finder.find([one])
            one.tokens.append(token)
        finder.ended(one)
    return finder


def test_a_row_that_repeats_itself_is_asked_for_much_and_another_for_nothing() -> None:
    finder = knowing(SONG)
    policy = AskingPolicy(NoProposer(), CURVE, None, 1000, False, finder)
    rows = [live(1, [2, *SONG[:12]]), live(2, [2, 3, 5, 4, 6])]
    request, forecast = policy.request(rows)
    assert request.counts[0] >= 6
    assert request.counts[1] == 0
    assert forecast is not None
    assert forecast.tokens > 5
    first, second = ask(NoProposer(), finder, rows, request)()
    assert tuple(first.tokens) == SONG[12 : 12 + request.counts[0]]
    assert (first.source, set(first.from_others)) == (Source.SUFFIX, {1})
    assert second == NO_PROPOSAL or not second.tokens


def test_no_more_is_asked_for_than_the_row_the_context_and_the_user_allow() -> None:
    def count(left: int, context: int, draft_tokens: int | None) -> int:
        policy = AskingPolicy(NoProposer(), CURVE, draft_tokens, context, False, knowing(SONG))
        return policy.request([live(1, [2, *SONG[:12]], left=left)])[0].counts[0]

    assert count(400, 1000, None) > 6
    assert count(4, 1000, None) == 3, "the last token is always the target's own"
    assert count(400, 15, None) == 2
    assert count(400, 1000, 5) == 5
    assert count(400, 1000, 0) == 0


def test_where_another_token_costs_as_much_as_a_pass_nothing_is_asked_for() -> None:
    policy = AskingPolicy(NoProposer(), DEAR, None, 1000, False, knowing(SONG))
    assert policy.request([live(1, [2, *SONG[:12]])])[0].counts == [0]


def test_the_model_is_asked_for_rows_of_which_nothing_is_found() -> None:
    finder, model = knowing(SONG), Model(DraftCost(0.01, 0.01))
    policy = AskingPolicy(model, CHEAP, None, 1000, False, finder)
    rows = [live(1, [2, *SONG[:12]]), live(2, [2, 3, 5, 4, 6])]
    request, _ = policy.request(rows)
    assert set(request.found) == {0}
    first, second = ask(model, finder, rows, request)()
    assert first.tokens[0] == SONG[12]
    assert second.tokens
    assert set(second.tokens) == {7}
    assert model.asked == [2]
    # A draft that takes long is not waited for by a row that does well without.
    model.cost = DraftCost(0.5, 0.5)
    request, _ = policy.request(rows)
    assert (set(request.found), request.counts[1]) == ({0}, 0)
    # A draft that is lost is no matter.
    model.cost = None
    request, _ = policy.request(rows)
    assert (request.counts[0] >= 6, request.counts[1]) == (True, 0)


def test_a_draft_that_has_the_whole_prompt_to_read_is_asked_where_that_pays_in_the_rest_of_the_row() -> None:
    """Reading takes as long as ten passes and comes once; held against one round's gain it would never begin."""
    for left, asked in ((400, True), (8, False)):
        model = Model(DraftCost(0.01, 0.01, read=0.1), unread=100)
        policy = AskingPolicy(model, CHEAP, None, 1000, False, SuffixFinder(1 << 16))
        request, _ = policy.request([live(1, [2, 3, 5, 4, 6], left=left)])
        assert (request.counts[0] > 0) is asked
        assert not request.found


def test_rows_that_may_not_be_assisted_leave_nothing_behind() -> None:
    finder = SuffixFinder(1 << 16)
    unassisted = live(1, [1, *SONG])
    finder.ended(unassisted)
    assert finder.find([live(2, [2, *SONG[:12]])]) == [()]
    finder.learn([SONG])
    [reaches] = finder.find([live(3, [2, *SONG[:12]])])
    assert len(reaches) > 0


def test_a_draft_that_takes_longer_than_its_candidates_gain_is_not_asked_beside_what_is_found() -> None:
    """What is found promises the row a little less than the draft does, and takes no time."""
    finder, model = knowing(SONG), Model(DraftCost(0.3, 0.0))
    policy = AskingPolicy(model, CHEAP, None, 1000, False, finder)
    row = live(1, [2, *SONG[:12]], left=8)
    row.acceptance = Acceptance(0.999, weight=1000.0)
    request, forecast = policy.request([row])
    assert set(request.found) == {0}
    assert forecast is not None
    assert forecast.drafting == 0.0


def expecting(key: int, prompt: Sequence[int], predicted: Sequence[int], left: int = 400) -> LiveRow:
    row = Row(key, tuple(prompt), left, Sampling(), predicted=tuple(predicted))
    return LiveRow(row, list(prompt), TextWriter(decode, (), ()), 0.0, cached=len(prompt) - 1)


def test_what_is_expected_is_proposed_from_the_first_token_on() -> None:
    """And again behind a place where the row went its own way."""
    finder = knowing(SONG)
    row = expecting(1, [200, 201, 202, 203], range(100, 140))
    finder.find([row])
    assert tuple(finder.proposal(row, 3).tokens) == (100, 101, 102)
    row.tokens += [100, 101, 102, 7, 8]
    finder.find([row])
    assert not finder.proposal(row, 3).tokens
    row.tokens += [110, 111, 112, 113]
    finder.find([row])
    found = finder.proposal(row, 3)
    assert (tuple(found.tokens), set(found.from_others)) == ((114, 115, 116), {0})


def test_what_was_expected_is_no_answer_that_others_go_by() -> None:
    finder = knowing(SONG)
    row = expecting(1, [200, 201], range(100, 140))
    finder.find([row])
    row.tokens += [5, 6]
    finder.ended(row)
    other = live(2, [2, *range(100, 120)])
    finder.find([other])
    assert not finder.proposal(other, 3).tokens
