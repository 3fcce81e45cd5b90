"""A job's recent speed, and the time left at that speed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from outrider.runner.counted import counted

# Speed is measured over this time: long enough for rows of all lengths, short enough to notice a change.
WINDOW_SECONDS = 300.0
SECONDS_BETWEEN = 5.0
# With fewer rows no time left is estimated.
LEAST_ROWS = 3


@dataclass(frozen=True, slots=True)
class Rates:
    """Rates per second over the last ``seconds``, in which ``ended`` rows have ended."""

    seconds: float
    ended: int
    rows: float
    tokens: float
    prompt_tokens: float

    def left(self, pending: int) -> float | None:
        """Estimated seconds until all rows have ended; None if unknown."""
        return pending / self.rows if self.ended >= LEAST_ROWS and self.rows else None


class Pace:
    """Points (seconds of the job, rows, tokens, prompt tokens), summed over all runs of the job, of the last minutes."""

    def __init__(self, kept: list[list[float]] | None = None) -> None:
        self._points = [(float(s), int(ended), int(tokens), int(prompts)) for s, ended, tokens, prompts in kept or []]

    def resume(self, ended: int, tokens: int) -> None:
        """Shift the points so that a resumed job begins with these counts.

        Rows that had ended but are done again are counted again, which must not lower the speed. Older versions counted
        only the tokens of ended rows.
        """
        if self._points:
            _, last, written, _ = self._points[-1]
            repeated, more = max(0, last - ended), tokens - written
            self._points = [(now, before - repeated, had + more, prompts) for now, before, had, prompts in self._points]

    def add(self, now: float, ended: int, tokens: float, prompt_tokens: float) -> None:
        point = (round(now, 3), ended, int(tokens), int(prompt_tokens))
        # Older versions kept points that are later than the job's seconds after a kill.
        while self._points and self._points[-1][0] > point[0]:
            self._points.pop()
        # The last point is replaced until it is SECONDS_BETWEEN after the one before it.
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
    """A job's speed, for live display and status."""
    if rates is None:
        return "no speed known yet"
    rows = f"{rates.rows:,.1f}" if rates.rows >= 0.95 else f"{rates.rows:.2g}"
    return f"{rows} rows/s, {rates.tokens:,.0f} tok/s, prompts {rates.prompt_tokens:,.0f} tok/s"


def left_words(rates: Rates | None, pending: int) -> str:
    """The time left, and the rows that the estimate is based on."""
    left = None if rates is None else rates.left(pending)
    if rates is None or left is None:
        return "time left not known yet"
    rows = f"the {counted(rates.ended, 'row')} of the last {spoken_duration(rates.seconds)}"
    return f"about {spoken_duration(left)} left (by {rows})"


def spoken_duration(seconds: float) -> str:
    """A duration in at most two units, such as "3 h 20 min"."""
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
    """The pace that the journal has kept."""
    return Pace((statistics or {}).get("pace"))
