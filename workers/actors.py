"""The Ray actors: thin shells around the loops. Models and torch are imported in the actor's own process only."""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from array import array
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import ray

from outrider.workers.draft.call_transport import CallTransport
from outrider.workers.draft.shared_memory_transport import answer_requests, join_transport, open_transport
from outrider.workers.draft.transport import DraftTransport
from outrider.workers.errors import first_line
from outrider.workers.machine.pin_check import check_pinning, pin_process
from outrider.workers.messages import (
    ActorPlacement,
    DraftReply,
    DraftRequest,
    Harvest,
    ModelSpec,
    ReplicaSpec,
    Row,
    Trace,
    WorkerReport,
)

if TYPE_CHECKING:
    from outrider.workers.models.opening import OpenModel
    from outrider.workers.target.draft_link import DraftLink

logger = logging.getLogger(__name__)


def _open(role: str, spec: ModelSpec, placement: ActorPlacement, rows: int) -> tuple[OpenModel, WorkerReport]:
    """Pins this process to its cores, loads the model and reports on both."""
    started = time.perf_counter()
    pin_process(placement.launch, placement.leases, placement.lease_seconds, shared=placement.shared)
    from outrider.workers.build import open_unchanged

    model = open_unchanged(spec, rows)
    pinned = check_pinning(placement.launch, model.weights, model.threads)
    report = WorkerReport(
        pid=os.getpid(),
        host=socket.gethostname(),
        load_seconds=time.perf_counter() - started,
        engine=model.kind,
        notes=tuple(f"{role}: {note}" for note in model.notes),
        path=model.numeric_path,
        pinned=pinned.record(),
        differences=pinned.differences,
    )
    return model, report


@ray.remote(num_cpus=0, max_restarts=0, max_concurrency=4)
class TargetActor:
    """Holds the target model, and leads the rounds. ``load`` is called first: Ray hides an exception of a constructor."""

    def __init__(self) -> None:
        self._attaching = threading.Lock()
        self._link: DraftLink | None = None
        self._transport: DraftTransport | None = None
        self._notes: tuple[str, ...] = ()

    def load(self, spec: ModelSpec, placement: ActorPlacement, replica_spec: ReplicaSpec) -> WorkerReport:
        model, report = _open("target", spec, placement, replica_spec.rows_at_once)
        from outrider.workers.actor_loops import TargetLoop
        from outrider.workers.build import build_target
        from outrider.workers.models.hide_torch import go_without_torch
        from outrider.workers.target.metrics import Metrics

        if model.kind == "native":
            go_without_torch()
        target = build_target(spec, replica_spec, model)
        self._metrics = Metrics(replica_spec.replica)
        with self._attaching:
            self._link = target.link
            self._link.attach(self._transport)
        self._loop = TargetLoop(target.verifier, target.tuner)
        return report

    def attach(self, draft: Any) -> None:
        """Ask this draft from now on, through shared memory where both are on one host.

        May be called while ``load`` runs: opening a transport takes a while, and it should be open when the first rows
        come.
        """
        self._newest_draft = draft
        transport: DraftTransport
        try:
            transport = open_transport(draft)
        except Exception as error:  # parts of Ray may have changed, and the draft may have died meanwhile
            note = f"a target reaches its draft by calls, which are slower than shared memory: {first_line(error)}"
            logger.warning("%s", note)
            self._notes = (note,)
            transport = CallTransport(draft)
        with self._attaching:
            if self._newest_draft is draft:  # no other draft was attached while this transport was being opened
                self._transport = transport
                if self._link is not None:
                    self._link.attach(transport)

    def set_layout(self, name: str | None) -> None:
        self._loop.set_layout(name)

    def submit(self, rows: list[Row]) -> None:
        self._loop.submit(rows)

    def cancel(self, keys: list[int]) -> None:
        self._loop.cancel(keys)

    def harvest(self, timeout: float, rows: Sequence[Row] = (), answers: Sequence[bytes] = ()) -> Harvest:
        """Also hands over new rows, which spares a call for each, and answers of other replicas: their tokens as int32."""
        self._loop.submit(rows)
        self._loop.learn([array("i", answer) for answer in answers])
        harvest = self._loop.harvest(timeout)
        self._metrics.ended(harvest.ended)
        self._metrics.publish(harvest.counters)
        of_link = self._link.note if self._link is not None else None
        return replace(harvest, notes=self._notes if of_link is None else (*self._notes, of_link))

    def clock(self) -> float:
        """The clock of this process's timeline."""
        return time.perf_counter()


@ray.remote(num_cpus=0, max_restarts=0, max_concurrency=3)
class DraftActor:
    """Holds the draft model, and answers a target's requests. ``watch`` and ``trace`` occupy a thread each."""

    def load(self, spec: ModelSpec, placement: ActorPlacement, replica_spec: ReplicaSpec) -> WorkerReport:
        self._model, report = _open("draft", spec, placement, replica_spec.rows_at_once)
        from outrider.workers.actor_loops import DraftLoop
        from outrider.workers.build import build_draft
        from outrider.workers.timeline import Timeline

        draft = build_draft(spec, replica_spec, self._model)
        self._loop = DraftLoop(draft.drafter, Timeline() if replica_spec.trace else None)
        return replace(report, notes=(*report.notes, *draft.notes))

    def reconfigure(self, cores: Sequence[int], draft_ahead: bool) -> None:
        """Move to these cores (none: stay), and start or stop drafting ahead of the target."""
        from outrider.workers.build import move

        self._loop.reconfigure(draft_ahead, lambda: move(self._model, cores))

    def propose(self, request: DraftRequest) -> DraftReply:
        return self._loop.propose(request)

    def node(self) -> str:
        """The id of the Ray node that this actor is on."""
        return str(ray.get_runtime_context().get_node_id())

    def connect(self, target: Any, asks: Any, path: str) -> Any:
        """Take requests through these channels from now on, beside calls of ``propose``."""
        pipe_end, answers = join_transport(target, asks, path)
        threading.Thread(target=answer_requests, args=(pipe_end, self._loop.propose), name="answers", daemon=True).start()
        return answers

    def trace(self, seconds: float) -> Trace:
        return self._loop.trace(seconds)

    def clock(self) -> float:
        return time.perf_counter()

    def watch(self) -> None:
        """Never returns: whoever waits for it learns at once when this process dies."""
        threading.Event().wait()
