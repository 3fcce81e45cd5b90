"""Every file of this repository that its documents and comments name is there.

docs/measurements.md is left out: it tells of commands as they were when something was measured.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("runner", "workers", "kernels", "tests", "stress", "benchmarks", "tools", "examples", "docs")
NAMED = re.compile(rf"(?<![\w/.\-])(?:{'|'.join(FOLDERS)})/[\w./\-]*[\w/]")
ENDINGS = (".py", ".md", ".cpp", ".h", ".inc", ".jsonl", ".sh", ".yaml", ".svg", ".html")
LINKED = re.compile(r"\]\(([^)#:]+)[)#]")
DOCUMENTS = [ROOT / "README.md", *(file for file in (ROOT / "docs").glob("*.md") if file.name != "measurements.md")]
SOURCES = [
    file for folder in FOLDERS for ending in (".py", ".cpp", ".h", ".inc") for file in (ROOT / folder).rglob(f"*{ending}")
]
# In an installed package, and what a stress run makes.
ELSEWHERE = {"kernels/__init__.py", "stress/killed.json"}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda file: file.name)
def test_what_a_document_names_in_backticks_or_links_to_is_there(document: Path) -> None:
    text = document.read_text()
    named = {path for quoted in re.findall(r"`([^`\n]+)`", text) for path in NAMED.findall(quoted)}
    assert {path for path in named if not (ROOT / path).exists()} - ELSEWHERE == set()
    assert [link for link in LINKED.findall(text) if not (document.parent / link).exists()] == []


def test_what_sources_name_is_there() -> None:
    assert len(SOURCES) > 200
    gone = {
        f"{file.relative_to(ROOT)}: {path}"
        for file in SOURCES
        for path in NAMED.findall(file.read_text())
        if path.endswith(ENDINGS) and path not in ELSEWHERE and not (ROOT / path).exists()
    }
    assert gone == set()
