"""Log-probabilities of a prompt's own tokens, for `echo`."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np

from outrider.workers.engines.engine import Engine, Feed
from outrider.workers.engines.sampling import LEAST_LOG_PROBABILITY
from outrider.workers.messages import Sampling

# The size of one pass's logits, as float32.
PASS_BYTES = 32 << 20
MOST_TOKENS = 512


def prompt_scores(
    engine: Engine,
    row: int,
    prompt: Sequence[int],
    likeliest: int,
    passed: Callable[[float, float, int], None] = lambda started, ended, tokens: None,
) -> list[list[tuple[int, float]]]:
    """For each token but the first, (token, log-probability): its own, then those of the ``likeliest`` tokens.

    ``row`` is a number that no row of the engine has; it is closed again. ``passed`` is called after each pass with the
    times of its beginning and end, and its number of tokens.
    """
    entries: list[list[tuple[int, float]]] = []
    most = max(1, min(MOST_TOKENS, PASS_BYTES // (4 * engine.vocabulary)))
    engine.open(row, Sampling(), len(prompt))
    try:
        for start in range(0, len(prompt) - 1, most):
            tokens = prompt[start : min(start + most, len(prompt) - 1)]
            started = time.perf_counter()
            scored = engine.scores([Feed(row, tokens, len(tokens))])
            passed(started, time.perf_counter(), len(tokens))
            for position, logits in enumerate(scored, start + 1):
                scores = logits.astype(np.float64) - logits.max()
                scores -= np.log(np.exp(scores).sum())
                # Of equal scores the smaller token id first, as in the sampler.
                best = np.argsort(-scores, kind="stable")[:likeliest]
                named = [prompt[position], *map(int, best)]
                entries.append([(token, max(float(scores[token]), LEAST_LOG_PROBABILITY)) for token in named])
    finally:
        engine.close(row)
    return entries
