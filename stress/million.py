"""A million rows from a table through a whole job and out again, with a target that answers at once: the memory it takes.

    python stress/million.py                        # 100,000 rows, then 1,000,000
    python stress/million.py --rows 20000 40000
    python stress/million.py --format csv

Admission, journal, driver, results and tables are the real ones, by the command's own functions; tokenizer, replicas and
Ray are not. Each size runs in a process of its own, which says after each stage how much memory it has had at most.
Exits with 1 where the last size takes more than ``--most-growth`` times the memory of the first.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).parent.parent / "tests/support"))
from driver_fakes import PLAN
from small_job import FakeTokenizerProcess
from virtual_ray import report_of

from outrider.runner import drive_job, prepare_job
from outrider.runner.driving import driver
from outrider.runner.driving.replica import Call
from outrider.runner.hosts.this_machine import LocalHost
from outrider.runner.job.tables import write_table
from outrider.runner.options.job import JobSpec
from outrider.runner.planning.replica_plan import ReplicaPlan
from outrider.runner.report.counters import JobCounters
from outrider.runner.run_job import run_job
from outrider.workers.messages import Harvest, Row, RowResult, TargetCounters, Trace, WorkerReport

BATCH = 1024
ANSWER = "an answer of some words"
MAKE = """
import sys
from pathlib import Path
import pyarrow, pyarrow.csv
from pyarrow import parquet
path, rows, form = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
def table(first, count):
    numbers = range(first, first + count)
    return pyarrow.table({
        "text": [f"text {n}" for n in numbers], "label": [n % 7 for n in numbers], "weight": [n / 3 for n in numbers],
    })
schema = table(0, 1).schema
make = pyarrow.csv.CSVWriter if form == "csv" else parquet.ParquetWriter
with make(path, schema) as writer:
    for first in range(0, rows, 10000):
        writer.write_table(table(first, min(10000, rows - first)))
"""


class AtOnce:
    """A replica whose rows have ended when it is asked for them."""

    def __init__(self, number: int, plan: ReplicaPlan) -> None:
        self.number, self.plan = number, plan
        self.report: WorkerReport | None = None
        self.pending: dict[Any, Call] = {}
        self.rows: deque[Row] = deque()
        self.counters = TargetCounters()
        self.unsent: frozenset[int] = frozenset()

    def start(self) -> None:
        self.pending[SimpleFuture(lambda: report_of(SimpleNamespace(host="here")))] = Call.LOAD_TARGET  # type: ignore[arg-type]

    def target_is_ready(self, report: WorkerReport) -> None:
        self.report = report

    def harvested(self) -> None:
        pass

    def harvest(self, seconds: float) -> None:
        if self.report is not None and not self.pending:
            self.pending[SimpleFuture(self._harvest)] = Call.HARVEST

    def _harvest(self) -> Harvest:
        rows, self.rows = self.rows, deque()
        self.counters.rounds += 1
        self.counters.prompt_tokens += sum(len(row.prompt) for row in rows)
        ended = tuple(RowResult(row.key, (1, 2, 3, 4, 5), ANSWER, "stop", 1, 0, 0, 0.1) for row in rows)
        return Harvest(ended, self.counters, Trace())

    def cancel(self, keys: Sequence[int]) -> None:
        pass

    def submit(self, rows: Sequence[Row]) -> None:
        self.rows.extend(rows)

    def stop(self) -> None:
        self.pending.clear()


class SimpleFuture:
    def __init__(self, answer: Callable[[], Any]) -> None:
        self.answer = answer


class Quiet:
    def __enter__(self) -> Quiet:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def say(self, text: str) -> None:
        print(text, file=sys.stderr)

    def show(self, counters: JobCounters) -> None:
        pass


@contextmanager
def here(*_: object) -> Iterator[tuple[LocalHost, list[ReplicaPlan]]]:
    from dataclasses import replace

    plan = replace(PLAN, replica_spec=replace(PLAN.replica_spec, batch=BATCH))
    yield LocalHost(lambda unplaced: [], lambda: None, lambda: None), [plan]


def wait(futures: list[SimpleFuture], num_returns: int, timeout: float) -> tuple[list[SimpleFuture], list[SimpleFuture]]:
    return futures[:num_returns], futures[num_returns:]


def peak_mib() -> float:
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1)


def one_size(folder: Path, rows: int, form: str) -> None:
    """The whole way of this many rows, in this process."""
    source, directory = folder / f"in.{form}", folder / "job"
    subprocess.run([sys.executable, "-c", MAKE, str(source), str(rows), form], check=True)
    told: dict[str, Any] = {"rows": rows, "input": form, "at the start": peak_mib()}
    began = time.monotonic()
    spec = JobSpec(input=source, out=directory, template="Say: {text}", max_tokens=5, draft="none", engine="hf")
    with ExitStack() as stack:
        stack.enter_context(mock.patch.multiple(prepare_job, TokenizerProcess=FakeTokenizerProcess))
        stack.enter_context(mock.patch.multiple(drive_job, local_host=here))
        fake_ray = SimpleNamespace(wait=wait, get=lambda future: future.answer())
        stack.enter_context(mock.patch.multiple(driver, Replica=AtOnce, ray=fake_ray))
        outcome = run_job(spec, Quiet())
    assert (outcome.summary["done"], outcome.exit_code) == (rows, 0), outcome.summary
    told |= {"after the job": peak_mib(), "seconds of the job": round(time.monotonic() - began, 1)}
    for name in ("parquet", "csv", "jsonl"):
        began = time.monotonic()
        write_table(directory, folder / f"out.{name}", name)
        told |= {f"after {name}": peak_mib(), f"seconds of {name}": round(time.monotonic() - began, 1)}
    check(folder, rows, form)
    print(json.dumps(told), flush=True)


def check(folder: Path, rows: int, form: str) -> None:
    """Every row once, in order, with its own columns."""
    from pyarrow import parquet

    number = 0
    for batch in parquet.ParquetFile(folder / "out.parquet").iter_batches(10_000):
        for row in batch.select(["input_text", "label", "text"]).to_pylist():
            label: object = number % 7 if form == "parquet" else str(number % 7)
            assert row == {"input_text": f"text {number}", "label": label, "text": ANSWER}, row
            number += 1
    assert number == rows
    with (folder / "out.jsonl").open("rb") as lines:
        assert sum(1 for _ in lines) == rows


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[100_000, 1_000_000])
    parser.add_argument("--format", choices=("parquet", "csv"), default="parquet")
    parser.add_argument("--most-growth", type=float, default=1.25)
    parser.add_argument("--folder", type=Path, help="run one size there, in this process")
    asked = parser.parse_args(given)
    if asked.folder is not None:
        one_size(asked.folder, asked.rows[0], asked.format)
        return
    peaks = []
    for rows in asked.rows:
        with tempfile.TemporaryDirectory() as folder:
            words = [__file__, "--rows", str(rows), "--format", asked.format, "--folder", folder]
            said = subprocess.run([sys.executable, *words], check=True, stdout=subprocess.PIPE, text=True).stdout
        print(said, end="", flush=True)
        peaks.append(max(value for name, value in json.loads(said).items() if name.startswith("after")))
    if peaks[-1] > asked.most_growth * peaks[0]:
        sys.exit(f"memory grows with the rows: {peaks[0]} MiB, then {peaks[-1]} MiB")


if __name__ == "__main__":
    main()
