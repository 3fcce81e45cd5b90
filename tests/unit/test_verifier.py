"""The verifier: with any proposals a row's result equals plain decoding."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
from fakes import END, VOCABULARY, FakeEngine, FakePieces, Fixed, Nonsense, decode, hashed, plain
from hypothesis import given, settings
from hypothesis import strategies as st

from examples import examples
from outrider.workers import speculation
from outrider.workers.engines.costs import CostCurve
from outrider.workers.engines.engine import Chosen, Feed
from outrider.workers.messages import Row, RowFailure, RowResult, Sampling
from outrider.workers.speculation import LEAST_RUNNER_UP, MOST_RUNNERS_UP, CandidateRequest
from outrider.workers.target import verifier as verify
from outrider.workers.target.live_row import LiveRow
from outrider.workers.target.proposers import LookupProposer, NoProposer, PendingProposals, Proposal, Proposer
from outrider.workers.target.text_and_stop_strings import TextWriter
from outrider.workers.target.verifier import Verifier

CONTEXT = 96
CURVE = CostCurve({1: 1.0, 8: 1.2, 64: 3.0})


def verifier(
    engine: FakeEngine,
    proposer: Proposer,
    batch: int = 4,
    draft_tokens: int | None = 3,
    end: Sequence[int] = (END,),
    prefix_tokens: int = 0,
    runners_up: bool = True,
) -> Verifier:
    return Verifier(
        engine=engine,
        new_writer=lambda row: TextWriter(
            decode, row.stop, {*end, *(row.sampling.end_tokens or ())}, row.sampling.min_tokens, FakePieces()
        ),
        proposer=proposer,
        batch=batch,
        draft_tokens=draft_tokens,
        verify_seconds=CURVE,
        end_tokens=end,
        prefix_tokens=prefix_tokens,
        runners_up=runners_up,
    )


def finish(verifier: Verifier, rows: Sequence[Row]) -> dict[int, RowResult | RowFailure]:
    verifier.add(rows)
    ended: dict[int, RowResult | RowFailure] = {}
    for _ in range(10_000):
        if verifier.idle:
            return ended
        for one in verifier.round():
            assert one.key not in ended, f"row {one.key} ended twice"
            ended[one.key] = one
    raise AssertionError("the verifier does not come to an end")


def assert_plain(
    rows: Sequence[Row], ended: dict[int, RowResult | RowFailure], context: int = CONTEXT, end: Sequence[int] = (END,)
) -> None:
    assert ended.keys() == {row.key for row in rows}
    for row in rows:
        result, expected = ended[row.key], plain(row, context, end)
        assert isinstance(result, RowResult)
        found = (result.tokens, result.text, result.finish_reason)
        assert found == (expected.tokens, expected.text, expected.finish_reason), f"row {row.key} differs from plain"
        assert (result.logprobs is None) == (row.logprobs is None)
        if result.logprobs is not None:
            assert result.logprobs.chosen == tuple(entry[0][1] for entry in expected.logprobs)
            assert result.logprobs.likeliest == tuple(tuple(entry[1:]) for entry in expected.logprobs)
            assert len(result.logprobs.offsets) == len(result.tokens)


samplings = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.0, 0.7, 1.0]),
    seed=st.integers(0, 5),
    sample=st.integers(0, 2),
    min_tokens=st.sampled_from([0, 0, 5, 20]),
    end_tokens=st.sampled_from([None, (), (2,), (1, 4, END)]),
)
told = st.sampled_from([None, None, 0, 3])
stops = st.lists(st.sampled_from(["a", "ab", "bca", "x", "y x", "xa", "\n", "cab", "abcabc", "zz"]), max_size=3)


@st.composite
def jobs(draw: st.DrawFn) -> list[Row]:
    prompts = draw(st.lists(st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=40), min_size=1, max_size=7))
    return [
        Row(key, tuple(prompt), draw(st.integers(1, 70)), draw(samplings), tuple(draw(stops)), draw(told))
        for key, prompt in enumerate(prompts)
    ]


@settings(max_examples=examples(150), deadline=None)
@given(
    jobs(),
    st.integers(1, 8),
    st.sampled_from([None, 0, 1, 3, 6, 20]),
    st.integers(0, 1 << 30),
    st.sampled_from([(END,), (), (END, 3)]),
    st.booleans(),
)
def test_assisted_is_plain(
    rows: list[Row], batch: int, draft_tokens: int | None, seed: int, end: tuple[int, ...], branches: bool
) -> None:
    engine, proposer = FakeEngine(CONTEXT), Nonsense(seed)
    engine.branches = branches
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(verify, "PREFILL_TOKENS", 16)
        target = verifier(engine, proposer, batch, draft_tokens, end)
        ended = finish(target, rows)
    assert_plain(rows, ended, end=end)
    assert engine.rows == {}, "a row that has ended must leave the engine"
    assert sorted(proposer.forgotten) == [row.key for row in rows], "the draft must hear of every row that ended"
    results = [one for one in ended.values() if isinstance(one, RowResult)]
    assert target.counters.tokens == sum(len(one.tokens) for one in results)
    assert target.counters.proposed == sum(one.proposed for one in results)
    assert target.counters.accepted == sum(one.accepted for one in results)
    assert target.counters.plain_rounds <= target.counters.rounds == len(engine.passes)
    assert target.counters.runners_up_accepted <= target.counters.runners_up
    if not branches:
        assert target.counters.runners_up == 0
    for one in results:
        assert one.accepted <= one.proposed
        assert one.accepted <= len(one.tokens)
    assert all(len(each) <= batch for each in engine.passes)


@pytest.mark.parametrize("proposer", [NoProposer(), LookupProposer()])
@pytest.mark.parametrize("draft_tokens", [None, 4])
def test_the_proposers_without_a_model(proposer: Proposer, draft_tokens: int | None) -> None:
    rows = [Row(key, (key, 1, 2, 1, 2), 40, Sampling(temperature=float(key % 2), seed=key)) for key in range(9)]
    assert_plain(rows, finish(verifier(FakeEngine(CONTEXT), proposer, 4, draft_tokens), rows))


class Oracle(Nonsense):
    """Proposes exactly what the target will choose."""

    def _one(self, live: LiveRow, limit: int) -> Sequence[int]:
        return self._right(live, max(0, limit))


def test_a_perfect_draft_saves_the_rounds_it_should() -> None:
    row = Row(1, (1, 2, 3), 25)
    engine = FakeEngine(CONTEXT)
    target = verifier(engine, Oracle(0), 1, 4, end=())
    result = finish(target, [row])[1]
    assert_plain([row], {1: result}, end=())
    # One pass for the prompt and its token, then five tokens a pass; the last pass needs only four.
    assert len(engine.passes) == 1 + 5
    assert isinstance(result, RowResult)
    assert (result.rounds, result.proposed, result.accepted) == (6, 4 * 4 + 3, 4 * 4 + 3)


class Talkative(Nonsense):
    """Proposes more than it is asked for, and all of it right."""

    def _one(self, live: LiveRow, limit: int) -> Sequence[int]:
        return self._right(live, max(0, limit) + 3)


def test_candidates_that_nobody_asked_for_are_not_tried() -> None:
    row, engine = Row(1, (1, 2, 3), 25), FakeEngine(CONTEXT)
    assert_plain([row], finish(verifier(engine, Talkative(0), 1, 4, end=()), [row]), end=())
    assert [len(feed.tokens) for (feed,) in engine.passes] == [3, 5, 5, 5, 5, 4]


class RunnerUpShare(Nonsense):
    """Its third candidate is wrong, and what it would have said second is right."""

    def ask(self, rows: Sequence[LiveRow], request: CandidateRequest) -> PendingProposals:
        self.requests.append(request)
        proposals = []
        for live, count in zip(rows, request.counts, strict=True):
            tokens = self._right(live, max(0, count))
            if count > 2:
                right, tokens[2] = tokens[2], (tokens[2] + 1) % VOCABULARY
                proposals.append(Proposal(tokens, [(1, tokens[2]), (2, right)]))
            else:
                proposals.append(Proposal(tokens))
        return lambda: proposals

    def __post_init__(self) -> None:
        super().__post_init__()
        self.requests: list[CandidateRequest] = []


def test_a_runner_up_that_is_accepted_brings_its_successor() -> None:
    row = Row(1, (1, 2, 3), 25, logprobs=1)
    engine, draft = FakeEngine(CONTEXT), RunnerUpShare(0)
    target = verifier(engine, draft, 1, 4, end=())
    result = finish(target, [row])[1]
    assert_plain([row], {1: result}, end=())
    # The prompt's token, then two candidates, the runner-up and the token after it a pass, 25 = 1 + 6 * 4.
    assert [len(feed.tokens) for (feed,) in engine.passes] == [3, 5, 6, 6, 6, 6, 5], "it is fed once more; the last has 3"
    assert [len(feed.branches) for (feed,) in engine.passes] == [0] + [2] * 6
    assert (target.counters.runners_up, target.counters.runners_up_accepted) == (12, 6)
    assert target.counters.accepted == 12
    done = target.last_round
    assert done is not None
    assert (done.steady, done.read, done.runners_up_accepted, done.gained, done.fed) == (True, 0, 1, 4, 7)
    worth = draft.requests[0].runner_up_chances
    assert len(worth) == MOST_RUNNERS_UP
    assert LEAST_RUNNER_UP <= worth[0] <= worth[1] < 1.0


def test_runners_up_of_long_rows_are_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speculation, "LONGEST_WITH_RUNNERS_UP", 12)
    engine = FakeEngine(CONTEXT)
    target = verifier(engine, RunnerUpShare(0), 1, 4, end=())
    rows = [Row(1, (1, 2, 3), 40)]
    assert_plain(rows, finish(target, rows), end=())
    assert 2 < target.counters.runners_up < 8


@pytest.mark.parametrize("able", [True, False])
def test_runners_up_are_left_alone_where_they_are_not_wanted_or_cannot_be_tried(able: bool) -> None:
    engine, draft = FakeEngine(CONTEXT), RunnerUpShare(0)
    engine.branches = able
    target = verifier(engine, draft, 1, 4, end=(), runners_up=not able)
    rows = [Row(1, (1, 2, 3), 25)]
    assert_plain(rows, finish(target, rows), end=())
    assert target.counters.runners_up == 0
    assert all(request.runner_up_chances == () for request in draft.requests)


def test_no_candidate_is_asked_for_a_rows_last_token() -> None:
    engine = FakeEngine(CONTEXT)
    finish(verifier(engine, Oracle(0), 1, 8, end=()), [Row(1, (1, 2, 3), 1), Row(2, (1,), 1)])
    assert [[len(feed.tokens) for feed in each] for each in engine.passes] == [[3], [1]]


def test_an_end_amid_accepted_candidates_ends_the_row_there() -> None:
    def ends_soon(tokens: Sequence[int], sampling: Sampling) -> int:
        return END if len(tokens) == 6 else len(tokens) % END

    engine = FakeEngine(CONTEXT, choose=ends_soon)
    target = verifier(engine, Oracle(0, choose=ends_soon), 1, 8)
    result = finish(target, [Row(1, (1, 2), 50)])[1]
    assert isinstance(result, RowResult)
    assert result.tokens == (2, 3, 4, 5, END)
    assert result.finish_reason == "stop"
    assert result.accepted <= 5, "candidates behind the end were never used"
    assert target.counters.tokens == 5


def test_a_prompt_longer_than_a_prefill_step_goes_in_pieces_beside_the_others() -> None:
    context = 2000
    long = Row(1, tuple(index % END for index in range(2 * verify.PREFILL_TOKENS + 7)), 12)
    exact = Row(2, tuple(index % 7 for index in range(verify.PREFILL_TOKENS)), 5)
    one_more = Row(3, tuple(index % 5 for index in range(verify.PREFILL_TOKENS + 1)), 5)
    short = Row(4, (1, 2), 12)
    engine = FakeEngine(context)
    rows = [long, exact, one_more, short]
    ended = finish(verifier(engine, Oracle(0), 4, 3), rows)
    assert_plain(rows, ended, context)
    assert max(len(feed.tokens) for each in engine.passes for feed in each) == verify.PREFILL_TOKENS
    assert len(engine.passes[1]) > 1, "short rows go on while a long prompt enters"


@pytest.mark.parametrize("length", [CONTEXT - 3, CONTEXT - 2, CONTEXT - 1])
def test_the_context_ends_a_row(length: int) -> None:
    row = Row(1, (1,) * length, 50)
    result = finish(verifier(FakeEngine(CONTEXT), Nonsense(3), 1, 6, end=()), [row])[1]
    assert_plain([row], {1: result}, end=())
    assert isinstance(result, RowResult)
    assert len(result.tokens) == CONTEXT - length
    assert result.finish_reason == "length"


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ((1,) * CONTEXT, "the prompt has 96 tokens, the model holds 96"),
        ((1, VOCABULARY), f"token {VOCABULARY} is not one of the model's {VOCABULARY}"),
        ((1, -2), f"token -2 is not one of the model's {VOCABULARY}"),
        ((), "the prompt has no tokens"),
    ],
)
def test_a_row_that_cannot_be_run_fails_alone(prompt: tuple[int, ...], message: str) -> None:
    engine = FakeEngine(CONTEXT)
    good = Row(2, (1, 2), 5)
    ended = finish(verifier(engine, NoProposer(), 1), [Row(1, prompt, 5), good])
    assert ended.pop(1) == RowFailure(1, message)
    assert_plain([good], ended)


def test_a_row_whose_scores_are_not_numbers_fails_alone() -> None:
    class Overflowing(FakeEngine):
        def _feed(self, feed: Feed) -> Chosen:
            chosen = super()._feed(feed)
            if feed.row == 1 and len(self.rows[1]) >= 4:
                chosen.margins[:] = [math.nan] * len(chosen.tokens)
            return chosen

    good = Row(2, (1, 2), 5)
    ended = finish(verifier(Overflowing(CONTEXT), NoProposer(), 2, end=()), [Row(1, (1, 2), 5), good])
    failure = ended.pop(1)
    assert isinstance(failure, RowFailure)
    assert failure.message.startswith("after 2 tokens the model's logits are not finite")
    assert_plain([good], ended, end=())


def test_a_finished_rows_place_is_taken_in_the_very_next_pass() -> None:
    rows = [Row(1, (1,), 3), Row(2, (2,), 9), Row(3, (3,), 2), Row(4, (4,), 2)]
    engine = FakeEngine(CONTEXT)
    finish(verifier(engine, NoProposer(), 2, end=()), rows)
    assert [[feed.row for feed in each] for each in engine.passes] == [
        *[[1, 2]] * 3,
        *[[2, 3]] * 2,
        *[[2, 4]] * 2,
        *[[2]] * 2,
    ]


def test_a_row_in_the_prefill_is_not_put_to_the_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "PREFILL_TOKENS", 2)
    proposer = Oracle(0)
    target = verifier(FakeEngine(CONTEXT), proposer, 2, 3)
    target.add([Row(1, (1, 2, 3, 4), 5)])
    target.round()
    assert proposer.asked == []
    target.round()
    assert proposer.asked == [1]


def test_nothing_is_asked_while_there_is_no_draft() -> None:
    proposer = Nonsense(0, step=None)
    rows = [Row(1, (1, 2), 20)]
    target = verifier(FakeEngine(CONTEXT), proposer, 2, None)
    assert_plain(rows, finish(target, rows))
    assert proposer.asked == []
    assert target.counters.plain_rounds == target.counters.rounds


@pytest.mark.slow
def test_a_draft_that_seems_too_slow_is_tried_again_now_and_then() -> None:
    """Its price was measured once; nothing else would ever correct it."""
    proposer = Nonsense(0, step=1e9)
    rows = [Row(1, (1, 2), 1500)]
    target = verifier(FakeEngine(1600), proposer, 1, None, end=())
    assert_plain(rows, finish(target, rows), 1600, end=())
    assert 1 <= len(proposer.asked) <= 100


def test_near_ties_are_counted_for_committed_tokens_only() -> None:
    class Close(FakeEngine):
        exact = False

        def _feed(self, feed):
            chosen = super()._feed(feed)
            chosen.margins[:] = [1e-6] * len(chosen.tokens)
            return chosen

    class Wrong(Nonsense):
        def _one(self, live: LiveRow, limit: int) -> Sequence[int]:
            return [(hashed(live.tokens, live.row.sampling) + 1) % VOCABULARY] * limit

    target = verifier(Close(CONTEXT), Wrong(0), 1, 4, end=())
    finish(target, [Row(1, (1, 2), 10)])
    assert target.counters.near_ties == 10


def test_samples_of_one_row_differ_and_repeat() -> None:
    rows = [Row(key, (1, 2), 20, Sampling(temperature=1.0, seed=3, sample=key % 3)) for key in range(6)]
    ended = finish(verifier(FakeEngine(CONTEXT), Nonsense(1), 3, 4, end=()), rows)
    texts = [ended[key].tokens for key in range(6)]  # type: ignore[union-attr]
    assert texts[:3] == texts[3:]
    assert len(set(texts)) == 3


def test_a_text_that_the_draft_must_read_has_to_pay_for_it() -> None:
    """Long prompts and short answers: reading costs more than all the tokens that are left could gain."""
    job = [Row(key, (key, *range(1, 9)) * 4, 8, Sampling(seed=key, end_tokens=()), ()) for key in range(3)]
    cheap, dear = Nonsense(1, read=0.001), Nonsense(1, read=1.0)
    for proposer in (cheap, dear):
        target = verifier(FakeEngine(CONTEXT), proposer, draft_tokens=None)
        target.policy.verify_seconds = Fixed({1: 1.0, 64: 1.1})
        assert_plain(job, finish(target, job))
    assert set(cheap.asked) == {0, 1, 2}
    assert dear.asked == []


def test_a_new_row_is_believed_to_accept_what_those_before_it_did() -> None:
    class Wrong(Nonsense):
        def _one(self, live: LiveRow, limit: int) -> Sequence[int]:
            right = self._right(live, max(0, limit))
            return [(token + 1) % VOCABULARY for token in right]

    proposer = Wrong(1, step=0.02)
    job = [Row(key, (key % END, 3, 1), 40, Sampling(seed=key, end_tokens=()), ()) for key in range(30)]
    target = verifier(FakeEngine(CONTEXT), proposer, batch=1, draft_tokens=None)
    target.policy.verify_seconds = Fixed({1: 1.0, 64: 4.0})
    finish(target, job)
    assert target.counters.accepted == 0
    # Each takes a fourteenth of a plain round.
    said = "the first rows have shown that there is nothing to be had: all of them take less than a hundredth of the time"
    assert target.counters.proposed / 14 < 0.01 * target.counters.rounds, said


def test_a_round_says_what_was_expected_of_it() -> None:
    target = verifier(FakeEngine(CONTEXT), Nonsense(1, step=0.02), draft_tokens=2)
    curve = target.policy.verify_seconds = Fixed({1: 1.0, 64: 4.0})
    target.add([Row(1, (1, 2, 3), 40, Sampling(end_tokens=()), ())])
    target.round()
    target.round()
    done = target.last_round
    assert done is not None
    assert done.forecast is not None
    assert done.forecast.seconds == pytest.approx(curve(3) + 2 * 0.02)
    assert done.forecast.tokens == pytest.approx(1 + 0.7 + 0.49)
    assert done.fed == 1 + sum(done.proposed) + target.counters.runners_up
