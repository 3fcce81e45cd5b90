"""The parts of report.html's sections: plain values that the templates render."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from outrider.runner.report.charts import Figure, LegendEntry

# A cell is text, or the sentences about how an actor's pinning differs from what it asked for (none: it does not).
Cell = str | Sequence[str]


@dataclass(frozen=True, slots=True)
class Table:
    """The first cell of a row is its heading; columns from ``numeric_from`` on are numbers."""

    head: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    numeric_from: int = 1


@dataclass(frozen=True, slots=True)
class CoreUser:
    words: str
    color: int


@dataclass(frozen=True, slots=True)
class Core:
    """``differs``: an actor asked for the core and did not get it, or got it unasked."""

    number: int
    users: Sequence[CoreUser]
    differs: bool


@dataclass(frozen=True, slots=True)
class HostCores:
    name: str
    cores: Sequence[Core]


@dataclass(frozen=True, slots=True)
class Section:
    """``chart_table`` (the chart's values) and ``source`` (JSON) are folded until the reader opens them."""

    title: str
    text: str = ""
    figure: Figure | None = None
    legend: Sequence[LegendEntry] = ()
    chart_table: Table | None = None
    hosts: Sequence[HostCores] = ()
    table: Table | None = None
    source: str = ""
    note: str = ""
