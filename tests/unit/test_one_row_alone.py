"""One row at a time, on a clock that passes alone move: faster than with any fixed number of candidates."""

from __future__ import annotations

import random
import time
from bisect import bisect_right
from collections.abc import Sequence

import pytest
from clocked import Clock, ClockedTarget, ClockedTransport
from fakes import FakeEngine

from outrider.workers.draft.confidence import BOUNDS
from outrider.workers.draft.drafter import Drafter
from outrider.workers.engines.costs import CostCurve
from outrider.workers.engines.engine import Chosen, DecodeFeed, DecodeResult, Feed, StopRule
from outrider.workers.engines.stepwise import decode_in_steps
from outrider.workers.messages import Row, RowResult, Sampling
from outrider.workers.target.draft_link import DraftLink
from outrider.workers.target.text_and_stop_strings import TextWriter
from outrider.workers.target.verifier import Verifier

VOCABULARY, PROMPT, NEW, ROWS = 64, 24, 96, 24
# Seconds of a target's pass by its tokens, and of a draft's step and the hop to it: a model of a billion parameters in 4
# bits, and one of an eighth of it.
BOUND_BY_MEMORY = {1: 0.0210, 2: 0.0212, 4: 0.0217, 8: 0.0255, 12: 0.038, 16: 0.050, 64: 0.2, 128: 0.4}
BOUND_BY_ARITHMETIC = {1: 0.0158, 2: 0.0174, 4: 0.0207, 6: 0.0244, 8: 0.0299, 12: 0.0427, 16: 0.0578, 64: 0.21, 128: 0.42}
STEP, HOP = 0.0021, 0.0008
# How often a guess holds whose margin lies there, in a usual row.
HOLDS = (0.4, 0.45, 0.5, 0.55, 0.6, 0.65, 0.7, 0.8, 0.88, 0.95, 0.98, 0.99)
# How much oftener guesses miss in a row, and how many places its beginning has, of which hardly any guess holds.
MISSES, BEGINNINGS, HOLDS_AT_FIRST = (0.3, 1.0, 1.0, 2.5), (0, 4, 8), 0.2


class TextsAndGuesses:
    """Texts that a target writes, and what a draft guesses in each place of them, and how clearly."""

    def __init__(self, seed: int) -> None:
        dice = random.Random(seed)
        self.texts = [[dice.randrange(1, VOCABULARY) for _ in range(PROMPT + NEW + 40)] for _ in range(ROWS)]
        self.guesses: list[list[tuple[int, float]]] = []
        for text in self.texts:
            misses, beginning = dice.choice(MISSES), PROMPT + dice.choice(BEGINNINGS)
            row = []
            for at, token in enumerate(text):
                margin = dice.expovariate(0.2)
                chance = 1.0 - misses * (1.0 - HOLDS[bisect_right(BOUNDS, margin)])
                held = dice.random() < (HOLDS_AT_FIRST if at < beginning else chance)
                row.append((token if held else token % (VOCABULARY - 1) + 1, margin))
            self.guesses.append(row)

    def after(self, row: int, history: Sequence[int]) -> tuple[int, float]:
        """The draft's guess. Once one of its guesses has missed it goes on about something else."""
        at = len(history)
        if list(history) == self.texts[row][:at]:
            return self.guesses[row][at]
        return 0, self.guesses[row][at][1]


class Draft(FakeEngine):
    def __init__(self, texts_and_guesses: TextsAndGuesses, clock: Clock) -> None:
        super().__init__(context=1024, vocabulary=VOCABULARY)
        self.texts_and_guesses, self.clock = texts_and_guesses, clock

    def feed(self, feeds: Sequence[Feed]) -> list[Chosen]:
        self.clock.now += STEP * max(1.0, sum(len(feed.tokens) for feed in feeds) / 8.0)
        chosen = []
        for feed in feeds:
            self.rows[feed.row].extend(feed.tokens)
            token, margin = self.texts_and_guesses.after(feed.row, self.rows[feed.row])
            chosen.append(Chosen([token], [margin]) if feed.choose else Chosen([], []))
        return chosen

    def decode(self, decode_feeds: Sequence[DecodeFeed], stop_rule: StopRule) -> DecodeResult:
        return decode_in_steps(self, decode_feeds, stop_rule)


def tokens_a_second(seed: int, points: dict[int, float], count: int | None, monkeypatch: pytest.MonkeyPatch) -> float:
    """Over all rows, one after the other, their prompts included."""
    texts_and_guesses, clock, curve = TextsAndGuesses(seed), Clock(), CostCurve(points)
    monkeypatch.setattr(time, "perf_counter", clock)
    link = DraftLink(5.0)
    verifier = Verifier(
        engine=ClockedTarget(texts_and_guesses.texts, clock, curve),
        new_writer=lambda row: TextWriter(lambda tokens: "", row.stop, ()),
        proposer=link,
        batch=1,
        draft_tokens=count,
        verify_seconds=curve.snapshot(),
        end_tokens=(),
    )
    link.attach(ClockedTransport(Drafter(Draft(texts_and_guesses, clock), ()), clock, HOP))
    verifier.add(
        [Row(key, tuple(text[:PROMPT]), NEW, Sampling(end_tokens=())) for key, text in enumerate(texts_and_guesses.texts)]
    )
    ended: dict[int, RowResult] = {}
    while not verifier.idle:
        ended.update({each.key: each for each in verifier.round() if isinstance(each, RowResult)})
    monkeypatch.undo()
    assert {key: list(each.tokens) for key, each in ended.items()} == {
        key: text[PROMPT : PROMPT + NEW] for key, text in enumerate(texts_and_guesses.texts)
    }
    return ROWS * NEW / clock.now


@pytest.mark.slow
@pytest.mark.parametrize("points", [BOUND_BY_MEMORY, BOUND_BY_ARITHMETIC], ids=["memory", "arithmetic"])
@pytest.mark.parametrize("seed", [1, 2])
def test_a_row_alone_is_faster_than_with_any_fixed_number(
    seed: int, points: dict[int, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the beginning of an answer is hard to guess: rows that begin badly are asked for more again."""
    fixed = {count: tokens_a_second(seed, points, count, monkeypatch) for count in (0, 2, 3, 4, 5, 6)}
    found = tokens_a_second(seed, points, None, monkeypatch)
    assert found > 1.02 * max(fixed.values()), fixed
