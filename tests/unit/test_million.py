"""Memory does not grow with the rows: stress/million.py, with fewer of them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "stress" / "million.py"


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize(("form", "rows", "most_growth"), [("parquet", 60_000, 1.1), ("csv", 60_000, 1.1)])
def test_more_rows_take_no_more_memory(form: str, rows: int, most_growth: float) -> None:
    """The first size is larger than whatever is held together at any stage. What is let grow is 550 bytes a row."""
    words = ["--rows", "20000", str(rows), "--most-growth", str(most_growth), "--format", form]
    done = subprocess.run([sys.executable, SCRIPT, *words], capture_output=True, text=True, check=False, timeout=580)
    assert done.returncode == 0, done.stderr + done.stdout
    assert [json.loads(line)["rows"] for line in done.stdout.splitlines()] == [20000, rows]
