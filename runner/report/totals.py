"""What a run of a job has done so far."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(slots=True)
class Totals:
    """What this run of the job has done so far."""

    rows: int = 0
    done: int = 0
    failed: int = 0
    tokens: int = 0
    proposed: int = 0
    accepted: int = 0
    rounds: int = 0
    near_ties: int = 0
    prompt_tokens: int = 0
    prompt_tokens_reused: int = 0
    resumed_tokens: int = 0
    seconds: float = 0.0
    target_deaths: int = 0
    draft_deaths: int = 0
    ray_deaths: int = 0
    replicas_up: int = 0
    notes: list[str] = field(default_factory=list)

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def summed(self, earlier: Mapping[str, float]) -> dict[str, float]:
        """What every run of the job has done together."""
        return {name: round(getattr(self, name) + earlier.get(name, 0), 3) for name in SUMMED}


# What adds up over the runs of a job.
SUMMED = (
    *("tokens", "seconds", "rounds", "proposed", "accepted", "near_ties", "target_deaths", "draft_deaths", "ray_deaths"),
    *("prompt_tokens", "prompt_tokens_reused", "resumed_tokens"),
)
