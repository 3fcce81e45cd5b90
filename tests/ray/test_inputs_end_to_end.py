"""Jobs whose input comes through a pipe or compressed, and jobs that somebody has edited, as a user types them."""

from __future__ import annotations

import gzip
import json
import sqlite3
import subprocess
from pathlib import Path

import pytest
from command_line import DEADLINE, OUTRIDER, outrider

pytestmark = pytest.mark.slow

ROWS = "".join(
    json.dumps({"id": f"r{number}", "prompt": f"def f{number}(x):", "max_tokens": 6}) + "\n" for number in range(4)
)


def run(folder: Path, job: str, given: bytes, *arguments: str, code: int = 0) -> str:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [*OUTRIDER, "run", *arguments, "-o", job, "--draft", "none", "--json"],
            cwd=folder,
            input=given,
            stdout=full,
            stderr=subprocess.PIPE,
            timeout=DEADLINE,
            check=False,
        )
    said = done.stderr.decode()
    assert done.returncode == code, said
    assert "Traceback" not in said
    return said


def test_a_job_from_standard_input_from_a_compressed_file_and_one_that_was_edited(tmp_path: Path) -> None:
    said = run(tmp_path, "piped", ROWS.encode(), "-")
    assert "the summary cannot be printed (No space left on device); it stands in piped/job.json, too" in said
    results = (tmp_path / "piped" / "results.jsonl").read_bytes()
    assert results.count(b"\n") == 4
    assert "holds a job that was begun with an input" in run(tmp_path, "piped", b"another prompt\n", "-", code=1)

    # A row is lost by hand, and the job's description broken: it goes on with nothing on standard input.
    with sqlite3.connect(tmp_path / "piped" / "job.db") as db:
        db.execute("DELETE FROM records WHERE row = 2")
    db.close()
    (tmp_path / "piped" / "job.json").write_text("{")
    assert json.loads(outrider("status", "piped", "--json", cwd=tmp_path).stdout)["done"] == 3
    again = run(tmp_path, "piped", b"", "-")
    assert "1 row was marked as ended without a whole record, and will be done again" in again
    assert "piped/job.json cannot be used (it is no JSON): what it said is taken from job.db" in again
    assert (tmp_path / "piped" / "results.jsonl").read_bytes() == results
    assert json.loads((tmp_path / "piped" / "job.json").read_text())["summary"]["done"] == 4

    (tmp_path / "in.jsonl.gz").write_bytes(gzip.compress(ROWS.encode()))
    run(tmp_path, "compressed", b"", "in.jsonl.gz")
    assert (tmp_path / "compressed" / "results.jsonl").read_bytes() == results
