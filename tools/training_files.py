"""How the training tools save: files of a folder are replaced once all new ones are complete, and a training that is ended
early ends with a sentence that says what was saved.
"""

from __future__ import annotations

import shutil
from argparse import ArgumentParser
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from outrider.runner.exit_codes import INTERRUPTED
from outrider.workers.errors import ModelError, first_line


@contextmanager
def replacing(folder: Path, partial: Path) -> Iterator[Path]:
    """An empty folder ``partial``, whose files move to ``folder`` at the end: a full disk destroys no saved file."""
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        yield partial
        folder.mkdir(exist_ok=True)
        for file in partial.iterdir():
            file.replace(folder / file.name)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


@contextmanager
def told_at_the_end(parser: ArgumentParser, out: Path, saved: str = "config.json") -> Iterator[None]:
    """Turns the end of a training into an exit with a sentence. ``saved``: a pattern that matches a file under ``out`` once
    something is saved."""
    try:
        yield
    except KeyboardInterrupt:
        kept = f"{out} is as it was last saved" if any(out.glob(saved)) else "nothing was saved yet"
        parser.exit(INTERRUPTED, f"stopped; {kept}\n")
    except ModelError as error:
        parser.error(str(error))
    except (OSError, SafetensorError) as error:  # safetensors wraps the system's error in its own
        parser.exit(1, f"--out: {out} cannot be written: {first_line(error)}\n")
