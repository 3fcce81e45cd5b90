"""Feeds windows of text to one model or to two, and sums up their figures."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from outrider.workers.engines.engine import Engine, Feed
from outrider.workers.messages import ModelSpec, Sampling
from outrider.workers.models.opening import open_model
from outrider.workers.scoring.figures import Figures, of_logits, of_two
from outrider.workers.scoring.windows import Window, tokens_of_a_pass


class Scorer:
    """``against`` is the model that the first one is compared with. Both are in memory."""

    def __init__(self, model: ModelSpec, against: ModelSpec | None = None) -> None:
        opened = [open_model(spec) for spec in (model, against) if spec is not None]
        self.notes = list(opened[0].notes)
        self.notes += [f"--against: {note}" for each in opened[1:] for note in each.notes]
        self._engines: list[Engine] = [each.engine for each in opened]
        widest = max(engine.vocabulary for engine in self._engines)
        self._most = tokens_of_a_pass(widest)

    def score(self, windows: Sequence[Window]) -> Figures:
        """As many windows as fit are rows of one pass, so that short texts are fed together."""
        total = Figures()
        waiting: list[Window] = []
        for window in windows:
            if waiting and sum(len(each.tokens) for each in waiting) + len(window.tokens) > self._most:
                total += self._together(waiting)
                waiting = []
            waiting.append(window)
        return total + self._together(waiting) if waiting else total

    def _together(self, windows: Sequence[Window]) -> Figures:
        for engine in self._engines:
            for row, window in enumerate(windows):
                engine.open(row, Sampling(), len(window.tokens))
        try:
            total, start = Figures(), 0
            # Several windows fit into one pass; a single one may take several passes.
            longest = max(len(window.tokens) for window in windows)
            while start < longest - 1:
                total += self._pass(windows, start, start + self._most)
                start += self._most
            return total
        finally:
            for engine in self._engines:
                for row in range(len(windows)):
                    engine.close(row)

    def _pass(self, windows: Sequence[Window], start: int, stop: int) -> Figures:
        """Feed each window's tokens from ``start`` to ``stop``, without its last one, after which nothing is scored."""
        feeds: list[Feed] = []
        wanted: list[int] = []
        for row, window in enumerate(windows):
            end = min(stop, len(window.tokens) - 1)
            if start < end:
                # The logits after a token predict the next one.
                scored = max(0, end - max(start, window.first - 1))
                feeds.append(Feed(row, window.tokens[start:end], scored))
                wanted.extend(window.tokens[end - scored + 1 : end + 1])
        if not wanted:
            for engine in self._engines:
                engine.feed(feeds)
            return Figures()
        ids = np.asarray(wanted, np.int64)
        first, *others = (engine.scores(feeds) for engine in self._engines)
        return of_two(first, others[0], ids) if others else of_logits(first, ids)
