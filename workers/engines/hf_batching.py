"""How the hf engine batches a model's rows. (Imports no torch: the driver uses it, too.)"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class RowFeeding(Enum):
    """How a row that runs alone in its passes is fed on top of the model's cache."""

    # Any number of tokens in a pass.
    CACHED = "cached"
    # The prompt in one pass, then one token in each: some recurrent models are right only so.
    STEPPED = "stepped"
    # Without a cache: every pass reads the whole row.
    WHOLE = "whole"


HOW = {
    RowFeeding.CACHED: "rows run one at a time",
    RowFeeding.STEPPED: "rows run one at a time and are fed one token after the other, so that candidates gain nothing",
    RowFeeding.WHOLE: "rows run one at a time, and each pass reads the whole row",
}


@dataclass(frozen=True, slots=True)
class Batching:
    """``ragged``: several rows in a pass; else one at a time by ``feeding``. ``why`` no better batching is possible."""

    ragged: bool
    feeding: RowFeeding = RowFeeding.CACHED
    why: str = ""

    @property
    def note(self) -> str:
        """A sentence for the user; empty where the batching is the best one."""
        return "" if self.ragged else f"{HOW[self.feeding]}, because {self.why}"
