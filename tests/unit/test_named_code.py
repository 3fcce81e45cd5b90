"""Members of classes that a page of docs/ names exist, and its lists of formats and of scripts are whole."""

from __future__ import annotations

import ast
import re
import tomllib
from collections import defaultdict
from pathlib import Path

from outrider.workers.models.formats.gguf.architectures import ARCHITECTURES
from outrider.workers.models.formats.gguf.pre_tokenizers import PRE_TOKENIZERS
from outrider.workers.models.formats.mlx_families import FAMILIES

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = [*ROOT.glob("*.md"), *DOCS.glob("*.md")]
# A changelog tells of what has gone as well.
TEXT = "\n".join(page.read_text() for page in PAGES if page.name != "CHANGELOG.md")


def test_the_members_that_pages_name_exist() -> None:
    named = set(re.findall(r"`([A-Z][a-z]\w*)\.([A-Za-z_]\w*)", TEXT))
    ours = members_of_classes()
    assert len(named) >= 5
    assert {(kind, member) for kind, member in named if member not in ours[kind]} == set()


def test_the_members_of_the_kernels_that_pages_name_exist() -> None:
    named = set(re.findall(r"`([A-Z][a-z]\w*)::([A-Za-z_]\w*)", TEXT))
    headers = "".join(file.read_text() for file in (ROOT / "kernels" / "src").glob("*.h"))
    kinds = set(re.findall(r"^(?:class|struct) (\w+)", headers, re.M))
    assert len(named) >= 3
    assert {(kind, member) for kind, member in named if kind not in kinds or f" {member}(" not in headers} == set()


def members_of_classes() -> dict[str, set[str]]:
    """The methods and fields of each class in runner, workers and kernels, those of classes of one name together."""
    members: dict[str, set[str]] = defaultdict(set)
    for folder in ("runner", "workers", "kernels"):
        for file in (ROOT / folder).rglob("*.py"):
            for kind in ast.walk(ast.parse(file.read_text())):
                if isinstance(kind, ast.ClassDef):
                    members[kind.name].update(each.name for each in kind.body if isinstance(each, ast.FunctionDef))
                    members[kind.name].update(
                        each.target.id
                        for each in kind.body
                        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
                    )
    return members


def test_the_page_lists_every_architecture_of_gguf() -> None:
    assert quoted("**Architectures:**", "Layers that predict") == set(ARCHITECTURES)


def test_the_page_lists_every_family_of_mlx() -> None:
    assert quoted("These families are read", "Of each a tiny model") == FAMILIES | {"model_type"}


def test_the_page_counts_the_pre_tokenizers() -> None:
    page = (DOCS / "quantised-checkpoints.md").read_text()
    assert f"{len(PRE_TOKENIZERS)} pre-tokenizers (`tokenizer.ggml.pre`)" in page


def test_the_page_names_the_versions_of_ray_that_are_allowed() -> None:
    with (ROOT / "pyproject.toml").open("rb") as file:
        [ray] = [each for each in tomllib.load(file)["project"]["dependencies"] if each.startswith("ray")]
    assert f"`{ray}`" in (DOCS / "jobs.md").read_text()


def test_the_page_names_every_script_that_measures_or_makes_models() -> None:
    page = (DOCS / "benchmarks.md").read_text()
    scripts = {file.name for file in (ROOT / "benchmarks").glob("*.py") if '__name__ == "__main__"' in file.read_text()}
    assert len(scripts) > 20
    assert {name for name in scripts if f"benchmarks/{name}" not in page} == set()


def quoted(begin: str, end: str) -> set[str]:
    """What stands in backticks between two pieces of the page."""
    page = (DOCS / "quantised-checkpoints.md").read_text()
    [between] = re.findall(f"{re.escape(begin)}(.*?){re.escape(end)}", page, re.S)
    return set(re.findall(r"`([^`]+)`", between))
