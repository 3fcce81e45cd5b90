"""The Ray actors: thin shells around the loops. Models and torch are imported in the actor's own process only."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Sequence
from typing import Any

import ray

from outrider.workers.messages import Ask, Candidates, Harvest, ModelSpec, Row, Seat, ServeSpec, WorkerReport
from outrider.workers.readback import move_threads, read_back, take_place


class _Loaded:
    """A model in this process, on the cores that it was given, and what there is to say about it."""

    def __init__(self, spec: ModelSpec, seat: Seat) -> None:
        started = time.perf_counter()
        take_place(seat.launch, seat.leases, seat.lease_seconds)
        from outrider.workers.models.opening import open_model

        self.model = open_model(spec)
        pinned = read_back(seat.launch, self.model.weights, self.model.threads)
        self.report = WorkerReport(
            pid=os.getpid(),
            host=socket.gethostname(),
            load_seconds=time.perf_counter() - started,
            engine=self.model.kind,
            notes=tuple(self.model.notes),
            path=self.model.numeric_path,
            pinned=pinned.record(),
            differences=pinned.differences,
        )

    def move(self, cores: Sequence[int]) -> None:
        """Take the engine, and every other thread of the process, to these cores of its own."""
        if cores and self.model.use_cores is not None:
            move_threads(cores)
            self.model.use_cores(cores)


@ray.remote(num_cpus=0, max_restarts=0, max_concurrency=4)
class TargetActor:
    """Holds the target model, and leads the rounds. ``load`` comes first, so that its errors arrive as they are."""

    def load(self, spec: ModelSpec, seat: Seat, serve: ServeSpec) -> WorkerReport:
        from outrider.workers.arranger import Arranger
        from outrider.workers.costs import measure
        from outrider.workers.draft_link import DraftLink
        from outrider.workers.models.tokenizer import Tokenizer
        from outrider.workers.proposers import EitherProposer, LookupProposer, NoProposer
        from outrider.workers.serving import TargetServer
        from outrider.workers.text import TextWriter
        from outrider.workers.verify import Proposer, Verifier

        loaded = self._loaded = _Loaded(spec, seat)
        model = loaded.model
        tokenizer = Tokenizer(spec.path)
        self._link = DraftLink(serve.draft_deadline, serve.draft_confidence)
        verify_seconds = measure(model.engine)
        proposer: Proposer = self._link
        if serve.lookup:
            proposer = (
                EitherProposer(self._link, lambda tokens: verifier.verify_seconds(tokens))
                if serve.model
                else LookupProposer()
            )
        elif not serve.model:
            proposer = NoProposer()
        verifier = Verifier(
            engine=model.engine,
            new_writer=lambda row: TextWriter(tokenizer.decode, row.stop, model.end_tokens),
            proposer=proposer,
            batch=serve.batch,
            draft_tokens=serve.draft_tokens,
            verify_seconds=verify_seconds,
            end_tokens=model.end_tokens,
        )
        arranger = Arranger(
            verifier, self._link, serve.arrangements, loaded.move, lambda: measure(model.engine), serve.memory_key
        )
        self._server = TargetServer(verifier, arranger)
        return loaded.report

    def attach(self, draft: Any) -> None:
        self._link.attach(draft)

    def submit(self, rows: list[Row]) -> None:
        self._server.submit(rows)

    def cancel(self, keys: list[int]) -> None:
        self._server.cancel(keys)

    def harvest(self, timeout: float, rows: list[Row]) -> Harvest:
        """Takes new rows along, which spares a call for each."""
        self._server.submit(rows)
        return self._server.harvest(timeout)


@ray.remote(num_cpus=0, max_restarts=0, max_concurrency=2)
class DraftActor:
    """Holds the draft model, and answers a target's requests. The second thread is there for ``watch``."""

    def load(self, spec: ModelSpec, seat: Seat) -> WorkerReport:
        from outrider.workers.propose import Drafter
        from outrider.workers.serving import DraftServer

        loaded = self._loaded = _Loaded(spec, seat)
        self._server = DraftServer(Drafter(loaded.model.engine, loaded.model.end_tokens))
        return loaded.report

    def settle(self, cores: Sequence[int], run_ahead: bool) -> None:
        """Work on these cores from now on (none: where it is), and run ahead of the target or do not."""
        self._server.settle(run_ahead, lambda: self._loaded.move(cores))

    def propose(self, ask: Ask) -> Candidates:
        return self._server.propose(ask)

    def watch(self) -> None:
        """Never returns: whoever waits for it learns at once when this process dies."""
        threading.Event().wait()
