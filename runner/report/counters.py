"""The counters of a job's run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from outrider.runner.report.pace import Pace
from outrider.workers.counters import clock, counter, names


@dataclass(slots=True)
class JobCounters:
    """The counters of this run of the job."""

    rows: int = 0
    done: int = 0
    failed: int = 0
    # Counts rows that have ended.
    tokens: int = counter("Tokens of answers")
    seconds: float = clock("Since the first replica was up")
    rounds: int = counter("Passes of the targets", from_targets=True)
    proposed: int = counter("Candidates proposed", from_targets=True)
    accepted: int = counter("Candidates that targets accepted", from_targets=True)
    near_ties: int = counter("Choices that lay within rounding of another", from_targets=True)
    target_deaths: int = counter("Targets that died")
    draft_deaths: int = counter("Drafts that died")
    ray_deaths: int = counter("Rays that died under the job")
    prompt_tokens: int = counter("Tokens of prompts", from_targets=True)
    prompt_tokens_reused: int = counter("Tokens of prompts that were read for an earlier row", from_targets=True)
    resumed_tokens: int = counter("Tokens that an earlier target had written", from_targets=True)
    read_again: int = counter("Tokens of prompts and answers that were read a second time, after a death or a stop")
    replicas_up: int = 0
    # Whether all replicas wait for cores.
    without_cores: bool = False
    pace: Pace = field(default_factory=Pace)
    notes: list[str] = field(default_factory=list)

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def summed(self, earlier: Mapping[str, float]) -> dict[str, float]:
        """The sums over all runs of the job."""
        return {name: round(getattr(self, name) + earlier.get(name, 0), 3) for name in SUMMED}


# The counters that are summed over the runs of a job.
SUMMED = names(JobCounters)
FROM_TARGETS = names(JobCounters, lambda counter: counter.from_targets)
