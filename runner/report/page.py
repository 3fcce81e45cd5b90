"""The page of report.html: sections of text, charts and tables. Pure; nothing in it is fetched from anywhere."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import outrider
from outrider.runner.report.charts import (
    Bar,
    Line,
    bar_chart,
    duration,
    legend,
    line_chart,
    number,
    replica_color,
    stacked_bars,
)
from outrider.runner.report.latencies import Latencies
from outrider.runner.report.markup import Markup, table, tag
from outrider.runner.report.pinning import layouts, placement
from outrider.runner.report.report import Job
from outrider.runner.report.series import Series
from outrider.runner.report.statistics import COLUMNS, PHASES, summary_of
from outrider.runner.report.style import STYLE

# More lines than this say nothing; then the sum is drawn alone.
MOST_LINES = 6
# A mean over hardly anything is none; what falls into an interval may be a fraction of a row's turn.
LEAST_ROWS = 0.05
LATENCY_BARS = 36
PERCENTILES = (0.5, 0.9, 0.95, 0.99)
PHASE_COLORS = {phase: color for color, phase in enumerate((*PHASES, "other"))}
PHASE_MEANING = (
    "verify: passes of the target; draft: waiting for a draft that computes; hop: the rest of that waiting, the way there "
    "and back; idle: no rows; other: bookkeeping. Shares of the time of the targets."
)


def page(job: Job) -> str:
    summary = summary_of(job.account)
    body = tag(
        "body",
        _header(job, summary),
        tag(
            "main",
            _throughput(job),
            _phases(summary),
            _acceptance(summary),
            _candidates(job),
            _latency(job),
            _errors(job),
            placement(job.pinning),
            layouts(job.layouts),
            _what_ran(job),
        ),
        tag("footer", tag("p", f"Written by outrider {outrider.__version__}. This page needs no network.")),
    )
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("title", f"{job.name} · outrider"),
        tag("style", Markup(STYLE)),
    )
    return "<!DOCTYPE html>\n" + tag("html", head, body, lang="en")


def section(title: str, *children: object) -> Markup:
    return tag("section", tag("h2", title), *children)


def as_table(content: Markup) -> Markup:
    return tag("details", tag("summary", "as a table"), content)


def _header(job: Job, summary: dict[str, Any]) -> Markup:
    counts, seconds = job.counts, job.totals.get("seconds", 0.0)
    tokens = int(job.totals.get("tokens", 0))
    if job.running:
        state, kind = f"running, {counts.pending:,} rows to go", "running"
    elif counts.pending:
        state, kind = f"stopped with {counts.pending:,} rows to go; the same command resumes it", "stopped"
    elif counts.failed:
        state, kind = f"finished, {counts.failed:,} rows failed", "failed"
    else:
        state, kind = "finished", "finished"
    latencies = Latencies(job.account.get("latencies"))
    figures = [
        ("rows", f"{counts.done:,}", f"of {counts.rows:,} done, {counts.failed:,} failed"),
        ("tokens", f"{tokens:,}", f"in {duration(seconds)}"),
        ("tokens a second", number(tokens / seconds) if seconds else "none", "all replicas together"),
    ]
    if job.totals.get("proposed"):
        rate = 100 * job.totals["accepted"] / job.totals["proposed"]
        figures.append(("accepted", f"{rate:.0f}%", f"of {int(job.totals['proposed']):,} candidates"))
        figures.append(("tokens a round", f"{summary['tokens_per_round']:.2f}", f"mean k {summary['mean_k']:.1f}"))
    if latencies.count:
        figures.append(
            ("a row takes", duration(latencies.percentile(0.5)), f"95% within {duration(latencies.percentile(0.95))}")
        )
    return tag(
        "header",
        tag("h1", job.name),
        tag("p", tag("span", state, class_=f"state {kind}"), _updated(job)),
        tag(
            "dl",
            *(tag("div", tag("dt", name), tag("dd", value, tag("small", note))) for name, value, note in figures),
            class_="figures",
        ),
    )


def _updated(job: Job) -> str:
    updated = job.description.get("updated")
    return f" · last started {updated}" if updated else ""


def _series(job: Job) -> dict[int, Series]:
    replicas = job.account.get("replicas", {})
    return {int(number): Series.restored(COLUMNS, replica["series"]) for number, replica in replicas.items()}


def _throughput(job: Job) -> Markup:
    series = _series(job)
    end = max([job.totals.get("seconds", 0.0), *(_last(one) for one in series.values())], default=0.0)
    speeds = {name: _speeds(one, end) for name, one in series.items()}
    if not any(speeds.values()):
        return section("Throughput over time", tag("p", "Nothing has been measured yet."))
    total = _sum_of(list(series.values()), end)
    lines = [Line("all replicas", total, 0, filled=True)]
    if 1 < len(series) <= MOST_LINES:
        lines += [Line(f"replica {name}", points, replica_color(name)) for name, points in sorted(speeds.items())]
    rows: list[list[object]] = [[f"{x:.2f}", number(y)] for x, y in total]
    by_replica: list[list[object]] = [
        [
            f"replica {one['replica']}",
            f"{one['tokens']:,}",
            duration(one["seconds"]),
            number(one["tokens_per_second"]),
            f"{one['tokens_per_round']:.2f}",
            f"{one['mean_k']:.1f}",
            f"{100 * one['acceptance']:.0f}%",
        ]
        for one in summary_of(job.account)["replicas"]
    ]
    head = ["", "tokens", "up for", "tokens/s", "tokens a round", "mean k", "accepted"]
    return section(
        "Throughput over time",
        tag("p", "Committed tokens a second, over the time in which the job ran, without pauses between its runs."),
        line_chart("Throughput", "Tokens a second over the seconds of the job", lines, "tokens/s", end),
        legend([(line.name, line.color) for line in lines]) if len(lines) > 1 else "",
        as_table(table(["middle of the interval (s)", "tokens/s"], rows)),
        table(head, by_replica),
    )


def _last(series: Series) -> float:
    """A series reaches at least to the beginning of its last interval."""
    return max(0, len(series.points) - 1) * series.interval


def _width(series: Series, index: int, end: float) -> float:
    """How much of an interval has been lived through; the last one is under way."""
    return min(series.interval, end - index * series.interval)


def _speeds(series: Series, end: float) -> list[tuple[float, float]]:
    found = []
    for index, point in enumerate(series.points):
        width = _width(series, index, end)
        # What is left of an interval that has hardly begun is no measurement.
        if width >= 0.2 * series.interval:
            found.append((index * series.interval + width / 2, point[COLUMNS.index("tokens")] / width))
    return found


def _sum_of(many: Sequence[Series], end: float) -> list[tuple[float, float]]:
    """The replicas together, in intervals as long as the longest of theirs."""
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


def _phases(summary: dict[str, Any]) -> Markup:
    if not any(summary["time"].values()):
        return Markup("")
    bars = [(f"replica {one['replica']}", one["time"]) for one in summary["replicas"]]
    if len(bars) > 1:
        bars = [("all", summary["time"]), *bars]
    rows: list[list[object]] = [[name, *(f"{100 * shares[phase]:.1f}%" for phase in PHASE_COLORS)] for name, shares in bars]
    return section(
        "Time by phase",
        tag("p", PHASE_MEANING),
        stacked_bars("Time by phase", "Shares of each target's time", bars[:40], PHASE_COLORS),
        legend(list(PHASE_COLORS.items())),
        as_table(table(["", *PHASE_COLORS], rows)),
    )


def _acceptance(summary: dict[str, Any]) -> Markup:
    lengths = summary["accepted_lengths"]
    total = sum(lengths)
    if not total:
        return section("Accepted lengths", tag("p", "No candidates were proposed."))
    longest = max(length for length, count in enumerate(lengths) if count)
    names = [f"{length} or more" if length == len(lengths) - 1 else str(length) for length in range(longest + 1)]
    bars = [
        Bar(name, 100 * lengths[length] / total, f"{name}: {lengths[length]:,} times, {100 * lengths[length] / total:.1f}%")
        for length, name in enumerate(names)
    ]
    rows: list[list[object]] = [[bar.label, f"{lengths[at]:,}", f"{bar.value:.1f}%"] for at, bar in enumerate(bars)]
    mean = sum(length * count for length, count in enumerate(lengths)) / total
    return section(
        "Accepted lengths",
        tag(
            "p",
            f"How many of a row's candidates held in a round, in the {total:,} turns in which some were proposed; "
            f"{mean:.2f} on average. The target adds a token of its own to each.",
        ),
        bar_chart("Accepted lengths", "Turns by accepted candidates", bars, "share", "accepted candidates", _percent),
        as_table(table(["accepted", "turns", "share"], rows)),
    )


def _percent(value: float) -> str:
    return f"{value:g}%"


def _candidates(job: Job) -> Markup:
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
            lines.append(Line(f"replica {name}", points, replica_color(name)))
    if not lines:
        return Markup("")
    rows: list[list[object]] = [[f"{x:.2f}", line.name, f"{k:.2f}"] for line in lines for x, k in line.points]
    note = f" Shown are the first {MOST_LINES} replicas." if len(series) > MOST_LINES else ""
    return section(
        "k over time",
        tag("p", f"How many candidates a row was asked for, on average over the rows that could have some.{note}"),
        line_chart("k over time", "Mean number of candidates asked for", lines, "k", end),
        legend([(line.name, line.color) for line in lines]) if len(lines) > 1 else "",
        as_table(table(["middle of the interval (s)", "replica", "k"], rows, numeric_from=2)),
    )


def _latency(job: Job) -> Markup:
    latencies = Latencies(job.account.get("latencies"))
    if not latencies.count:
        return section("Latency of a row", tag("p", "No row has ended yet."))
    steps = latencies.histogram(LATENCY_BARS)
    bars = [Bar(duration(low), count, f"{duration(low)} to {duration(high)}: {count:,} rows") for low, high, count in steps]
    rows: list[list[object]] = [
        [f"{duration(low)} to {duration(high)}", f"{count:,}"] for low, high, count in steps if count
    ]
    heads = [f"{100 * share:g}% within" for share in PERCENTILES]
    shares: list[object] = [duration(latencies.percentile(share)) for share in PERCENTILES]
    return section(
        "Latency of a row",
        tag("p", f"From a row's entry into the batch to its end; {latencies.count:,} rows. Steps grow by a fixed ratio."),
        bar_chart("Latency of a row", "Rows by the time they took", bars, "rows", "time, from", number),
        as_table(table(["time", "rows"], rows)),
        table(["", *heads], [["rows", *shares]]),
    )


def _errors(job: Job) -> Markup:
    if not job.errors:
        return section("Errors", tag("p", "No row has failed."))
    rows: list[list[object]] = [
        [kind.code, f"{kind.rows:,}", kind.message, ", ".join(kind.examples)] for kind in job.errors
    ]
    return section(
        "Errors by kind",
        table(["kind", "rows", "message of the first", "such as"], rows, numeric_from=9),
        tag("p", "All of them stand in errors.jsonl."),
    )


def _what_ran(job: Job) -> Markup:
    description = job.description
    spec, identity = description.get("spec", {}), description.get("identity", {})
    path = description.get("numeric_path") or {}
    target, draft = description.get("target", {}), description.get("draft", {})
    draft_name = draft.get("name", "") if isinstance(draft, dict) else draft
    facts: list[tuple[str, object]] = [
        ("target", _join(target.get("name"), identity.get("engine"), identity.get("precision"))),
        ("draft", _join(draft_name, None if not isinstance(draft, dict) else f"precision {spec.get('draft_precision')}")),
        ("candidates (k)", spec.get("draft_tokens")),
        ("batch", spec.get("batch")),
        ("sampling", _join(*(f"{key} {spec[key]}" for key in ("temperature", "top_p", "top_k", "seed") if key in spec))),
        ("input", _join(spec.get("input"), _short(identity.get("input")))),
        ("model digest", _short(identity.get("model"))),
        ("numeric path", _join(*(f"{key} {value}" for key, value in path.items()))),
        ("versions", _join(f"outrider {description.get('outrider')}", f"Python {description.get('python')}")),
        ("deaths", _join(*(f"{int(job.totals.get(f'{who}_deaths', 0))} of {who}s" for who in ("target", "draft")))),
    ]
    rows: list[list[object]] = [[name, value] for name, value in facts if value not in (None, "")]
    whole = {key: value for key, value in description.items() if key not in ("over_time", "pinning")}
    return section(
        "What ran",
        table(["", ""], rows, numeric_from=9),
        tag("details", tag("summary", "all of job.json"), tag("pre", json.dumps(whole, indent=2, ensure_ascii=False))),
    )


def _join(*parts: object) -> str:
    return ", ".join(str(part) for part in parts if part not in (None, ""))


def _short(digest: str | None) -> str | None:
    return f"{digest[:16]}…" if digest and len(digest) > 20 else digest
