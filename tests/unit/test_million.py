"""Memory does not grow with the rows: stress/million.py, with fewer of them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "stress" / "million.py"


@pytest.mark.slow
@pytest.mark.parametrize("form", ["parquet", "csv"])
def test_three_times_the_rows_take_no_more_memory(form: str, tmp_path: Path) -> None:
    """The first size is larger than whatever is held together at any stage."""
    words = ["--rows", "60000", "180000", "--format", form]
    done = subprocess.run([sys.executable, SCRIPT, *words], capture_output=True, text=True, check=False, timeout=580)
    assert done.returncode == 0, done.stderr + done.stdout
    assert [json.loads(line)["rows"] for line in done.stdout.splitlines()] == [60000, 180000]
