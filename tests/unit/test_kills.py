"""The checks of stress/kills.py find a row that is lost, doubled or changed."""

from __future__ import annotations

import json
import shutil
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from outrider.runner.job.journal import Journal, StoredRow

sys.path.append(str(Path(__file__).resolve().parents[2] / "stress"))
import kills
from kills import CONFIGURATIONS, KillCounts, Violation, check_rows

ROWS = 4


def record(number: int, tokens: int = 2) -> str:
    return json.dumps({"custom_id": f"row {number}", "response": {"body": {"usage": {"completion_tokens": tokens}}}})


@pytest.fixture
def jobs(tmp_path: Path) -> tuple[Path, Path]:
    """A job that is done, and the undisturbed one."""
    job = tmp_path / "job"
    job.mkdir()
    journal = Journal(job / "job.db")
    journal.fill((StoredRow(n, f"row {n}", n + 1, "completion", {}, (1,)) for n in range(ROWS)), [], {})
    journal.record([(n, record(n)) for n in range(ROWS)], [], {"tokens": 2 * ROWS})
    journal.close()
    (job / "results.jsonl").write_text("".join(record(n) + "\n" for n in range(ROWS)))
    (job / "errors.jsonl").write_text("")
    shutil.copytree(job, tmp_path / "undisturbed")
    return job, tmp_path / "undisturbed"


def test_a_whole_job_passes(jobs: tuple[Path, Path]) -> None:
    check_rows(*jobs, ROWS)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda lines: lines[1:], "3 of 4 rows"),
        (lambda lines: [*lines, lines[0]], "doubled"),
        (lambda lines: [lines[0].replace("2}", "3}"), *lines[1:]], "not the bytes"),
        (lambda lines: [*lines[1:], lines[0]], "not the bytes"),
    ],
)
def test_a_row_lost_doubled_or_changed_is_found(
    jobs: tuple[Path, Path], damage: Callable[[list[str]], list[str]], said: str
) -> None:
    results = jobs[0] / "results.jsonl"
    results.write_text("".join(damage(results.read_text().splitlines(keepends=True))))
    with pytest.raises(Violation, match=said):
        check_rows(*jobs, ROWS)


def test_a_failed_row_and_a_wrong_total_are_found(jobs: tuple[Path, Path]) -> None:
    job, undisturbed = jobs
    journal = Journal(job / "job.db")
    journal.record([], [], {"tokens": 2 * ROWS + 1})
    journal.close()
    with pytest.raises(Violation, match="9 tokens are counted, 8 were written"):
        check_rows(job, undisturbed, ROWS)
    (job / "errors.jsonl").write_text("{}\n")
    with pytest.raises(Violation, match="4 of 4 rows"):
        check_rows(job, undisturbed, ROWS)


def test_runs_add_to_the_count(tmp_path: Path) -> None:
    path = tmp_path / "killed.json"
    for deaths in (3, 4):
        total = KillCounts.read(path)
        total.add(KillCounts(Counter({"target": deaths}), Counter(), Counter({"draft": 1}), 10, 2, 1.5))
        total.write(path)
    total = KillCounts.read(path)
    assert (total.deaths, total.jobs["draft"], total.rows, total.runs, total.seconds) == (7, 2, 20, 4, 3.0)


def test_configurations_differ_in_what_they_run() -> None:
    assert len({each.name for each in CONFIGURATIONS}) == len(CONFIGURATIONS)
    assert kills.COUNT_FILE.parent.name == "stress"
