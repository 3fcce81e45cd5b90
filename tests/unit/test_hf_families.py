"""A dozen families of transformers, tiny, random, against its own ``generate``. All: ``python -m benchmarks.families``."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from benchmarks.families.check import Verdict, check

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "families.md"
FAMILIES = {
    "llama4_text": Verdict.BATCHED,  # chunks; queries scaled by position in layers without rope
    "gemma2": Verdict.BATCHED,  # soft caps, windows
    "gemma3_text": Verdict.BATCHED,  # windows, two bases of rope
    "gpt_oss": Verdict.BATCHED,  # sinks, windows, experts
    "phi3, long rope": Verdict.BATCHED,  # keys anew beyond the switch
    "llama, long rope": Verdict.BATCHED,  # keys as they were
    "phimoe, long rope": Verdict.BATCHED,
    "lfm2": Verdict.ALONE,  # convolutions
    "mamba": Verdict.ALONE,  # a state that is fed token by token
    "qwen3_next": Verdict.ALONE,  # a state beside attention
    "minimax": Verdict.ALONE,  # a cache of its own kind
    "bloom": Verdict.ALONE,  # biases by distance
    "bert, both ways": Verdict.REFUSED,
}
QUICK = ("bert, both ways",)


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """One thread, which is plenty for them, and nothing remembered of other runs."""
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in FAMILIES]
)
def test_a_family_writes_what_transformers_writes_or_is_refused(tmp_path: Path, family: str) -> None:
    outcome = check(family, tmp_path / "model", seed=5)
    assert outcome.verdict is FAMILIES[family], outcome.said
    if outcome.verdict is Verdict.BATCHED:
        assert not outcome.said
        assert outcome.proposed > 20
    else:
        assert "because" in outcome.said or "cannot be run by the hf engine" in outcome.said


def cells(page: Path) -> list[list[str]]:
    lines = [line for line in page.read_text().splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[1:]]


def unversioned(page: Path) -> str:
    """What stands before the table, without what depends on the libraries and on how many were tried."""
    head = page.read_text().partition("\n| family")[0]
    return re.sub(r"\(transformers [^)]*\)|^\d+ tried: .*$", "", head, flags=re.M)


def test_the_page_counts_its_own_table() -> None:
    rows = cells(PAGE)
    assert len(rows) > 200 and {len(row) for row in rows} == {4}
    found = Counter(row[2] for row in rows)
    counts = f"{len(rows)} tried: " + ", ".join(f"{found[verdict.value]} {verdict.value}" for verdict in Verdict) + "."
    assert counts in PAGE.read_text()
    assert not found[Verdict.WRONG.value]


@pytest.mark.slow
def test_the_command_writes_the_table_of_the_page(tmp_path: Path) -> None:
    written = tmp_path / "families.md"
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.families", "llama", "--write", str(written)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert cells(written) == [row for row in cells(PAGE) if row[0] == "llama"]
    assert unversioned(written) == unversioned(PAGE)
