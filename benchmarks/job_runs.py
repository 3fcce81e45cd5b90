"""Runs jobs for benchmarks (``outrider run`` over prompts), and reads their job.json and results."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from types import FrameType
from typing import Any

from outrider.runner.job.journal import Journal

OUTRIDER = [sys.executable, "-c", "from outrider.runner.cli.main import main; main()"]
EXAMPLES = Path(__file__).resolve().parents[1] / "examples" / "prompts.jsonl"
TEMPERATURES = (0.0, 0.8)
POLL_SECONDS = 0.2


@dataclass(frozen=True, slots=True)
class Ran:
    """A job that has ended: its directory, and the whole of its job.json."""

    directory: Path
    told: dict[str, Any]

    @property
    def summary(self) -> dict[str, Any]:
        return dict(self.told["summary"])

    def same_as(self, other: Ran) -> bool:
        name = "results.jsonl"
        return (self.directory / name).read_bytes() == (other.directory / name).read_bytes()


def prompts_of(files: Sequence[Path]) -> list[str]:
    """The prompts of several files, alternating between the files as long as each has prompts."""
    lines = [[json.loads(line) for line in file.read_text().splitlines() if line.strip()] for file in files]
    texts = [[str(line["prompt"]) for line in each if "prompt" in line] for each in lines]
    longest = max(map(len, texts))
    return [each[index] for index in range(longest) for each in texts if index < len(each)]


def rows_of(prompts: Sequence[str], count: int, temperatures: Sequence[float] = (0.0,)) -> Iterator[dict[str, Any]]:
    """This many rows with prompts and temperatures in turn. Repeated prompts have different ids, and so different seeds."""
    for number, (prompt, temperature) in enumerate(islice(zip(cycle(prompts), cycle(temperatures), strict=False), count)):
        yield {"id": f"row-{number}", "prompt": prompt, "temperature": temperature}


def write_rows(file: Path, rows: Iterable[dict[str, Any]]) -> None:
    with file.open("w", encoding="utf-8") as stream:
        stream.writelines(json.dumps(row) + "\n" for row in rows)


def _end_by(number: int, _frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def run(
    rows: Path, job: Path, options: Sequence[str], watch: Callable[[subprocess.Popen[bytes], Path], None] | None = None
) -> Ran:
    """Run the job to its end; ``watch`` is called repeatedly while it runs. A job that fails ends the benchmark; a SIGTERM
    to the benchmark ends the job.
    """
    before = signal.signal(signal.SIGTERM, _end_by)
    log = job.with_suffix(".log")
    with log.open("wb") as stream:
        process = subprocess.Popen(
            [*OUTRIDER, "run", str(rows), *options, "-o", str(job)],
            stdout=stream,
            stderr=subprocess.STDOUT,
            env={**os.environ, "HF_HUB_OFFLINE": "1"},
        )
        try:
            while process.poll() is None:
                if watch is not None:
                    watch(process, job)
                time.sleep(POLL_SECONDS)
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
            signal.signal(signal.SIGTERM, before)
    if process.returncode != 0:
        raise SystemExit(f"outrider run {' '.join(options)} ended with {process.returncode}:\n{log.read_text()[-3000:]}")
    return Ran(job, json.loads((job / "job.json").read_text()))


def rows_done(job: Path) -> int:
    if not (job / "job.db").exists():
        return 0
    journal = Journal(job / "job.db", read_only=True)
    try:
        return journal.counts().done if journal.filled else 0
    finally:
        journal.close()


def descendants(process: int) -> Iterator[tuple[int, str]]:
    """All descendants of the process with their command lines; Ray names workers after their actors."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue  # it has just ended
            children.setdefault(parent, []).append(int(entry.name))
    waiting = [process]
    while waiting:
        for child in children.get(waiting.pop(), []):
            waiting.append(child)
            try:
                command = (Path("/proc") / str(child) / "cmdline").read_bytes()
            except OSError:
                continue
            yield child, command.replace(b"\0", b" ").decode(errors="replace")
