"""A reserve file, deleted when the disk is full to make room for operations that free space (deleting, cancelling)."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from outrider.workers.errors import NoSpaceError

NAME = "reserve"
# Hundreds of transactions of the store.
BYTES, AT_ONCE = 1 << 20, 64 << 10
Result = TypeVar("Result")


class Reserve:
    def __init__(self, folder: Path) -> None:
        self._path = folder / NAME

    def fill(self) -> None:
        """Fill the file as far as there is room; with random bytes, since a file system may store zeros without space."""
        with suppress(OSError), self._path.open("ab") as stream:
            while (missing := BYTES - stream.tell()) > 0:
                stream.write(os.urandom(min(AT_ONCE, missing)))
                stream.flush()

    def even_if_full(self, act: Callable[[], Result]) -> Result:
        try:
            return act()
        except NoSpaceError:
            self._path.unlink(missing_ok=True)
        try:
            return act()
        finally:
            self.fill()
