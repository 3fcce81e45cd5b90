"""The summary's lines about speculation, for the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

from outrider.runner.counted import counted
from outrider.workers.messages import OTHER_PHASE, PHASES

BARS = "▁▂▃▄▅▆▇█"
WIDTH = 40


def speculation_lines(summary: dict[str, Any], over_time: Sequence[dict[str, Any]]) -> Iterable[tuple[str, str]]:
    """Name and value of each line; no lines about candidates if none were proposed."""
    lengths = summary["accepted_lengths"]
    if sum(lengths):
        rate = f"{summary['tokens_per_round']:.2f}"
        yield "tokens a round", f"{rate} (k {summary['mean_k']:.1f} on average)"
        yield "accepted", histogram(lengths)
    if summary.get("draft_passes"):
        unread = f", {skipped:,} tokens left unread" if (skipped := summary.get("draft_skipped")) else ""
        yield (
            "draft",
            f"{counted(summary['draft_passes'], 'pass', 'passes')} beside {summary['rounds']:,} of the target{unread}",
        )
    if right := summary.get("corrected_right"):
        wrong = summary["corrected_wrong"]
        yield "draft learned", f"{right:,} guesses right because of it, {wrong:,} wrong"
    if summary.get("found"):
        accepted, others = f"{summary['found_accepted']:,} of {summary['found']:,}", summary["others_accepted"]
        yield "found in texts", f"{accepted} candidates accepted, {others:,} of them from other rows' answers"
    if summary.get("runners_up"):
        tried, accepted = summary["runners_up"], summary["runners_up_accepted"]
        yield "runners-up", f"{100 * accepted / tried:.0f}% ({accepted:,} of {tried:,} second choices) accepted"
    if any(summary["time"].values()):
        yield "time", ", ".join(f"{phase} {100 * summary['time'][phase]:.1f}%" for phase in (*PHASES, OTHER_PHASE))
    for line in over_time:
        asked = [k for _, k, tokens in line["points"] if tokens]
        if sum(lengths) and len(asked) > 1:
            which = f" of replica {line['replica']}" if len(over_time) > 1 else ""
            yield f"k over time{which}", f"{sparkline(asked, WIDTH)} {min(asked):.1f} to {max(asked):.1f}"
    if len(summary["replicas"]) > 1:
        for replica in summary["replicas"]:
            speed = f"{replica['tokens_per_second']:,.1f} tokens/s"
            yield f"replica {replica['replica']}", f"{speed}, {replica['tokens']:,} tokens, k {replica['mean_k']:.1f}"


def histogram(lengths: Sequence[int]) -> str:
    """The share of each accepted length, from 0 to the longest that occurred."""
    longest = max(length for length, count in enumerate(lengths) if count)
    total = sum(lengths)
    shares = ", ".join(f"{length}: {100 * lengths[length] / total:.0f}%" for length in range(longest + 1))
    return f"{sparkline(lengths[: longest + 1], longest + 1)} {shares}"


def sparkline(values: Sequence[float], width: int) -> str:
    """One character per value, or per mean of one of ``width`` parts; the highest value is a full bar."""
    if len(values) > width:
        edges = [len(values) * part // width for part in range(width + 1)]
        values = [sum(values[left:right]) / (right - left) for left, right in pairwise(edges)]
    highest = max(values, default=0.0)
    if highest <= 0:
        return BARS[0] * len(values)
    return "".join(BARS[min(len(BARS) - 1, int(value / highest * len(BARS)))] for value in values)
