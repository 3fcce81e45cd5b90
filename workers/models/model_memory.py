"""The memory of a model in its process."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.kernels.library import fewest_in_pairs
from outrider.kernels.program import Scales

# As in the kernels: the most memory that is allocated in advance for rows' first tokens.
MOST_RESERVED = 2 << 30


# The kinds of scales whose codes some processors multiply in pairs of channels.
PAIRED = (Scales.WORDS, Scales.FACTORS)


def scales_in_pairs() -> frozenset[Scales]:
    """The kinds of scales whose codes this machine multiplies in pairs."""
    return frozenset(scales for scales in PAIRED if fewest_in_pairs(scales))


@dataclass(frozen=True, slots=True)
class PairsMemory:
    """The additional bytes of matrices that are multiplied in pairs of channels, by the kind of their scales."""

    words: int = 0
    factors: int = 0

    def on(self, in_pairs: frozenset[Scales]) -> int:
        """The bytes on a processor that multiplies codes with these kinds of scales in pairs."""
        return (Scales.WORDS in in_pairs) * self.words + (Scales.FACTORS in in_pairs) * self.factors

    def __add__(self, other: PairsMemory) -> PairsMemory:
        return PairsMemory(self.words + other.words, self.factors + other.factors)


NO_PAIRS = PairsMemory()


@dataclass(frozen=True, slots=True)
class ModelMemory:
    """Bytes of the packed weights, of a pass (``working``), of a row of any length, and of each token of a row.

    Memory for the ``first_tokens`` of each row is allocated when the model is opened. ``pairs`` are additional weights on
    processors that multiply in pairs of channels.
    """

    weights: int
    working: int = 0
    row: int = 0
    token: int = 0
    first_tokens: int = 0
    pairs: PairsMemory = NO_PAIRS

    def of_rows(self, rows: int, tokens: int) -> int:
        """The memory of this many rows with this many tokens in all."""
        reserved = min(rows * self.first_tokens * self.token, MOST_RESERVED)
        return max(reserved, tokens * self.token) + rows * self.row
