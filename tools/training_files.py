"""What the training tools save: a folder's files change once all the new ones are whole, and whatever ends a training early
ends it in a sentence that says what is left.
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
    """An empty folder ``partial``, whose files come into ``folder`` at the end: what was saved outlives a full disk."""
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
    """``saved``: the files under ``out`` of which there is one as soon as something is saved."""
    try:
        yield
    except KeyboardInterrupt:
        kept = f"{out} is as it was last saved" if any(out.glob(saved)) else "nothing was saved yet"
        parser.exit(INTERRUPTED, f"stopped; {kept}\n")
    except ModelError as error:
        parser.error(str(error))
    except (OSError, SafetensorError) as error:  # safetensors has the system's reason in an error of its own
        parser.exit(1, f"--out: {out} cannot be written: {first_line(error)}\n")
