"""The draft's loop: the state that it keeps for rows, and that no request or cancellation breaks it."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf, isfinite, prod

import pytest
from fakes import END, VOCABULARY, FakeEngine, hashed
from hypothesis import given
from hypothesis import strategies as st

from outrider.workers.draft import drafter as propose
from outrider.workers.draft.drafter import Drafter
from outrider.workers.engines.engine import MOST_MARGIN, Chosen, DecodeFeed, DecodeResult, Feed, StopRule
from outrider.workers.messages import Advance, DraftReply, DraftRequest, Sampling

GREEDY = Sampling()


def never_ends(tokens: Sequence[int], sampling: Sampling) -> int:
    return hashed(tokens, sampling) % END


def opening(key: int, tokens: Sequence[int], limit: int, sampling: Sampling = GREEDY) -> Advance:
    return Advance(key, 0, tuple(tokens), limit, sampling, len(tokens))


def written(tokens: Sequence[int], count: int, sampling: Sampling = GREEDY) -> tuple[int, ...]:
    """What the draft model itself would write."""
    row = list(tokens)
    for _ in range(count):
        row.append(never_ends(row, sampling))
    return tuple(row[len(tokens) :])


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine(choose=never_ends)


@pytest.fixture
def drafter(engine: FakeEngine) -> Drafter:
    return Drafter(engine, {END})


def ask(drafter: Drafter, *rows: Advance, closed: Sequence[int] = (), round: int = 1) -> DraftReply:
    return drafter.propose(DraftRequest(round, rows, tuple(closed)))


def test_it_proposes_what_its_model_would_write(drafter: Drafter) -> None:
    prompt = (1, 2, 3)
    sampled = Sampling(temperature=1.0, seed=5)
    reply = ask(drafter, opening(1, prompt, 4), opening(2, prompt, 2, sampled), opening(3, prompt, 0), round=7)
    assert reply.round == 7
    assert reply.forgotten == ()
    assert reply.tokens.get(1) == written(prompt, 4)
    assert reply.tokens.get(2) == written(prompt, 2, sampled)
    assert not reply.tokens.get(3)


def test_it_says_how_likely_its_candidates_are_to_be_reached(drafter: Drafter, engine: FakeEngine) -> None:
    reply = ask(drafter, opening(1, (1, 2, 3), 4), opening(2, (4, 5), 2), opening(3, (1, 2), 0))
    assert {key: len(reaches) for key, reaches in reply.reaches.items()} == {1: 4, 2: 2, 3: 0}
    chances = [drafter.confidence.chance(margin) for margin in drafter._rows[1].margins]
    assert reply.reaches[1] == pytest.approx([prod(chances[: count + 1]) for count in range(4)])
    again = ask(drafter, Advance(1, 3, reply.tokens[1][:1], 2, None, 3))
    assert again.reaches[1][0] < 1.0, "what the target has decided since is no chance any more"


def test_the_only_token_that_is_left_is_no_certain_one(drafter: Drafter, engine: FakeEngine) -> None:
    """Of top-k 1: the target may have another one left."""
    engine.margin = inf
    reply = ask(drafter, opening(1, (1, 2, 3), 4))
    assert all(isfinite(margin) for margin in drafter._rows[1].margins)
    assert reply.reaches[1][3] < reply.reaches[1][0] < 1.0
    before = drafter.confidence.chance(MOST_MARGIN)
    ask(drafter, Advance(1, 3, (reply.tokens[1][0] ^ 1,), 4, None, 3))
    assert drafter.confidence.chance(MOST_MARGIN) < before, "it is learned from"


def test_after_full_acceptance_only_two_tokens_are_fed(drafter: Drafter, engine: FakeEngine) -> None:
    """The cache lacks the last candidate, which was never fed, and the target's own token."""
    prompt = (1, 2, 3)
    first = ask(drafter, opening(1, prompt, 3)).tokens[1]
    own = 6
    engine.passes.clear()
    reply = ask(drafter, Advance(1, 3, (*first, own), 2, None, 3))
    assert list(engine.passes[0][0].tokens) == [first[-1], own]
    assert reply.tokens[1] == written((*prompt, *first, own), 2)


@pytest.mark.parametrize("accepted", [0, 1, 2])
def test_after_a_miss_the_cache_is_cut_back(drafter: Drafter, engine: FakeEngine, accepted: int) -> None:
    prompt = (1, 2, 3)
    first = ask(drafter, opening(1, prompt, 3)).tokens[1]
    other = (first[accepted] + 1) % END
    engine.passes.clear()
    reply = ask(drafter, Advance(1, 3, (*first[:accepted], other), 2, None, 3))
    assert list(engine.passes[0][0].tokens) == [other]
    assert reply.tokens[1] == written((*prompt, *first[:accepted], other), 2)


def test_a_row_it_does_not_know_is_forgotten(drafter: Drafter) -> None:
    assert ask(drafter, Advance(9, 4, (1,), 3)).forgotten == (9,)


def test_a_gap_in_the_history_is_noticed(drafter: Drafter, engine: FakeEngine) -> None:
    ask(drafter, opening(1, (1, 2, 3), 2))
    reply = ask(drafter, Advance(1, 5, (4,), 2, None, 3))
    assert reply.forgotten == (1,)
    assert engine.rows == {}
    again = ask(drafter, opening(1, (1, 2, 3, 4, 5, 4), 2))
    assert again.tokens[1] == written((1, 2, 3, 4, 5, 4), 2)


def test_opening_anew_begins_anew(drafter: Drafter, engine: FakeEngine) -> None:
    ask(drafter, opening(1, (1, 2, 3), 2))
    assert ask(drafter, opening(1, (5, 5), 2)).tokens[1] == written((5, 5), 2)
    assert len(engine.rows) == 1


def test_closed_rows_leave_the_engine(drafter: Drafter, engine: FakeEngine) -> None:
    ask(drafter, opening(1, (1, 2), 1), opening(2, (3,), 1))
    ask(drafter, closed=[1, 77])
    assert set(engine.rows) == {2}


def test_it_stops_at_the_models_context() -> None:
    engine = FakeEngine(context=8, choose=never_ends)
    drafter = Drafter(engine, ())
    assert len(ask(drafter, opening(1, (1, 2, 3, 4, 5, 6), 9)).tokens[1]) == 2
    assert not ask(drafter, opening(2, (1,) * 8, 9)).tokens.get(2)
    assert not ask(drafter, opening(3, (1,) * 30, 9)).tokens.get(3), "the target's context may be the longer one"


def test_a_row_may_outgrow_the_draft_without_harm() -> None:
    engine = FakeEngine(context=8, choose=never_ends)
    drafter = Drafter(engine, ())
    row = [1, 2, 3, 4, 5]
    start = 0
    for _ in range(10):
        advance = Advance(1, start, tuple(row[start:]), 3, GREEDY if start == 0 else None, 5)
        reply = ask(drafter, advance)
        assert reply.forgotten == ()
        start = len(row)
        row.append(3)


def test_tokens_that_only_the_target_has_are_never_fed() -> None:
    engine = FakeEngine(vocabulary=VOCABULARY, choose=never_ends)
    drafter = Drafter(engine, ())
    assert not ask(drafter, opening(1, (1, VOCABULARY + 3, 2), 4)).tokens.get(1)
    # It stays known, and stays silent.
    reply = ask(drafter, Advance(1, 3, (4,), 4, None, 3))
    assert reply.forgotten == ()
    assert not reply.tokens.get(1)


def test_a_draft_that_expects_the_end_proposes_nothing_behind_it() -> None:
    engine = FakeEngine(choose=lambda tokens, sampling: END if len(tokens) == 4 else 1)
    assert ask(Drafter(engine, {END}), opening(1, (1, 2), 9)).tokens[1] == (1, 1, END)


@pytest.mark.parametrize(
    ("ends", "proposed"), [((), (1, 1, END, 1, 1)), ((1,), (1,)), ((END,), (1, 1, END)), (None, (1, 1, END))]
)
def test_a_rows_own_end_tokens_are_the_ones_that_matter(ends: tuple[int, ...] | None, proposed: tuple[int, ...]) -> None:
    engine = FakeEngine(choose=lambda tokens, sampling: END if len(tokens) == 4 else 1)
    sampling = Sampling(end_tokens=ends)
    assert ask(Drafter(engine, {END}), opening(1, (1, 2), 5, sampling)).tokens[1] == proposed


def test_a_draft_bans_end_tokens_as_long_as_the_target_does() -> None:
    engine = FakeEngine(choose=lambda tokens, sampling: END)
    sampling = Sampling(min_tokens=3, end_tokens=(END,))
    assert ask(Drafter(engine, ()), opening(1, (1, 2), 9, sampling)).tokens[1] == (0, 0, 0, END)


def test_long_prompts_enter_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(propose, "PREFILL_TOKENS", 8)
    engine = FakeEngine(choose=never_ends)
    prompts = [[index % END for index in range(length)] for length in (27, 1, 5, 9)]
    reply = ask(Drafter(engine, ()), *(opening(key, prompt, 2) for key, prompt in enumerate(prompts)))
    assert [reply.tokens[key] for key in range(4)] == [written(prompt, 2) for prompt in prompts]
    fed = [sum(len(feed.tokens) for feed in each) for each in engine.passes]
    assert fed[:4] == [8, 8, 8, 8]
    assert fed[4] == sum(map(len, prompts)) - 4 * 8, "what is left, with the last token of each"


@given(st.data())
def test_whatever_the_target_decides_the_draft_keeps_in_step(data: st.DataObject) -> None:
    """A target that accepts some of what it hears: every proposal is what the draft would write behind the committed."""
    drafter = Drafter(FakeEngine(context=200, choose=never_ends), {END})
    rows = {key: [key + 1, 2] for key in range(3)}
    known = dict.fromkeys(rows, 0)
    for round in range(8):
        asked = data.draw(st.sets(st.sampled_from(sorted(rows)), min_size=1))
        limits = {key: data.draw(st.integers(0, 4)) for key in asked}
        advances = [
            Advance(key, known[key], tuple(rows[key][known[key] :]), limits[key], None if known[key] else GREEDY, 2)
            for key in sorted(asked)
        ]
        reply = ask(drafter, *advances, round=round)
        assert reply.forgotten == ()
        for key in asked:
            known[key] = len(rows[key])
            guess = reply.tokens.get(key, ())
            assert guess == written(rows[key], limits[key])
            accepted = data.draw(st.integers(0, len(guess)))
            rows[key].extend([*guess[:accepted], data.draw(st.integers(0, END - 1))])


class Timed(FakeEngine):
    """Says of the passes of a run that they took this many seconds."""

    def __init__(self, seconds: Sequence[float]) -> None:
        super().__init__(choose=never_ends)
        self.seconds = seconds

    def decode(self, decode_feeds: Sequence[DecodeFeed], stop_rule: StopRule) -> DecodeResult:
        result = super().decode(decode_feeds, stop_rule)
        return DecodeResult(
            result.chosen, [(going, seconds) for (going, _), seconds in zip(result.steps, self.seconds, strict=False)]
        )


def test_prices_are_those_of_the_passes_by_their_rows() -> None:
    """A prompt's pass is the price of reading; then two rows take a step, and one of them another two."""
    drafter = Drafter(Timed((4.0, 0.3, 0.2, 0.2)), ())
    reply = ask(drafter, opening(1, [1] * 40, 4), opening(2, [2] * 10, 2))
    assert reply.read == pytest.approx(4.0 / 50)
    assert reply.step == 0.3, "of two rows"
    assert reply.overhead == 0.0, "the passes are said to have taken longer than all of it"
    alone = ask(drafter, Advance(1, 40, reply.tokens[1][:1], 1, None, 40), closed=[2])
    assert alone.step == 0.2, "of one row"
    assert alone.overhead == alone.seconds, "what it had guessed was still good"


def test_what_is_no_pass_is_told_apart(drafter: Drafter) -> None:
    reply = ask(drafter, opening(1, (1, 2, 3), 4))
    assert 0.0 < reply.overhead < reply.seconds


def test_after_a_failure_between_two_passes_the_counters_are_those_of_the_cache() -> None:
    class Failing(FakeEngine):
        broken = True

        def feed(self, feeds: Sequence[Feed]) -> list[Chosen]:
            if self.broken and len(self.passes) == 2:
                raise RuntimeError("the cache is full")
            return super().feed(feeds)

    engine = Failing(choose=never_ends)
    drafter = Drafter(engine, ())
    with pytest.raises(RuntimeError):
        ask(drafter, opening(1, (1, 2, 3), 4))
    assert engine.length(1) == 0, "as the drafter believes"
    engine.broken = False
    assert ask(drafter, Advance(1, 3, (4,), 2, None, 3)).tokens[1] == written((1, 2, 3, 4), 2)


class LearningEngine(FakeEngine):
    """Takes down what it is told, and says that half of it was right for having learned."""

    def __init__(self) -> None:
        super().__init__(choose=never_ends)
        self.learner = self
        self.told: list[tuple[int, int, tuple[int, ...]]] = []

    def learn(self, row: int, first: int, tokens: Sequence[int]) -> tuple[int, int]:
        self.told.append((row, first, tuple(tokens)))
        return len(tokens), 1


def test_the_engine_learns_from_the_guesses_that_were_decided_about() -> None:
    engine = LearningEngine()
    drafter = Drafter(engine, {END})
    prompt = (1, 2, 3)
    first = ask(drafter, opening(1, prompt, 4), opening(2, (5,), 3)).tokens
    assert engine.told == []
    other = (first[1][2] + 1) % END
    reply = ask(drafter, Advance(1, 3, (*first[1][:2], other), 2, None, 3), Advance(2, 1, (*first[2], 7), 2, None, 1))
    assert engine.told == [(1, 3, (*first[1][:2], other)), (2, 1, first[2])], "the first miss, and nothing behind it"
    assert (reply.corrected_right, reply.corrected_wrong) == (6, 2)
    # Without a guess there is nothing to learn, and what was counted is told once.
    again = ask(drafter, Advance(1, 6, (9,), 0, None, 3), Advance(2, 5, (), 2, None, 1))
    assert (again.corrected_right, again.corrected_wrong) == (1, 1)
    engine.told.clear()
    last = ask(drafter, Advance(1, 7, (9, 8), 2, None, 3))
    assert engine.told == [] and (last.corrected_right, last.corrected_wrong) == (0, 0)


def test_of_tokens_that_the_draft_does_not_have_it_learns_nothing() -> None:
    engine = LearningEngine()
    drafter = Drafter(engine, {END})
    ask(drafter, opening(1, (1, 2, 3), 4))
    reply = ask(drafter, Advance(1, 3, (VOCABULARY,), 2, None, 3))
    assert engine.told == [] and not reply.tokens.get(1)
