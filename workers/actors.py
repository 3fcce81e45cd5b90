"""The Ray actors: thin shells around the loops. Models and torch are imported in the actor's own process only."""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import ray

from outrider.workers.draft.shared_memory import join_line, open_line, serve
from outrider.workers.draft.transport import CallLine, Line
from outrider.workers.errors import first_line
from outrider.workers.machine.pin_check import move_threads, read_back, take_place
from outrider.workers.messages import Ask, Candidates, Harvest, ModelSpec, Row, Seat, ServeSpec, Trace, WorkerReport

if TYPE_CHECKING:
    from outrider.workers.target.draft_link import DraftLink

logger = logging.getLogger(__name__)


class _Loaded:
    """A model in this process, on the cores that it was given, and what there is to say about it."""

    def __init__(self, spec: ModelSpec, seat: Seat, rows: int) -> None:
        started = time.perf_counter()
        take_place(seat.launch, seat.leases, seat.lease_seconds, shared=seat.shared)
        from outrider.workers.models.cards import check_unchanged
        from outrider.workers.models.opening import open_model

        check_unchanged(spec.path, spec.digest)
        self.model = open_model(spec)
        if self.model.reserve is not None:
            self.model.reserve(rows)
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

    def __init__(self) -> None:
        self._introducing = threading.Lock()
        self._link: DraftLink | None = None
        self._line: Line | None = None
        self._notes: tuple[str, ...] = ()

    def load(self, spec: ModelSpec, seat: Seat, serve: ServeSpec) -> WorkerReport:
        from outrider.workers.engines.costs import measure
        from outrider.workers.models.cards import check_unchanged
        from outrider.workers.models.torchless import go_without_torch
        from outrider.workers.serving import TargetServer
        from outrider.workers.target.draft_link import DraftLink
        from outrider.workers.target.layout_tuner import Arranger
        from outrider.workers.target.metrics import Metrics
        from outrider.workers.target.proposers import EitherProposer, LookupProposer, NoProposer
        from outrider.workers.target.statistics import Tally
        from outrider.workers.target.text import TextWriter
        from outrider.workers.target.verifier import Proposer, Verifier
        from outrider.workers.timeline import Timeline

        loaded = self._loaded = _Loaded(spec, seat, serve.rows_at_once)
        model = loaded.model
        if model.kind == "native":
            go_without_torch()
        # The hf engine has imported transformers with torch by now.
        from outrider.workers.models.tokenizer import Tokenizer

        tokenizer = Tokenizer(spec.path)
        # Again, now that everything has been read: rows must not come from what lay there for a moment.
        check_unchanged(spec.path, spec.digest)
        tally = Tally(Timeline() if serve.trace else None)
        self._metrics = Metrics(serve.replica)
        link = DraftLink(serve.draft_deadline, serve.draft_confidence, tally)
        with self._introducing:
            self._link = link
            link.attach(self._line)
        # The thread that asks for a pass stays on the engine's first core: not this one, which answers calls later.
        with ThreadPoolExecutor(1) as aside:
            verify_seconds = aside.submit(measure, model.engine).result()
        proposer: Proposer = link
        if serve.lookup:
            proposer = (
                EitherProposer(link, lambda tokens: verifier.verify_seconds(tokens)) if serve.model else LookupProposer()
            )
        elif not serve.model:
            proposer = NoProposer()
        verifier = Verifier(
            engine=model.engine,
            new_writer=lambda row: TextWriter(
                tokenizer.decode,
                row.stop,
                {*model.end_tokens, *(row.sampling.end_tokens or ())},
                row.sampling.min_tokens,
                tokenizer.pieces,
            ),
            proposer=proposer,
            batch=serve.batch,
            draft_tokens=serve.draft_tokens,
            verify_seconds=verify_seconds,
            end_tokens=model.end_tokens,
            prefix_tokens=spec.prefix_tokens,
            tally=tally,
            runners_up=serve.runners_up,
        )
        arranger = Arranger(
            verifier,
            link,
            serve.arrangements,
            loaded.move,
            lambda only: measure(model.engine, only=only),
            serve.memory_key,
            serve.rows,
        )
        self._server = TargetServer(verifier, arranger)
        return loaded.report

    def attach(self, draft: Any) -> None:
        """Take this draft from now on, by shared memory where the two have any in common.

        Called amid ``load`` too: to open a line takes a while, so it is open when the first rows come.
        """
        self._newest = draft
        line: Line
        try:
            line = open_line(draft)
        except Exception as error:  # of parts of Ray that may change, and of a draft that may have died since
            note = f"a target reaches its draft by calls, which are slower than shared memory: {first_line(error)}"
            logger.warning("%s", note)
            self._notes = (note,)
            line = CallLine(draft)
        with self._introducing:
            if self._newest is draft:  # and not another that came up while the line to this one was being opened
                self._line = line
                if self._link is not None:
                    self._link.attach(line)

    def arrange(self, name: str | None) -> None:
        self._server.arrange(name)

    def submit(self, rows: list[Row]) -> None:
        self._server.submit(rows)

    def cancel(self, keys: list[int]) -> None:
        self._server.cancel(keys)

    def harvest(self, timeout: float, rows: Sequence[Row] = ()) -> Harvest:
        """Takes new rows along, which spares a call for each."""
        self._server.submit(rows)
        harvest = self._server.harvest(timeout)
        self._metrics.ended(harvest.ended)
        self._metrics.publish(harvest.progress)
        return replace(harvest, notes=self._notes)

    def clock(self) -> float:
        """What the times of this process's timeline are measured by."""
        return time.perf_counter()


@ray.remote(num_cpus=0, max_restarts=0, max_concurrency=3)
class DraftActor:
    """Holds the draft model, and answers a target's requests. The other threads are there for ``watch`` and ``trace``."""

    def load(self, spec: ModelSpec, seat: Seat, serve: ServeSpec) -> WorkerReport:
        from outrider.workers.draft.drafter import Drafter
        from outrider.workers.serving import DraftServer
        from outrider.workers.timeline import Timeline

        loaded = self._loaded = _Loaded(spec, seat, serve.rows_at_once)
        drafter = Drafter(loaded.model.engine, loaded.model.end_tokens, spec.prefix_tokens)
        self._server = DraftServer(drafter, Timeline() if serve.trace else None)
        return loaded.report

    def settle(self, cores: Sequence[int], run_ahead: bool) -> None:
        """Work on these cores from now on (none: where it is), and run ahead of the target or do not."""
        self._server.settle(run_ahead, lambda: self._loaded.move(cores))

    def propose(self, ask: Ask) -> Candidates:
        return self._server.propose(ask)

    def node(self) -> str:
        """Which of Ray's nodes this is on."""
        return str(ray.get_runtime_context().get_node_id())

    def connect(self, target: Any, asks: Any, path: str) -> Any:
        """Take requests through these channels from now on, beside calls of ``propose``."""
        wire, answers = join_line(target, asks, path)
        threading.Thread(target=serve, args=(wire, self._server.propose), name="answers", daemon=True).start()
        return answers

    def trace(self, seconds: float) -> Trace:
        return self._server.trace(seconds)

    def clock(self) -> float:
        return time.perf_counter()

    def watch(self) -> None:
        """Never returns: whoever waits for it learns at once when this process dies."""
        threading.Event().wait()
