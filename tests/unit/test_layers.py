"""Imports go one way only: runner, then workers, then kernels, and inside of these from each level to those below it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LAYERS = ("runner", "workers", "kernels")
BELOW = {"runner": {"runner", "workers", "kernels"}, "workers": {"workers", "kernels"}, "kernels": {"kernels"}}
FOREIGN = {
    "runner": {"torch", "transformers", "tokenizers", "safetensors", "huggingface_hub"},
    "workers": set(),
    "kernels": {"ray", "torch", "transformers", "tokenizers", "pydantic", "typer"},
}
# The only modules of workers/ that know Ray.
RAY_IN_WORKERS = {
    "actors.py",
    "call_transport.py",
    "metrics.py",
    "pinning.py",
    "ray_compat.py",
    "shared_memory_transport.py",
}
# The levels of each layer, the lowest first: packages, and modules outside of them. Those on one level may know each other.
LEVELS = {
    "runner": [
        {"backlog", "continued", "counted", "exit_codes", "options", "printable", "progress", "run_arguments"}
        | {
            "process_exit",
            "safe_path",
            "streams",
            "writable",
            "pool_of_one",
            "small_file",
            "template",
            "temporary_file",
            "working_directory",
        }
        | {"validation_errors"},
        {"planning"},
        {"job"},
        {"report"},
        {"hosts"},
        {"driving"},
        {"model_choice"},
        {"prepare_job"},
        {"drive_job"},
        {"on_end"},
        {"run_job"},
        {"retry"},
        {"job_child"},
        {"job_process"},
        {"api"},
        {"quality"},
        {"bench"},
        {"serve"},
        {"cli"},
    ],
    "workers": [
        {"counters", "errors", "precisions", "speculation"},
        {"machine"},
        {"messages", "ray_compat"},
        {"timeline"},
        {"engines"},
        {"constraints"},
        {"models"},
        {"merging", "quantising", "scoring"},
        {"draft"},
        {"target"},
        {"build"},
        {"actor_loops"},
        {"actors"},
    ],
}
FILES = [path for layer in LAYERS for path in sorted((ROOT / layer).rglob("*.py"))]


@cache
def imports(source: str) -> list[tuple[int, str]]:
    """Every module that a file imports, at its top or anywhere inside, with the line."""
    return list(_imports(source))


def _imports(source: str) -> Iterator[tuple[int, str]]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: imports are absolute here"
            # "from outrider import runner" names the layer only in its names.
            yield node.lineno, node.module or ""
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute):
            name = node.func.id if isinstance(node.func, ast.Name) else node.func.attr
            first = node.args[0] if node.args else None
            if name in ("import_module", "__import__") and isinstance(first, ast.Constant):
                yield node.lineno, str(first.value)


def breaches(layer: str, source: str) -> list[str]:
    found = []
    for line, module in imports(source):
        parts = module.split(".")
        if parts[0] == "outrider" and len(parts) > 1 and parts[1] in LAYERS and parts[1] not in BELOW[layer]:
            found.append(f"line {line}: {layer} must not import {module}")
        if parts[0] in FOREIGN[layer]:
            found.append(f"line {line}: {layer} must know nothing of {parts[0]}")
        if parts[0] in LAYERS:
            found.append(f"line {line}: {module} must be imported as outrider.{module}")
    return found


def test_there_is_something_to_look_at() -> None:
    assert {path.relative_to(ROOT).parts[0] for path in FILES} == set(LAYERS)


def test_imports_go_down_only() -> None:
    names = [path.relative_to(ROOT) for path in FILES]
    found = [f"{name}: {said}" for name in names for said in breaches(name.parts[0], (ROOT / name).read_text())]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("layer", "source"),
    [
        ("workers", "import outrider.runner.cli.main"),
        ("workers", "def f():\n    from outrider import runner"),
        ("kernels", "def f():\n    from outrider.workers import messages"),
        ("kernels", "import ray.util"),
        ("runner", "def f():\n    import torch.nn"),
        ("runner", "import importlib\nimportlib.import_module('transformers')"),
        ("runner", "import kernels"),
    ],
)
def test_a_breach_is_seen(layer: str, source: str) -> None:
    assert breaches(layer, source)


def level_of(layer: str, name: str) -> int:
    [level] = [number for number, level in enumerate(LEVELS[layer]) if name in level]
    return level


def climbs(path: Path) -> list[str]:
    """What a file imports from levels above its own."""
    layer, *inner = path.relative_to(ROOT).with_suffix("").parts
    own = level_of(layer, inner[0])
    found = []
    for line, module in imports(path.read_text()):
        parts = module.split(".")
        if parts[:2] == ["outrider", layer] and len(parts) > 2 and level_of(layer, parts[2]) > own:
            found.append(f"line {line}: {'/'.join(inner)} stands below {module}")
    return found


@pytest.mark.parametrize("layer", LEVELS)
def test_imports_go_down_inside_of_a_layer_too(layer: str) -> None:
    files = [path for path in (ROOT / layer).rglob("*.py") if path.name != "__init__.py" or path.parent.name != layer]
    assert len(files) > 30
    assert [breach for path in files for breach in climbs(path)] == []


def imported(path: Path) -> set[Path]:
    """The files of ours that a file imports, at its head or within a function."""
    found = set()
    for _, module in imports(path.read_text()):
        words = module.split(".")[1:] if module.startswith("outrider.") else []
        while words and not (file := ROOT.joinpath(*words).with_suffix(".py")).exists():
            words.pop()
        if words:
            found.add(file)
    return found - {path}


def circle(needs: dict[Path, set[Path]]) -> list[Path]:
    """Files that import one another in a loop; none is left when those that need nothing more are taken away in turn."""
    left = {path: set(others) for path, others in needs.items()}
    while free := {path for path, others in left.items() if not others & left.keys()}:
        left = {path: others for path, others in left.items() if path not in free}
    return sorted(left)


def test_no_files_import_one_another_in_a_circle() -> None:
    needs = {path: imported(path) for path in FILES}
    assert sum(map(len, needs.values())) > 500
    assert circle(needs) == []
    one, other = FILES[:2]
    assert circle({**needs, one: {other}, other: {one}}) != []


def test_ray_stays_in_its_shells() -> None:
    knowing = {
        path.name
        for path in (ROOT / "workers").rglob("*.py")
        if any(module.split(".")[0] == "ray" for _, module in imports(path.read_text()))
    }
    assert knowing <= RAY_IN_WORKERS


def test_kernels_is_no_package_at_the_top() -> None:
    """Run from the repository root, ``import kernels`` must not find a package of ours."""
    assert not (ROOT / "kernels" / "__init__.py").exists()


def test_the_import_package_is_made_of_the_three_folders() -> None:
    package = ROOT / "src" / "outrider"
    for layer in LAYERS:
        assert (package / layer).resolve() == ROOT / layer
    assert {path.name for path in package.iterdir()} - {"__pycache__"} == {
        *LAYERS,
        "__init__.py",
        "__main__.py",
        "py.typed",
    }
