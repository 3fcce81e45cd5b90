"""Every test that CI runs beside the fast ones, side by side: a third less time on two cores than one after the other.

    python tools/all_tests.py [--logs DIR]

Tests that start a Ray wait most of their time, so there are two streams of them, each with core leases and shared memory of
its own (one after the other where a mount namespace cannot be had). What only computes has the processor time that these
leave. Tests that failed have a second turn, alone, when all else has ended: two cores are few for some deadlines. A set
that was not run to its end has none, since nobody knows what it left out.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# pytest's exit code where every test was run, and some failed.
TESTS_FAILED = 1
NEWEST = ".venv/bin/python"
OLDEST = ".venv-oldest-ray/bin/python"


def of_ray(*names: str) -> tuple[str, ...]:
    return tuple(f"tests/ray/test_{name}.py" for name in names)


# Tests of jobs that run in the stream of hosts, which has time for them.
BESIDE_HOSTS = of_ray("embedded_ray", "python_interface")
# A third of the other jobs, which follow the rest of them. Hosts take as long as all others.
SERVERS = of_ray(
    *("serve", "tables_end_to_end", "tools_end_to_end", "inputs_end_to_end", "hostile_models_end_to_end"),
    *("second_user", "metrics_port"),
)
# The files of tests/unit with tests that start a Ray; pytest need not import the others.
UNIT_WITH_RAY = tuple(
    str(file.relative_to(ROOT))
    for file in sorted((ROOT / "tests" / "unit").glob("test_*.py"))
    if "pytest.mark.ray" in file.read_text(encoding="utf-8")
)

# A mount namespace with its own /dev/shm, which has core leases and Ray's shared memory.
APART = ("unshare", "--mount", "sh", "-c", 'mount -t tmpfs tmpfs /dev/shm && exec "$@"', "sh")
# The lowest priority, below that of Ray's actors (15).
LAST = ("nice", "-n", "19")


@dataclass(frozen=True)
class Tests:
    name: str
    python: str
    marks: str
    places: tuple[str, ...]
    # Property tests try all examples (tests/support/examples.py).
    all_examples: bool = False
    # One process per core (tools/parallel_tests.py). Failed tests are run again by one process.
    parallel: bool = False

    def command(self, logs: Path, again: bool) -> list[str]:
        cache, places, options = logs / f"cache-{self.name}", self.places, ["-m", self.marks, "--durations=30"]
        if self.parallel and not again:
            # No more processes than cores, since two other streams run at the same time.
            processes = ["--processes", str(min(len(os.sched_getaffinity(0)), 8)), "--in-memory"]
            return [self.python, "tools/parallel_tests.py", *processes, "--cache", str(cache), *places, "--", *options]
        failed = ["--last-failed", "--last-failed-no-failures", "none"] if again else []
        return [self.python, "-m", "pytest", "-q", "-o", f"cache_dir={cache}", *options, *failed, *places]


@dataclass(frozen=True)
class Stream:
    """Sets of tests that run one after the other, each with the command prefix ``within``."""

    sets: tuple[Tests, ...]
    within: tuple[str, ...]


STREAMS = (
    Stream(
        (
            Tests(
                "jobs", NEWEST, "slow and ray", ("tests/ray", *(f"--ignore={file}" for file in (*BESIDE_HOSTS, *SERVERS)))
            ),
            Tests("jobs-oldest-ray", OLDEST, "oldest_ray", ("tests/ray",)),
            Tests("servers", NEWEST, "slow and ray", SERVERS),
        ),
        APART,
    ),
    Stream(
        (Tests("hosts", NEWEST, "slow and (ray or cluster)", ("tests/cluster", *BESIDE_HOSTS, *UNIT_WITH_RAY)),),
        APART,
    ),
    Stream(
        (
            Tests("computing", NEWEST, "slow and not ray and not cluster", ("tests",), all_examples=True, parallel=True),
            Tests("fast-oldest-ray", OLDEST, "oldest_ray and not slow", ("tests/unit",), parallel=True),
        ),
        LAST,
    ),
)


def can(words: Sequence[str]) -> bool:
    return subprocess.run([*words, "true"], cwd=ROOT, capture_output=True, check=False).returncode == 0


def last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines()
    return next((line for line in reversed(lines) if line.strip()), "it said nothing")


def show(tests: Tests, logs: Path) -> None:
    log = logs / f"{tests.name}.log"
    print(log.read_text(errors="replace") if log.exists() else f"{tests.name} did not start", flush=True)


def run(tests: Tests, within: Sequence[str], logs: Path, again: bool = False) -> int:
    """Runs a set of tests and returns its exit code."""
    log = logs / f"{tests.name}.log"
    environment = {**os.environ, **({"OUTRIDER_ALL_EXAMPLES": "1"} if tests.all_examples else {})}
    with log.open("a") as file:
        code = subprocess.run(
            [*within, *tests.command(logs, again)],
            cwd=ROOT,
            env=environment,
            stdout=file,
            stderr=subprocess.STDOUT,
            check=False,
        ).returncode
    print(f"{time.strftime('%H:%M:%S')} {tests.name}: {last_line(log)}", flush=True)
    return code


def run_all(logs: Path) -> dict[str, int]:
    """Runs all streams side by side: the exit code of each set that was run."""
    codes: dict[str, int] = {}
    one_ray = threading.Lock()
    apart = can(APART)

    def go_through(stream: Stream) -> None:
        takes_turns = stream.within is APART and not apart
        with one_ray if takes_turns else nullcontext():
            for tests in stream.sets:
                codes[tests.name] = run(tests, () if takes_turns else stream.within, logs)

    threads = [threading.Thread(target=go_through, args=(stream,)) for stream in STREAMS]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return codes


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--logs", type=Path, default=ROOT / "build" / "tests")
    logs = parser.parse_args().logs.resolve()
    logs.mkdir(parents=True, exist_ok=True)
    for old in logs.glob("*.log"):
        old.unlink()
    # What failed in an earlier run must not stand for what fails in this one.
    for old in logs.glob("cache-*"):
        shutil.rmtree(old)
    codes = run_all(logs)
    lost = []
    # A set without an exit code was not run: its stream ended by an exception.
    for tests in (tests for stream in STREAMS for tests in stream.sets if codes.get(tests.name) != 0):
        if codes.get(tests.name) == TESTS_FAILED:
            show(tests, logs)
            print(f"{tests.name}: what failed, once more and alone", flush=True)
            if run(tests, (), logs, again=True) == 0:
                continue
        lost.append(tests)
    for tests in lost:
        show(tests, logs)
    return 1 if lost else 0


if __name__ == "__main__":
    sys.exit(main())
