"""Which test files another Ray could change: those that import Ray, or a file of ours which imports it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

SUPPORT = Path(__file__).parent
ROOT = SUPPORT.parents[1]


def imported(path: Path) -> Iterator[str]:
    """Names of modules, also of those that a function imports, and whatever else `from` takes."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield node.module
            yield from (f"{node.module}.{name.name}" for name in node.names)


def _names_ray(path: Path) -> bool:
    return any(name == "ray" or name.startswith("ray.") or name.endswith(".ray_compat") for name in imported(path))


@cache
def modules_that_import_ray() -> frozenset[str]:
    # Parsing takes most of the time, and few files have the word.
    return frozenset(
        ".".join(("outrider", *path.relative_to(ROOT).with_suffix("").parts))
        for room in ("runner", "workers")
        for path in (ROOT / room).rglob("*.py")
        if "ray" in path.read_text(encoding="utf-8") and _names_ray(path)
    )


@cache
def of_ray(path: Path) -> bool:
    names = set(imported(path))
    helpers = [SUPPORT / f"{name}.py" for name in names if "." not in name]
    return (
        bool(names & modules_that_import_ray())
        or _names_ray(path)
        or any(of_ray(helper) for helper in helpers if helper.exists() and helper != path)
    )
