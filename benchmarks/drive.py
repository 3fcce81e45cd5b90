"""What the driver costs a row: the real driver, journal and Ray, over targets that answer at once.

python benchmarks/drive.py --rows 20000 --replicas 2 --tokens 32
"""

from __future__ import annotations

import argparse
import cProfile
import json
import os
import pstats
import resource
import socket
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from outrider.runner.hosts import ray_start as cluster
from outrider.runner.hosts.this_machine import LocalHost
from outrider.runner.job.journal import Counts, Journal, StoredRow
from outrider.runner.job.results import write_results
from outrider.runner.planning.placement import PlannedActor
from outrider.runner.planning.replica_plan import ActorPlan, ReplicaPlan
from outrider.workers.machine.pinning import Launch
from outrider.workers.messages import (
    ActorPlacement,
    ModelSpec,
    PartialTokens,
    ReplicaSpec,
    Row,
    RowResult,
    WorkerReport,
)
from outrider.workers.target.statistics import TargetStatistics

PLANNED = PlannedActor("target", 0, "here", (0,), (), 1, "cpu", "", {}, (), {})
PLAN = ActorPlan(
    ModelSpec("instant", "none", "fp32"), PLANNED, ActorPlacement(Launch(PLANNED.pin, "affinity", (), "python3"))
)
REQUEST = {
    "max_tokens": 32, "n": 1, "stop": [], "temperature": 0.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "seed": 1,
    "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "logit_bias": [],
}  # fmt: skip


class AnyPlace(ActorPlan):
    def options(self, variables: Any) -> dict[str, Any]:
        return {}


class Instant:
    """A fake verifier: a round takes this many seconds and ends all rows of the batch."""

    def __init__(self, batch: int, tokens: int, seconds: float) -> None:
        self.statistics = TargetStatistics()
        self.batch, self._tokens, self._seconds = batch, tuple(range(tokens)), seconds
        self._rows: list[Row] = []

    @property
    def idle(self) -> bool:
        return not self._rows

    @property
    def in_store(self) -> int:
        return max(0, len(self._rows) - self.batch)

    def add(self, rows: Iterable[Row]) -> None:
        self._rows.extend(rows)

    def cancel(self, keys: Iterable[int]) -> None:
        gone = set(keys)
        self._rows = [row for row in self._rows if row.key not in gone]

    def learn(self, answers: Sequence[Sequence[int]]) -> None:
        """Ignores other replicas' answers, since it proposes nothing."""

    def written(self) -> list[PartialTokens]:
        """Empty, since no row is unfinished after a round."""
        return []

    def round(self) -> list[RowResult]:
        time.sleep(self._seconds)
        some, self._rows = self._rows[: self.batch], self._rows[self.batch :]
        self.statistics.counters.rounds += 1
        text = " word" * len(self._tokens)
        return [RowResult(row.key, self._tokens, text, "length", 1, 0, 0, self._seconds) for row in some]


def instant_target(tokens: int, seconds: float) -> Any:
    import ray

    @ray.remote(num_cpus=0, max_concurrency=4)
    class InstantTarget:
        def load(self, spec: ModelSpec, placement: ActorPlacement, replica_spec: ReplicaSpec) -> WorkerReport:
            from outrider.workers.actor_loops import TargetLoop

            self._loop = TargetLoop(Instant(replica_spec.batch, tokens, seconds))  # type: ignore[arg-type]
            return WorkerReport(os.getpid(), socket.gethostname(), 0.0, "instant", (), {}, {"warnings": ()}, ())

        def submit(self, rows: Any) -> None:
            self._loop.submit(rows)

        def harvest(self, timeout: float, rows: Any) -> Any:
            self._loop.submit(rows)
            return self._loop.harvest(timeout)

        def cancel(self, keys: list[int]) -> None:
            self._loop.cancel(keys)

    return InstantTarget


def filled_journal(folder: Path, rows: int, prompt_tokens: int) -> Journal:
    journal = Journal(folder / "job.db")
    prompt = tuple(range(prompt_tokens))
    stored = (StoredRow(n, f"request-{n}", n + 1, "completion", {**REQUEST, "seed": n}, prompt) for n in range(rows))
    journal.fill(stored, [], {})
    return journal


def run_driver(journal: Journal, given: argparse.Namespace) -> tuple[float, float]:
    """Runs the driver to its end: (seconds, CPU seconds of this process)."""
    with cluster.local_ray(2, {}) as lost:
        from outrider.runner.driving import driver as driving
        from outrider.runner.driving import replica

        replica.TargetActor = instant_target(given.tokens, given.seconds)  # type: ignore[misc]
        plan = ReplicaPlan(AnyPlace(PLAN.model, PLAN.actor, PLAN.placement), None, ReplicaSpec(given.batch, 0))
        driver = driving.Driver(
            journal,
            [replace(plan) for _ in range(given.replicas)],
            "instant",
            start_deadline=300.0,
            agree_on_path=lambda path: None,
            hosts=LocalHost(lambda unplaced: [], lost, lambda: None),
            show=lambda counters: None,
        )
        profile = cProfile.Profile()
        cpu = time.process_time()
        if given.profile:
            profile.runcall(driver.run)
        else:
            driver.run()
        cpu = time.process_time() - cpu
        if given.profile:
            pstats.Stats(profile).sort_stats("tottime").print_stats(given.profile)
        return driver.counters.seconds, cpu


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=128, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=32, help="tokens of an answer")
    parser.add_argument("--seconds", type=float, default=0.0, help="that a batch takes")
    parser.add_argument("--profile", type=int, default=0, help="show this many functions of the driver")
    given = parser.parse_args()

    with tempfile.TemporaryDirectory(dir=".") as directory:
        journal = filled_journal(Path(directory), given.rows, given.prompt)
        seconds, cpu = run_driver(journal, given)
        assert journal.counts() == Counts(given.rows, given.rows, 0)
        began = time.perf_counter()
        write_results(journal, Path(directory))
        written = time.perf_counter() - began
        figures = {
            "rows": given.rows,
            "replicas": given.replicas,
            "seconds": round(seconds, 2),
            "rows_a_second": round(given.rows / seconds),
            "driver_cpu_us_a_row": round(cpu / given.rows * 1e6, 1),
            "results_us_a_row": round(written / given.rows * 1e6, 1),
            # A journal on a network file system has no job.db-wal.
            "journal_mib": {
                file.name: round(file.stat().st_size / 2**20, 1)
                for name in ("job.db", "job.db-wal")
                if (file := Path(directory) / name).exists()
            },
            "peak_mib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
        }
        print(json.dumps(figures))


if __name__ == "__main__":
    main()
