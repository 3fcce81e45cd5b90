"""GGUF models of the hub: ``OWNER/NAME:Q4_K_M`` names the one of that quantisation type, ``OWNER/NAME:FILE.gguf`` the file.

Repositories hold a model in many types, each in one file or split into several, maybe in a folder of its own.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path

from outrider.workers.errors import ModelError
from outrider.workers.models.formats.gguf.file import SUFFIX
from outrider.workers.models.formats.gguf.split import NAME, files_of
from outrider.workers.models.hub import Wanted
from outrider.workers.models.hub_names import hub_id

NAMED = re.compile(r"([\w.-]+(?:/[\w.-]+)?):([\w./-]+)")
# The vision part of a model is a separate file, in the same types.
SEEING = "mmproj"
MOST_TOLD = 8


def of_hub(name: str) -> tuple[str, str] | None:
    """(repository, type or file) if the name has the form OWNER/NAME:CHOICE; else None."""
    found = NAMED.fullmatch(name)
    if found is None or name.startswith((".", "/")):
        return None
    return hub_id(found[1]), found[2]


def wanted_of(repository: str, choice: str) -> Wanted:
    return Wanted([f"*{SUFFIX}"], partial(_chosen, repository, choice), partial(_place, repository, choice), _lacking)


def models_among(files: Iterable[str]) -> dict[str, list[str]]:
    """GGUF models by the name that their files have in common, each with its files, the first one first."""
    models: dict[str, list[str]] = {}
    for file in sorted(files):
        folder, _, name = file.rpartition("/")
        if not name.lower().endswith(SUFFIX) or SEEING in name.lower():
            continue
        part = NAME.fullmatch(name)
        stem = part[1] if part else name[: -len(SUFFIX)]
        models.setdefault(f"{folder}/{stem}" if folder else stem, []).append(file)
    return models


def told(models: Iterable[str]) -> str:
    """Names for a sentence, at most MOST_TOLD of them."""
    names = sorted(models)
    more = f" and {len(names) - MOST_TOLD} more" if len(names) > MOST_TOLD else ""
    return ", ".join(names[:MOST_TOLD]) + more


def _matching(choice: str, files: Sequence[str]) -> dict[str, list[str]]:
    models = models_among(files)
    if choice.lower().endswith(SUFFIX):
        return {name: each for name, each in models.items() if choice in each}
    # The choice must be the end of the name, and begin at a word boundary.
    ends = re.compile(rf"(?:^|[-._/]){re.escape(choice)}", re.IGNORECASE)
    return {name: each for name, each in models.items() if any(end.end() == len(name) for end in ends.finditer(name))}


def _chosen(repository: str, choice: str, files: Sequence[str]) -> list[str]:
    found = _matching(choice, files)
    if not found:
        models = models_among(files)
        there = f"it has {told(models)}" if models else "it has no GGUF files"
        raise ModelError(f'the repository "{repository}" has no GGUF model "{choice}": {there}')
    chosen, *others = found.values()
    if others:
        raise ModelError(
            f'the repository "{repository}" has several GGUF models "{choice}" ({told(found)}): name the file, such as '
            f'"{repository}:{chosen[0]}"'
        )
    return chosen


def _place(repository: str, choice: str, snapshot: Path) -> Path | None:
    files = [str(file.relative_to(snapshot)) for file in snapshot.rglob(f"*{SUFFIX}")]
    return snapshot / _chosen(repository, choice, files)[0] if _matching(choice, files) else None


def _lacking(path: Path) -> str:
    try:
        files_of(path)
    except ModelError as error:
        return str(error)
    return ""
