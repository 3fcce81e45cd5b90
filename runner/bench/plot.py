"""The benchmark's chart. matplotlib is optional, and checked for before anything is measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from outrider.runner.bench.table import Measured
from outrider.workers.errors import UsageError

SUFFIXES = (".svg", ".png")
PLAIN, ASSISTED = "#8a8f98", "#0b6e99"


def check_plot(path: Path) -> None:
    if path.suffix.lower() not in SUFFIXES:
        raise UsageError(f"--plot: {path} must end in .svg or .png")
    if find_spec("matplotlib") is None:
        raise UsageError("--plot needs matplotlib, which is not installed: pip install 'outrider[plot]'")


def plot(path: Path, title: str, modes: Mapping[str, Sequence[Measured]], compared: Sequence[dict[str, Any]]) -> None:
    """Draw the speed-ups of a comparison, or without one the tokens per second."""
    import matplotlib

    matplotlib.use("Agg")
    # Text stays text in an SVG, and two charts of the same figures are the same bytes.
    matplotlib.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "outrider", "font.size": 10}
    from matplotlib import pyplot

    rows = next(iter(modes.values()))
    labels = [f"{row.prompt_length}+{row.new_tokens}" for row in rows]
    if compared:
        series = {
            "decoding": [row["speedup_decoding"] or 0.0 for row in compared],
            "whole request": [row["speedup_total"] or 0.0 for row in compared],
        }
    else:
        series = {name: [row.tokens_a_second or 0.0 for row in measured] for name, measured in modes.items()}
    figure, axes = pyplot.subplots(figsize=(max(6.0, 1.2 + 0.75 * len(labels)), 4.2), layout="constrained")
    width = 0.8 / len(series)
    for index, ((name, values), colour) in enumerate(zip(series.items(), (ASSISTED, PLAIN), strict=False)):
        places = [place + (index - (len(series) - 1) / 2) * width for place in range(len(labels))]
        bars = axes.bar(places, values, width * 0.92, label=name, color=colour)
        axes.bar_label(bars, fmt="%.2f" if compared else "%.1f", fontsize=7, padding=2)
    if compared:
        axes.axhline(1.0, color="#444444", linewidth=1, linestyle="--")
    axes.set_xticks(range(len(labels)), labels, rotation=30 if len(labels) > 6 else 0)
    axes.set_xlabel("prompt + new tokens of each example")
    axes.set_ylabel("assisted against plain, times as fast" if compared else "tokens a second in decoding")
    axes.set_title(title, fontsize=10)
    axes.margins(y=0.12)
    axes.spines[["top", "right"]].set_visible(False)
    if len(series) > 1:
        axes.legend(frameon=False, ncols=2, loc="upper right")
    try:
        figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix.lower() == ".svg" else None)
    except OSError as error:
        raise UsageError(f"--plot: {path} cannot be written: {error.strerror}") from None
    finally:
        pyplot.close(figure)
