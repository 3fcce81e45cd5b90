"""What an engine is: it holds one model and the caches of many rows, and chooses tokens. It knows nothing of Ray."""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from outrider.workers.messages import Sampling

MOST_RANKED = 16


class PassMasks:
    """Which tokens the choices of a pass may take: of each mask, bit t % 32 of word t / 32 for token t.

    They may still be in the making when the pass begins, in another thread, which says when they are made. ``words`` are
    [masks, words of a mask].
    """

    def __init__(self, words: NDArray[np.uint32]) -> None:
        self.words = words
        # For engines that look by themselves.
        self.ready = np.zeros(1, np.int32)
        self._made = threading.Event()

    def made(self) -> None:
        self.ready[0] = 1
        self._made.set()

    def wait(self) -> None:
        self._made.wait()


class FeedMasks(NamedTuple):
    """A feed's own among the masks of a pass: those of its choices, from the ``first`` on."""

    of: PassMasks
    first: int


class Guide(Protocol):
    """What tells which tokens may come next, in the course of a row that goes on by itself."""

    def fill(self, mask: NDArray[np.uint32]) -> None:
        """Set the bits of the tokens that may come next; all bits are 0 before."""

    def follow(self, token: int) -> Sequence[int] | None:
        """The token has been chosen. Those behind it that are certain, of which the guide knows then too.

        None where the token may not come after all: the row does not go on, and the choice is none.
        """


@dataclass(frozen=True, slots=True)
class Feed:
    """Tokens to append to a row's cache, and after how many of them (counted from the last) a choice is wanted.

    ``logprobs`` asks for each choice's log-probability, and for those of as many of the likeliest tokens.
    ``branches`` are (after, token): a choice is also wanted after the first ``after`` tokens and this one in place of the
    next (-1 where that has no finite scores). Nothing of a branch stays. For engines that branch.
    With ``masks`` a choice is one of the tokens that its mask allows (-1 where that is none); branches have none.
    ``runners_up`` asks for the second-best tokens too, ``states`` for the states of all its tokens, of an engine that can
    tell them.
    """

    row: int
    tokens: Sequence[int]
    choose: int
    logprobs: int | None = None
    branches: Sequence[tuple[int, int]] = ()
    masks: FeedMasks | None = None
    runners_up: bool = False
    states: bool = False


@dataclass(frozen=True, slots=True)
class Chosen:
    """The tokens chosen for one feed, first position first.

    ``margins`` are the distances between the best and the second-best score: how clear each choice was. On an engine that
    is not exact, a margin close to the kernels' rounding is where two runs may differ. NaN: the scores were not numbers.
    ``logprobs`` holds, where the feed asked, for each choice (token, log-probability): its own, then the likeliest.
    Behind the feed's own choices stand those after its branches. ``runners_up`` are the tokens with the second-best scores
    (-1: there is none), where an engine tells them. ``states`` [tokens fed, columns] are bf16, where the feed asked.
    """

    tokens: list[int]
    margins: list[float]
    logprobs: list[list[tuple[int, float]]] = field(default_factory=list)
    runners_up: list[int] = field(default_factory=list)
    states: NDArray[np.uint16] | None = None


@dataclass(frozen=True, slots=True)
class DecodeFeed:
    """A row that goes on by itself: it is fed ``tokens``, and then again and again what it chose last.

    It stops after ``most`` choices, after one of ``ends``, or where it is not worth while any more: ``reach`` is the chance
    that everything chosen before holds, and a choice misses ``miss_factor`` times as often as is usual. With a ``guide``,
    what is certain behind a choice is taken without one, its margin infinite; there may be more than ``most`` then.
    """

    row: int
    tokens: Sequence[int]
    most: int
    ends: Collection[int]
    reach: float = 1.0
    miss_factor: float = 1.0
    guide: Guide | None = None


# The margin of a token that a model chose because top-k, top-p or min-p had left no other; of a forced one it is infinite.
MOST_MARGIN = 1e9


@dataclass(frozen=True, slots=True)
class StopRule:
    """When decoding stops. ``usual`` are the chances that a choice holds, by its margin: below and between ``bounds``.

    No chance is taken for less than ``least_chance``. A row stops where its reach is below ``least_reach``, and all of them
    when sum(reach - least_reach) over the rows that go on is below ``least_sum``: another pass is not worth it.
    """

    bounds: Sequence[float]
    usual: Sequence[float]
    least_chance: float
    least_reach: float = 0.0
    least_sum: float = 0.0

    def chance(self, margin: float, miss_factor: float) -> float:
        if margin == inf:  # there was no other choice
            return 1.0
        return max(self.least_chance, 1.0 - (1.0 - self.usual[bisect_right(self.bounds, margin)]) * miss_factor)


@dataclass(frozen=True, slots=True)
class DecodeResult:
    """The choices of each feed, and of each pass how many rows were in it and its seconds."""

    chosen: list[Chosen]
    steps: list[tuple[int, float]]


class Router(NamedTuple):
    """One layer of a mixture of experts: how many it has, and how many of them a token takes."""

    experts: int
    chosen: int


@dataclass(slots=True)
class Mixture:
    """A model's layers with experts, and how many experts its latest pass read, over all layers, each counted once."""

    routers: tuple[Router, ...]
    read: int = 0


class Ranker(Protocol):
    @property
    def most_tokens(self) -> int:
        """Of feeds that have more tokens together, what was chosen first is not known any more."""

    def rank(self, choice: int, count: int, mask: NDArray[np.uint32] | None = None) -> Sequence[int]:
        """The best tokens for one of the choices of the latest pass, best first, among those that the mask allows.

        Choices are counted over all its feeds, those after branches too. There may be fewer tokens than ``count``, which is
        MOST_RANKED at most. The choice's row holds what stood before it.
        """


class Learner(Protocol):
    def learn(self, row: int, first: int, tokens: Sequence[int]) -> tuple[int, int]:
        """What in truth came behind the row's first ``first`` tokens, one after the other. It corrects later choices.

        How many of its choices there had been right because of corrections, and how many wrong. Where they are no longer
        known, nothing is learned.
        """


class Skipper(Protocol):
    def skip(self, row: int, tokens: Sequence[int]) -> None:
        """Append tokens that are never computed: what is fed behind them sees neither them nor anything before them.

        For drafts: a target's choices depend on all of its row.
        """


@runtime_checkable
class CanLearn(Protocol):
    def correct_choices(self) -> None:
        """Have a ``learner``, where the model has what that takes.

        For drafts: no choice of a target may depend on another row.
        """


@runtime_checkable
class CanShorten(Protocol):
    def shorten(self, tokens: int | None) -> int:
        """Score so many tokens of the vocabulary at most, those of the texts that are fed (0: all, None: a part where their
        scores are a good part of a pass). How many are scored now.

        For drafts: a target may choose any token.
        """


class Engine(Protocol):
    """One loaded model. Rows are named by the caller; each has a cache as long as the tokens fed and not truncated."""

    @property
    def mixture(self) -> Mixture | None:
        """Of a mixture of experts whose passes say what they read; else None."""

    @property
    def context_share(self) -> float:
        """The bytes that a pass reads for each token of its rows' contexts, over those of the weights; 0 where unknown."""

    @property
    def exact(self) -> bool:
        """Whether a row's choices never depend, not even by rounding, on what else is computed beside it."""

    @property
    def forks(self) -> bool:
        """Whether a fork is cheaper than feeding its tokens again."""

    @property
    def branches(self) -> bool:
        """Whether a feed may have branches."""

    @property
    def ranker(self) -> Ranker | None:
        """What tells behind a pass what else its choices could have been; None of an engine that cannot."""

    @property
    def learner(self) -> Learner | None:
        """What learns from choices that turned out wrong; None of an engine whose choices stay its model's own."""

    @property
    def skipper(self) -> Skipper | None:
        """What leaves a beginning of a row unread; None of an engine whose rows are read from their first token on."""

    @property
    def context(self) -> int:
        """The longest row, in tokens, that the model can hold."""

    @property
    def vocabulary(self) -> int:
        """How many token ids the model scores; a larger id must never be fed."""

    def open(self, row: int, sampling: Sampling, prompt_length: int) -> None:
        """Begin an empty row; its first ``prompt_length`` tokens count as given, the rest as written."""

    def fork(self, row: int, source: int, length: int, sampling: Sampling, prompt_length: int) -> None:
        """Begin a row with the first ``length`` tokens of another one's cache."""

    def feed(self, feeds: Sequence[Feed]) -> list[Chosen]:
        """One forward pass over all feeds together; the answers stand in the same order."""

    def scores(self, feeds: Sequence[Feed]) -> NDArray[np.float32]:
        """One forward pass that chooses nothing: the logits after the last ``choose`` tokens of each feed, one behind the
        other. Log-probabilities and branches are not looked at."""

    def decode(self, decode_feeds: Sequence[DecodeFeed], stop_rule: StopRule) -> DecodeResult:
        """As many passes as the feeds want, the rows that go on together; the answers stand in the same order.

        A pass makes one choice a row, or more where the engine can try what a row's text went on with before.
        """

    def length(self, row: int) -> int:
        """How many tokens the row's cache holds."""

    def truncate(self, row: int, length: int) -> None:
        """Forget all but the first ``length`` tokens."""

    def close(self, row: int) -> None:
        """Forget the row."""
