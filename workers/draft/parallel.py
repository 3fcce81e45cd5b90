"""A parallel draft: one pass over a row's new tokens and k - 1 copies of a mask token makes all k candidates.

The first candidate is the choice after the last real token, each further one the choice after a mask. A mask has the
position of the token that it stands for, so the choice takes that position's noise, as the target's will. Masks are
truncated from the cache after each pass.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf

import numpy as np

from outrider.workers.constraints.matching import EVERYTHING
from outrider.workers.engines.costs import CostCurve, Recent
from outrider.workers.engines.engine import (
    MOST_MARGIN,
    Chosen,
    DecodeFeed,
    DecodeResult,
    Engine,
    Feed,
    FeedMasks,
    PassMasks,
)
from outrider.workers.speculation import MOST_CANDIDATES

# The share of a new observation in the mean of ``text_tokens``.
FRESH = 0.05
# The cost by number of candidates is computed again after this many passes, since that mean changes slowly.
PASSES_BETWEEN = 16


@dataclass(slots=True)
class OnePass:
    """Decodes with a model that was trained on ``mask_token``, and knows the cost: ``curve`` is that of passes by tokens.

    The curve was measured when the model was loaded, often while a target was being loaded, too. So only its shape is used,
    scaled by the recent ratio of actual to measured times (``_pace``).
    """

    mask_token: int
    curve: CostCurve
    # The mean number of a row's new text tokens in a pass: its accepted candidates, and the target's own token.
    text_tokens: float = 2.0
    _pace: Recent = field(default_factory=Recent)
    _by_curve: dict[int, tuple[float, ...]] = field(default_factory=dict)
    _observed: int = 0

    def decode(self, engine: Engine, decode_feeds: Sequence[DecodeFeed]) -> DecodeResult:
        result = decode_in_one_pass(engine, decode_feeds, self.mask_token)
        [(rows, seconds)] = result.steps
        text = sum(len(feed.tokens) for feed in decode_feeds)
        self._pace.observe(1, seconds / self.curve(text + sum(feed.most - 1 for feed in decode_feeds)))
        # Bounded, since a new row's prompt is longer than what later passes read.
        self.text_tokens += FRESH * (min(text / rows, MOST_CANDIDATES) - self.text_tokens)
        self._observed += 1
        if self._observed % PASSES_BETWEEN == 0:
            self._by_curve.clear()
        return result

    def seconds(self, rows: int) -> tuple[float, ...]:
        """Seconds of a pass that makes 1, 2, … candidates for each of ``rows``."""
        if rows not in self._by_curve:
            counts = range(1, MOST_CANDIDATES + 1)
            self._by_curve[rows] = tuple(
                self.curve(round(max(1, rows) * (self.text_tokens + count - 1))) for count in counts
            )
        pace = self._pace(1) or 1.0
        return tuple(pace * seconds for seconds in self._by_curve[rows])


def decode_in_one_pass(engine: Engine, decode_feeds: Sequence[DecodeFeed], mask_token: int) -> DecodeResult:
    """``Engine.decode`` by a parallel draft. Its one pass cannot stop early.

    With a guide only the first choice has a mask, since later masks depend on earlier choices. The choices then end before
    the first that the guide refuses.
    """
    lengths = [engine.length(feed.row) + len(feed.tokens) for feed in decode_feeds]
    masks_of_feeds = _masks(decode_feeds, engine.vocabulary)
    feeds = [
        Feed(feed.row, [*feed.tokens, *[mask_token] * (feed.most - 1)], feed.most, masks=masks, runners_up=True)
        for feed, masks in zip(decode_feeds, masks_of_feeds, strict=True)
    ]
    started = time.perf_counter()
    answers = engine.feed(feeds)
    seconds = time.perf_counter() - started
    for feed, length in zip(decode_feeds, lengths, strict=True):
        engine.truncate(feed.row, length)
    chosen = [_usable(feed, answer, mask_token) for feed, answer in zip(decode_feeds, answers, strict=True)]
    return DecodeResult(chosen, [(len(feeds), seconds)])


def _masks(decode_feeds: Sequence[DecodeFeed], vocabulary: int) -> list[FeedMasks | None]:
    """Masks of the feeds with a guide: the guide's for the first choice, and all tokens for the others."""
    count = sum(feed.most for feed in decode_feeds if feed.guide is not None)
    if not count:
        return [None] * len(decode_feeds)
    masks = PassMasks(np.zeros((count, -(-vocabulary // 32)), np.uint32))
    found, first = list[FeedMasks | None](), 0
    for feed in decode_feeds:
        if feed.guide is None:
            found.append(None)
            continue
        feed.guide.fill(masks.words[first])
        masks.words[first + 1 : first + feed.most] = EVERYTHING
        found.append(FeedMasks(masks, first))
        first += feed.most
    masks.made()
    return found


def _usable(feed: DecodeFeed, answer: Chosen, mask_token: int) -> Chosen:
    """The choices up to an end token. Forced tokens between them replace the choices at their positions."""
    found = Chosen([], [])
    at = 0
    while at < len(answer.tokens):
        token = answer.tokens[at]
        if token in (-1, mask_token):
            break
        forced = [] if feed.guide is None else feed.guide.follow(token)
        if forced is None:
            break
        found.tokens.extend([token, *forced])
        found.margins.extend([min(answer.margins[at], MOST_MARGIN), *[inf] * len(forced)])
        if answer.runners_up:
            found.runners_up.extend([answer.runners_up[at], *[-1] * len(forced)])
        if found.tokens[-1] in feed.ends:
            break
        at += 1 + len(forced)
    return found
