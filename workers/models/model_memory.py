"""What memory a model takes in its process."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.kernels.library import fewest_in_pairs
from outrider.kernels.program import Scales

# Of the kernels: the most that is taken for rows' first tokens beforehand.
MOST_RESERVED = 2 << 30


# Scales of codes that some processors multiply in pairs of channels.
PAIRED = (Scales.WORDS, Scales.FACTORS)


def scales_in_pairs() -> frozenset[Scales]:
    """Those whose codes this machine multiplies in pairs."""
    return frozenset(scales for scales in PAIRED if fewest_in_pairs(scales))


@dataclass(frozen=True, slots=True)
class PairsMemory:
    """Bytes beside the codes of matrices that are multiplied in pairs of channels, by the scales of these codes."""

    words: int = 0
    factors: int = 0

    def on(self, in_pairs: frozenset[Scales]) -> int:
        """On a processor that multiplies codes with such scales in pairs."""
        return (Scales.WORDS in in_pairs) * self.words + (Scales.FACTORS in in_pairs) * self.factors

    def __add__(self, other: PairsMemory) -> PairsMemory:
        return PairsMemory(self.words + other.words, self.factors + other.factors)


NO_PAIRS = PairsMemory()


@dataclass(frozen=True, slots=True)
class ModelMemory:
    """Bytes: of the weights as they are packed, of a pass, of a row whatever its length, and of each token of a row.

    What the ``first_tokens`` of rows take is taken when the model is opened. ``pairs`` are taken beside the weights by
    processors that multiply in pairs of channels.
    """

    weights: int
    working: int = 0
    row: int = 0
    token: int = 0
    first_tokens: int = 0
    pairs: PairsMemory = NO_PAIRS

    def of_rows(self, rows: int, tokens: int) -> int:
        """Of so many rows at once that have so many tokens together."""
        reserved = min(rows * self.first_tokens * self.token, MOST_RESERVED)
        return max(reserved, tokens * self.token) + rows * self.row
