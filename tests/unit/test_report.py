"""report.html: its content for jobs in every state, and escaped text of rows."""

from __future__ import annotations

import json
import os
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from built_once import CliRunner

from outrider.runner.cli.main import app
from outrider.runner.job.directory import job_lock
from outrider.runner.job.journal import Journal, StoredRow
from outrider.runner.job.results import error_record
from outrider.runner.report import statistics
from outrider.runner.report.error_kinds import MOST_KINDS, error_kinds
from outrider.runner.report.pinning import ranges
from outrider.runner.report.report import write_report
from outrider.runner.report.statistics import JobStatistics
from outrider.workers.errors import UsageError
from outrider.workers.messages import LONGEST_COUNTED, TargetCounters

ATTACK = "<script>alert(1)</script>"
VOID = {"meta", "br", "line", "rect", "circle", "path", "polyline"}


class Page(HTMLParser):
    """What a browser would see: elements, all closed in order, and the text of the body."""

    def __init__(self, content: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self._open: list[str] = []
        self.feed(content)
        assert not self._open, f"left open: {self._open}"

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attributes)))
        self._open.append(tag)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attributes)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, words: str) -> None:
        if "style" not in self._open:
            self.words.append(words)

    @property
    def text(self) -> str:
        return " ".join(self.words)


def stored(number: int, name: str) -> StoredRow:
    return StoredRow(number, name, number + 1, "completion", {"n": 1}, (1, 2))


@pytest.fixture
def job(tmp_path: Path) -> Path:
    directory = tmp_path / f"a job {ATTACK.replace('/', '')}"
    directory.mkdir()
    journal = Journal(directory / "job.db")
    journal.fill([stored(number, ATTACK if number == 3 else f"row-{number}") for number in range(10)], [], {})
    journal.close()
    return directory


def work(directory: Path, replicas: int = 2) -> None:
    """Ten seconds of it: five rows done, one failed."""
    journal = Journal(directory / "job.db")
    spent = JobStatistics(None, replicas)
    lengths = [3, 2, 5, *[0] * (LONGEST_COUNTED - 2)]
    counters = TargetCounters(
        seconds=10.0, rounds=20, row_rounds=20, tokens=500, asked=40, asking_rows=10, proposed=40, accepted=12,
        verify_seconds=6.0, draft_seconds=2.0, hop_seconds=1.0, idle_seconds=0.5, accepted_lengths=lengths,
    )  # fmt: skip
    for replica in range(replicas):
        spent.started(replica, 0.0)
        spent.observe(replica, counters, 10.0)
    for seconds in (0.5, 1.0, 1.0, 2.0, 8.0):
        spent.latencies.add(seconds)
    failure = (3, error_record(stored(3, ATTACK), "invalid_request", f"row 3: {ATTACK} is no prompt"))
    totals = {"tokens": 1000, "seconds": 10.0, "proposed": 80, "accepted": 24, "target_deaths": 1, "draft_deaths": 0}
    journal.record([(number, "{}") for number in (0, 1, 2, 4, 5)], [failure], totals)
    journal.set_meta(statistics.KEY, spent.record())
    pinning = [
        {
            "replica": replica, "role": "target", "pid": 7, "host": ATTACK, "cores": [2, 3, 4], "memory_policy": "bind",
            "asked": {"cores": [2, 3, 5], "memory_nodes": [0], "threads": 3}, "memory_nodes": [0], "threads": 3,
            "weight_pages": {"0": 192, "1": 64}, "differences": ["asked for cores 2-3,5, got 2-4"], "warnings": [],
        }
        for replica in range(replicas)
    ]  # fmt: skip
    journal.set_meta("pinning", pinning)
    tried = {"took": "shared", "rates": {"shared": 50.0, "split": 41.5}, "sentence": f"shared is faster {ATTACK}"}
    journal.set_meta("layouts", {0: tried, 10: {**tried, "rates": {"shared": 48.0}}})
    journal.close()
    (directory / "job.json").write_text(
        json.dumps({"target": {"name": f"opt {ATTACK}"}, "draft": "lookup", "spec": {"batch": 8, "draft_tokens": "auto"}})
    )


def report(directory: Path, running: bool = False) -> Page:
    path = write_report(Journal(directory / "job.db", read_only=True), directory, running)
    assert path == directory / "report.html"
    return Page(path.read_text())


def test_it_shows_what_the_job_did(job: Path) -> None:
    work(job)
    page = report(job)
    for part in ("Throughput over time", "Time by phase", "Accepted lengths", "k over time", "Latency of a row",
                 "Errors by kind", "Placement: asked and got", "What ran"):  # fmt: skip
        assert part in page.text
    facts = (
        "stopped with 4 rows to go", "of 10 done, 1 failed", "100", "30%", "1 of targets", "invalid_request", "2-3,5",
        "2-4", "node 0: 75%, node 1: 25%", "asked for cores 2-3,5, got 2-4", "lookup", "41.5", "not tried", "replica 10",
    )  # fmt: skip
    for fact in facts:
        assert fact in page.text, fact
    shares = re.findall(r"replica 0: (\w+) ([\d.]+)%", page.text)
    assert shares == [("verify", "60.0"), ("draft", "20.0"), ("hop", "10.0"), ("idle", "5.0"), ("other", "5.0")]
    assert "core 4" in page.text and "target 1 got, not asked" in page.text and "target 1 asked, not got" in page.text


def test_of_a_draft_it_says_how_it_ran_and_not_only_what_was_asked(job: Path) -> None:
    work(job)
    journal = Journal(job / "job.db")
    path = {"engine": "native", "precision": "w8a8"}
    journal.set_meta("pinning", [{**journal.meta("pinning")[0], "role": "draft", "numeric_path": path}])
    journal.close()
    spec = {"draft": "auto", "draft_precision": "auto"}
    (job / "job.json").write_text(json.dumps({"target": {"name": "opt"}, "draft": {"name": "small"}, "spec": spec}))
    assert "small, native, w8a8" in report(job).text


def test_every_chart_has_a_name_and_a_table_beside_it(job: Path) -> None:
    work(job)
    page = report(job)
    charts = [attributes for tag, attributes in page.elements if tag == "svg"]
    assert len(charts) == 5
    assert all(chart["role"] == "img" and chart["aria-label"] for chart in charts)
    assert page.text.count("as a table") == len(charts)


def test_nothing_of_a_row_or_a_name_becomes_markup(job: Path) -> None:
    work(job)
    page = report(job)
    assert page.text.count(ATTACK) >= 4, "the host, the row, its message, the model"
    assert not [tag for tag, _ in page.elements if tag == "script"]
    assert not [name for _, attributes in page.elements for name in attributes if name.startswith("on")]


def test_a_name_that_is_not_utf8_is_spelled_in_the_page(tmp_path: Path) -> None:
    directory = tmp_path / os.fsdecode(b"caf\xe9-job")
    directory.mkdir()
    journal = Journal(directory / "job.db")
    journal.fill([stored(0, "a")], [], {})
    journal.close()
    (directory / "job.json").write_text(json.dumps({"target": {"name": os.fsdecode(b"mod\xe8le")}}))
    shown = report(directory).text
    assert "caf\\udce9-job" in shown and "mod\\udce8le" in shown


def test_nothing_is_fetched_from_anywhere(job: Path) -> None:
    work(job)
    page = report(job)
    assert not [tag for tag, _ in page.elements if tag in ("link", "img", "iframe", "object", "script")]
    assert not [name for _, attributes in page.elements for name in attributes if name in ("src", "href", "xlink:href")]
    content = (job / "report.html").read_text()
    assert "url(" not in content and "@import" not in content
    assert "prefers-color-scheme: dark" in content


def test_a_job_that_has_just_begun_has_a_report(job: Path) -> None:
    page = report(job, running=True)
    for words in ("running, 10 rows to go", "Nothing has been measured yet", "No row has ended", "No replica has come up"):
        assert words in page.text


def test_a_job_of_many_replicas_stays_legible(job: Path) -> None:
    work(job, replicas=30)
    page = report(job)
    lines = [attributes for tag, attributes in page.elements if tag == "polyline"]
    assert len(lines) <= 1 + 6, "the sum, and k of the first few"


def test_the_command_works_on_a_running_job_and_on_a_stopped_one(job: Path) -> None:
    work(job)
    with job_lock(job):
        done = CliRunner().invoke(app, ["report", str(job)])
        assert done.exit_code == 0, done.output
        assert done.output.strip() == str(job / "report.html")
        assert "running, 4 rows to go" in Page((job / "report.html").read_text()).text
    CliRunner().invoke(app, ["report", str(job)])
    assert "stopped with 4 rows to go" in Page((job / "report.html").read_text()).text


def test_what_is_no_job_is_refused(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["report", str(tmp_path)])
    assert isinstance(done.exception, UsageError)
    assert "is not a job directory" in str(done.exception)
    assert not list(tmp_path.iterdir())


def test_errors_that_say_the_same_are_one_kind() -> None:
    records = [error_record(stored(n, f"id-{n}"), "invalid_request", f"row {n}: has {n * 7} tokens") for n in range(200)]
    records += [error_record(stored(900, "other"), "replica_died", "its process died")]
    kinds = error_kinds(records)
    assert [(kind.code, kind.rows) for kind in kinds] == [("invalid_request", 200), ("replica_died", 1)]
    assert kinds[0].examples == [f"id-{n}" for n in range(5)]


def test_very_many_kinds_of_errors_stay_few() -> None:
    words = [chr(97 + n // 26 % 26) + chr(97 + n % 26) + chr(97 + n // 676) for n in range(3000)]
    kinds = error_kinds(error_record(stored(n, word), "invalid_request", word) for n, word in enumerate(words))
    assert len(kinds) == MOST_KINDS + 1
    assert sum(kind.rows for kind in kinds) == 3000


def test_ranges() -> None:
    assert ranges([5, 0, 1, 2, 8, 9]) == "0-2,5,8-9"
    assert ranges([]) == ""
