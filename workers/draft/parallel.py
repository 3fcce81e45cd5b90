"""A parallel draft: one pass proposes all candidates of a row, behind its text and copies of one mask token.

The first candidate is what the model says behind the last real token, each further one what it says behind a mask. A mask
stands where its token will stand, so its choice is made with that position's noise, as the target will make it. What the
passes leave of masks in the cache is forgotten at once.
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

# The share of a new observation in the mean of how many tokens a row brings.
FRESH = 0.05
# That mean changes slowly: what passes over so many tokens take is looked up again after so many.
PASSES_BETWEEN = 16


@dataclass(slots=True)
class OnePass:
    """How a model proposes that was trained on ``mask_token``, and what that costs: ``curve`` is of passes by tokens.

    The curve was measured when the model was loaded, often beside a target that was being loaded too. So its shape is
    believed, and how much faster or slower passes are than it says is what was usual of late.
    """

    mask_token: int
    curve: CostCurve
    # How many tokens of its text a row brings to a pass: its accepted candidates, and the target's own.
    brought: float = 2.0
    _pace: Recent = field(default_factory=Recent)
    _by_curve: dict[int, tuple[float, ...]] = field(default_factory=dict)
    _observed: int = 0

    def decode(self, engine: Engine, decode_feeds: Sequence[DecodeFeed]) -> DecodeResult:
        result = decode_in_one_pass(engine, decode_feeds, self.mask_token)
        [(rows, seconds)] = result.steps
        text = sum(len(feed.tokens) for feed in decode_feeds)
        self._pace.observe(1, seconds / self.curve(text + sum(feed.most - 1 for feed in decode_feeds)))
        # A row that is read for the first time brings more than others will.
        self.brought += FRESH * (min(text / rows, MOST_CANDIDATES) - self.brought)
        self._observed += 1
        if self._observed % PASSES_BETWEEN == 0:
            self._by_curve.clear()
        return result

    def seconds(self, rows: int) -> tuple[float, ...]:
        """Of a pass that makes 1, 2 and so on candidates for each of so many rows."""
        if rows not in self._by_curve:
            counts = range(1, MOST_CANDIDATES + 1)
            self._by_curve[rows] = tuple(self.curve(round(max(1, rows) * (self.brought + count - 1))) for count in counts)
        pace = self._pace(1) or 1.0
        return tuple(pace * seconds for seconds in self._by_curve[rows])


def decode_in_one_pass(engine: Engine, decode_feeds: Sequence[DecodeFeed], mask_token: int) -> DecodeResult:
    """What ``Engine.decode`` is to do, by a model that was trained on masks. There is nothing to stop early.

    With a guide only the first choice is made among what it allows: what may come later depends on what comes before. There
    the choices end with the first that the guide does not allow.
    """
    lengths = [engine.length(feed.row) + len(feed.tokens) for feed in decode_feeds]
    limits = _limits(decode_feeds, engine.vocabulary)
    feeds = [
        Feed(feed.row, [*feed.tokens, *[mask_token] * (feed.most - 1)], feed.most, masks=masks, runners_up=True)
        for feed, masks in zip(decode_feeds, limits, strict=True)
    ]
    started = time.perf_counter()
    answers = engine.feed(feeds)
    seconds = time.perf_counter() - started
    for feed, length in zip(decode_feeds, lengths, strict=True):
        engine.truncate(feed.row, length)
    chosen = [_usable(feed, answer, mask_token) for feed, answer in zip(decode_feeds, answers, strict=True)]
    return DecodeResult(chosen, [(len(feeds), seconds)])


def _limits(decode_feeds: Sequence[DecodeFeed], vocabulary: int) -> list[FeedMasks | None]:
    """For each feed with a guide what its choices may be: the first what comes next, the others anything."""
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
    """The choices up to an end, and what is certain between them, whose places need no choice."""
    found = Chosen([], [])
    at = 0
    while at < len(answer.tokens):
        token = answer.tokens[at]
        if token in (-1, mask_token):
            break
        behind = [] if feed.guide is None else feed.guide.follow(token)
        if behind is None:
            break
        found.tokens.extend([token, *behind])
        found.margins.extend([min(answer.margins[at], MOST_MARGIN), *[inf] * len(behind)])
        if answer.runners_up:
            found.runners_up.extend([answer.runners_up[at], *[-1] * len(behind)])
        if found.tokens[-1] in feed.ends:
            break
        at += 1 + len(behind)
    return found
