"""What a file imports, directly and through our other files. Lines are matched, since parsing all files takes seconds."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

SUPPORT = Path(__file__).parent
ROOT = SUPPORT.parents[1]
# Folders whose modules tests import by their bare names (pyproject.toml).
BARE = (SUPPORT, SUPPORT.parent / "unit", ROOT / "benchmarks", ROOT / "stress", ROOT / "tools")
_IMPORT = re.compile(r"^([ \t]*)(?:import ([\w.]+(?:, *[\w.]+)*)|from ([\w.]+) import (\([^)]*\)|.*))", re.M)
_COMMENT = re.compile(r"#.*")


@cache
def imported(path: Path, at_once: bool = False) -> frozenset[str]:
    """The names of imported modules, and names that `from` imports. `at_once`: without imports inside functions."""
    names: set[str] = set()
    for indent, modules, origin, taken in _IMPORT.findall(path.read_text(encoding="utf-8")):
        if at_once and indent:
            continue
        names |= set(re.findall(r"[\w.]+", modules))
        if origin:
            parts = re.sub(r"\bas \w+", "", _COMMENT.sub("", taken))
            names |= {origin, *(f"{origin}.{name}" for name in re.findall(r"\w+", parts))}
    return frozenset(names)


@cache
def file_of(name: str) -> Path | None:
    """The file of one of our modules; None for others."""
    first, *rest = name.split(".")
    if first == "outrider":
        places = [ROOT.joinpath(*rest)] if rest else []
    elif first == "benchmarks":
        places = [ROOT.joinpath(first, *rest)]
    else:
        places = [] if rest else [folder / first for folder in BARE]
    files = (file for place in places for file in (place.with_suffix(".py"), place / "__init__.py"))
    return next((file for file in files if file.exists()), None)


def reached(path: Path, at_once: bool = False) -> frozenset[str]:
    """All names that the file imports, directly or through our files, modules of others included."""
    names: set[str] = set()
    seen, waiting = {path}, [path]
    while waiting:
        new = imported(waiting.pop(), at_once) - names
        names |= new
        files = {file for name in new if (file := file_of(name)) is not None} - seen
        seen |= files
        waiting += files
    return frozenset(names)
