"""How fast a job has gone of late, and when it will be through by that."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from outrider.runner.counted import counted

# The past that the future is told by: long enough to hold rows of every length, short enough to notice a change.
WINDOW_SECONDS = 300.0
SECONDS_BETWEEN = 5.0
# Fewer rows say nothing.
LEAST_ROWS = 3


@dataclass(frozen=True, slots=True)
class Rates:
    """Of ``ended`` rows in ``seconds``, each a second."""

    seconds: float
    ended: int
    rows: float
    tokens: float
    prompt_tokens: float

    def left(self, pending: int) -> float | None:
        """Seconds until all rows have ended, if those to come are like these; None where that is not known."""
        return pending / self.rows if self.ended >= LEAST_ROWS and self.rows else None


class Pace:
    """Sums over all runs of the job, at moments of the last minutes, in seconds of the job."""

    def __init__(self, kept: list[list[float]] | None = None) -> None:
        self._points = [(float(s), int(ended), int(tokens), int(prompts)) for s, ended, tokens, prompts in kept or []]

    def go_on(self, ended: int, tokens: int) -> None:
        """From so many rows: those that had ended and are done again count once more, and not against the speed.

        From so many tokens, too: earlier versions counted those of rows that had ended, and not what targets had written.
        """
        if self._points:
            _, last, written, _ = self._points[-1]
            again, more = max(0, last - ended), tokens - written
            self._points = [(now, before - again, had + more, prompts) for now, before, had, prompts in self._points]

    def add(self, now: float, ended: int, tokens: float, prompt_tokens: float) -> None:
        point = (round(now, 3), ended, int(tokens), int(prompt_tokens))
        # Earlier versions kept some that the job's seconds, after a kill, have not come to.
        while self._points and self._points[-1][0] > point[0]:
            self._points.pop()
        # The last one moves on until it is far enough from the one before.
        if len(self._points) > 1 and self._points[-1][0] - self._points[-2][0] < SECONDS_BETWEEN:
            self._points[-1] = point
        else:
            self._points.append(point)
        while len(self._points) > 2 and self._points[1][0] <= now - WINDOW_SECONDS:
            del self._points[0]

    def rates(self) -> Rates | None:
        if len(self._points) < 2:
            return None
        (begin, rows, tokens, prompts), (end, *others) = self._points[0], self._points[-1]
        seconds = end - begin
        if seconds <= 0:
            return None
        ended, written, read = others[0] - rows, others[1] - tokens, others[2] - prompts
        return Rates(seconds, ended, ended / seconds, written / seconds, read / seconds)

    def record(self) -> list[list[float]]:
        return [list(point) for point in self._points]


def speed_words(rates: Rates | None) -> str:
    """The same words wherever a job's speed is told."""
    if rates is None:
        return "no speed known yet"
    rows = f"{rates.rows:,.1f}" if rates.rows >= 0.95 else f"{rates.rows:.2g}"
    return f"{rows} rows/s, {rates.tokens:,.0f} tok/s, prompts {rates.prompt_tokens:,.0f} tok/s"


def left_words(rates: Rates | None, pending: int) -> str:
    """Time left, and what that rests on."""
    left = None if rates is None else rates.left(pending)
    if rates is None or left is None:
        return "time left not known yet"
    rows = f"the {counted(rates.ended, 'row')} of the last {duration(rates.seconds)}"
    return f"about {duration(left)} left (by {rows})"


def duration(seconds: float) -> str:
    """As one says it: two units at most."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s" if whole < 600 and whole % 60 else f"{round(whole / 60)} min"
    hours, minutes = divmod(round(whole / 60), 60)
    if hours < 48:
        return f"{hours} h {minutes} min" if minutes else f"{hours} h"
    days, hours = divmod(hours, 24)
    return f"{days} d {hours} h" if hours else f"{days} d"


def pace_of(statistics: dict[str, Any] | None) -> Pace:
    """What the journal has kept."""
    return Pace((statistics or {}).get("pace"))
