"""The live display of a job, and the summary at its end."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Protocol, Self

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from outrider.runner.printable import printable
from outrider.runner.report.counters import JobCounters
from outrider.runner.report.pace import left_words, speed_words
from outrider.runner.report.summary_lines import speculation_lines
from outrider.runner.report.words import accepted_words, read_again_words, share

PLAIN_LINE_SECONDS = 10.0
DEATHS = {"target": "target_deaths", "draft": "draft_deaths", "Ray": "ray_deaths"}


class Watcher(Protocol):
    """Receives a job's messages and counters while it runs."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def say(self, text: str) -> None:
        """Print a message that stays."""

    def show(self, counters: JobCounters) -> None:
        """Show the job's progress; called many times a second."""


class Display:
    """A live progress bar on a terminal; without a terminal a line every ten seconds."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._last_line = time.monotonic()
        self._bar = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rates]}"),
            TimeElapsedColumn(),
            TextColumn("{task.fields[left]}"),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("starting", total=None, rates="", left="")
        self._notes = 0

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._bar.stop()

    def say(self, text: str) -> None:
        self._console.print(printable(text), highlight=False, soft_wrap=True, markup=False)

    def show(self, counters: JobCounters) -> None:
        for note in counters.notes[self._notes :]:
            self.say(f"note: {note}")
        self._notes = len(counters.notes)
        self._bar.update(
            self._task,
            description=_stage(counters),
            completed=counters.done + counters.failed,
            total=counters.rows,
            rates=rates(counters),
            left=left(counters),
        )
        if not self._console.is_terminal and time.monotonic() - self._last_line > PLAIN_LINE_SECONDS:
            self._last_line = time.monotonic()
            self.say(progress_line(counters))


def progress_line(counters: JobCounters) -> str:
    so_far = f"{counters.done + counters.failed}/{counters.rows} rows"
    return f"{_stage(counters)}: {so_far}, {rates(counters)}, {left(counters)}"


def _stage(counters: JobCounters) -> str:
    if counters.without_cores:
        return "waiting for cores"
    return "running" if counters.replicas_up else "loading models"


def rates(counters: JobCounters) -> str:
    candidates = {"proposed": counters.proposed, "accepted": counters.accepted}
    return f"{speed_words(counters.pace.rates())}{accepted_words(candidates)}"


def left(counters: JobCounters) -> str:
    return left_words(counters.pace.rates(), counters.rows - counters.done - counters.failed)


def summary_table(summary: dict[str, Any], over_time: Sequence[dict[str, Any]], directory: str) -> Table:
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    speed = summary["tokens"] / summary["seconds"] if summary["seconds"] else 0.0
    table.add_row("rows", f"{summary['rows']:,} ({summary['failed']:,} failed)")
    table.add_row("tokens", f"{summary['tokens']:,} in {summary['seconds']:.1f} s")
    rows = summary["done"] / summary["seconds"] if summary["seconds"] else 0.0
    table.add_row("speed", f"{speed:,.1f} tokens/s, {rows:,.2f} rows/s")
    if summary.get("prompt_tokens"):
        read = summary["prompt_tokens"] / summary["seconds"] if summary["seconds"] else 0.0
        table.add_row("prompts", f"{summary['prompt_tokens']:,} tokens, {read:,.1f} tokens/s")
    if read_again := read_again_words(summary):
        table.add_row("read twice", read_again)
    accepted = f"{summary['accepted']:,} of {summary['proposed']:,} candidates"
    if summary["proposed"]:
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
    # Of in.jsonl:100: it would make an emoji.
    return Console(file=sys.stderr, emoji=False)
