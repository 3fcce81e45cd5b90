"""Charts as inline SVG: pure functions. Colours come from the page's style sheet, so that they follow light and dark.

Every chart carries a title and a description, and every mark a tooltip; the page puts a table beside it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from outrider.runner.report.markup import Markup, tag

WIDTH, HEIGHT = 720, 250
LEFT, RIGHT, TOP, BOTTOM = 56, 14, 30, 40
SERIES = 8


def replica_color(replica: int) -> int:
    """The same in every chart; the first color is for all replicas together."""
    return 1 + replica % (SERIES - 1)


@dataclass(frozen=True, slots=True)
class Line:
    """``color`` is one of the page's series, from 0."""

    name: str
    points: Sequence[tuple[float, float]]
    color: int = 0
    filled: bool = False


@dataclass(frozen=True, slots=True)
class Bar:
    label: str
    value: float
    hint: str


def number(value: float) -> str:
    """Short, for axes and tables."""
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
    name: str, description: str, lines: Sequence[Line], y_label: str, end: float, y_text: Callable[[float], str] = number
) -> Markup:
    """Lines over the time from 0 to ``end`` seconds."""
    y_ticks = ticks(max((y for line in lines for _, y in line.points), default=0.0))
    end = end or 1.0

    def across(x: float) -> float:
        return round(LEFT + x / end * (WIDTH - LEFT - RIGHT), 1)

    def down(y: float) -> float:
        return round(HEIGHT - BOTTOM - y / y_ticks[-1] * (HEIGHT - TOP - BOTTOM), 1)

    marks: list[Markup] = [_y_axis(y_ticks, down, y_text, y_label)]
    for x in time_ticks(end):
        anchor = "end" if across(x) > WIDTH - RIGHT - 24 else "middle"
        marks.append(tag("text", duration(x), x=across(x), y=HEIGHT - BOTTOM + 18, class_="tick", text_anchor=anchor))
        marks.append(tag("line", x1=across(x), x2=across(x), y1=HEIGHT - BOTTOM, y2=HEIGHT - BOTTOM + 4, class_="axis"))
    for line in lines:
        path = " ".join(f"{across(x)},{down(y)}" for x, y in line.points)
        color = f"series-{line.color % SERIES}"
        if line.filled and line.points:
            floor = down(0)
            first, last = across(line.points[0][0]), across(line.points[-1][0])
            area = f"M{first},{floor} L{path.replace(' ', ' L')} L{last},{floor} Z"
            marks.append(tag("path", d=area, class_=f"area {color}"))
        if len(line.points) > 1:
            marks.append(tag("polyline", tag("title", line.name), points=path, class_=f"line {color}"))
        else:
            marks.extend(tag("circle", cx=across(x), cy=down(y), r=4, class_=f"dot {color}") for x, y in line.points)
        # Wide enough to be hit, and unseen.
        marks.extend(
            tag(
                "circle",
                tag("title", f"{line.name}: {y_text(y)} at {duration(x)}"),
                cx=across(x),
                cy=down(y),
                r=5,
                class_="target",
            )
            for x, y in line.points
        )
    return _figure(name, description, marks, HEIGHT)


def bar_chart(
    name: str, description: str, bars: Sequence[Bar], y_label: str, x_label: str, y_text: Callable[[float], str] = number
) -> Markup:
    """Upright bars that share the width; where they are many, not every one is labelled."""
    y_ticks = ticks(max((bar.value for bar in bars), default=0.0))
    room = (WIDTH - LEFT - RIGHT) / max(1, len(bars))
    every = max(1, math.ceil(max((len(bar.label) for bar in bars), default=1) * 7.5 / room))

    def down(y: float) -> float:
        return round(HEIGHT - BOTTOM - y / y_ticks[-1] * (HEIGHT - TOP - BOTTOM), 1)

    marks: list[Markup] = [_y_axis(y_ticks, down, y_text, y_label)]
    for index, bar in enumerate(bars):
        left = LEFT + index * room
        marks.append(
            tag(
                "rect",
                tag("title", bar.hint),
                x=round(left + 0.12 * room, 1),
                y=down(bar.value),
                width=round(0.76 * room, 1),
                height=round(down(0) - down(bar.value), 1),
                rx=1.5,
                class_="bar series-0",
            )
        )
        if index % every == 0:
            marks.append(
                tag(
                    "text",
                    bar.label,
                    x=round(left + room / 2, 1),
                    y=HEIGHT - BOTTOM + 16,
                    class_="tick",
                    text_anchor="middle",
                )
            )
    marks.append(tag("text", x_label, x=WIDTH - RIGHT, y=HEIGHT - 6, class_="label", text_anchor="end"))
    return _figure(name, description, marks, HEIGHT)


def stacked_bars(
    name: str, description: str, bars: Sequence[tuple[str, Mapping[str, float]]], colors: Mapping[str, int]
) -> Markup:
    """One bar from 0 to 100% each, made of named shares."""
    thick, gap, left = 24, 12, 92
    marks = []
    for index, (label, shares) in enumerate(bars):
        top = 4 + index * (thick + gap)
        marks.append(tag("text", label, x=left - 8, y=top + 16, class_="label", text_anchor="end"))
        at = 0.0
        for part, share in shares.items():
            width = share * (WIDTH - left - RIGHT)
            x = left + at * (WIDTH - left - RIGHT)
            color = f"series-{colors[part] % SERIES}"
            hint = tag("title", f"{label}: {part} {100 * share:.1f}%")
            marks.append(
                tag("rect", hint, x=round(x, 1), y=top, width=round(width, 1), height=thick, class_=f"bar {color}")
            )
            if width > 42:
                middle = round(x + width / 2, 1)
                inside = f"{100 * share:.0f}%"
                marks.append(tag("text", inside, x=middle, y=top + 16.5, class_="inside", text_anchor="middle"))
            at += share
    return _figure(name, description, marks, 4 + len(bars) * (thick + gap))


def legend(entries: Sequence[tuple[str, int]]) -> Markup:
    return tag(
        "ul",
        *(
            tag("li", tag("span", class_=f"swatch series-{color % SERIES}", aria_hidden="true"), name)
            for name, color in entries
        ),
        class_="legend",
    )


def _y_axis(y_ticks: Sequence[float], down: Callable[[float], float], y_text: Callable[[float], str], label: str) -> Markup:
    lines = []
    for y in y_ticks:
        lines.append(tag("line", x1=LEFT, x2=WIDTH - RIGHT, y1=down(y), y2=down(y), class_="axis" if y == 0 else "grid"))
        lines.append(tag("text", y_text(y), x=LEFT - 8, y=down(y) + 4, class_="tick", text_anchor="end"))
    lines.append(tag("text", label, x=0, y=14, class_="label"))
    return tag("g", *lines)


def _figure(name: str, description: str, marks: Sequence[Markup], height: int) -> Markup:
    svg = tag(
        "svg",
        tag("title", name),
        tag("desc", description),
        *marks,
        viewBox=f"0 0 {WIDTH} {height}",
        role="img",
        aria_label=f"{name}. {description}",
    )
    return tag("div", svg, class_="chart")
