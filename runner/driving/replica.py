"""One replica as the driver sees it: a target and its draft, started, fed, watched and replaced."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from outrider.runner.job.requests import MOST_SAMPLES
from outrider.runner.planning.replica_plan import ActorPlan, ReplicaPlan
from outrider.runner.report.trace import TraceFile
from outrider.workers.actors import DraftActor, TargetActor
from outrider.workers.messages import Row, Trace, WorkerReport

# How long a target holds a harvest back when nothing has ended.
HARVEST_SECONDS = 1.0
# Only a traced run asks these, at a start and at the end.
CLOCK_SECONDS = 10.0
LAST_TRACE_SECONDS = 5.0
# A draft that dies this often is left dead: the job goes on without.
MOST_DRAFT_DEATHS = 5


class Replica:
    """Holds the futures that the driver waits for: ``pending`` maps each to what it stands for."""

    def __init__(self, number: int, plan: ReplicaPlan) -> None:
        self.number = number
        self.plan = plan
        self.report: WorkerReport | None = None
        self.draft_report: WorkerReport | None = None
        self.draft_deaths = 0
        self.pending: dict[Any, str] = {}
        self._harvesting = False
        self._outbox: list[Row] = []
        self._target: Any = None
        self._draft: Any = None

    def start(self) -> None:
        """Bring up both processes at the same time."""
        self.report = None
        self._forget_calls()
        self._target = _start_actor(TargetActor, self.plan.target)
        plan = self.plan.target
        serve = replace(self.plan.serve, replica=self.number)
        self.pending[self._target.load.remote(plan.model, plan.seat, serve)] = "target ready"
        self.start_draft()

    def start_draft(self) -> None:
        if self.plan.draft is None:
            return
        self._draft = _start_actor(DraftActor, self.plan.draft)
        plan = self.plan.draft
        loaded = self._draft.load.remote(plan.model, plan.seat, self.plan.serve)
        self.pending[loaded] = "draft ready"

    def target_is_ready(self, report: WorkerReport) -> None:
        self.report = report

    def draft_is_ready(self, report: WorkerReport) -> None:
        self.draft_report = report
        self.pending[self._draft.watch.remote()] = "draft gone"
        # A target that is up decodes plainly until this has arrived.
        self.pending[self._target.attach.remote(self._draft)] = "attached"

    def draft_is_gone(self) -> bool:
        """True where it is worth another start."""
        self.draft_report = None
        self._draft = None
        self.draft_deaths += 1
        return self.draft_deaths < MOST_DRAFT_DEATHS

    def harvested(self) -> None:
        """The harvest has arrived. Rows submitted from now on travel with the next one."""
        self._harvesting = False

    def harvest(self, seconds: float = HARVEST_SECONDS) -> None:
        """Ask for the next harvest, unless one is on its way."""
        if self._target is not None and self.report is not None and not self._harvesting:
            rows, self._outbox = self._outbox, []
            self.pending[self._target.harvest.remote(seconds, rows)] = "harvest"
            self._harvesting = True

    def arrange(self, name: str | None) -> None:
        """Hold the target to one of its arrangements, if it has it; None gives it back its choice."""
        ray.get(self._target.arrange.remote(name))

    def submit(self, rows: Sequence[Row]) -> None:
        if self._harvesting:
            # Watched like everything else: rows that never arrived would be waited for without end.
            self.pending[self._target.submit.remote(list(rows))] = "submitted"
        else:
            self._outbox.extend(rows)

    @property
    def unsent(self) -> frozenset[int]:
        """Rows that would have travelled with the next harvest."""
        return frozenset(row.key // MOST_SAMPLES for row in self._outbox)

    def cancel(self, keys: Sequence[int]) -> None:
        if self._target is not None:
            self._target.cancel.remote(list(keys))

    def align(self, role: str, trace: TraceFile) -> None:
        actor = self._target if role == "target" else self._draft
        # Where it does not answer, what is pending reports why.
        with suppress(RayError):
            trace.align(self.number, role, lambda: float(ray.get(actor.clock.remote(), timeout=CLOCK_SECONDS)))

    def draft_trace(self) -> None:
        self.pending[self._draft.trace.remote(HARVEST_SECONDS)] = "trace of the draft"

    def last_traces(self) -> Iterator[tuple[str, Trace]]:
        """What the timelines still hold, and what was on its way; nothing of a process that does not answer any more."""
        asked = {future: what for future, what in self.pending.items() if what in ("harvest", "trace of the draft")}
        if self.report is not None:
            asked[self._target.harvest.remote(0.0)] = "harvest"
        if self.draft_report is not None:
            asked[self._draft.trace.remote(0.0)] = "trace of the draft"
        ready, _ = ray.wait(list(asked), num_returns=len(asked), timeout=LAST_TRACE_SECONDS) if asked else ([], [])
        for future in asked:
            with suppress(RayError):
                if future in ready:
                    answer = ray.get(future)
                    yield ("target", answer.trace) if asked[future] == "harvest" else ("draft", answer)

    def stop(self) -> None:
        """Let go of the target, and of the draft with it: whatever it knows belongs to that target's rows."""
        for actor in (self._target, self._draft):
            if actor is not None:
                ray.kill(actor)
        self._target = self._draft = None
        self.report = self.draft_report = None
        self._forget_calls()

    def _forget_calls(self) -> None:
        self.pending.clear()
        self._harvesting = False
        self._outbox = []


VARIABLES = {
    # Threads that wait must not burn the core that the other model is working on.
    "OMP_WAIT_POLICY": "PASSIVE",
    "TOKENIZERS_PARALLELISM": "false",
    # Whatever is to be fetched has been fetched before.
    "HF_HUB_OFFLINE": "1",
    "PYTHONWARNINGS": "ignore",
}


def _start_actor(actor_class: Any, plan: ActorPlan) -> Any:
    options = plan.options(VARIABLES)
    if plan.node is not None:
        options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(plan.node, soft=False)
    return actor_class.options(**options).remote()
