"""The race's table and chart."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Any

from peers_lanes import Lane

from outrider.runner.bench.table import first_difference, markdown


def figures(lanes: list[Lane], reference: str) -> list[dict[str, Any]]:
    plain = {lane.entry.name: lane for lane in lanes if lane.mode == "plain"}
    rows = []
    for lane in lanes:
        written = lane.written / len(lane.seconds)
        rates = sorted(written / seconds for seconds in lane.seconds)
        own = plain.get(lane.entry.name)
        base = None if own is None else median(own.seconds)
        rows.append(
            {
                "engine": lane.entry.name,
                "mode": lane.mode,
                "tokens_per_second": median(rates),
                "lowest": rates[0],
                "highest": rates[-1],
                "tokens_per_pass": lane.written / lane.passes,
                "speedup": None if base is None else base / median(lane.seconds),
                "same_as_own_plain": None if own is None else same(lane, own),
                "same_as_reference": same(lane, plain[reference]) if reference in plain else None,
                "repeatable": not lane.unsteady,
                "seconds": lane.seconds,
                "tokens": lane.tokens,
            }
        )
    return rows


def same(lane: Lane, other: Lane) -> str:
    """How many of the prompts got the same tokens, and where the first of the others parts."""
    parts = [first_difference(lane.tokens[number], other.tokens[number]) for number in lane.tokens]
    differing = [part for part in parts if part is not None]
    return f"{len(parts) - len(differing)}/{len(parts)}" + (f", from token {min(differing)}" if differing else "")


def table(rows: list[dict[str, Any]], reference: str) -> str:
    header = ["Engine", "Mode", "Tokens/Sec", "Lowest to highest", "Tokens/Round", "Against own plain", "Same as own plain"]
    cells = [
        [
            row["engine"],
            row["mode"],
            f"{row['tokens_per_second']:.2f}",
            f"{row['lowest']:.2f} to {row['highest']:.2f}",
            f"{row['tokens_per_pass']:.2f}",
            "-" if row["speedup"] is None else f"{row['speedup']:.2f}",
            row["same_as_own_plain"] or "-",
            row["same_as_reference"] or "-",
        ]
        for row in rows
    ]
    return markdown([*header, f"Same as {reference}"], cells)


def chart(path: Path, rows: list[dict[str, Any]], title: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "outrider", "font.size": 10}
    from matplotlib import pyplot

    labels = [f"{row['engine']}, {row['mode']}" for row in rows][::-1]
    rates = [row["tokens_per_second"] for row in rows][::-1]
    spread = [
        [row["tokens_per_second"] - row["lowest"] for row in rows][::-1],
        [row["highest"] - row["tokens_per_second"] for row in rows][::-1],
    ]
    colours = ["#0b6e99" if label.startswith("outrider") else "#8a8f98" for label in labels]
    figure, axes = pyplot.subplots(figsize=(8.0, 1.2 + 0.36 * len(rows)), layout="constrained")
    bars = axes.barh(labels, rates, color=colours, xerr=spread, error_kw={"elinewidth": 1, "ecolor": "#333333"})
    axes.bar_label(bars, labels=[f"{rate:.1f}" for rate in rates], padding=8, fontsize=8)
    axes.set_xlabel("tokens a second, prompt included: median round, lowest to highest")
    axes.set_title(title, fontsize=10)
    axes.margins(x=0.12)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
