"""What an engine is: it holds one model and the caches of many rows, and chooses tokens. It knows nothing of Ray."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from outrider.workers.messages import Sampling


@dataclass(frozen=True, slots=True)
class Feed:
    """Tokens to append to a row's cache, and after how many of them (counted from the last) a choice is wanted.

    ``logprobs`` asks for each choice's log-probability, and for those of as many of the likeliest tokens.
    ``branches`` are (after, token): a choice is also wanted after the first ``after`` tokens and this one in place of the
    next (-1 where that has no finite scores). Nothing of a branch stays. For engines that branch.
    """

    row: int
    tokens: Sequence[int]
    choose: int
    logprobs: int | None = None
    branches: Sequence[tuple[int, int]] = ()


@dataclass(frozen=True, slots=True)
class Chosen:
    """The tokens chosen for one feed, first position first.

    ``margins`` are the distances between the best and the second-best score: how clear each choice was. On an engine that
    is not exact, a margin close to the kernels' rounding is where two runs may differ.
    ``logprobs`` holds, where the feed asked, for each choice (token, log-probability): its own, then the likeliest.
    Behind the feed's own choices stand those after its branches. ``runners_up`` are the tokens with the second-best scores
    (-1: there is none), where a run's engine tells them.
    """

    tokens: list[int]
    margins: list[float]
    logprobs: list[list[tuple[int, float]]] = field(default_factory=list)
    runners_up: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Run:
    """A row that goes on by itself: it is fed ``tokens``, and then again and again what it chose last.

    It stops after ``most`` choices, after one of ``ends``, or where it is not worth while any more: ``reach`` is the chance
    that everything chosen before holds, and a choice misses ``doubt`` times as often as is usual.
    """

    row: int
    tokens: Sequence[int]
    most: int
    ends: Collection[int]
    reach: float = 1.0
    doubt: float = 1.0


@dataclass(frozen=True, slots=True)
class Trust:
    """How much a choice's lead is worth: the ``usual`` chances that it holds, below and between ``bounds``.

    No chance is taken for less than ``least_chance``. A run stops where its reach is below ``least_reach``, and all of them
    where the reaches of those that go on, each less that, come to less than ``least_sum``: another pass is not worth it.
    """

    bounds: Sequence[float]
    usual: Sequence[float]
    least_chance: float
    least_reach: float = 0.0
    least_sum: float = 0.0

    def chance(self, lead: float, doubt: float) -> float:
        return max(self.least_chance, 1.0 - (1.0 - self.usual[bisect_right(self.bounds, lead)]) * doubt)


@dataclass(frozen=True, slots=True)
class Ran:
    """The choices of each run, and of each pass how many runs were in it and its seconds."""

    chosen: list[Chosen]
    steps: list[tuple[int, float]]


class Engine(Protocol):
    """One loaded model. Rows are named by the caller; each has a cache as long as the tokens fed and not truncated."""

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

    def run(self, runs: Sequence[Run], trust: Trust) -> Ran:
        """As many passes as the runs want, those together that go on; the answers stand in the same order."""

    def length(self, row: int) -> int:
        """How many tokens the row's cache holds."""

    def truncate(self, row: int, length: int) -> None:
        """Forget all but the first ``length`` tokens."""

    def close(self, row: int) -> None:
        """Forget the row."""
