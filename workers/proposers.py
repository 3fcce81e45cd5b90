"""Where a target's candidates come from: a draft actor across Ray, the row's own text, or nowhere."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import RayError

from outrider.workers.messages import Advance, Ask, Candidates
from outrider.workers.propose import lookup
from outrider.workers.verify import LiveRow

logger = logging.getLogger(__name__)
# The share of a new observation in the running mean of a step's cost.
FRESH = 0.2


class NoProposer:
    """Plain decoding."""

    def propose(self, rows: Sequence[LiveRow], limits: Sequence[int]) -> list[Sequence[int]]:
        return [()] * len(rows)

    def forget(self, key: int) -> None:
        pass

    def step_seconds(self, rows: int) -> float | None:
        return None


class LookupProposer:
    """n-grams of the row's own prompt and text."""

    def propose(self, rows: Sequence[LiveRow], limits: Sequence[int]) -> list[Sequence[int]]:
        return [lookup(live.tokens, limit) for live, limit in zip(rows, limits, strict=True)]

    def forget(self, key: int) -> None:
        pass

    def step_seconds(self, rows: int) -> float | None:
        return 0.0


class DraftLink:
    """Asks a draft actor, tells it only what is new, and never waits for it longer than the deadline.

    A draft that is late, dead or confused costs the round its candidates and nothing else. ``attach`` may be called from
    another thread at any time; everything else belongs to the verifying thread.
    """

    def __init__(self, deadline: float) -> None:
        self._deadline = deadline
        self._draft: Any = None
        self._round = 0
        self._known: dict[int, int] = {}
        self._closed: list[int] = []
        self._late: ray.ObjectRef[Candidates] | None = None
        # Until a round has been measured a step counts as free, so that the first round asks.
        self._step_seconds = 0.0

    def attach(self, draft: Any) -> None:
        """Take this draft from now on; None for the time without one."""
        self._draft = draft
        self._known = {}
        self._late = None

    def forget(self, key: int) -> None:
        if self._known.pop(key, None) is not None:
            self._closed.append(key)

    def step_seconds(self, rows: int) -> float | None:
        return self._step_seconds if self._draft is not None else None

    def propose(self, rows: Sequence[LiveRow], limits: Sequence[int]) -> list[Sequence[int]]:
        draft, known = self._draft, self._known
        nothing: list[Sequence[int]] = [()] * len(rows)
        if draft is None or not self._caught_up():
            return nothing
        self._round += 1
        closed, self._closed = tuple(self._closed), []
        ask = Ask(self._round, tuple(self._advance(live, limit) for live, limit in zip(rows, limits, strict=True)), closed)
        started = time.perf_counter()
        try:
            reply = draft.propose.remote(ask)
            for live in rows:
                known[live.row.key] = len(live.tokens)
            ready, _ = ray.wait([reply], timeout=self._deadline)
            if not ready:
                self._late = reply
                return nothing
            candidates = ray.get(reply)
        except RayError as error:
            # Gone, or failing: decode plainly until the driver attaches another.
            logger.warning("the draft is lost, going on without it: %s", str(error).splitlines()[0])
            if self._draft is draft:
                self.attach(None)
            return nothing
        steps = max(1, max(limits))
        self._step_seconds += FRESH * ((time.perf_counter() - started) / steps - self._step_seconds)
        for key in candidates.forgotten:
            known.pop(key, None)
        if candidates.round != ask.round:
            return nothing
        return [candidates.tokens.get(live.row.key, ()) for live in rows]

    def _caught_up(self) -> bool:
        """Whether the draft has answered everything it was asked. A late answer is read only to be dropped."""
        if self._late is None:
            return True
        ready, _ = ray.wait([self._late], timeout=0)
        if ready:
            self._late = None
            # What that answer would have said of forgotten rows is unknown, so every row is sent whole.
            self._known.clear()
        return bool(ready)

    def _advance(self, live: LiveRow, limit: int) -> Advance:
        key, start = live.row.key, self._known.get(live.row.key, 0)
        sampling = live.row.sampling if start == 0 else None
        return Advance(key, start, tuple(live.tokens[start:]), max(0, limit), sampling, len(live.row.prompt))
