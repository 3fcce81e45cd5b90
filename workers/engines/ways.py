"""The ways in which the hf engine runs a model, from the best down. (Free of torch: the driver's side knows them, too.)"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class RowFeeding(Enum):
    """How a row that runs alone goes on from what the model remembers of it."""

    # Any number of tokens at a time.
    CACHED = "cached"
    # The prompt in one pass, then one token at a time: some recurrent models go on right only so.
    STEPPED = "stepped"
    # Not at all: every pass reads the whole row.
    WHOLE = "whole"


HOW = {
    RowFeeding.CACHED: "rows run one at a time",
    RowFeeding.STEPPED: "rows run one at a time and are fed one token after the other, so that candidates gain nothing",
    RowFeeding.WHOLE: "rows run one at a time, and each pass reads the whole row",
}


@dataclass(frozen=True, slots=True)
class Way:
    """Several rows in a pass, or one at a time and how that is fed; ``why`` not better."""

    ragged: bool
    feeding: RowFeeding = RowFeeding.CACHED
    why: str = ""

    @property
    def note(self) -> str:
        """What a person should know of it; nothing where all is well."""
        return "" if self.ragged else f"{HOW[self.feeding]}, because {self.why}"
