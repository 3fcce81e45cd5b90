"""Tables in and out on a real Ray: Parquet through the Python interface and the command, CSV, and failed rows once more."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
from pathlib import Path

import pyarrow
import pytest
from command_line import DEADLINE, OFFLINE, outrider
from pyarrow import parquet

import outrider as library

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
ROWS = 20
REVIEWS = pyarrow.table(
    {
        "id": [f"r{number}" for number in range(ROWS)],
        "text": [f"Review {number} of the sea." for number in range(ROWS)],
        "stars": pyarrow.array([number % 5 for number in range(ROWS)], pyarrow.int8()),
        "seen": pyarrow.array(range(ROWS), pyarrow.timestamp("ns")),
        "max_tokens": [6.0 if number % 2 else None for number in range(ROWS)],
    }
)


def test_twenty_rows_through_the_door_and_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    parquet.write_table(REVIEWS, "reviews.parquet")
    job = library.run("reviews.parquet", template="Summarise: {text}", max_tokens=8, draft="lookup", replicas=1)
    assert any("text, stars, seen" in note for note in job.notes), job.notes
    back = parquet.read_table(job.to_parquet("answers.parquet"))
    assert back.column_names[:7] == ["id", "text", "tokens", "finish_reason", "input_text", "stars", "seen"]
    assert back["id"].equals(REVIEWS["id"])
    for name, new in (("text", "input_text"), ("stars", "stars"), ("seen", "seen")):
        assert back[new].combine_chunks().equals(REVIEWS[name].combine_chunks())

    # The same prompts as lines of JSON are the same texts, with and without a draft.
    prompts = [f"Summarise: {text}" for text in REVIEWS["text"].to_pylist()]
    lines = [{"id": f"r{n}", "prompt": prompt, "max_tokens": 6 if n % 2 else 8} for n, prompt in enumerate(prompts)]
    plain = library.run(lines, draft="none", replicas=1, progress=False)
    assert back["text"].to_pylist() == [row.text for row in plain.results()]
    assert back["tokens"].to_pylist() == [row.tokens for row in plain.results()]


def test_the_command_with_a_table_and_its_failed_rows_again(tmp_path: Path) -> None:
    parquet.write_table(REVIEWS.slice(0, 6), tmp_path / "reviews.parquet")
    told = 'echo "$OUTRIDER_EXIT $OUTRIDER_DONE $OUTRIDER_FAILED $RAY_AUTH_TOKEN" >> ended'
    words = ("reviews.parquet", "--template", "Say: {text}", "-o", "job", "--max-tokens", 8, "--draft", "none")
    done = outrider("run", *words, "--on-end", told, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "ended").read_text() == "0 6 0 \n"
    before = outrider("results", "job", "-o", "before.csv", cwd=tmp_path)
    assert before.returncode == 0, before.stderr

    # Two rows have failed, by hand; the input is gone.
    (tmp_path / "reviews.parquet").unlink()
    with sqlite3.connect(tmp_path / "job" / "job.db") as db:
        for row in (1, 4):
            [(text,)] = db.execute("SELECT record FROM records WHERE row = ?", (row,))
            record = json.loads(text) | {"response": None, "error": {"code": "replica_died", "message": "it died"}}
            db.execute("UPDATE records SET record = ? WHERE row = ?", (json.dumps(record), row))
            db.execute("UPDATE rows SET state = 2 WHERE row = ?", (row,))
    db.close()
    status = outrider("status", "job", cwd=tmp_path).stdout
    assert "6 rows, 4 done, 2 failed, not running" in status
    assert "2 × it died (replica_died: r1, r4)" in status

    again = outrider("retry", "job", "--batch", 2, "--json", cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    assert "2 failed rows to be run again" in again.stderr
    assert json.loads(again.stdout)["done"] == 6
    after = outrider("results", "job", "-o", "after.csv", cwd=tmp_path)
    assert after.returncode == 0, after.stderr
    assert (tmp_path / "after.csv").read_bytes() == (tmp_path / "before.csv").read_bytes()
    assert (tmp_path / "ended").read_text() == "0 6 0 \n", "a retry is told its own command"


def test_the_example_with_ray_data(tmp_path: Path) -> None:
    pytest.importorskip("pandas", reason="Ray Data needs pandas")
    blocks = [block.split("```")[0] for block in (ROOT / "docs" / "data.md").read_text().split("```python\n")[1:]]
    assert len(blocks) == 1
    done = subprocess.run(
        [sys.executable, "-c", blocks[0]],
        cwd=tmp_path,
        # What the caller's Ray would else write into the home directory; and it is not to join that of another test.
        env={**os.environ, **OFFLINE, "RAY_AUTH_MODE": "disabled", "RAY_ADDRESS": "local"},
        capture_output=True,
        text=True,
        timeout=2 * DEADLINE,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "judged.parquet").exists()
