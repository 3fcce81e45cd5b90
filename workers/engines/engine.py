"""The interface of an engine: one model, the KV caches of many rows, and the choice of tokens. No Ray in here."""

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
    """The tokens that the choices of a pass may take: ``words`` [masks, words of a mask], bit t % 32 of word t / 32 for
    token t.

    Another thread may still compute them when the pass begins; it calls ``made`` when they are complete.
    """

    def __init__(self, words: NDArray[np.uint32]) -> None:
        self.words = words
        # What the native engine polls; the hf engine calls ``wait``.
        self.ready = np.zeros(1, np.int32)
        self._made = threading.Event()

    def made(self) -> None:
        self.ready[0] = 1
        self._made.set()

    def wait(self) -> None:
        self._made.wait()


class FeedMasks(NamedTuple):
    """The masks of one feed's choices: those of the pass from index ``first`` on."""

    of: PassMasks
    first: int


class Guide(Protocol):
    """Tells which tokens may come next while a draft decodes a row under a grammar."""

    def fill(self, mask: NDArray[np.uint32]) -> None:
        """Set the bits of the tokens that may come next; all bits are 0 before."""

    def follow(self, token: int) -> Sequence[int] | None:
        """Append the chosen token. The tokens that the grammar forces after it, which the guide has then appended, too.

        None where the token is not allowed after all: decoding of the row ends, and the token is dropped.
        """


@dataclass(frozen=True, slots=True)
class Feed:
    """Tokens to append to a row's cache; a choice is wanted after each of the last ``choose`` of them.

    ``logprobs`` asks for each choice's log-probability, and for those of as many of the likeliest tokens.
    ``branches`` are (after, token): a choice is also wanted after the first ``after`` tokens followed by ``token`` (-1
    where its scores are not finite). A branch leaves nothing in the cache. Only for engines with ``branches``. With
    ``masks`` a choice is one of the tokens that its mask allows (-1 where it allows none); branches have no mask.
    ``runners_up`` asks for the second-best tokens, ``states`` for the hidden states of all tokens that are fed, where the
    engine has them.
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

    ``margins`` are best score - second-best score; NaN where scores were not finite. On an engine that is not exact, two
    runs may choose differently where a margin is within the kernels' rounding. ``logprobs`` holds, where the feed asked,
    for each choice (token, log-probability): its own, then the likeliest. The choices after branches follow those of the
    feed. ``runners_up`` are the tokens with the second-best scores (-1: there is none), where the engine has them.
    ``states`` [tokens fed, columns] are bf16, where the feed asked.
    """

    tokens: list[int]
    margins: list[float]
    logprobs: list[list[tuple[int, float]]] = field(default_factory=list)
    runners_up: list[int] = field(default_factory=list)
    states: NDArray[np.uint16] | None = None


@dataclass(frozen=True, slots=True)
class DecodeFeed:
    """Autoregressive decoding of one row: it is fed ``tokens``, and then its own last choice, again and again.

    It stops after ``most`` choices, after one of ``ends``, or by the ``StopRule``: ``reach`` is the chance that all earlier
    choices are accepted, and a choice misses ``miss_factor`` times as often as usual. Tokens that the grammar of a
    ``guide`` forces are appended without a pass, with an infinite margin; there may be more than ``most`` tokens then.
    """

    row: int
    tokens: Sequence[int]
    most: int
    ends: Collection[int]
    reach: float = 1.0
    miss_factor: float = 1.0
    guide: Guide | None = None


# The margin of a choice where top-k, top-p or min-p left only one token. (That of a token forced by a grammar is infinite.)
MOST_MARGIN = 1e9


@dataclass(frozen=True, slots=True)
class StopRule:
    """When decoding stops. ``usual[i]`` is the chance that a choice is accepted if bounds[i - 1] <= margin < bounds[i].

    No chance is taken to be below ``least_chance``. A row stops when its reach is below ``least_reach``, and all rows when
    sum(reach - least_reach) over those that go on is below ``least_sum``: another pass is not worth its time.
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
    """The choices of each feed, and (rows, seconds) of each pass."""

    chosen: list[Chosen]
    steps: list[tuple[int, float]]


class Router(NamedTuple):
    """One layer of a mixture of experts: the number of its experts, and how many of them the router chooses for a token, on
    average where it also chooses among experts without weights."""

    experts: int
    chosen: float


@dataclass(slots=True)
class Mixture:
    """The routers of a mixture of experts; ``read``: how many distinct experts its latest pass read, summed over layers."""

    routers: tuple[Router, ...]
    read: int = 0


class Ranker(Protocol):
    @property
    def most_tokens(self) -> int:
        """The largest pass, in tokens: larger feeds take several passes, and only the last can be ranked."""

    def rank(self, choice: int, count: int, mask: NDArray[np.uint32] | None = None) -> Sequence[int]:
        """The best tokens for one of the choices of the latest pass, best first, among those that the mask allows.

        Choices are numbered over all feeds of the pass, those after branches included. There may be fewer tokens than
        ``count``, which is MOST_RANKED at most. The choice's row must still hold the tokens before it.
        """


class Learner(Protocol):
    def learn(self, row: int, first: int, tokens: Sequence[int]) -> tuple[int, int]:
        """Learn from the tokens that the target committed after the row's first ``first`` tokens, to correct later choices.

        Returns how many of the choices there were right because of corrections, and how many wrong. Nothing is learned from
        choices that are no longer kept.
        """


class Skipper(Protocol):
    def skip(self, row: int, tokens: Sequence[int]) -> None:
        """Append tokens without computing them: later tokens attend neither to them nor to anything before them.

        For drafts only: a target's choices depend on all of its row.
        """


@runtime_checkable
class CanLearn(Protocol):
    def correct_choices(self) -> None:
        """Set ``learner``, where the model's LM head can be corrected.

        For drafts only: no choice of a target may depend on another row.
        """


@runtime_checkable
class CanShorten(Protocol):
    def shorten(self, tokens: int | None) -> int:
        """Compute logits only for the ``tokens`` tokens of the vocabulary that rows were fed last (0: for all; None: for a
        part, where the LM head is a good part of a pass). Returns for how many they are computed now.

        For drafts only: a target may choose any token.
        """


class Engine(Protocol):
    """One loaded model. The caller numbers the rows; a row's cache holds all tokens that it was fed and that were not
    truncated."""

    @property
    def mixture(self) -> Mixture | None:
        """For a mixture of experts whose passes report the experts that they read; else None."""

    @property
    def context_share(self) -> float:
        """Bytes of keys and values of one token / bytes of the weights that a pass reads; 0 where unknown."""

    @property
    def exact(self) -> bool:
        """Whether a row's logits have the same bits whatever else is in its pass."""

    @property
    def forks(self) -> bool:
        """Whether ``fork`` is cheaper than feeding the tokens again."""

    @property
    def branches(self) -> bool:
        """Whether a feed may have branches."""

    @property
    def ranker(self) -> Ranker | None:
        """Ranks further tokens for a choice of the latest pass; None where the engine cannot."""

    @property
    def learner(self) -> Learner | None:
        """Learns corrections from wrong choices; None unless ``correct_choices`` was called and possible."""

    @property
    def skipper(self) -> Skipper | None:
        """Skips the beginning of a row; None where the engine must read rows from their first token on."""

    @property
    def context(self) -> int:
        """The longest row, in tokens, that the model can hold."""

    @property
    def vocabulary(self) -> int:
        """How many token ids the model scores; a larger id must never be fed."""

    def open(self, row: int, sampling: Sampling, prompt_length: int) -> None:
        """Begin an empty row; its first ``prompt_length`` tokens are the prompt, all later ones are written."""

    def fork(self, row: int, source: int, length: int, sampling: Sampling, prompt_length: int) -> None:
        """Begin a row with a copy of the first ``length`` tokens of another row's cache."""

    def feed(self, feeds: Sequence[Feed]) -> list[Chosen]:
        """One forward pass over all feeds together; the results are in the order of the feeds."""

    def scores(self, feeds: Sequence[Feed]) -> NDArray[np.float32]:
        """One forward pass without choices: the logits after the last ``choose`` tokens of each feed, concatenated.
        ``logprobs`` and ``branches`` of feeds are ignored."""

    def decode(self, decode_feeds: Sequence[DecodeFeed], stop_rule: StopRule) -> DecodeResult:
        """Decode all rows together until each has stopped; the results are in the order of the feeds.

        A pass makes one choice for each row, or several where the engine verifies tokens from earlier text in it.
        """

    def length(self, row: int) -> int:
        """The number of tokens in the row's cache."""

    def truncate(self, row: int, length: int) -> None:
        """Keep only the first ``length`` tokens."""

    def close(self, row: int) -> None:
        """Forget the row."""
