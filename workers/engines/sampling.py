"""The choice of a token in NumPy, bit for bit as the native sampler.

The token at a position is ``argmax(process(logits) / temperature + noise)``; greedy leaves the noise out. The noise is a
function of (seed, sample, position, token) alone, so the draft draws the same as the target and the two agree often.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from outrider.kernels import arithmetic
from outrider.workers.messages import Sampling

# Stands for -infinity, which JSON lacks, as in OpenAI's interface.
LEAST_LOG_PROBABILITY = -9999.0
NO_COUNTS: Mapping[int, int] = {}
Mask = NDArray[np.uint32]


def process(
    logits: NDArray[np.float32],
    sampling: Sampling,
    prompt: Mapping[int, int] = NO_COUNTS,
    written: Mapping[int, int] = NO_COUNTS,
    mask: Mask | None = None,
) -> NDArray[np.float64]:
    """Scores after the mask, penalties, bias, min-tokens, temperature, top-k, top-p and min-p, in that order; -inf where a
    token is excluded.

    ``prompt`` and ``written`` count the tokens before this position: the repetition penalty uses both, the other penalties
    only ``written``. Bit t % 32 of word t / 32 of a ``mask`` is 1 where token t may be chosen.
    """
    scores = logits.astype(np.float64)
    if mask is not None:
        allowed = np.unpackbits(mask.view(np.uint8), count=scores.size, bitorder="little")
        scores[allowed == 0] = -np.inf
    if sampling.repetition_penalty != 1.0:
        seen = np.fromiter(sorted(prompt.keys() | written.keys()), dtype=np.int64)
        value = scores[seen]
        penalty = sampling.repetition_penalty
        scores[seen] = np.where(value > 0, value / penalty, value * penalty)
    if sampling.presence_penalty != 0.0 or sampling.frequency_penalty != 0.0:
        for token, count in written.items():
            scores[token] -= count * sampling.frequency_penalty + sampling.presence_penalty
    for token, bias in sampling.logit_bias:
        if token < scores.size:  # a draft gets the target's sampling, and may have a smaller vocabulary
            scores[token] += bias
    if sum(written.values()) < sampling.min_tokens:
        scores[[token for token in sampling.end_tokens or () if token < scores.size]] = -np.inf
    if sampling.greedy:
        return scores
    scores /= sampling.temperature
    if 0 < sampling.top_k < scores.size:
        scores[_ranked(scores)[sampling.top_k :]] = -np.inf
    if (sampling.top_p < 1.0 or sampling.min_p > 0.0) and scores.max() > -np.inf:
        weights = arithmetic.exp(scores - scores.max())
        if sampling.top_p < 1.0:
            order = _ranked(scores)
            before = np.concatenate(([0.0], np.cumsum(weights[order])[:-1]))
            # The token that crosses the threshold stays, so at least one always does.
            scores[order[before >= sampling.top_p * arithmetic.lane_sum(weights)]] = -np.inf
        scores[weights < sampling.min_p] = -np.inf
    return scores


def _ranked(scores: NDArray[np.float64]) -> NDArray[np.int64]:
    """Token ids by falling score, equal scores by rising id."""
    return np.argsort(-scores, kind="stable")


def choose(
    logits: NDArray[np.float32],
    sampling: Sampling,
    position: int,
    prompt: Mapping[int, int] = NO_COUNTS,
    written: Mapping[int, int] = NO_COUNTS,
    mask: Mask | None = None,
) -> tuple[int, float]:
    """The token for one position (the number of tokens before it) and its margin over the second best.

    -1 where no token is allowed. The margin is NaN where a logit is NaN or +infinity.
    """
    if not logits.max() < np.inf:
        return int(logits.argmax()), np.nan
    scores = process(logits, sampling, prompt, written, mask)
    if not sampling.greedy:
        scores = scores + arithmetic.gumbel(sampling.seed, sampling.sample, position, scores.size)
    best = int(scores.argmax())
    margin = scores[best]
    if margin == -np.inf:
        return -1, 0.0
    scores[best] = -np.inf
    return best, float(margin - scores.max())


def log_probabilities(logits: NDArray[np.float32], chosen: int, count: int) -> list[tuple[int, float]]:
    """(token, log-probability) by the unprocessed logits: of the chosen token, then of the ``count`` likeliest."""
    scores = logits.astype(np.float64)
    highest = scores.max()
    total = arithmetic.log(np.array([arithmetic.lane_sum(arithmetic.exp(scores - highest))]))[0]
    tokens = [chosen, *_ranked(scores)[:count].tolist()]
    return [(token, max(float((scores[token] - highest) - total), LEAST_LOG_PROBABILITY)) for token in tokens]
