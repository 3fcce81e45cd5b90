"""A target, and a transport to a draft, whose work advances a virtual clock, so that speeds can be compared exactly."""

from __future__ import annotations

from collections.abc import Sequence

from built import Answered, InProcess
from fakes import FakeEngine

from outrider.workers.draft.drafter import Drafter
from outrider.workers.engines.costs import CostCurve
from outrider.workers.engines.engine import Chosen, Feed
from outrider.workers.messages import DraftRequest


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class ClockedTarget(FakeEngine):
    """Writes the text given for each row; a pass of n tokens takes ``passes(n)`` seconds."""

    def __init__(self, texts: Sequence[Sequence[int]], clock: Clock, passes: CostCurve) -> None:
        super().__init__(context=1 << 16, vocabulary=1 << 30)
        self._texts, self._clock, self._passes = texts, clock, passes

    def feed(self, feeds: Sequence[Feed]) -> list[Chosen]:
        self._clock.now += self._passes(sum(len(feed.tokens) + len(feed.branches) for feed in feeds))
        return super().feed(feeds)

    def _feed(self, feed: Feed) -> Chosen:
        text = self._texts[feed.row]
        # After a rejected candidate the choice does not matter.
        self.choose = lambda history, sampling: text[len(history)] if history == text[: len(history)] else 0
        return super()._feed(feed)


class ClockedTransport(InProcess):
    """A transport to a draft in this process, whose round trip takes ``seconds``."""

    def __init__(self, drafter: Drafter, clock: Clock, seconds: float) -> None:
        super().__init__(drafter)
        self._clock, self._seconds = clock, seconds

    def ask(self, request: DraftRequest) -> Answered:
        self._clock.now += self._seconds
        return super().ask(request)
