"""Charts of report.html: the positions of their parts, and escaped text."""

from __future__ import annotations

from itertools import pairwise
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.runner.report.charts import (
    HEIGHT,
    WIDTH,
    Bar,
    ChartLine,
    Figure,
    bar_chart,
    duration,
    line_chart,
    number,
    stacked_bars,
    ticks,
    time_ticks,
)
from outrider.runner.report.render import environment
from outrider.runner.report.sections import Table

ATTACK = '<script>alert("1")</script>&\''


def render_macro(name: str, given: object) -> str:
    return str(getattr(environment().get_template("macros.html").module, name)(given))


def drawn(figure: Figure) -> ElementTree.Element:
    return ElementTree.fromstring(render_macro("figure", figure))


def test_tables_name_their_columns_and_rows_and_whatever_stands_in_them_is_text() -> None:
    made = render_macro("table", Table(["name", ATTACK], [[ATTACK, "3"], ["b", [ATTACK]], ["c", []]]))
    assert "<script" not in made
    parsed = ElementTree.fromstring(made)
    assert [cell.get("scope") for cell in parsed.iter("th")] == ["col", "col", "row", "row", "row"]
    assert [cell.text for cell in parsed.iter("th")] == ["name", ATTACK, ATTACK, "b", "c"]
    assert ["".join(cell.itertext()) for cell in parsed.iter("td")] == ["3", ATTACK, "yes"]
    assert [cell.get("class") for cell in parsed.iter("td")] == ["number"] * 3


@given(st.floats(min_value=0, max_value=1e12, allow_nan=False))
def test_ticks_are_few_and_reach_far_enough(highest: float) -> None:
    found = ticks(highest)
    assert found[0] == 0 and found[-1] >= highest * 0.99999
    assert 2 <= len(found) <= 7


@given(st.floats(min_value=0.01, max_value=1e7, allow_nan=False))
def test_times_are_marked_at_moments_that_have_passed(highest: float) -> None:
    found = time_ticks(highest)
    assert found[0] == 0 and found[-1] <= highest * 1.001
    assert len(found) <= 7 or highest > 3600 * 30 * 6


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(0, "0"), (0.0123, "12.3 ms"), (0.9999, "1 s"), (5.25, "5.25 s"), (119, "119 s"), (5400, "90 min"), (86400, "24 h")],
)
def test_durations(seconds: float, said: str) -> None:
    assert duration(seconds) == said


def test_numbers() -> None:
    assert [number(value) for value in (0, 0.1234, 5, 12.34, 10.0, 1234.5)] == ["0", "0.123", "5", "12.3", "10", "1,234"]


def positions(chart: ElementTree.Element) -> list[tuple[float, float]]:
    line = chart.find(".//polyline")
    assert line is not None
    return [(float(pair.split(",")[0]), float(pair.split(",")[1])) for pair in line.attrib["points"].split()]


def test_a_line_goes_where_its_points_are() -> None:
    chart = drawn(line_chart("Speed", "of it", [ChartLine(ATTACK, [(0, 0), (50, 100), (100, 50)])], "tok/s", 100))
    (x0, y0), (x1, y1), (x2, y2) = positions(chart)
    assert (x1 - x0) == pytest.approx(x2 - x1, abs=0.2)
    assert (y0 - y1) == pytest.approx(2 * (y0 - y2), abs=0.3)
    svg = chart.find("svg")
    assert svg is not None and svg.get("role") == "img"
    assert [child.text for child in svg][:2] == ["Speed", "of it"]
    titles = [title.text for title in chart.iter("title")]
    assert f"{ATTACK}: 100 at 50 s" in titles


@given(
    st.lists(st.tuples(st.floats(0, 1e6), st.floats(0, 1e9)), max_size=30),
    st.floats(0, 1e6),
)
def test_nothing_is_drawn_outside_the_chart(points: list[tuple[float, float]], end: float) -> None:
    end = max([end, *(x for x, _ in points)])
    chart = drawn(line_chart("a", "b", [ChartLine("c", sorted(points), filled=True)], "d", end))
    for circle in chart.iter("circle"):
        assert 0 <= float(circle.attrib["cx"]) <= WIDTH
        assert 0 <= float(circle.attrib["cy"]) <= HEIGHT


def test_bars_are_as_high_as_their_values() -> None:
    chart = drawn(bar_chart("a", "b", [Bar("0", 10, "ten"), Bar("1", 40, ATTACK), Bar("2", 0, "-")], "y", "x"))
    heights = [float(bar.attrib["height"]) for bar in chart.iter("rect")]
    assert heights[1] == pytest.approx(4 * heights[0], abs=0.5)
    assert heights[2] == 0
    assert [title.text for title in chart.iter("title")][1:] == ["ten", ATTACK, "-"]


def test_shares_lie_end_to_end() -> None:
    shares = {"verify": 0.5, "draft": 0.3, "idle": 0.2}
    chart = drawn(stacked_bars("a", "b", [("one", shares)], {"verify": 0, "draft": 1, "idle": 2}))
    bars = [(float(bar.attrib["x"]), float(bar.attrib["width"])) for bar in chart.iter("rect")]
    for (x, width), (after, _) in pairwise(bars):
        assert x + width == pytest.approx(after, abs=0.2)
    assert bars[0][1] == pytest.approx(2.5 * bars[2][1], abs=0.5)
