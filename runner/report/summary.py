"""A job's summary, as job.json and the Python interface have it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from outrider.runner.job.journal import Journal
from outrider.runner.report import statistics
from outrider.runner.report.counters import JobCounters


def summarize(journal: Journal) -> dict[str, Any]:
    """The summary over all runs of the job so far."""
    counts = journal.counts()
    summary: dict[str, Any] = {
        "rows": counts.rows,
        "done": counts.done,
        "failed": counts.failed,
        "pending": counts.pending,
    }
    summary |= JobCounters().summed(journal.meta("totals") or {})
    return summary | statistics.summary_of(journal.meta(statistics.KEY))


class Summary:
    """The summary with its keys as attributes (described in docs/jobs.md)."""

    rows: int
    done: int
    failed: int
    pending: int
    tokens: int
    seconds: float
    rounds: int
    proposed: int
    accepted: int
    near_ties: int
    target_deaths: int
    draft_deaths: int
    ray_deaths: int
    prompt_tokens: int
    prompt_tokens_reused: int
    resumed_tokens: int
    read_again: int
    acceptance: float
    tokens_per_round: float
    mean_k: float
    found: int
    found_accepted: int
    others_accepted: int
    plain_rounds: int
    draft_passes: int
    draft_skipped: int
    corrected_right: int
    corrected_wrong: int
    runners_up: int
    runners_up_accepted: int
    forced_tokens: int
    accepted_lengths: list[int]
    time: dict[str, float]
    replicas: list[dict[str, Any]]

    def __init__(self, values: Mapping[str, Any]) -> None:
        vars(self).update(values)

    def __repr__(self) -> str:
        return f"Summary({', '.join(f'{name}={value!r}' for name, value in vars(self).items())})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Summary) and vars(self) == vars(other)
