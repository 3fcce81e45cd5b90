"""One target and its draft for the benchmark: a job's replica, without schedule and journal."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import ray
from ray.exceptions import RayTaskError

from outrider.runner.driving.replica import Call, Replica
from outrider.runner.hosts.ray_watch import Lost
from outrider.runner.hosts.worker_errors import explain
from outrider.runner.planning import sysfs
from outrider.runner.planning.replica_plan import ReplicaPlan
from outrider.workers.errors import JobError, OutriderError
from outrider.workers.messages import LayoutRecord, Row, RowFailure, RowResult, WorkerReport

POLL_SECONDS = 0.5


class Pair:
    """A context manager: both actors are up inside the block. If either dies, the benchmark ends with an error."""

    def __init__(self, plan: ReplicaPlan, start_deadline: float, lost: Lost) -> None:
        self._replica = Replica(0, plan)
        self._lost = lost
        self._start_deadline = start_deadline
        self.reports: dict[str, WorkerReport] = {}
        self.layout: LayoutRecord | None = None
        self.costs: dict[str, Any] = {}

    @property
    def chooses_layout(self) -> bool:
        """Whether the target tries several layouts before it keeps one."""
        return sum(not each.plain for each in self._replica.plan.replica_spec.layouts) > 1

    def set_layout(self, name: str | None) -> None:
        """Fix the layout; None lets the tuner choose again."""
        self._replica.set_layout(name)

    def __enter__(self) -> Self:
        deadline = time.monotonic() + self._start_deadline
        self._replica.start()
        # Wait until the draft is attached, too; a row before that would be decoded plainly.
        up = self._replica.plan.draft is None
        try:
            while not (up and "target" in self.reports):
                for call, value in self._answers():
                    up = up or call is Call.ATTACH_DRAFT
                    if call is Call.LOAD_TARGET:
                        self.reports["target"] = value
                        self._replica.target_is_ready(value)
                    elif call is Call.LOAD_DRAFT:
                        self.reports["draft"] = value
                        self._replica.draft_is_ready(value)
                        self._replica.attach_draft()
                if time.monotonic() > deadline:
                    late, plan = "the target", self._replica.plan.target
                    if "target" in self.reports and self._replica.plan.draft is not None:
                        late, plan = "the draft", self._replica.plan.draft
                    raise plan.placement.launch.not_up(late, self._start_deadline)
        except BaseException:
            self._replica.stop()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._replica.stop()

    def answer(self, row: Row) -> RowResult:
        return self.answers([row])[0]

    def answers(self, rows: Sequence[Row]) -> list[RowResult]:
        """The answers of rows that are decoded in one batch, in the order of ``rows``."""
        results: dict[int, RowResult] = {}
        self._replica.submit(list(rows))
        while len(results) < len(rows):
            self._replica.harvest()
            for call, value in self._answers():
                if call is not Call.HARVEST:
                    continue
                self._replica.harvested()
                self.layout, self.costs = value.layout, value.costs
                for ended in value.ended:
                    if isinstance(ended, RowFailure):
                        raise JobError(ended.message)
                    results[ended.key] = ended
        return [results[row.key] for row in rows]

    def peak_bytes(self) -> int:
        """The sum of both processes' peak memory (VmHWM)."""
        return sum(_peak(report.pid) for report in self.reports.values())

    def _answers(self) -> Iterator[tuple[Call, Any]]:
        pending = self._replica.pending
        ready, _ = ray.wait(list(pending), num_returns=1, timeout=POLL_SECONDS)
        if how := self._lost():
            raise JobError(f"{how}; the benchmark ends with what was measured until then")
        for future in ready:
            call = pending.pop(future)
            try:
                yield call, ray.get(future)
            except Exception as error:
                cause = error.cause if isinstance(error, RayTaskError) else error
                if isinstance(cause, OutriderError):
                    raise cause from None
                who = "the draft" if call.of_draft else "the target"
                raise JobError(f"{who} failed: {explain(error)}") from error


def _peak(pid: int) -> int:
    for line in (sysfs.read_text(Path(f"/proc/{pid}/status")) or "").splitlines():
        name, _, value = line.partition(":")
        if name == "VmHWM":
            return int(value.split()[0]) * 1024
    return 0
