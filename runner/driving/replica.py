"""One replica on the driver's side: the actor handles of its target and draft, and the calls to them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from enum import Enum
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from outrider.runner.driving.answers import AnswerExchange
from outrider.runner.job.requests import MOST_SAMPLES
from outrider.runner.planning.replica_plan import ActorPlan, ReplicaPlan
from outrider.runner.report.trace import TraceFile
from outrider.workers.actors import DraftActor, TargetActor
from outrider.workers.messages import Row, Trace, WorkerReport

# How long a target holds a harvest back while no row has ended.
HARVEST_SECONDS = 1.0
# Timeouts of calls that only a traced run makes: an actor's clock at its start, and its last trace at the end.
CLOCK_SECONDS = 10.0
LAST_TRACE_SECONDS = 5.0


class Call(Enum):
    """A call to an actor or to a host."""

    LOAD_TARGET = "load the target"
    LOAD_DRAFT = "load the draft"
    # Returns only when the draft dies.
    WATCH_DRAFT = "watch the draft"
    ATTACH_DRAFT = "attach the draft"
    SUBMIT = "submit rows"
    HARVEST = "harvest"
    TRACE_DRAFT = "trace of the draft"
    SIGN_OF_LIFE = "sign of life of the host"

    @property
    def of_draft(self) -> bool:
        """Whether the draft answers it."""
        return self in (Call.LOAD_DRAFT, Call.WATCH_DRAFT, Call.TRACE_DRAFT)


class Replica:
    """Holds the futures that the driver waits for: ``pending`` maps each to the call that it answers."""

    def __init__(self, number: int, plan: ReplicaPlan) -> None:
        self.number = number
        self.plan = plan
        self.report: WorkerReport | None = None
        self.draft_report: WorkerReport | None = None
        self.pending: dict[Any, Call] = {}
        self._harvesting = False
        self._outbox: list[Row] = []
        self._target: Any = None
        self._draft: Any = None
        # Answers of other replicas, if suffixes are searched in them.
        self.answers: AnswerExchange | None = None

    def start(self) -> None:
        """Start both processes at the same time."""
        self.report = None
        self._forget_calls()
        if self.answers is not None:
            self.answers.started(self.number)
        self._target = _start_actor(TargetActor, self.plan.target)
        plan = self.plan.target
        replica_spec = replace(self.plan.replica_spec, replica=self.number)
        self.pending[self._target.load.remote(plan.model, plan.placement, replica_spec)] = Call.LOAD_TARGET
        self.start_draft()

    def start_draft(self) -> None:
        if self.plan.draft is None:
            return
        self._draft = _start_actor(DraftActor, self.plan.draft)
        plan = self.plan.draft
        loaded = self._draft.load.remote(plan.model, plan.placement, self.plan.replica_spec)
        self.pending[loaded] = Call.LOAD_DRAFT

    def target_is_ready(self, report: WorkerReport) -> None:
        self.report = report

    def draft_is_ready(self, report: WorkerReport) -> None:
        self.draft_report = report

    def attach_draft(self) -> None:
        """Watch the draft, and attach it to its target, which decodes plainly until then."""
        self.pending[self._draft.watch.remote()] = Call.WATCH_DRAFT
        self.pending[self._target.attach.remote(self._draft)] = Call.ATTACH_DRAFT

    def draft_is_gone(self) -> None:
        self.draft_report = None
        self._draft = None

    def ask_host(self, sign_of_life: Any) -> None:
        """Wait for the future of a sign of life of the host."""
        self.pending[sign_of_life] = Call.SIGN_OF_LIFE

    def harvested(self) -> None:
        """The harvest has arrived. Rows submitted from now on travel with the next one."""
        self._harvesting = False

    def harvest(self, seconds: float = HARVEST_SECONDS) -> None:
        """Ask for the next harvest, unless one is pending."""
        if self._target is not None and self.report is not None and not self._harvesting:
            rows, self._outbox = self._outbox, []
            answers = () if self.answers is None else self.answers.take(self.number)
            arguments = (seconds, rows, answers) if answers else (seconds, rows)
            self.pending[self._target.harvest.remote(*arguments)] = Call.HARVEST
            self._harvesting = True

    def set_layout(self, name: str | None) -> None:
        """Fix the target's layout, if it has one of this name; None lets it choose again."""
        ray.get(self._target.set_layout.remote(name))

    def submit(self, rows: Sequence[Row]) -> None:
        if self._harvesting:
            # In pending, so that a failed submit is noticed: rows that never arrived would be waited for without end.
            self.pending[self._target.submit.remote(list(rows))] = Call.SUBMIT
        else:
            self._outbox.extend(rows)

    @property
    def unsent(self) -> frozenset[int]:
        """Rows that wait here for the next harvest call."""
        return frozenset(row.key // MOST_SAMPLES for row in self._outbox)

    def cancel(self, keys: Sequence[int]) -> None:
        self._outbox = [row for row in self._outbox if row.key not in keys]
        if self._target is not None:
            self._target.cancel.remote(list(keys))

    def align(self, role: str, trace: TraceFile) -> None:
        actor = self._target if role == "target" else self._draft
        # If the actor does not answer, a pending call reports why.
        with suppress(RayError):
            trace.align(self.number, role, lambda: float(ray.get(actor.clock.remote(), timeout=CLOCK_SECONDS)))

    def draft_trace(self) -> None:
        self.pending[self._draft.trace.remote(HARVEST_SECONDS)] = Call.TRACE_DRAFT

    def last_traces(self) -> Iterator[tuple[str, Trace]]:
        """The last parts of the traces, pending ones included; nothing from an actor that does not answer any more."""
        asked = {future: call for future, call in self.pending.items() if call in (Call.HARVEST, Call.TRACE_DRAFT)}
        if self.report is not None:
            asked[self._target.harvest.remote(0.0)] = Call.HARVEST
        if self.draft_report is not None:
            asked[self._draft.trace.remote(0.0)] = Call.TRACE_DRAFT
        ready, _ = ray.wait(list(asked), num_returns=len(asked), timeout=LAST_TRACE_SECONDS) if asked else ([], [])
        for future in asked:
            with suppress(RayError):
                if future in ready:
                    answer = ray.get(future)
                    yield ("draft", answer) if asked[future].of_draft else ("target", answer.trace)

    def stop(self) -> None:
        """Kill the target, and the draft too, since the state that it holds is that of the target's rows."""
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
    # Waiting threads must not spin on a core that the other model computes on.
    "OMP_WAIT_POLICY": "PASSIVE",
    "TOKENIZERS_PARALLELISM": "false",
    # All files were downloaded before the actors start.
    "HF_HUB_OFFLINE": "1",
    "PYTHONWARNINGS": "ignore",
}


def _start_actor(actor_class: Any, plan: ActorPlan) -> Any:
    options = plan.options(VARIABLES)
    if plan.node is not None:
        options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(plan.node, soft=False)
    return actor_class.options(**options).remote()
