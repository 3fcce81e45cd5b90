"""Corrections of a draft's logits by the target's earlier choices."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pytest
from kernel_models import LLAMA, Packed, packed, tokens
from numpy.typing import NDArray

from outrider.kernels.library import KernelError
from outrider.kernels.native import NativeDecodeFeed, NativeFeed, NativeMasks, NativeModel, NativeOutput, NativeStopRule
from outrider.kernels.program import Format
from outrider.kernels.sampling_values import SamplingValues

# By so much one truth moves the scores of both tokens, for the state that they were scored from.
STEP = 0.5
# What a repetition is worth at first, and by how much a truth changes that.
REPETITION, REPETITION_STEP = 1.5, 0.1
TEXT = tokens(LLAMA, 9)


@pytest.fixture(scope="module")
def model() -> Packed:
    return packed(LLAMA, Format.W4A8)


def choice(engine: NativeModel, row: int) -> NativeOutput:
    """What the engine chooses behind the text, which the row holds afterwards."""
    engine.truncate(row, min(engine.length(row), len(TEXT) - 1))
    return engine.forward([NativeFeed(row, TEXT[engine.length(row) :], choose=1)], runners_up=True)[0]


def test_choices_are_the_models_own_until_there_is_something_to_learn(model: Packed) -> None:
    text = tokens(LLAMA, 20)
    said = []
    for corrects in (False, True):
        with model.model() as engine:
            if corrects:
                engine.correct(8)
            row = engine.open()
            said.append(engine.decode([NativeDecodeFeed(row, text, 12)], NativeStopRule())[0])
    assert said[0] == said[1]


def test_a_right_choice_that_was_close_is_learned_from_and_one_that_was_not_is_not(model: Packed) -> None:
    with model.model() as engine:
        engine.correct(8)
        row = engine.open()

        def chosen(text: list[int], runners_up: bool = True) -> NativeOutput:
            engine.truncate(row, 0)
            return engine.forward([NativeFeed(row, text, choose=1)], runners_up=runners_up)[0]

        text = next(text for seed in range(99) if chosen(text := tokens(LLAMA, 9, seed)).margins[0] < 1.0)
        scores = engine.forward([NativeFeed(engine.open(), text, choose=1, logits=1)])[0].logits[0].copy()
        close = True
        while close:
            before = chosen(text)
            best, second = np.argsort(scores)[[-1, -2]]
            assert (before.tokens, before.runners_up) == ([best], [second])
            assert before.margins[0] == pytest.approx(float(scores[best] - scores[second]), abs=1e-4)
            # Where the runner-up was not asked for there is nothing to compare with.
            chosen(text, runners_up=False)
            engine.learn(row, len(text), before.tokens)
            assert chosen(text) == before
            assert engine.learn(row, len(text), before.tokens) == (0, 0)
            close = before.margins[0] < 1.0
            scores[best] += STEP * close
            scores[second] -= STEP * close
        assert chosen(text) == before


@dataclass(frozen=True)
class Repeating:
    """A text whose last tokens came before, and what came behind them then: a token that is nearly the model's choice."""

    text: list[int]
    came_then: int
    scores: NDArray[np.float32]

    def choice(self, added: Mapping[int, float]) -> tuple[int, object]:
        """The best token and its margin, with so much added to some scores."""
        scores = self.scores.copy()
        for token, more in added.items():
            scores[token] += more
        best, second = np.argsort(scores)[[-1, -2]]
        return int(best), pytest.approx(float(scores[best] - scores[second]), abs=1e-4)


def repeating(model: Packed, common: int) -> Repeating:
    with model.model() as engine:
        for seed in range(999):
            body = list(dict.fromkeys(tokens(LLAMA, 60, seed)))[:30]
            text, came_then = [*body, *body[10 : 10 + common]], body[10 + common]
            scores = engine.forward([NativeFeed(engine.open(), text, choose=1, logits=1)])[0].logits[0].copy()
            if REPETITION_STEP < scores.max() - scores[came_then] < REPETITION - REPETITION_STEP:
                return Repeating(text, came_then, scores)
    raise AssertionError("no text of which what it repeats is nearly chosen")


def step(engine: NativeModel, row: int, text: list[int]) -> tuple[int, float]:
    """What a draft chooses behind the text, and by which margin."""
    engine.truncate(row, 0)
    [(found, margins, _)], _ = engine.decode([NativeDecodeFeed(row, text, 1)], NativeStopRule())
    return found[0], margins[0]


@pytest.mark.parametrize("common", [2, 3, 4, 5, 9])
def test_what_a_text_went_on_with_before_is_likelier_by_what_has_proved_right(model: Packed, common: int) -> None:
    case = repeating(model, common)
    own, came_then = int(case.scores.argmax()), case.came_then
    with model.model() as engine:
        engine.correct(8)
        row = engine.open()
        assert step(engine, row, case.text) == case.choice({came_then: REPETITION})
        assert step(engine, row, case.text)[0] == came_then
        # In a pass that is no step of the draft's own the choice is the model's.
        engine.truncate(row, 0)
        assert engine.forward([NativeFeed(row, case.text, choose=1)])[0].tokens == [own]
        wrong = 0
        while step(engine, row, case.text)[0] == came_then:
            assert engine.learn(row, len(case.text), [own]) == (0, 1), "wrong because of the repetition"
            wrong += 1
            worth = {own: wrong * STEP, came_then: REPETITION - wrong * (STEP + REPETITION_STEP)}
            assert step(engine, row, case.text) == case.choice(worth)
        engine.learn(row, len(case.text), [came_then])
        worth = {own: (wrong - 1) * STEP, came_then: REPETITION - (wrong - 1) * (STEP + REPETITION_STEP)}
        assert step(engine, row, case.text) == case.choice(worth)


def test_one_token_that_came_before_says_nothing(model: Packed) -> None:
    case = repeating(model, 1)
    with model.model() as engine:
        engine.correct(8)
        assert step(engine, engine.open(), case.text) == case.choice({})


def test_each_truth_brings_the_right_score_nearer_until_it_wins(model: Packed) -> None:
    with model.model() as engine:
        engine.correct(8)
        row = engine.open()
        first = choice(engine, row)
        [own], [right], [margin] = first.tokens, first.runners_up, first.margins
        told = 0
        while choice(engine, row).tokens == [own]:
            assert engine.learn(row, len(TEXT), [right]) == (0, 0)
            told += 1
        assert told == int(margin / (2 * STEP)) + 1
        found = choice(engine, row)
        assert found.tokens == [right] and found.runners_up == [own]
        assert found.margins[0] == pytest.approx(2 * STEP * told - margin, abs=1e-4)
        assert engine.learn(row, len(TEXT), [right]) == (1, 0), "right because of the corrections"
        assert engine.learn(row, len(TEXT), [own]) == (0, 1), "wrong because of them"


def test_what_is_learned_in_one_row_holds_for_others_alone_and_together_on_any_threads(model: Packed) -> None:
    # Every second one repeats itself.
    texts = [tokens(LLAMA, 12, seed) + (tokens(LLAMA, 9, seed) if seed % 2 else []) for seed in range(4)]
    said = []
    for threads in (1, 3):
        with model.model(threads) as engine:
            engine.correct(64)
            rows = [engine.open(SamplingValues(temperature=at % 2, seed=at)) for at in range(4)]
            wanted = [NativeDecodeFeed(row, text, 6) for row, text in zip(rows, texts, strict=True)]
            own, _ = engine.decode(wanted, NativeStopRule())
            for row, text, (_, _, runners_up) in zip(rows[:2], texts, own, strict=False):
                for _ in range(4):
                    engine.learn(row, len(text), [max(0, token) for token in runners_up])
            for row in rows:
                engine.truncate(row, 0)
            together, _ = engine.decode(wanted, NativeStopRule())
            assert together != own
            for feed, of_all in zip(wanted, together, strict=True):
                engine.truncate(feed.row, 0)
                for room in (0, 3, 8, 40):
                    assert engine.decode([feed], NativeStopRule(), room)[0] == [of_all]
                    engine.truncate(feed.row, 0)
            said.append(together)
    assert said[0] == said[1]


def test_corrections_that_do_harm_are_not_used_until_they_do_good_again(model: Packed) -> None:
    with model.model() as engine:
        engine.correct(8)
        row = engine.open()
        first = choice(engine, row)
        [own], [other] = first.tokens, first.runners_up
        for _ in range(4):
            while choice(engine, row).tokens == [own]:
                engine.learn(row, len(TEXT), [other])
            assert engine.learn(row, len(TEXT), [own]) == (0, 1)
        # What would be the corrected choice is not taken any more, but goes on learning.
        assert choice(engine, row).tokens == [own]
        engine.learn(row, len(TEXT), [other])
        assert choice(engine, row).tokens == [own], "by the corrections it would be the other"
        assert engine.learn(row, len(TEXT), [other]) == (1, 0)
        assert choice(engine, row).tokens == [other]


def test_of_more_tokens_than_there_is_room_for_the_latest_are_corrected(model: Packed) -> None:
    with model.model() as engine:
        engine.correct(2)
        row = engine.open()
        scores = engine.forward([NativeFeed(row, TEXT, choose=1, logits=1)])[0].logits
        wrong, right, unlikely = (int(scores.argsort()[0, place]) for place in (-1, -2, 0))
        margin = choice(engine, row).margins[0]
        engine.learn(row, len(TEXT), [right])
        nearer = choice(engine, row)
        engine.learn(row, len(TEXT), [unlikely])
        found = choice(engine, row)
    assert nearer.margins[0] == pytest.approx(abs(margin - 2 * STEP), abs=1e-4)
    # The runner-up's score is its own again, that of the wrong one has fallen twice.
    assert {found.tokens[0], found.runners_up[0]} == {wrong, right}
    assert found.margins[0] == pytest.approx(abs(margin - 2 * STEP), abs=1e-4)
    assert (found.tokens == [wrong]) == (margin > 2 * STEP)


def test_of_choices_that_are_no_longer_known_nothing_is_learned(model: Packed) -> None:
    with model.model() as engine:
        engine.correct(8)
        row, fed_only = engine.open(), engine.open()
        own = choice(engine, row)
        engine.forward([NativeFeed(fed_only, TEXT, choose=0)])
        right = own.runners_up
        assert engine.learn(fed_only, len(TEXT), right) == (0, 0)
        assert engine.learn(row, len(TEXT) + 1, right) == (0, 0)
        # 64 choices later another one has its place.
        engine.truncate(row, len(TEXT))
        engine.decode([NativeDecodeFeed(row, [1], 64)], NativeStopRule())
        assert engine.learn(row, len(TEXT), right) == (0, 0)
        assert choice(engine, row).margins == own.margins


def test_of_a_choice_that_a_mask_left_nothing_for_nothing_is_learned(model: Packed) -> None:
    nothing = NativeMasks(np.zeros((1, -(-LLAMA.vocabulary // 32)), np.uint32), np.ones(1, np.int32))
    with model.model() as engine:
        engine.correct(8)
        row = engine.open()
        own = choice(engine, row)
        engine.truncate(row, len(TEXT) - 1)
        masked = engine.forward([NativeFeed(row, TEXT[-1:], choose=1, first_mask=0)], nothing)
        assert masked[0].tokens == [-1]
        assert engine.learn(row, len(TEXT), own.runners_up) == (0, 0)
        assert choice(engine, row) == own


def test_scores_that_are_asked_for_stay_the_models_own(model: Packed) -> None:
    with model.model() as engine:
        engine.correct(8)
        row = engine.open()

        def scores() -> NDArray[np.float32]:
            engine.truncate(row, 0)
            return engine.forward([NativeFeed(row, TEXT, choose=1, logits=1)])[0].logits

        own = scores()
        engine.learn(row, len(TEXT), [int(own.argmin())])
        np.testing.assert_array_equal(scores(), own)


def test_what_cannot_be_learned_is_refused_in_a_sentence(model: Packed) -> None:
    with model.model() as engine:
        row = engine.open()
        with pytest.raises(KernelError, match="the scores of 0 tokens cannot be corrected"):
            engine.correct(0)
        with pytest.raises(KernelError, match="nothing to correct behind token 3"):
            engine.learn(row, 3, [1])
        engine.correct(8)
        with pytest.raises(KernelError, match="row 0: token 211 is not in the vocabulary of 211"):
            engine.learn(row, 3, [1, 211])
        with pytest.raises(KernelError, match="row 7 is not open"):
            engine.learn(7, 3, [1])
        with pytest.raises(KernelError, match="nothing to correct behind token -1"):
            engine.learn(row, -1, [1])
