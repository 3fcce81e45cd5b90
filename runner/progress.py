"""The progress of a job that a Python program runs: one line, overwritten in place, at a terminal or in a notebook."""

from __future__ import annotations

import os
import shutil
import sys
import time
from contextlib import suppress
from typing import TextIO

PLAIN_LINE_SECONDS = 10.0


class ProgressLine:
    """``shown``: True, False, or None (only at a terminal or in a notebook). Errors of writing are ignored."""

    def __init__(self, shown: bool | None) -> None:
        self._notebook = _in_notebook()
        self._out: TextIO | None = sys.stdout if self._notebook else sys.stderr
        self._overwrites = self._notebook or _is_terminal(self._out)
        if shown is False or (shown is None and not self._overwrites):
            self._out = None
        self._width = 0
        self._plain_at = time.monotonic()

    def show(self, line: str) -> None:
        """Overwrite the progress line; where that is not possible, print a line every ten seconds."""
        if self._overwrites:
            room = self._room()
            line = line[:room]
            self._write("\r" + line.ljust(self._width)[:room])
            self._width = len(line)
        elif time.monotonic() - self._plain_at > PLAIN_LINE_SECONDS:
            self._plain_at = time.monotonic()
            self._write(line + "\n")

    def say(self, text: str) -> None:
        """Print a message that stays."""
        self._write(("\r" + text.ljust(self._width) if self._width else text) + "\n")
        self._width = 0

    def end(self) -> None:
        if self._width:
            self._write("\n")
        self._width = 0

    def _room(self) -> int | None:
        """The columns that a line may take: one that reaches the last column cannot be overwritten as a whole."""
        if self._notebook or self._out is None:
            return None
        try:
            columns = os.get_terminal_size(self._out.fileno()).columns
        except (OSError, ValueError):  # not a real terminal, or closed
            columns = 0
        return (columns or shutil.get_terminal_size().columns) - 1

    def _write(self, text: str) -> None:
        if self._out is not None:
            with suppress(OSError, ValueError):
                self._out.write(text)
                self._out.flush()


def _in_notebook() -> bool:
    """Whether standard output is shown below a notebook's cell."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return shell is not None and hasattr(shell, "kernel")


def _is_terminal(stream: TextIO | None) -> bool:
    with suppress(ValueError, AttributeError):
        return stream is not None and stream.isatty()
    return False
