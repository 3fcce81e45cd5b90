"""The sections of report.html. Pure; ``templates/`` has their HTML. The page loads nothing from the network."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import outrider
from outrider.runner.counted import counted
from outrider.runner.report.charts import (
    Bar,
    ChartLine,
    bar_chart,
    duration,
    legend,
    line_chart,
    number,
    replica_color,
    stacked_bars,
)
from outrider.runner.report.latencies import Latencies
from outrider.runner.report.pinning import layouts, placement
from outrider.runner.report.render import render
from outrider.runner.report.report_data import ReportData
from outrider.runner.report.sections import Cell, Section, Table
from outrider.runner.report.series import Series
from outrider.runner.report.statistics import COLUMNS, summary_of
from outrider.workers.messages import OTHER_PHASE, PHASES

# With more replicas only their sum is drawn.
MOST_LINES = 6
# The fewest rows of an interval for a mean (a harvest is spread over intervals, so there are fractions).
LEAST_ROWS = 0.05
LATENCY_BARS = 36
PERCENTILES = (0.5, 0.9, 0.95, 0.99)
PHASE_COLORS = {phase: color for color, phase in enumerate((*PHASES, OTHER_PHASE))}
PHASE_MEANING = (
    "; ".join(f"{phase}: {meaning}" for phase, meaning in {**PHASES, OTHER_PHASE: "bookkeeping"}.items())
    + ". Shares of the time of the targets."
)


@dataclass(frozen=True, slots=True)
class State:
    words: str
    kind: str


@dataclass(frozen=True, slots=True)
class KeyFigure:
    name: str
    value: str
    note: str


def page(job: ReportData) -> str:
    summary = summary_of(job.statistics)
    sections = [
        _throughput(job),
        _phases(summary),
        _acceptance(summary),
        _candidates(job),
        _latency(job),
        _errors(job),
        placement(job.pinning),
        layouts(job.layouts),
        _what_ran(job),
    ]
    return render(
        "page.html",
        name=job.name,
        state=_state(job),
        updated=job.description.get("updated"),
        key_figures=_key_figures(job, summary),
        sections=[section for section in sections if section is not None],
        version=outrider.__version__,
    )


def _state(job: ReportData) -> State:
    counts = job.counts
    if job.running:
        return State(f"running, {counted(counts.pending, 'row')} to go", "running")
    if counts.pending:
        return State(f"stopped with {counted(counts.pending, 'row')} to go; the same command resumes it", "stopped")
    if counts.failed:
        return State(f"finished, {counted(counts.failed, 'row')} failed", "failed")
    return State("finished", "finished")


def _key_figures(job: ReportData, summary: dict[str, Any]) -> list[KeyFigure]:
    counts, seconds = job.counts, job.totals.get("seconds", 0.0)
    tokens = int(job.totals.get("tokens", 0))
    found = [
        KeyFigure("rows", f"{counts.done:,}", f"of {counts.rows:,} done, {counts.failed:,} failed"),
        KeyFigure("tokens", f"{tokens:,}", f"in {duration(seconds)}"),
        KeyFigure("tokens a second", number(tokens / seconds) if seconds else "none", "all replicas together"),
    ]
    if job.totals.get("proposed"):
        rate = 100 * job.totals["accepted"] / job.totals["proposed"]
        found.append(KeyFigure("accepted", f"{rate:.0f}%", f"of {int(job.totals['proposed']):,} candidates"))
        k = f"mean k {summary['mean_k']:.1f}"
        if summary["draft_passes"]:
            k += f", {summary['draft_passes']:,} passes of the draft"
        found.append(KeyFigure("tokens a round", f"{summary['tokens_per_round']:.2f}", k))
    latencies = Latencies(job.statistics.get("latencies"))
    if latencies.count:
        most = f"95% within {duration(latencies.percentile(0.95))}"
        found.append(KeyFigure("a row takes", duration(latencies.percentile(0.5)), most))
    return found


def _series(job: ReportData) -> dict[int, Series]:
    replicas = job.statistics.get("replicas", {})
    return {int(number): Series.restored(COLUMNS, replica["series"]) for number, replica in replicas.items()}


def _throughput(job: ReportData) -> Section:
    series = _series(job)
    end = max([job.totals.get("seconds", 0.0), *(_last(one) for one in series.values())], default=0.0)
    speeds = {name: _speeds(one, end) for name, one in series.items()}
    if not any(speeds.values()):
        return Section("Throughput over time", "Nothing has been measured yet.")
    total = _sum_of(list(series.values()), end)
    lines = [ChartLine("all replicas", total, 0, filled=True)]
    if 1 < len(series) <= MOST_LINES:
        lines += [ChartLine(f"replica {name}", points, replica_color(name)) for name, points in sorted(speeds.items())]
    rows: list[list[Cell]] = [[f"{x:.2f}", number(y)] for x, y in total]
    by_replica: list[list[Cell]] = [
        [
            f"replica {one['replica']}",
            f"{one['tokens']:,}",
            duration(one["seconds"]),
            number(one["tokens_per_second"]),
            f"{one['tokens_per_round']:.2f}",
            f"{one['mean_k']:.1f}",
            f"{100 * one['acceptance']:.0f}%",
        ]
        for one in summary_of(job.statistics)["replicas"]
    ]
    head = ["", "tokens", "up for", "tokens/s", "tokens a round", "mean k", "accepted"]
    return Section(
        "Throughput over time",
        "Committed tokens a second, over the time in which the job ran, without pauses between its runs.",
        line_chart("Throughput", "Tokens a second over the seconds of the job", lines, "tokens/s", end),
        legend([(line.name, line.color) for line in lines]) if len(lines) > 1 else (),
        chart_table=Table(["middle of the interval (s)", "tokens/s"], rows),
        table=Table(head, by_replica),
    )


def _last(series: Series) -> float:
    """The beginning of the last interval of a series, in seconds."""
    return max(0, len(series.points) - 1) * series.interval


def _width(series: Series, index: int, end: float) -> float:
    """The length of an interval; the last one is not over yet."""
    return min(series.interval, end - index * series.interval)


def _speeds(series: Series, end: float) -> list[tuple[float, float]]:
    found = []
    for index, point in enumerate(series.points):
        width = _width(series, index, end)
        # An interval that has hardly begun is left out.
        if width >= 0.2 * series.interval:
            found.append((index * series.interval + width / 2, point[COLUMNS.index("tokens")] / width))
    return found


def _sum_of(many: Sequence[Series], end: float) -> list[tuple[float, float]]:
    """The speed of all replicas together, in intervals as long as the longest of theirs."""
    together = Series(("tokens",), interval=max(one.interval for one in many))
    for one in many:
        for index, point in enumerate(one.points):
            width = max(0.0, _width(one, index, end))
            together.add(index * one.interval, index * one.interval + 0.999 * width, (point[COLUMNS.index("tokens")],))
    found = []
    for index, (tokens,) in enumerate(together.points):
        width = _width(together, index, end)
        if width >= 0.2 * together.interval:
            found.append((index * together.interval + width / 2, tokens / width))
    return found


def _phases(summary: dict[str, Any]) -> Section | None:
    if not any(summary["time"].values()):
        return None
    bars = [(f"replica {one['replica']}", one["time"]) for one in summary["replicas"]]
    if len(bars) > 1:
        bars = [("all", summary["time"]), *bars]
    rows: list[list[Cell]] = [[name, *(f"{100 * shares[phase]:.1f}%" for phase in PHASE_COLORS)] for name, shares in bars]
    return Section(
        "Time by phase",
        PHASE_MEANING,
        stacked_bars("Time by phase", "Shares of each target's time", bars[:40], PHASE_COLORS),
        legend(list(PHASE_COLORS.items())),
        chart_table=Table(["", *PHASE_COLORS], rows),
    )


def _acceptance(summary: dict[str, Any]) -> Section:
    lengths = summary["accepted_lengths"]
    total = sum(lengths)
    if not total:
        return Section("Accepted lengths", "No candidates were proposed.")
    longest = max(length for length, count in enumerate(lengths) if count)
    names = [f"{length} or more" if length == len(lengths) - 1 else str(length) for length in range(longest + 1)]
    bars = [
        Bar(name, 100 * lengths[length] / total, f"{name}: {lengths[length]:,} times, {100 * lengths[length] / total:.1f}%")
        for length, name in enumerate(names)
    ]
    rows: list[list[Cell]] = [[bar.label, f"{lengths[at]:,}", f"{bar.value:.1f}%"] for at, bar in enumerate(bars)]
    mean = sum(length * count for length, count in enumerate(lengths)) / total
    return Section(
        "Accepted lengths",
        f"How many of a row's candidates were accepted in a round, over the {total:,} times that some were proposed; "
        f"{mean:.2f} on average. The target adds a token of its own each time.",
        bar_chart(
            "Accepted lengths", "Rounds of rows by accepted candidates", bars, "share", "accepted candidates", _percent
        ),
        chart_table=Table(["accepted", "rounds of rows", "share"], rows),
    )


def _percent(value: float) -> str:
    return f"{value:g}%"


def _candidates(job: ReportData) -> Section | None:
    asked, rows_asked = COLUMNS.index("asked"), COLUMNS.index("asking_rows")
    lines = []
    series = _series(job)
    end = max([job.totals.get("seconds", 0.0), *(_last(one) for one in series.values())], default=0.0)
    for name, one in sorted(series.items())[:MOST_LINES]:
        points = [
            (min(end, (index + 0.5) * one.interval), point[asked] / point[rows_asked])
            for index, point in enumerate(one.points)
            if point[rows_asked] > LEAST_ROWS
        ]
        if any(k for _, k in points):
            lines.append(ChartLine(f"replica {name}", points, replica_color(name)))
    if not lines:
        return None
    rows: list[list[Cell]] = [[f"{x:.2f}", line.name, f"{k:.2f}"] for line in lines for x, k in line.points]
    note = f" Shown are the first {MOST_LINES} replicas." if len(series) > MOST_LINES else ""
    return Section(
        "k over time",
        f"How many candidates a row was asked for, on average over the rows that could have some.{note}",
        line_chart("k over time", "Mean number of candidates asked for", lines, "k", end),
        legend([(line.name, line.color) for line in lines]) if len(lines) > 1 else (),
        chart_table=Table(["middle of the interval (s)", "replica", "k"], rows, numeric_from=2),
    )


def _latency(job: ReportData) -> Section:
    latencies = Latencies(job.statistics.get("latencies"))
    if not latencies.count:
        return Section("Latency of a row", "No row has ended yet.")
    steps = latencies.histogram(LATENCY_BARS)
    bars = [
        Bar(duration(low), count, f"{duration(low)} to {duration(high)}: {counted(count, 'row')}")
        for low, high, count in steps
    ]
    rows: list[list[Cell]] = [[f"{duration(low)} to {duration(high)}", f"{count:,}"] for low, high, count in steps if count]
    heads = [f"{100 * share:g}% within" for share in PERCENTILES]
    shares: list[Cell] = [duration(latencies.percentile(share)) for share in PERCENTILES]
    return Section(
        "Latency of a row",
        f"From the entry of a row's answer into the batch to its end, the slowest of each row's answers; what was resumed "
        f"counts from then on. {counted(latencies.count, 'row')}; steps grow by a fixed ratio.",
        bar_chart("Latency of a row", "Rows by the time they took", bars, "rows", "time, from", number),
        chart_table=Table(["time", "rows"], rows),
        table=Table(["", *heads], [["rows", *shares]]),
    )


def _errors(job: ReportData) -> Section:
    if not job.errors:
        return Section("Errors", "No row has failed.")
    rows: list[list[Cell]] = [[kind.code, f"{kind.rows:,}", kind.message, ", ".join(kind.examples)] for kind in job.errors]
    return Section(
        "Errors by kind",
        table=Table(["kind", "rows", "message of the first", "such as"], rows, numeric_from=9),
        note="All of them stand in errors.jsonl.",
    )


def _what_ran(job: ReportData) -> Section:
    description = job.description
    spec, identity = description.get("spec", {}), description.get("identity", {})
    path = description.get("numeric_path") or {}
    target, draft = description.get("target", {}), description.get("draft", {})
    draft_name = draft.get("name", "") if isinstance(draft, dict) else draft
    facts: list[tuple[str, object]] = [
        ("target", _join(target.get("name"), identity.get("engine"), identity.get("precision"))),
        ("draft", _join(draft_name, *_draft_numbers(job))),
        ("--draft", spec.get("draft")),
        ("candidates (k)", spec.get("draft_tokens")),
        ("batch", spec.get("batch")),
        ("sampling", _join(*(f"{key} {spec[key]}" for key in ("temperature", "top_p", "top_k", "seed") if key in spec))),
        ("input", _join(spec.get("input"), _short(identity.get("input")))),
        ("model digest", _short(identity.get("model"))),
        ("numeric path", _join(*(f"{key} {value}" for key, value in path.items()))),
        ("versions", _join(f"outrider {description.get('outrider')}", f"Python {description.get('python')}")),
        ("deaths", _join(*(f"{int(job.totals.get(f'{who}_deaths', 0))} of {who}s" for who in ("target", "draft")))),
    ]
    rows: list[list[Cell]] = [[name, str(value)] for name, value in facts if value not in (None, "")]
    whole = {key: value for key, value in description.items() if key not in ("over_time", "pinning")}
    return Section(
        "What ran", table=Table(["", ""], rows, numeric_from=9), source=json.dumps(whole, indent=2, ensure_ascii=False)
    )


def _draft_numbers(job: ReportData) -> tuple[str, ...]:
    """The draft's engine and precision; empty if no draft has come up."""
    paths = (actor.get("numeric_path") or {} for actor in job.pinning if actor["role"] == "draft")
    path = next(paths, {})
    return tuple(path[key] for key in ("engine", "precision") if key in path)


def _join(*parts: object) -> str:
    return ", ".join(str(part) for part in parts if part not in (None, ""))


def _short(digest: str | None) -> str | None:
    return f"{digest[:16]}…" if digest and len(digest) > 20 else digest
