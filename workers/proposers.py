"""Where a target's candidates come from: a draft actor across Ray, the row's own text, or nowhere."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from outrider.workers.errors import first_line
from outrider.workers.messages import Advance, Ask, Candidates
from outrider.workers.propose import lookup
from outrider.workers.tally import Tally
from outrider.workers.verify import LiveRow

logger = logging.getLogger(__name__)
# The share of a new observation in the running mean of a step's cost.
FRESH = 0.2
# A draft that is told more than this of a row reads a prompt, which says nothing about the cost of a step.
MOST_NEW = 32
# A draft that answers with an error this often in a row is not asked again.
MOST_ERRORS = 3


class LookupProposer:
    """n-grams of the row's own prompt and text."""

    def propose(self, rows: Sequence[LiveRow], limits: Sequence[int]) -> list[Sequence[int]]:
        return [lookup(live.tokens, limit) for live, limit in zip(rows, limits, strict=True)]

    def forget(self, key: int) -> None:
        pass

    def step_seconds(self, rows: int) -> float | None:
        return 0.0


@dataclass(slots=True)
class _Draft:
    """A draft actor and what it has been told: how many tokens of each row, and which rows it may forget."""

    actor: Any
    known: dict[int, int] = field(default_factory=dict)
    closed: list[int] = field(default_factory=list)
    late: ray.ObjectRef[Candidates] | None = None
    errors: int = 0
    lost: bool = False


class DraftLink:
    """Asks a draft actor, tells it only what is new, and never waits for it longer than the deadline.

    A draft that is late, dead or confused costs the round its candidates and nothing else. ``attach`` may be called from
    another thread at any time: it replaces the draft whole, and everything else belongs to the verifying thread.
    """

    def __init__(self, deadline: float, tally: Tally | None = None) -> None:
        self._deadline = deadline
        self._tally = tally or Tally()
        self._draft: _Draft | None = None
        self._round = 0
        self._step_seconds: dict[int, float] = {}

    def attach(self, actor: Any) -> None:
        """Take this draft from now on; None for the time without one."""
        self._draft = None if actor is None else _Draft(actor)

    def forget(self, key: int) -> None:
        draft = self._draft
        if draft is not None:
            # Told even where it should not know the row: what it kept of a failed round is not certain.
            draft.known.pop(key, None)
            draft.closed.append(key)

    def step_seconds(self, rows: int) -> float | None:
        draft = self._draft
        if draft is None or draft.lost:
            return None
        # Until a round has been measured a step counts as free, so that the first round asks.
        nearest = min(self._step_seconds, key=lambda count: abs(count - rows), default=None)
        return 0.0 if nearest is None else self._step_seconds[nearest]

    def propose(self, rows: Sequence[LiveRow], limits: Sequence[int]) -> list[Sequence[int]]:
        draft = self._draft
        candidates = None
        if draft is not None and not draft.lost and _caught_up(draft):
            candidates = self._ask(draft, rows, limits)
        if candidates is None:
            return [()] * len(rows)
        return [candidates.tokens.get(live.row.key, ()) for live in rows]

    def _ask(self, draft: _Draft, rows: Sequence[LiveRow], limits: Sequence[int]) -> Candidates | None:
        self._round += 1
        closed, draft.closed = tuple(draft.closed), []
        advances = tuple(_advance(draft, live, limit) for live, limit in zip(rows, limits, strict=True))
        ask = Ask(self._round, advances, closed)
        steps = max(1, max(limits))
        started = time.perf_counter()
        try:
            reply = draft.actor.propose.remote(ask)
            draft.known.update((live.row.key, len(live.tokens)) for live in rows)
            ready, _ = ray.wait([reply], timeout=self._deadline)
            if not ready:
                draft.late = reply
                self._measure(len(rows), self._deadline / steps)
                return None
            candidates: Candidates = ray.get(reply)
        except RayTaskError as error:
            # It lives, but its rows may be half done: send them whole next time.
            draft.errors += 1
            draft.known.clear()
            draft.lost = draft.errors >= MOST_ERRORS
            logger.warning("the draft failed, this round goes on without it: %s", first_line(error))
            return None
        except RayError as error:
            # Gone: decode plainly until the driver attaches another.
            draft.lost = True
            logger.warning("the draft is lost, going on without it: %s", first_line(error))
            return None
        waited = time.perf_counter() - started
        self._tally.hop(waited, candidates.seconds)
        draft.errors = 0
        # A round that reads a prompt, or much else, pays for that, which says nothing of a step.
        if all(advance.start and len(advance.tokens) <= MOST_NEW for advance in advances):
            self._measure(len(rows), waited / steps)
        for key in candidates.forgotten:
            draft.known.pop(key, None)
        return candidates if candidates.round == ask.round else None

    def _measure(self, rows: int, seconds: float) -> None:
        previous = self._step_seconds.get(rows, seconds)
        self._step_seconds[rows] = previous + FRESH * (seconds - previous)


def _caught_up(draft: _Draft) -> bool:
    """Whether the draft has answered everything it was asked. A late answer is read only to be dropped."""
    if draft.late is None:
        return True
    ready, _ = ray.wait([draft.late], timeout=0)
    if ready:
        draft.late = None
        # What that answer would have said of forgotten rows is unknown, so every row is sent whole.
        draft.known.clear()
    return bool(ready)


def _advance(draft: _Draft, live: LiveRow, limit: int) -> Advance:
    key, start = live.row.key, draft.known.get(live.row.key, 0)
    sampling = live.row.sampling if start == 0 else None
    return Advance(key, start, tuple(live.tokens[start:]), max(0, limit), sampling, len(live.row.prompt))
