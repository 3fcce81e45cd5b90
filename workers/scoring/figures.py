"""Perplexity, KL divergence and agreement, summed over the logits of successive passes."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Figures:
    """Sums over scored tokens: negative log-likelihoods in nats of this model (``loss``) and of the other, KL divergences,
    and how often both have the same most likely token."""

    tokens: int = 0
    loss: float = 0.0
    other_loss: float = 0.0
    divergence: float = 0.0
    same: int = 0

    def __add__(self, other: Figures) -> Figures:
        return Figures(
            self.tokens + other.tokens,
            self.loss + other.loss,
            self.other_loss + other.other_loss,
            self.divergence + other.divergence,
            self.same + other.same,
        )

    @property
    def perplexity(self) -> float:
        return _perplexity(self.loss, self.tokens)

    @property
    def other_perplexity(self) -> float:
        return _perplexity(self.other_loss, self.tokens)

    @property
    def kl(self) -> float:
        """The mean of KL(other || this), in nats a token."""
        return self.divergence / self.tokens

    @property
    def agreement(self) -> float:
        return self.same / self.tokens


def _perplexity(loss: float, tokens: int) -> float:
    mean = loss / tokens
    # A token may have probability 0.
    return math.exp(mean) if mean < 700 else math.inf


def of_logits(logits: NDArray[np.float32], wanted: NDArray[np.int64]) -> Figures:
    """The figures of one model: ``wanted[i]`` is the token that ``logits[i]`` predict."""
    return Figures(len(wanted), loss=float(-_log_probabilities(logits)[np.arange(len(wanted)), wanted].sum()))


def of_two(logits: NDArray[np.float32], other: NDArray[np.float32], wanted: NDArray[np.int64]) -> Figures:
    """The figures of a model and the one that it is compared with. Only tokens that both score are compared (one may have
    more, as padding)."""
    shared = min(logits.shape[1], other.shape[1])
    places = np.arange(len(wanted))
    loss, other_loss = (float(-_log_probabilities(each)[places, wanted].sum()) for each in (logits, other))
    ours, theirs = _log_probabilities(logits[:, :shared]), _log_probabilities(other[:, :shared])
    # p log(p / q) is 0 where p is 0, even where q is 0 as well.
    with np.errstate(invalid="ignore"):
        terms = np.where(np.isneginf(theirs), 0.0, np.exp(theirs) * (theirs - ours))
    same = int((logits[:, :shared].argmax(axis=1) == other[:, :shared].argmax(axis=1)).sum())
    return Figures(len(wanted), loss, other_loss, divergence=float(terms.sum()), same=same)


def _log_probabilities(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    scores = logits.astype(np.float64)
    scores -= scores.max(axis=1, keepdims=True)
    scores -= np.log(np.exp(scores).sum(axis=1, keepdims=True))
    return scores
