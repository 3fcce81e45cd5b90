"""What a person sees while a job runs, and the summary at its end."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from outrider.runner.printable import printable
from outrider.runner.report.summary_lines import speculation_lines
from outrider.runner.report.totals import Totals

PLAIN_LINE_SECONDS = 10.0
DEATHS = {"target": "target_deaths", "draft": "draft_deaths", "Ray": "ray_deaths"}


class Display:
    """A live progress bar on a terminal; a line now and then where there is none."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._last_line = time.monotonic()
        self._bar = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rates]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("starting", total=None, rates="")
        self._notes = 0

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._bar.stop()

    def say(self, text: str) -> None:
        self._console.print(printable(text), highlight=False, soft_wrap=True, markup=False)

    def show(self, totals: Totals) -> None:
        for note in totals.notes[self._notes :]:
            self.say(f"note: {note}")
        self._notes = len(totals.notes)
        description = "running" if totals.replicas_up else "loading models"
        self._bar.update(
            self._task,
            description=description,
            completed=totals.done + totals.failed,
            total=totals.rows,
            rates=rates(totals),
        )
        if not self._console.is_terminal and time.monotonic() - self._last_line > PLAIN_LINE_SECONDS:
            self._last_line = time.monotonic()
            self.say(f"{description}: {totals.done + totals.failed}/{totals.rows} rows, {rates(totals)}")


def rates(totals: Totals) -> str:
    speed = totals.tokens / totals.seconds if totals.seconds else 0.0
    return f"{speed:.0f} tok/s, {share(totals.accepted, totals.proposed)} accepted"


def share(part: float, whole: float) -> str:
    return f"{100 * part / whole:.0f}%" if whole else "none"


def summary_table(summary: dict[str, Any], over_time: Sequence[dict[str, Any]], directory: str) -> Table:
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    speed = summary["tokens"] / summary["seconds"] if summary["seconds"] else 0.0
    table.add_row("rows", f"{summary['rows']:,} ({summary['failed']:,} failed)")
    table.add_row("tokens", f"{summary['tokens']:,} in {summary['seconds']:.1f} s")
    table.add_row("speed", f"{speed:,.1f} tokens/s")
    accepted = f"{summary['accepted']:,} of {summary['proposed']:,} candidates"
    table.add_row("acceptance", f"{share(summary['accepted'], summary['proposed'])} ({accepted})")
    for name, value in speculation_lines(summary, over_time):
        table.add_row(name, value)
    if summary.get("prompt_tokens_reused"):
        reused = f"{summary['prompt_tokens_reused']:,} of {summary['prompt_tokens']:,} tokens"
        table.add_row("prompts shared", f"{share(summary['prompt_tokens_reused'], summary['prompt_tokens'])} ({reused})")
    if summary.get("resumed_tokens"):
        table.add_row("resumed", f"{summary['resumed_tokens']:,} tokens of rows under way were not written again")
    if summary["near_ties"]:
        table.add_row("near ties", f"{summary['near_ties']:,} choices lay within rounding of another")
    if died := ", ".join(f"{what} {count:,}" for what, name in DEATHS.items() if (count := summary.get(name))):
        table.add_row("deaths", died)
    table.add_row("job", escape(printable(directory)))
    return table


def console() -> Console:
    return Console(file=sys.stderr)
