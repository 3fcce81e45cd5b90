"""The target's loop: it owns the committed tokens of its rows, and leads the rounds of propose and verify."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from outrider.workers import speculation
from outrider.workers.costs import CostCurve
from outrider.workers.engine import Chosen, Engine, Feed
from outrider.workers.messages import Progress, Row, RowFailure, RowResult
from outrider.workers.text import TextWriter

PREFILL_TOKENS = 512
# Two scores closer than this may change places when float kernels sum in another order.
NEAR_TIE = 1e-4


@dataclass(slots=True)
class LiveRow:
    """A row in the batch. ``tokens`` are the prompt and everything committed; the cache may lag behind them."""

    row: Row
    tokens: list[int]
    writer: TextWriter
    started: float
    cached: int = 0
    rounds: int = 0
    proposed: int = 0
    accepted: int = 0
    acceptance: speculation.Acceptance = field(default_factory=speculation.Acceptance)

    @property
    def pending(self) -> int:
        return len(self.tokens) - self.cached

    @property
    def remaining(self) -> int:
        return len(self.row.prompt) + self.row.max_tokens - len(self.tokens)


class Proposer(Protocol):
    def propose(self, rows: Sequence[LiveRow], limits: Sequence[int]) -> list[Sequence[int]]:
        """Candidates for each row, at most as many as its limit; fewer or none is always allowed."""

    def forget(self, key: int) -> None:
        """The row has ended."""

    def step_seconds(self, rows: int) -> float | None:
        """What one more candidate for that many rows costs; None while nothing can be proposed."""


class Verifier:
    def __init__(
        self,
        engine: Engine,
        new_writer: Callable[[Row], TextWriter],
        proposer: Proposer,
        batch: int,
        draft_tokens: int | None,
        verify_seconds: CostCurve,
        end_tokens: Collection[int],
    ) -> None:
        self.engine = engine
        self.proposer = proposer
        self.batch = batch
        self.draft_tokens = draft_tokens
        self.progress = Progress()
        self._new_writer = new_writer
        self._verify_seconds = verify_seconds
        self._end_tokens = frozenset(end_tokens)
        self._probing = speculation.Probing()
        self._waiting: deque[Row] = deque()
        self._live: list[LiveRow] = []

    @property
    def idle(self) -> bool:
        return not self._waiting and not self._live

    @property
    def in_store(self) -> int:
        """Rows that have not begun."""
        return len(self._waiting)

    def add(self, rows: Iterable[Row]) -> None:
        self._waiting.extend(rows)

    def cancel(self, keys: Collection[int]) -> None:
        """Drop rows that somebody else has written; what is not here any more is no matter."""
        self._waiting = deque(row for row in self._waiting if row.key not in keys)
        for live in [live for live in self._live if live.row.key in keys]:
            self._close(live)

    def round(self) -> list[RowResult | RowFailure]:
        """One pass of the target over the batch. Rows that end in it leave at once, and waiting ones take their places."""
        ended: list[RowResult | RowFailure] = list(self._admit())
        if not self._live:
            return ended
        started = time.perf_counter()
        candidates = self._propose()
        proposed = time.perf_counter()
        feeds = [self._feed(live, guess) for live, guess in zip(self._live, candidates, strict=True)]
        answers = self.engine.feed(feeds)
        verified = time.perf_counter()
        for live, guess, answer in zip(list(self._live), candidates, answers, strict=True):
            reason = self._commit(live, guess, answer)
            if reason is not None:
                ended.append(self._finish(live, reason))
        self._verify_seconds.observe(sum(len(feed.tokens) for feed in feeds), verified - proposed)
        self.progress.rounds += 1
        self.progress.plain_rounds += not any(candidates)
        self.progress.draft_seconds += proposed - started
        self.progress.verify_seconds += verified - proposed
        return ended

    def _admit(self) -> Iterable[RowFailure]:
        while self._waiting and len(self._live) < self.batch:
            row = self._waiting.popleft()
            problem = self._problem(row.prompt)
            if problem is not None:
                yield RowFailure(row.key, problem)
                continue
            self.engine.open(row.key, row.sampling, len(row.prompt))
            self._live.append(LiveRow(row, list(row.prompt), self._new_writer(row), time.perf_counter()))

    def _problem(self, prompt: Sequence[int]) -> str | None:
        if not prompt:
            return "the prompt has no tokens"
        if len(prompt) >= self.engine.context:
            return f"the prompt has {len(prompt)} tokens, the model holds {self.engine.context}"
        strange = next((token for token in prompt if not 0 <= token < self.engine.vocabulary), None)
        return None if strange is None else f"token {strange} is not one of the model's {self.engine.vocabulary}"

    def _propose(self) -> list[Sequence[int]]:
        """Candidates for the rows that are past their prompt."""
        ready = [live for live in self._live if live.pending == 1]
        # The last token of a row is always the target's own, so a candidate for it would be wasted.
        limits = [
            min(count, live.remaining - 1, self.engine.context - len(live.tokens))
            for live, count in zip(ready, self._counts_to_ask(ready), strict=True)
        ]
        if not any(limit > 0 for limit in limits):
            return [()] * len(self._live)
        guesses = self.proposer.propose(ready, limits)
        by_key = {
            live.row.key: self._sane(guess[: max(0, limit)])
            for live, guess, limit in zip(ready, guesses, limits, strict=True)
        }
        return [by_key.get(live.row.key, ()) for live in self._live]

    def _sane(self, guess: Sequence[int]) -> Sequence[int]:
        """A proposal up to its first id that the model does not have: whatever a draft sends, it is only a hint."""
        for index, token in enumerate(guess):
            if not 0 <= token < self.engine.vocabulary:
                return guess[:index]
        return guess

    def _counts_to_ask(self, ready: Sequence[LiveRow]) -> list[int]:
        if self.draft_tokens is not None:
            return [self.draft_tokens] * len(ready)
        step = self.proposer.step_seconds(len(ready)) if ready else None
        if step is None:
            return [0] * len(ready)
        counts = speculation.best_counts([live.acceptance.chance for live in ready], self._verify_seconds, step)
        return [1] * len(ready) if self._probing.due(asking=any(counts)) else counts

    def _feed(self, live: LiveRow, guess: Sequence[int]) -> Feed:
        new = live.tokens[live.cached :]
        if len(new) > PREFILL_TOKENS:
            return Feed(live.row.key, new[:PREFILL_TOKENS], 0)
        return Feed(live.row.key, [*new, *guess], len(guess) + 1)

    def _commit(self, live: LiveRow, guess: Sequence[int], answer: Chosen) -> str | None:
        """Take the target's choices up to and including the first that differs from its candidate."""
        live.rounds += 1
        if not answer.tokens:
            live.cached += PREFILL_TOKENS
            return None
        held = speculation.accepted(guess, answer.tokens)
        if guess:
            live.acceptance.observe(len(guess), held)
        live.cached = len(live.tokens) + held
        self.engine.truncate(live.row.key, live.cached)
        reason, committed = None, 0
        for token in answer.tokens[: held + 1]:
            live.tokens.append(token)
            committed += 1
            reason = self._ends(live, token)
            if reason is not None:
                break
        used = min(held, committed)
        live.proposed += len(guess)
        live.accepted += used
        self.progress.tokens += committed
        self.progress.proposed += len(guess)
        self.progress.accepted += used
        self.progress.near_ties += sum(margin < NEAR_TIE for margin in answer.margins[:committed])
        return reason

    def _ends(self, live: LiveRow, token: int) -> str | None:
        if token in self._end_tokens or live.writer.stopped_by(token):
            return "stop"
        if live.remaining == 0 or len(live.tokens) >= self.engine.context:
            return "length"
        return None

    def _finish(self, live: LiveRow, reason: str) -> RowResult:
        self._close(live)
        return RowResult(
            key=live.row.key,
            tokens=tuple(live.tokens[len(live.row.prompt) :]),
            text=live.writer.text(),
            finish_reason=reason,
            rounds=live.rounds,
            proposed=live.proposed,
            accepted=live.accepted,
            seconds=time.perf_counter() - live.started,
        )

    def _close(self, live: LiveRow) -> None:
        self._live.remove(live)
        self.engine.close(live.row.key)
        self.proposer.forget(live.row.key)
