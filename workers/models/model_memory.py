"""What memory a model takes in its process."""

from __future__ import annotations

from dataclasses import dataclass

# Of the kernels: the most that is taken for rows' first tokens beforehand.
MOST_RESERVED = 2 << 30


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
    pairs: int = 0

    def of_rows(self, rows: int, tokens: int) -> int:
        """Of so many rows at once that have so many tokens together."""
        reserved = min(rows * self.first_tokens * self.token, MOST_RESERVED)
        return max(reserved, tokens * self.token) + rows * self.row
