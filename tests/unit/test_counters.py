"""The table of counters: the names of metrics and of job.json's keys, which are made from it, do not change."""

from __future__ import annotations

from dataclasses import fields

from outrider.runner.report.counters import FROM_TARGETS, JobCounters
from outrider.runner.report.page import PHASE_COLORS, PHASE_MEANING
from outrider.runner.report.statistics import COLUMNS, SUMS, summary_of
from outrider.workers.counters import counters
from outrider.workers.messages import PHASES, TargetCounters
from outrider.workers.target.metrics import COUNTERS


def test_every_number_of_a_target_is_in_the_table_with_its_meaning() -> None:
    table = counters(TargetCounters)
    assert {field.name for field in fields(TargetCounters)} - set(table) == {"accepted_lengths"}, "that is a histogram"
    assert all(counter.meaning for counter in table.values())
    assert all(isinstance(getattr(TargetCounters(), name), int | float) for name in table)
    assert set(SUMS) == set(table)
    assert set(FROM_TARGETS) <= set(table), "the driver takes them from there"


def test_metrics_keep_their_names() -> None:
    assert set(COUNTERS) == {
        *("tokens", "rounds", "row_rounds", "proposed", "accepted"),
        *("draft_passes", "draft_skipped", "corrected_right", "corrected_wrong", "runners_up", "runners_up_accepted"),
        *("asked", "asking_rows"),
        *("found", "found_accepted", "others_accepted"),
    }
    assert tuple(PHASES) == ("verify", "draft", "hop", "idle")


def test_the_series_of_journals_that_are_there_already_can_be_read() -> None:
    """Their points are lists, in this order."""
    assert COLUMNS == ("tokens", "asked", "asking_rows", "proposed", "accepted")


def test_the_summary_keeps_its_keys() -> None:
    assert list(JobCounters().summed({})) == [
        *("tokens", "seconds", "rounds", "proposed", "accepted", "near_ties", "target_deaths", "draft_deaths"),
        *("ray_deaths", "prompt_tokens", "prompt_tokens_reused", "resumed_tokens", "read_again"),
    ]
    summary = summary_of(None)
    assert list(summary) == [
        *(
            "acceptance",
            "tokens_per_round",
            "mean_k",
            "found",
            "found_accepted",
            "others_accepted",
            "plain_rounds",
            "draft_passes",
            "draft_skipped",
            "corrected_right",
            "corrected_wrong",
            "runners_up",
            "runners_up_accepted",
            "forced_tokens",
        ),
        *("accepted_lengths", "time", "replicas"),
    ]
    assert list(summary["time"]) == list(PHASE_COLORS) == ["verify", "draft", "hop", "idle", "other"]
    assert all(f"{phase}: " in PHASE_MEANING for phase in PHASE_COLORS)
