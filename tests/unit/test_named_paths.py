"""Every file of this repository that its documents and comments name is there.

The pages of docs/lab tell of commands as they were when something was measured: only their links are followed.
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
ANCHORED = re.compile(r"\]\(([^)#:]*)#([^)]+)\)")
DOCUMENTS = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "stress").glob("*.md")]
LAB = sorted((ROOT / "docs" / "lab").glob("*.md"))
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
    assert broken_links(document) == []


def broken_links(document: Path) -> list[str]:
    text = document.read_text()
    files = [link for link in LINKED.findall(text) if not (document.parent / link).exists()]
    places = [(document.parent / link if link else document, anchor) for link, anchor in ANCHORED.findall(text)]
    return files + [f"{page.name}#{anchor}" for page, anchor in places if anchor not in anchors(page)]


def anchors(page: Path) -> set[str]:
    """What the headings of a page are called in links, as GitHub makes it of them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_pages_of_the_lab_have_a_date_and_are_listed_and_their_links_lead_somewhere() -> None:
    index = ROOT / "docs" / "lab" / "README.md"
    dated = {page.name for page in LAB} - {index.name}
    assert len(dated) > 20
    assert {name for name in dated if not re.match(r"\d{4}-\d\d-\d\d-[a-z0-9-]+\.md$", name)} == set()
    assert set(LINKED.findall(index.read_text())) == dated | {"../performance.md"}
    assert {(page.name, link) for page in LAB for link in broken_links(page)} == set()


def test_what_sources_name_is_there() -> None:
    assert len(SOURCES) > 200
    gone = {
        f"{file.relative_to(ROOT)}: {path}"
        for file in SOURCES
        for path in NAMED.findall(file.read_text())
        if path.endswith(ENDINGS) and path not in ELSEWHERE and not (ROOT / path).exists()
    }
    assert gone == set()
