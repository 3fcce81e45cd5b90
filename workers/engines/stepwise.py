"""``Engine.decode`` as a loop over ``Engine.feed``, for engines that cannot decode several steps in one call."""

from __future__ import annotations

import time
from collections.abc import Sequence
from math import inf

import numpy as np

from outrider.workers.engines.engine import (
    MOST_MARGIN,
    Chosen,
    DecodeFeed,
    DecodeResult,
    Engine,
    Feed,
    FeedMasks,
    PassMasks,
    StopRule,
)


def decode_in_steps(engine: Engine, decode_feeds: Sequence[DecodeFeed], stop_rule: StopRule) -> DecodeResult:
    """Each step feeds every unfinished row its last choice."""
    choices: dict[int, Chosen] = {feed.row: Chosen([], []) for feed in decode_feeds}
    reach = {feed.row: feed.reach for feed in decode_feeds}
    going: list[tuple[DecodeFeed, Sequence[int]]] = [(feed, feed.tokens) for feed in decode_feeds]
    steps = []
    while going:
        started = time.perf_counter()
        masks = _masks([feed for feed, _ in going], engine.vocabulary)
        answers = engine.feed([Feed(feed.row, tokens, 1, masks=masks.get(feed.row)) for feed, tokens in going])
        steps.append((len(going), time.perf_counter() - started))
        still_going: list[tuple[DecodeFeed, Sequence[int]]] = []
        surplus = 0.0
        for (feed, _), answer in zip(going, answers, strict=True):
            choice, margin, chosen = answer.tokens[0], min(answer.margins[0], MOST_MARGIN), choices[feed.row]
            if choice < 0:  # the guide's mask allows no token
                continue
            forced = [] if feed.guide is None else feed.guide.follow(choice)
            if forced is None:
                continue
            chosen.tokens.extend([choice, *forced])
            chosen.margins.extend([margin, *[inf] * len(forced)])
            reach[feed.row] *= stop_rule.chance(margin, feed.miss_factor)
            hopeful = reach[feed.row] >= stop_rule.least_reach and chosen.tokens[-1] not in feed.ends
            if hopeful and len(chosen.tokens) < feed.most:
                still_going.append((feed, [choice, *forced]))
                surplus += reach[feed.row] - stop_rule.least_reach
        going = still_going if surplus >= stop_rule.least_sum else []
    return DecodeResult([choices[feed.row] for feed in decode_feeds], steps)


def _masks(decode_feeds: Sequence[DecodeFeed], vocabulary: int) -> dict[int, FeedMasks]:
    """One mask for each row that has a guide."""
    guided = [(feed.row, feed.guide) for feed in decode_feeds if feed.guide is not None]
    if not guided:
        return {}
    masks = PassMasks(np.zeros((len(guided), -(-vocabulary // 32)), np.uint32))
    for index, (_, guide) in enumerate(guided):
        guide.fill(masks.words[index])
    masks.made()
    return {row: FeedMasks(masks, index) for index, (row, _) in enumerate(guided)}
