"""Fakes that are deterministic, fast, and strict about how they are used."""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from outrider.workers.engines.costs import CostCurve
from outrider.workers.engines.engine import (
    Chosen,
    DecodeFeed,
    DecodeResult,
    Feed,
    Learner,
    Mixture,
    Ranker,
    Skipper,
    StopRule,
)
from outrider.workers.engines.stepwise import decode_in_steps
from outrider.workers.messages import Row, Sampling
from outrider.workers.speculation import CandidateRequest, DraftCost
from outrider.workers.target.live_row import LiveRow
from outrider.workers.target.proposers import PendingProposals, Proposal

VOCABULARY = 12
END = 11
# The text of each token; the last one is the end token. Stop strings may span tokens.
PIECES = ("a", "b", "c", "ab", "bc", "ca", " ", "x", "xy", "\n", "abc", "")

Choose = Callable[[Sequence[int], Sampling], int]


def hashed(tokens: Sequence[int], sampling: Sampling, salt: int = 0) -> int:
    """A token that depends on every token before it and, when sampling, on seed and sample."""
    key = crc32(array("q", tokens), salt)
    if not sampling.greedy:
        key = crc32(f"{sampling.seed}:{sampling.sample}:{sampling.temperature}".encode(), key)
    return key % VOCABULARY


def permitted(token: int, sampling: Sampling, written: int) -> int:
    """The chosen token, or the next id that is no end token while fewer than min_tokens are written."""
    while written < sampling.min_tokens and token in (sampling.end_tokens or ()):
        token = (token + 1) % VOCABULARY
    return token


def likely(tokens: Sequence[int], chosen: int, count: int) -> list[tuple[int, float]]:
    """Arbitrary log-probabilities, which depend on every token before."""
    key = crc32(array("q", tokens).tobytes(), 7)
    return [(token, -(key % 1000) / 100 - index) for index, token in enumerate([chosen, *range(count)])]


def decode(tokens: Sequence[int]) -> str:
    return "".join(PIECES[token] for token in tokens)


class FakePieces:
    silent_tokens = frozenset({END})

    def bytes_of(self, token: int) -> bytes:
        return PIECES[token].encode()

    def silent(self, token: int) -> bool:
        return token == END


class FakeEngine:
    """Implements ``Engine``, and asserts what a real one would let pass and compute nonsense."""

    exact = True
    forks = True
    branches = True
    ranker: Ranker | None = None
    learner: Learner | None = None
    skipper: Skipper | None = None
    mixture: Mixture | None = None
    context_share = 0.0

    def __init__(self, context: int = 96, vocabulary: int = VOCABULARY, choose: Choose = hashed) -> None:
        self.context = context
        self.vocabulary = vocabulary
        self.choose = choose
        self.rows: dict[int, list[int]] = {}
        self.sampling: dict[int, Sampling] = {}
        self.prompt_lengths: dict[int, int] = {}
        self.passes: list[list[Feed]] = []
        # The margin of every choice over the second best token.
        self.margin = 1.0

    def open(self, row: int, sampling: Sampling, prompt_length: int) -> None:
        assert row not in self.rows, f"row {row} is open already"
        self.rows[row], self.sampling[row], self.prompt_lengths[row] = [], sampling, prompt_length

    def fork(self, row: int, source: int, length: int, sampling: Sampling, prompt_length: int) -> None:
        assert 0 < length <= len(self.rows[source]), f"{length} tokens of a row that has {len(self.rows[source])}"
        self.open(row, sampling, prompt_length)
        self.rows[row] = self.rows[source][:length]

    def feed(self, feeds: Sequence[Feed]) -> list[Chosen]:
        assert feeds, "a pass over nothing"
        assert len({feed.row for feed in feeds}) == len(feeds), "a row stands twice in one pass"
        self.passes.append(list(feeds))
        return [self._feed(feed) for feed in feeds]

    def _feed(self, feed: Feed) -> Chosen:
        cache = self.rows[feed.row]
        assert len(feed.tokens) > 0, "a feed of nothing"
        assert 0 <= feed.choose <= len(feed.tokens), "more choices than tokens"
        assert all(0 <= token < self.vocabulary for token in feed.tokens), f"ids out of range: {feed.tokens}"
        cache.extend(feed.tokens)
        assert len(cache) <= self.context, f"row {feed.row} outgrew the context: {len(cache)} > {self.context}"
        before = len(cache) - len(feed.tokens)
        histories = [cache[:length] for length in range(len(cache) - feed.choose + 1, len(cache) + 1)]
        for after, token in feed.branches:
            assert 0 < after < len(feed.tokens), f"a branch after {after} of {len(feed.tokens)} tokens"
            assert 0 <= token < self.vocabulary, f"a branch to {token}"
            histories.append([*cache[: before + after], token])
        chosen, logprobs = [], []
        sampling, prompt_length = self.sampling[feed.row], self.prompt_lengths[feed.row]
        for history in histories:
            token = permitted(self.choose(history, sampling), sampling, len(history) - prompt_length)
            chosen.append(token)
            if feed.logprobs is not None:
                logprobs.append(likely(history, token, feed.logprobs))
        return Chosen(chosen, [self.margin] * len(chosen), logprobs)

    def scores(self, feeds: Sequence[Feed]) -> NDArray[np.float32]:
        raise AssertionError("only echo asks for scores, and it is tried with real engines")

    def decode(self, decode_feeds: Sequence[DecodeFeed], stop_rule: StopRule) -> DecodeResult:
        """Runs the steps; the runner-up of a token is the next id, which is as good as any."""
        result = decode_in_steps(self, decode_feeds, stop_rule)
        for chosen in result.chosen:
            chosen.runners_up.extend((token + 1) % self.vocabulary for token in chosen.tokens)
        return result

    def length(self, row: int) -> int:
        return len(self.rows[row])

    def truncate(self, row: int, length: int) -> None:
        assert 0 <= length <= len(self.rows[row]), f"cannot truncate {len(self.rows[row])} tokens to {length}"
        del self.rows[row][length:]

    def close(self, row: int) -> None:
        del self.rows[row], self.sampling[row], self.prompt_lengths[row]


@dataclass(frozen=True)
class Plain:
    tokens: tuple[int, ...]
    text: str
    finish_reason: str
    logprobs: tuple[list[tuple[int, float]], ...] = ()


def plain(row: Row, context: int, end_tokens: Collection[int] = (END,), choose: Choose = hashed) -> Plain:
    """The expected result of a row, by the simplest loop: one token at a time, with the whole text decoded each time."""
    written: list[int] = []
    told: list[list[tuple[int, float]]] = []
    ends = end_tokens if row.sampling.end_tokens is None else row.sampling.end_tokens
    hidden, least = {*end_tokens, *ends}, row.sampling.min_tokens
    while True:
        before = [*row.prompt, *written]
        token = permitted(choose(before, row.sampling), row.sampling, len(written))
        if row.logprobs is not None:
            told.append(likely(before, token, row.logprobs))
        written.append(token)
        text = decode([other for other in written if other not in hidden])
        exempt = len(decode([other for other in written[:least] if other not in hidden]))
        places = [text.find(word, max(0, exempt + 1 - len(word))) for word in row.stop if len(written) > least]
        found = [place for place in places if place >= 0]
        if token in ends or found:
            return Plain(tuple(written), text[: min(found)] if found else text, "stop", tuple(told))
        if len(written) == row.max_tokens or len(row.prompt) + len(written) >= context:
            return Plain(tuple(written), text, "length", tuple(told))


@dataclass
class Nonsense:
    """A proposer whose candidates are right, wrong, invalid or missing, at random; it ignores every limit."""

    @property
    def knows_chances(self) -> bool:
        return False

    seed: int
    choose: Choose = hashed
    step: float | None = 0.0
    read: float = 0.0
    forgotten: list[int] = field(default_factory=list)
    asked: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)

    def ask(self, rows: Sequence[LiveRow], request: CandidateRequest) -> PendingProposals:
        self.asked.extend(live.row.key for live in rows)
        guesses = [
            Proposal(self._one(live, count), self._others(live)) for live, count in zip(rows, request.counts, strict=True)
        ]
        return lambda: guesses

    def _others(self, live: LiveRow) -> list[tuple[int, int]]:
        """Runners-up (position, token): right tokens, or invalid positions and tokens."""
        dice = self._random
        right = list(enumerate(self._right(live, 3)))
        strange = [(dice.randrange(-2, 20), dice.choice((-1, 0, 5, VOCABULARY, 1 << 40))) for _ in range(3)]
        return dice.sample([*right, *strange], dice.randrange(4))

    def _one(self, live: LiveRow, limit: int) -> Sequence[int]:
        dice = self._random
        kind = dice.choice(("right", "right", "half", "wrong", "long", "negative", "huge", "same", "none"))
        right = self._right(live, max(0, limit) + 3)
        match kind:
            case "right":
                return right[: max(0, limit)]
            case "half":
                guess = right[: max(0, limit)]
                return [token if dice.random() < 0.7 else dice.randrange(VOCABULARY) for token in guess]
            case "wrong":
                return tuple(dice.randrange(VOCABULARY) for _ in range(max(0, limit)))
            case "long":
                return right
            case "negative":
                return [*right[:1], -1, *right[1:]]
            case "huge":
                return [*right[:2], 1 << 40, *right[2:]]
            case "same":
                return [dice.randrange(VOCABULARY)] * max(0, limit)
        return ()

    def _right(self, live: LiveRow, count: int) -> list[int]:
        tokens = list(live.tokens)
        for _ in range(count):
            tokens.append(self.choose(tokens, live.row.sampling))
        return tokens[len(live.tokens) :]

    def forget(self, key: int) -> None:
        self.forgotten.append(key)

    def draft_cost(self, rows: int) -> DraftCost | None:
        return None if self.step is None else DraftCost(self.step, read=self.read)

    def unread(self, live: LiveRow) -> int:
        return len(live.tokens) if live.row.key not in self.asked else 0


class Fixed(CostCurve):
    """A cost curve that is not updated by the measured passes, which take no time here."""

    def observe(self, tokens: int, seconds: float) -> None:
        pass
