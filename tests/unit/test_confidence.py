"""The draft's estimate of its acceptance by margins and rows, and the candidates that it leaves out by it."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from fakes import VOCABULARY, FakeEngine

from outrider.workers.draft.confidence import BOUNDS, MOST_OBSERVATIONS, PRIOR, Confidence, MissFactor, RunnerUpShare
from outrider.workers.draft.drafter import Drafter
from outrider.workers.engines.engine import Chosen, Feed
from outrider.workers.messages import Advance, DraftRequest, Sampling

GREEDY = Sampling()


def test_it_learns_what_became_of_guesses_with_that_lead() -> None:
    dice, confidence = random.Random(5), Confidence()
    for _ in range(4000):
        confidence.learn(0.3, dice.random() < 0.2)
        confidence.learn(5.0, dice.random() < 0.9)
    assert confidence.chance(0.4) == pytest.approx(0.2, abs=0.05)
    assert confidence.chance(4.5) == pytest.approx(0.9, abs=0.05)
    assert confidence.chance(100.0) == PRIOR[-1]
    for _ in range(4000):
        confidence.learn(0.3, True)
    assert confidence.chance(0.3) > 0.8, "a job whose text changes must be followed"


def test_every_lead_has_a_span() -> None:
    assert len(PRIOR) == len(BOUNDS) + 1
    assert sorted(PRIOR) == list(PRIOR)
    assert Confidence().chance(-1.0) == PRIOR[0]
    assert MOST_OBSERVATIONS > 100


class Sure(FakeEngine):
    """Its margins are told: one for each token that it has written in the row."""

    def __init__(self, margins: Sequence[float]) -> None:
        super().__init__()
        self.margins = margins

    def _feed(self, feed: Feed) -> Chosen:
        chosen = super()._feed(feed)
        written = len(self.rows[feed.row]) - self.prompt_lengths[feed.row]
        return Chosen([token % 11 for token in chosen.tokens], [self.margins[written]])


def ask(drafter: Drafter, confidence: float = 0.0, keep: float = 0.0, a_step: float = 0.0) -> tuple[int, ...]:
    return drafter.propose(DraftRequest(1, (Advance(1, 0, (1, 2), 6, GREEDY, 2),), (), confidence, keep, a_step)).tokens[1]


def test_a_guess_that_is_not_sure_enough_is_not_sent_nor_what_follows_it() -> None:
    margins = (9.0, 9.0, 0.0, 9.0, 9.0, 9.0)
    assert len(ask(Drafter(Sure(margins), ()))) == 6
    assert len(ask(Drafter(Sure(margins), ()), confidence=0.45)) == 2
    assert len(ask(Drafter(Sure(margins), ()), keep=0.5)) == 2


def test_nothing_more_is_made_where_there_is_no_hope() -> None:
    engine = Sure((9.0, 0.0, 9.0, 9.0, 9.0, 9.0))
    assert len(ask(Drafter(engine, ()), a_step=0.5)) == 2
    assert len(engine.passes) == 2


def test_a_step_that_is_not_worth_it_for_one_row_may_be_for_two() -> None:
    def steps(*keys: int) -> int:
        engine = Sure((1.2,) * 6)  # 0.65 each
        advances = tuple(Advance(key, 0, (1, 2), 5, GREEDY, 2) for key in keys)
        Drafter(engine, ()).propose(DraftRequest(1, advances, (), 0.0, 0.1, 0.6))
        return len(engine.passes)

    assert steps(1) == 1, "0.55 beyond keep"
    assert steps(1, 2) == 3, "twice that, then twice 0.32, then twice 0.17"
    assert steps(1, 2, 3, 4) == 4


def test_what_the_target_committed_is_learned_up_to_the_first_miss() -> None:
    drafter = Drafter(Sure((5.0, 5.0, 5.0, 5.0, 5.0, 5.0)), ())
    guess = ask(drafter)
    before = drafter.confidence.chance(5.0)
    drafter.propose(DraftRequest(2, (Advance(1, 2, (guess[0], (guess[1] + 1) % 11), 1),)))
    accepted, tried = before * 8.0, 8.0
    assert drafter.confidence.chance(5.0) == pytest.approx((accepted + 1) / (tried + 2))


def test_a_runner_up_is_sent_where_a_guess_is_likely_to_be_reached_and_to_miss() -> None:
    margins = (9.0, 0.0, 9.0, 0.0, 9.0, 9.0)  # chances of 0.97 and 0.4
    drafter = Drafter(Sure(margins), ())
    advance = Advance(1, 0, (1, 2), 6, GREEDY, 2)

    def sent(*worth: float, keep: float = 0.0) -> list[int]:
        reply = drafter.propose(DraftRequest(1, (advance,), (), 0.0, keep, 0.0, worth))
        guesses = reply.tokens[1]
        found = reply.runners_up.get(1, ())
        # The fake engine's second choice is the token behind its first.
        assert all(token == guesses[place] + 1 for place, token in found)
        return [place for place, _ in found]

    assert sent() == []
    # Half of 0.97 * 0.6, and half of 0.97 * 0.4 * 0.97 * 0.6.
    assert sent(0.28) == [1]
    assert sent(0.3) == []
    assert sent(0.28, 0.10) == [1, 3]
    assert sent(0.28, 0.12) == [1]
    assert sent(0.28, 0.10, keep=0.2) == [1], "no guess, no runner-up"


def test_how_often_the_runner_up_holds_is_learned_at_misses() -> None:
    drafter = Drafter(Sure((0.0,) * 9), ())
    first = drafter.propose(DraftRequest(1, (Advance(1, 0, (1, 2), 3, GREEDY, 2),))).tokens[1]
    assert drafter.runner_up_share.share == pytest.approx(0.5)
    # One guess holds, and in place of the next comes what would have been guessed second.
    drafter.propose(DraftRequest(2, (Advance(1, 2, (first[0], first[1] + 1, 5), 3),)))
    assert drafter.runner_up_share.share == pytest.approx(5 / 9)
    [guess, *_] = drafter.propose(DraftRequest(3, (Advance(1, 5, (), 3),))).tokens[1]
    drafter.propose(DraftRequest(4, (Advance(1, 5, ((guess + 2) % VOCABULARY,), 3),)))
    assert drafter.runner_up_share.share == pytest.approx(5 / 10)


def test_what_the_runners_up_did_long_ago_counts_for_less() -> None:
    second = RunnerUpShare()
    for _ in range(5000):
        second.learn(True)
    assert second.share > 0.99
    for _ in range(2000):
        second.learn(False)
    assert second.share < 0.4


def test_a_row_is_doubted_as_much_as_it_misses_oftener_than_foretold() -> None:
    dice, worse, better, new = random.Random(7), MissFactor(), MissFactor(), MissFactor()
    for _ in range(400):
        worse.learn(0.8, dice.random() < 0.6)
        better.learn(0.8, dice.random() < 0.95)
    margin, confidence = 3.5, Confidence()
    usual = confidence.chance(margin)
    assert usual == pytest.approx(PRIOR[8])
    assert confidence.chance(margin, new.factor) == pytest.approx(usual)
    assert worse.factor == pytest.approx(2.0, abs=0.6)
    assert better.factor == pytest.approx(0.25, abs=0.3)
    assert confidence.chance(margin, better.factor) > usual > confidence.chance(margin, worse.factor)
    hopeless = MissFactor()
    for _ in range(400):
        hopeless.learn(0.97, False)
    assert 0.0 < confidence.chance(0.0, hopeless.factor) < confidence.chance(9.0, hopeless.factor) < confidence.chance(9.0)


def test_a_row_whose_guesses_hold_is_given_more_of_them_than_one_whose_guesses_do_not() -> None:
    """The same margins in two rows, of which one has always been right so far and the other never."""
    drafter = Drafter(Sure([0.6] * 200), ())
    rows: dict[int, list[int]] = {1: [1, 2], 2: [1, 2]}
    told: dict[int, int] = {1: 0, 2: 0}
    sent: dict[int, list[int]] = {1: [], 2: []}
    for turn in range(20):
        advances = tuple(
            Advance(key, told[key], tuple(tokens[told[key] :]), 4, None if told[key] else GREEDY, 2)
            for key, tokens in rows.items()
        )
        candidates = drafter.propose(DraftRequest(turn, advances, (), 0.0, 0.2, 0.2)).tokens
        for key, tokens in rows.items():
            told[key] = len(tokens)
            sent[key].append(len(candidates[key]))
            tokens.extend(candidates[key] if key == 1 else [(candidates[key][0] + 1) % 11 if candidates[key] else 3])
    assert sent[1][-1] == 4
    assert sent[2][-1] < 2
