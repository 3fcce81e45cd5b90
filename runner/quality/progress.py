"""The progress of score, quantize and merge: a status line on a terminal, else a line every ten seconds."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Self

from rich.console import Console

from outrider.runner.printable import printable

PLAIN_LINE_SECONDS = 10.0


class StatusLine:
    def __init__(self, console: Console) -> None:
        self._console = console
        self._status = console.status("starting", spinner="line") if console.is_terminal else None
        self._last_line = time.monotonic()

    def __enter__(self) -> Self:
        if self._status is not None:
            self._status.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._status is not None:
            self._status.stop()

    def say(self, text: str) -> None:
        """Print a message that stays."""
        self._console.print(printable(text), highlight=False, soft_wrap=True, markup=False)

    def show(self, text: str) -> None:
        """Replace the status line."""
        if self._status is not None:
            self._status.update(printable(text).replace("[", r"\["))
        elif time.monotonic() - self._last_line > PLAIN_LINE_SECONDS:
            self._last_line = time.monotonic()
            self.say(text)
