"""A million rows through the server's files: uploaded, admitted, answered at once, written and fetched; and its memory.

    python stress/serve_million.py --rows 1000000

The server is a process of its own, with a runner that has no models (``tests/support/fake_server.py``); its rows are read,
admitted into a journal and recorded as always, in portions. Its peak of memory is printed after each step, and the whole
fails where a million rows take more than a few thousand did.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from multiprocessing.connection import Connection
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "tests" / "support"))

import openai  # noqa: E402
from fake_server import KEY, FakeRunner, FakeServer, _result, line  # noqa: E402

from outrider.runner.job.directory import JOURNAL, job_lock  # noqa: E402
from outrider.runner.job.journal import Journal, StoredRow  # noqa: E402
from outrider.runner.job.prompts import BadRow, read_rows  # noqa: E402
from outrider.runner.job.results import result_record  # noqa: E402
from outrider.runner.job.source import Source  # noqa: E402
from outrider.runner.serve.admission_child import foreign_rows  # noqa: E402
from outrider.runner.serve.names import INPUT  # noqa: E402
from outrider.runner.serve.running import Admitted, BatchJob, Left  # noqa: E402

FEW, PORTION = 5_000, 1_000
# What SQLite's pages, threads and the allocator may take more.
MOST_MORE_MB = 40


class StreamingRunner(FakeRunner):
    """What an admission and a model's process do, in portions, with no models."""

    def admit(self, job: BatchJob) -> None:
        path = job.directory / INPUT
        assert not any(foreign_rows(path, job.endpoint, job.model))

        def rows() -> Iterator[StoredRow]:
            for number, row in enumerate(read_rows(Source(path))):
                assert not isinstance(row, BadRow)
                yield StoredRow(number, row.custom_id, row.line, "completion", {"n": 1}, (1, 2))

        with closing(Journal(job.directory / JOURNAL)) as journal:
            journal.fill(rows(), (), {"identity": {}})
            self.hear(Admitted(job.batch, journal.counts().rows))

    def run(self, job: BatchJob) -> None:
        last = -1
        with job_lock(job.directory), closing(Journal(job.directory / JOURNAL)) as journal:
            while found := journal.pending(last, PORTION):
                last = found[-1][0]
                rows = journal.load([row for row, _ in found])
                journal.record([(row.row, result_record(row, [_result(row)], job.model)) for row in rows], [])
        self.hear(Left(job.batch, whole=True))


def serve(data: Path, told: Connection) -> None:
    import fake_server

    fake_server.FakeRunner = StreamingRunner  # type: ignore[misc]
    with FakeServer(data).served() as url:
        told.send(url)
        told.recv()


def peak_mb(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) / 1024


def through(client: openai.OpenAI, folder: Path, rows: int, pid: int) -> float:
    """This many rows there and back; the server's peak of memory after it."""
    path = folder / "rows.jsonl"
    with path.open("w") as stream:
        stream.writelines(line(f"row {number}") for number in range(rows))
    started = time.monotonic()

    def say(what: str) -> None:
        print(f"{rows:>9,} rows {what:<9} {time.monotonic() - started:7.1f} s  {peak_mb(pid):6.1f} MB", flush=True)

    with path.open("rb") as content:
        file = client.files.create(file=content, purpose="batch")
    say("uploaded")
    batch = client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
    while batch.status != "completed":
        assert batch.status not in ("failed", "expired", "cancelled"), batch
        time.sleep(0.2)
        batch = client.batches.retrieve(batch.id)
    say("done")
    assert batch.output_file_id is not None
    seen = 0
    with client.files.with_streaming_response.content(batch.output_file_id) as answer:
        for number, each in enumerate(answer.iter_lines()):
            seen += json.loads(each)["custom_id"] == f"row {number}"
    assert seen == rows, f"{seen} of {rows} rows came back in order"
    say("fetched")
    return peak_mb(pid)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="outrider-million-") as name:
        folder = Path(name)
        ours, theirs = multiprocessing.get_context("spawn").Pipe()
        server = multiprocessing.get_context("spawn").Process(target=serve, args=(folder / "data", theirs), daemon=True)
        server.start()
        assert server.pid is not None
        client = openai.OpenAI(base_url=f"{ours.recv()}/v1", api_key=KEY, max_retries=0, timeout=7200)
        few = through(client, folder, FEW, server.pid)
        many = through(client, folder, asked.rows, server.pid)
        client.close()
        ours.send("end")
        server.join()
    print(f"peak: {few:.1f} MB after {FEW:,} rows, {many:.1f} MB after {asked.rows:,} more")
    if many - few > MOST_MORE_MB:
        sys.exit(f"the server's memory grew by {many - few:.0f} MB")


if __name__ == "__main__":
    main()
