"""The geometry of charts: pure functions. The template ``macros.html`` draws them as inline SVG.

Colours come from the page's style sheet, which has a light and a dark theme. Every chart has a title and a description, and
every mark a tooltip; the page has each chart as a table, too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

WIDTH, HEIGHT = 720, 250
LEFT, RIGHT, TOP, BOTTOM = 56, 14, 30, 40
SERIES = 8


def replica_color(replica: int) -> int:
    """A replica's color, the same in every chart; color 0 is that of all replicas together."""
    return 1 + replica % (SERIES - 1)


@dataclass(frozen=True, slots=True)
class ChartLine:
    """``color``: the number of one of the page's series colors, from 0."""

    name: str
    points: Sequence[tuple[float, float]]
    color: int = 0
    filled: bool = False


@dataclass(frozen=True, slots=True)
class Bar:
    label: str
    value: float
    hint: str


@dataclass(frozen=True, slots=True)
class Rule:
    """A line of the grid, or of an axis."""

    x1: float
    y1: float
    x2: float
    y2: float
    kind: str


@dataclass(frozen=True, slots=True)
class Label:
    words: str
    x: float
    y: float
    kind: str
    anchor: str = ""


@dataclass(frozen=True, slots=True)
class Point:
    x: float
    y: float
    hint: str


@dataclass(frozen=True, slots=True)
class DrawnLine:
    """``area``: the path around the area below a filled line; "" for other lines."""

    name: str
    points: Sequence[Point]
    color: int
    area: str = ""


@dataclass(frozen=True, slots=True)
class DrawnBar:
    x: float
    y: float
    width: float
    height: float
    color: int
    hint: str
    round: float = 0.0


@dataclass(slots=True)
class Figure:
    name: str
    description: str
    height: float = HEIGHT
    width: int = WIDTH
    rules: list[Rule] = field(default_factory=list)
    bars: list[DrawnBar] = field(default_factory=list)
    lines: list[DrawnLine] = field(default_factory=list)
    labels: list[Label] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class LegendEntry:
    name: str
    color: int


def number(value: float) -> str:
    """A number for axes and tables, with about three digits."""
    if value == 0:
        return "0"
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}".removesuffix(".0") if abs(value) >= 10 else f"{value:.3g}"


def duration(seconds: float) -> str:
    if seconds == 0:
        return "0"
    if seconds < 0.9995:
        return f"{1000 * seconds:.3g} ms"
    if seconds < 120:
        return f"{seconds:.3g} s"
    if seconds < 7200:
        return f"{seconds / 60:.3g} min"
    return f"{seconds / 3600:.3g} h"


def ticks(highest: float, wanted: int = 5) -> list[float]:
    """Round values from 0 up to at least ``highest``."""
    if highest < 1e-9 or not math.isfinite(highest):
        return [0.0, 1.0]
    power = 10 ** math.floor(math.log10(highest / wanted))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor * wanted >= highest * 0.999999)
    return [step * count for count in range(math.ceil(highest / step * 0.999999) + 1)]


def time_ticks(highest: float, wanted: int = 6) -> list[float]:
    """Like ``ticks``, in steps that suit seconds, minutes and hours; the last may lie below ``highest``."""
    for unit in (1, 60, 3600):
        for factor in (1, 2, 5, 10, 15, 20, 30):
            if unit * factor * wanted >= highest >= 1:
                return [float(unit * factor * count) for count in range(int(highest / (unit * factor)) + 1)]
    found = ticks(highest, wanted)
    return [value for value in found if value <= highest * 1.000001]


def line_chart(
    name: str,
    description: str,
    lines: Sequence[ChartLine],
    y_label: str,
    end: float,
    y_text: Callable[[float], str] = number,
) -> Figure:
    """Lines over the time from 0 to ``end`` seconds."""
    y_ticks = ticks(max((y for line in lines for _, y in line.points), default=0.0))
    end = end or 1.0
    floor = HEIGHT - BOTTOM

    def across(x: float) -> float:
        return round(LEFT + x / end * (WIDTH - LEFT - RIGHT), 1)

    def down(y: float) -> float:
        return _down(y, y_ticks[-1])

    figure = Figure(name, description)
    _add_y_axis(figure, y_ticks, y_text, y_label)
    for x in time_ticks(end):
        anchor = "end" if across(x) > WIDTH - RIGHT - 24 else "middle"
        figure.labels.append(Label(duration(x), across(x), floor + 18, "tick", anchor))
        figure.rules.append(Rule(across(x), floor, across(x), floor + 4, "axis"))
    for line in lines:
        points = [Point(across(x), down(y), f"{line.name}: {y_text(y)} at {duration(x)}") for x, y in line.points]
        area = ""
        if line.filled and points:
            path = " ".join(f"L{point.x},{point.y}" for point in points)
            area = f"M{points[0].x},{down(0)} {path} L{points[-1].x},{down(0)} Z"
        figure.lines.append(DrawnLine(line.name, points, line.color % SERIES, area))
    return figure


def bar_chart(
    name: str, description: str, bars: Sequence[Bar], y_label: str, x_label: str, y_text: Callable[[float], str] = number
) -> Figure:
    """Vertical bars that share the width; if there are many, only every n-th is labelled."""
    y_ticks = ticks(max((bar.value for bar in bars), default=0.0))
    room = (WIDTH - LEFT - RIGHT) / max(1, len(bars))
    every = max(1, math.ceil(max((len(bar.label) for bar in bars), default=1) * 7.5 / room))
    floor = _down(0, y_ticks[-1])
    figure = Figure(name, description)
    _add_y_axis(figure, y_ticks, y_text, y_label)
    for index, bar in enumerate(bars):
        left, top = LEFT + index * room, _down(bar.value, y_ticks[-1])
        x, width = round(left + 0.12 * room, 1), round(0.76 * room, 1)
        figure.bars.append(DrawnBar(x, top, width, round(floor - top, 1), 0, bar.hint, round=1.5))
        if index % every == 0:
            figure.labels.append(Label(bar.label, round(left + room / 2, 1), HEIGHT - BOTTOM + 16, "tick", "middle"))
    figure.labels.append(Label(x_label, WIDTH - RIGHT, HEIGHT - 6, "label", "end"))
    return figure


def stacked_bars(
    name: str, description: str, bars: Sequence[tuple[str, Mapping[str, float]]], colors: Mapping[str, int]
) -> Figure:
    """Horizontal bars from 0 to 100%, each divided into named shares."""
    thick, gap, left = 24, 12, 92
    figure = Figure(name, description, height=4 + len(bars) * (thick + gap))
    for index, (label, shares) in enumerate(bars):
        top = 4 + index * (thick + gap)
        figure.labels.append(Label(label, left - 8, top + 16, "label", "end"))
        at = 0.0
        for part, share in shares.items():
            x, width = left + at * (WIDTH - left - RIGHT), share * (WIDTH - left - RIGHT)
            hint = f"{label}: {part} {100 * share:.1f}%"
            figure.bars.append(DrawnBar(round(x, 1), top, round(width, 1), thick, colors[part] % SERIES, hint))
            if width > 42:
                inside = Label(f"{100 * share:.0f}%", round(x + width / 2, 1), top + 16.5, "inside", "middle")
                figure.labels.append(inside)
            at += share
    return figure


def legend(entries: Sequence[tuple[str, int]]) -> list[LegendEntry]:
    return [LegendEntry(name, color % SERIES) for name, color in entries]


def _down(y: float, highest: float) -> float:
    return round(HEIGHT - BOTTOM - y / highest * (HEIGHT - TOP - BOTTOM), 1)


def _add_y_axis(figure: Figure, y_ticks: Sequence[float], y_text: Callable[[float], str], label: str) -> None:
    for y in y_ticks:
        at = _down(y, y_ticks[-1])
        figure.rules.append(Rule(LEFT, at, WIDTH - RIGHT, at, "axis" if y == 0 else "grid"))
        figure.labels.append(Label(y_text(y), LEFT - 8, at + 4, "tick", "end"))
    figure.labels.append(Label(label, 0, 14, "label"))
