"""The engines of the race as processes."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.race.programs.protocol import Answer, Request, Setup

PROGRAMS = Path(__file__).resolve().parent / "programs"
END_SECONDS = 60.0


class Failed(RuntimeError):
    """An engine's process did not answer; the message says why."""


@dataclass(frozen=True)
class Entry:
    """How to start an engine in one of its kinds (precisions)."""

    name: str
    python: Path
    program: str
    kind: str


@dataclass
class Running:
    process: subprocess.Popen[str]
    log: Path
    modes: dict[str, int]
    about: str

    def answer(self, request: Request) -> Answer:
        return Answer(**self._ask(asdict(request)))

    def _ask(self, content: dict[str, Any]) -> dict[str, Any]:
        assert self.process.stdin is not None and self.process.stdout is not None
        with suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps(content) + "\n")
            self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise Failed(f"its process ended with code {self.process.wait()}; {last_line(self.log)}")
        told: dict[str, Any] = json.loads(line)
        return told


@contextmanager
def started(entry: Entry, setup: Setup, log: Path) -> Iterator[Running]:
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": str(setup.threads),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    with log.open("a") as errors:
        process = subprocess.Popen(
            [str(entry.python), str(PROGRAMS / entry.program)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=environment,
        )
    running = Running(process, log, {}, "")
    try:
        known = running._ask(asdict(setup))
        running.modes, running.about = known["modes"], known["about"]
        yield running
    finally:
        assert process.stdin is not None
        # Closing flushes, which fails if the process has ended already.
        with suppress(BrokenPipeError):
            process.stdin.close()
        try:
            process.wait(timeout=END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def last_line(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return f"{lines[-1][:300]} (all of it in {log})" if lines else f"without a word ({log})"
