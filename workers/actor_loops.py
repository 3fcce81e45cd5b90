"""The loops of a loaded target (a thread of its own) and of a loaded draft, which answers it. No Ray in here."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from outrider.workers.draft.drafter import Drafter
from outrider.workers.errors import WorkerError
from outrider.workers.messages import DraftReply, DraftRequest, Harvest, PartialTokens, Row, RowFailure, RowResult, Trace
from outrider.workers.target.layout_tuner import LayoutTuner
from outrider.workers.target.verifier import Verifier
from outrider.workers.timeline import Timeline

# The tokens of unfinished rows (``PartialTokens``) are collected no more often than this.
SECONDS_BETWEEN_PARTIAL_TOKENS = 0.5


class TargetLoop:
    """Runs a verifier as long as there are rows, and hands out what has ended.

    ``submit`` and ``harvest`` may be called from any thread; the verifier is touched by its own thread only.
    """

    def __init__(self, verifier: Verifier, tuner: LayoutTuner | None = None) -> None:
        self._verifier = verifier
        self._tuner = tuner
        self._changed = threading.Condition()
        self._inbox: list[Row] = []
        self._cancelled: set[int] = set()
        self._answers: list[Sequence[int]] = []
        self._fixed_layout: str | None = None
        self._ended: list[RowResult | RowFailure] = []
        self._written: list[PartialTokens] = []
        self._failure: BaseException | None = None
        verifier.statistics.start()
        threading.Thread(target=self._run, name="verify", daemon=True).start()

    def submit(self, rows: Sequence[Row]) -> None:
        with self._changed:
            self._inbox.extend(rows)
            self._changed.notify_all()

    def cancel(self, keys: Sequence[int]) -> None:
        with self._changed:
            self._cancelled.update(keys)
            self._changed.notify_all()

    def learn(self, answers: Sequence[Sequence[int]]) -> None:
        """Answers of other replicas. They wait for the next round."""
        with self._changed:
            self._answers.extend(answers)

    def set_layout(self, name: str | None) -> None:
        """From the next round on keep to this layout; None leaves the choice open again."""
        self._fixed_layout = name

    def harvest(self, timeout: float) -> Harvest:
        """The rows that ended since the last harvest; waits no longer than the timeout.

        While more than half a batch of rows is in store the call waits for all of the timeout, so that many ended rows
        share one reply.
        """
        deadline = time.monotonic() + timeout
        with self._changed:
            self._changed.wait_for(
                lambda: self._failure or (self._ended and self._runs_short()), timeout=max(0.0, deadline - time.monotonic())
            )
            # Rows that ended before the failure are good: they are returned first, and the next harvest raises.
            if self._failure is not None and not self._ended:
                raise WorkerError(f"the target failed: {self._failure!r}") from self._failure
            ended, self._ended = tuple(self._ended), []
            written, self._written = tuple(self._written), []
            statistics = self._verifier.statistics
            trace = Trace() if statistics.timeline is None else statistics.timeline.fetch()
            layout = None if self._tuner is None else self._tuner.record
            costs = {} if self._tuner is None else self._tuner.costs()
            return Harvest(ended, statistics.snapshot(), trace, layout, costs, written)

    def _runs_short(self) -> bool:
        return len(self._inbox) + self._verifier.in_store <= self._verifier.batch // 2

    def _run(self) -> None:
        before = collected = time.perf_counter()
        try:
            while True:
                with self._changed:
                    if self._verifier.idle and not self._inbox:
                        with self._verifier.statistics.idling():
                            self._changed.wait_for(lambda: self._inbox or self._cancelled)
                        before = time.perf_counter()
                    rows, self._inbox = self._inbox, []
                    cancelled, self._cancelled = self._cancelled, set()
                    answers, self._answers = self._answers, []
                if self._tuner is not None:
                    self._tuner.fix(self._fixed_layout)
                self._verifier.add(rows)
                if cancelled:
                    self._verifier.cancel(cancelled)
                self._verifier.learn(answers)
                ended = self._verifier.round()
                now = time.perf_counter()
                if self._tuner is not None:
                    self._tuner.after_round(now - before)
                    now = time.perf_counter()
                before = now
                written: list[PartialTokens] = []
                if now - collected > SECONDS_BETWEEN_PARTIAL_TOKENS:
                    written, collected = self._verifier.written(), now
                if ended or written:
                    with self._changed:
                        self._ended.extend(ended)
                        self._written.extend(written)
                        self._changed.notify_all()
        except BaseException as error:
            with self._changed:
                self._failure = error
                self._changed.notify_all()


class DraftLoop:
    """Answers the target's requests and, where ``reconfigure`` asks for it, drafts ahead between them.

    It drafts ahead one step at a time, so a request waits for one step at most.
    """

    def __init__(self, drafter: Drafter, timeline: Timeline | None = None) -> None:
        self._drafter = drafter
        self._timeline = timeline
        self._drafts_ahead = False
        self._turn = threading.Lock()
        self._asked = threading.Event()
        self._answered = threading.Event()
        threading.Thread(target=self._draft_ahead, name="draft ahead", daemon=True).start()

    def reconfigure(self, draft_ahead: bool, move: Callable[[], None]) -> None:
        """Start or stop drafting ahead; ``move`` is called while the engine is idle."""
        self._asked.set()
        with self._turn:
            self._asked.clear()
            self._drafts_ahead = draft_ahead
            move()

    def propose(self, request: DraftRequest) -> DraftReply:
        self._asked.set()
        with self._turn:
            self._asked.clear()
            started = time.perf_counter()
            candidates = self._drafter.propose(request)
            if self._timeline is not None:
                proposed = sum(map(len, candidates.tokens.values()))
                self._timeline.add("propose", started, time.perf_counter(), len(request.rows), proposed)
        if self._drafts_ahead:
            self._answered.set()
        return candidates

    def _draft_ahead(self) -> None:
        while self._answered.wait():
            self._answered.clear()
            more = True
            while more and not self._asked.is_set():
                with self._turn:
                    started = time.perf_counter()
                    more = self._drafter.draft_ahead()
                    if more and self._timeline is not None:
                        self._timeline.add("draft ahead", started, time.perf_counter())

    def trace(self, seconds: float) -> Trace:
        """The slices of the timeline after waiting this many seconds."""
        if self._timeline is None:
            return Trace()
        time.sleep(seconds)
        return self._timeline.fetch()
