"""The test files that depend on the version of Ray: those that import Ray, directly or through our files."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from imports import ROOT, SUPPORT, imported


def _names_ray(path: Path) -> bool:
    return any(name == "ray" or name.startswith("ray.") or name.endswith(".ray_compat") for name in imported(path))


@cache
def modules_that_import_ray() -> frozenset[str]:
    return frozenset(
        ".".join(("outrider", *path.relative_to(ROOT).with_suffix("").parts))
        for layer in ("runner", "workers")
        for path in (ROOT / layer).rglob("*.py")
        if _names_ray(path)
    )


@cache
def of_ray(path: Path) -> bool:
    names = imported(path)
    helpers = [SUPPORT / f"{name}.py" for name in names if "." not in name]
    return (
        bool(names & modules_that_import_ray())
        or _names_ray(path)
        or any(of_ray(helper) for helper in helpers if helper.exists() and helper != path)
    )
