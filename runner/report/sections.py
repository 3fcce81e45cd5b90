"""What the sections of report.html are made of: plain values, which the templates draw and escape."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from outrider.runner.report.charts import Figure, LegendEntry

# A cell is text, or the sentences that say what an actor has not got of what it asked for (none: it has all).
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
    """``astray``: somebody asked for it and has it not, or has it unasked."""

    number: int
    users: Sequence[CoreUser]
    astray: bool


@dataclass(frozen=True, slots=True)
class HostCores:
    name: str
    cores: Sequence[Core]


@dataclass(frozen=True, slots=True)
class Section:
    """``behind`` is the chart as a table, shown where that is asked for; ``source`` likewise, as it stands."""

    title: str
    text: str = ""
    figure: Figure | None = None
    legend: Sequence[LegendEntry] = ()
    behind: Table | None = None
    hosts: Sequence[HostCores] = ()
    table: Table | None = None
    source: str = ""
    note: str = ""
