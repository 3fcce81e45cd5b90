"""``python -m outrider`` is the command: for whoever has the package and not its scripts on the search path."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def as_module(*words: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "outrider", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


def test_it_is_called_as_it_was_called(tmp_path: Path) -> None:
    told = as_module("--help")
    assert told.returncode == 0 and told.stdout.startswith("Usage: python -m outrider [OPTIONS] COMMAND [ARGS]...\n")
    refused = as_module("status", tmp_path)
    assert (refused.returncode, refused.stderr) == (2, f"outrider: {tmp_path} is not a job directory: it has no job.db\n")


def test_to_import_it_begins_nothing() -> None:
    """As whoever walks through all modules of the package does."""
    done = subprocess.run([sys.executable, "-c", "import outrider.__main__"], capture_output=True, check=False, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
