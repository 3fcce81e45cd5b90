"""Whether outrider's own files have changed since the server started, which new processes of the server would load."""

from __future__ import annotations

import os
from pathlib import Path

import outrider

# Python's sources and the compiled kernels.
READ = (".py", ".so")
CHANGED = "outrider's own files have changed since this server was started: start it again, or this is tried again"


class OwnFiles:
    def __init__(self, folder: Path | None = None) -> None:
        self._folder = Path(outrider.__file__).parent if folder is None else folder
        self._before = self._now()

    def changed(self) -> bool:
        return self._now() != self._before

    def _now(self) -> dict[str, tuple[int, int]]:
        """Size and modification time of each file; symlinks are followed (editable installs)."""
        found = {}
        for folder, _, names in os.walk(self._folder, followlinks=True):
            for path in (Path(folder, name) for name in names if name.endswith(READ)):
                try:
                    about = path.stat()
                except OSError:  # removed in between
                    continue
                found[str(path)] = about.st_size, about.st_mtime_ns
        return found
