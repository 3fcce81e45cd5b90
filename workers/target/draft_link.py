"""A target's link to its draft actor: new tokens out, candidates back, and no wait beyond the deadline."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from outrider.workers.draft.transport import DraftFailed, DraftLost, DraftTransport, Reply
from outrider.workers.engines.costs import Recent
from outrider.workers.messages import Advance, DraftRequest, Layout
from outrider.workers.speculation import CandidateRequest, DraftCost, LayoutKind
from outrider.workers.target.live_row import LiveRow
from outrider.workers.target.proposers import NO_PROPOSAL, PendingProposals, Proposal
from outrider.workers.target.statistics import TargetStatistics

logger = logging.getLogger(__name__)
# A draft that answers with an error this often in a row is left alone for so long: a want of memory may pass.
MOST_ERRORS, REST_SECONDS = 3, 600.0


@dataclass(slots=True)
class _Draft:
    """A draft, and how many tokens of each row it was sent (``known``).

    ``sent``: rows that it may have, known or not: it may have kept one from a failed round. ``closed``: those that it may
    forget. Rows that ended without it are in neither, or both would grow for as long as a draft is not asked.
    """

    transport: DraftTransport
    known: dict[int, int] = field(default_factory=dict)
    sent: set[int] = field(default_factory=set)
    # The window of a new text that the draft named last; 0: it reads all of it.
    window: int = 0
    closed: list[int] = field(default_factory=list)
    late: list[Reply] = field(default_factory=list)
    errors: int = 0
    resting_until: float = 0.0
    lost: bool = False
    configured: bool = False

    @property
    def asked(self) -> bool:
        return not self.lost and time.monotonic() >= self.resting_until


@dataclass(frozen=True, slots=True)
class _DraftCosts:
    """``steps``: seconds of a draft step, by number of rows, as the draft reports. ``hops``: seconds of a request whatever
    it asks for, which are messages and what the draft does outside its passes. ``reading``: seconds of prefill a token.
    """

    steps: Recent = field(default_factory=lambda: Recent(1))
    hops: Recent = field(default_factory=Recent)
    reading: Recent = field(default_factory=lambda: Recent(1))
    # Of a parallel draft: by number of rows, seconds of a pass for 1, 2, … candidates.
    one_pass: dict[int, tuple[float, ...]] = field(default_factory=dict)

    def for_rows(self, rows: int) -> DraftCost:
        nearest = min(self.one_pass, key=lambda count: abs(count - rows), default=None)
        one_pass = () if nearest is None else self.one_pass[nearest]
        hop, read = self.hops(rows) or 0.0, self.reading(1) or 0.0
        # A parallel draft makes all candidates in one pass, so no row leaves earlier.
        row = 0.0 if one_pass else self.steps.of_a_row(rows)
        measured = (self.steps.nearest(rows) if nearest is None else nearest) or 0
        return DraftCost(self.steps(rows) or 0.0, hop, read, row, one_pass, None if measured == rows else measured)

    def record(self) -> dict[str, dict[int, float]]:
        known = {"step": self.steps.usual, "hop": self.hops.usual, "read": self.reading.usual}
        if made := max(list(self.one_pass.items()), default=None):
            known["one_pass"] = dict(enumerate(made[1], start=1))
        return known


@dataclass(frozen=True, slots=True)
class _Asked:
    """A request that was sent ``at`` this moment, which took ``sent`` seconds. ``wanted`` of the ``rows`` are asked for."""

    draft: _Draft
    round: int
    reply: Reply
    rows: tuple[int, ...]
    wanted: int
    at: float
    sent: float


class DraftLink:
    """Asks a draft actor, sends it only new tokens, and never waits for it longer than the deadline.

    A draft that is late, dead or confused costs the round its candidates and nothing else. Only ``attach``, which replaces
    the draft, may be called from another thread than the verifying one.
    """

    knows_chances = True

    def __init__(self, deadline: float, confidence: float = 0.0, statistics: TargetStatistics | None = None) -> None:
        self._deadline = deadline
        self._statistics = statistics
        self._confidence = confidence
        self._draft: _Draft | None = None
        self._round = 0
        self._layout: Layout | None = None
        self._draft_costs: dict[str, _DraftCosts] = {}
        # For the user: the first draft that was left alone for its errors, and the last of these.
        self.note: str | None = None

    @property
    def _current(self) -> _DraftCosts:
        """What the draft costs in this layout."""
        name = "" if self._layout is None else self._layout.name
        return self._draft_costs.setdefault(name, _DraftCosts())

    def attach(self, transport: DraftTransport | None) -> None:
        """Use the draft that this transport reaches from now on; None: there is no draft."""
        self._draft = None if transport is None else _Draft(transport)

    @property
    def ready(self) -> bool:
        draft = self._draft
        return draft is not None and draft.asked

    def set_layout(self, layout: Layout) -> None:
        """Tell the draft to use this layout before its next request. Costs are kept separately for each layout."""
        self._layout = layout
        if self._draft is not None:
            self._draft.configured = False

    def forget(self, key: int) -> None:
        draft = self._draft
        if draft is not None:
            draft.known.pop(key, None)
            if key in draft.sent:
                draft.sent.remove(key)
                draft.closed.append(key)

    @property
    def transport(self) -> str | None:
        """Which transport reaches the draft, if there is one."""
        draft = self._draft
        return None if draft is None else draft.transport.name

    def draft_cost(self, rows: int, layout: str | None = None) -> DraftCost | None:
        draft = self._draft
        if draft is None or not draft.asked:
            return None
        # Until a round has been measured candidates count as free, so that the first round asks.
        draft_costs = self._current if layout is None else self._draft_costs.get(layout, _DraftCosts())
        return draft_costs.for_rows(rows)

    def costs(self) -> dict[str, dict[str, dict[int, float]]]:
        """For job.json, by layout: seconds of a step and of the hop by number of rows, and of reading a token; of a
        parallel draft also those of a pass by number of candidates, for the largest number of rows.
        """
        return {name: draft_costs.record() for name, draft_costs in list(self._draft_costs.items())}

    def unread(self, live: LiveRow) -> int:
        draft = self._draft
        if draft is None:
            return len(live.tokens)
        unread = len(live.tokens) - draft.known.get(live.row.key, 0)
        return min(unread, draft.window) if draft.window else unread

    def ask(self, rows: Sequence[LiveRow], request: CandidateRequest) -> PendingProposals:
        draft = self._draft
        asked = None
        if draft is not None and draft.asked:
            try:
                if _caught_up(draft):
                    asked = self._ask(draft, rows, request)
            except DraftLost as error:
                self._lose(draft, error)
        if asked is None:
            return lambda: [NO_PROPOSAL] * len(rows)
        return lambda: self._collect(asked)

    def _ask(self, draft: _Draft, rows: Sequence[LiveRow], request: CandidateRequest) -> _Asked:
        if not draft.configured:
            self._configure(draft)
        self._round += 1
        closed, draft.closed = tuple(draft.closed), []
        # Rows without candidates in this round are left out: their new tokens are sent with their next request.
        wanted = [(live, count) for live, count in zip(rows, request.counts, strict=True) if count > 0]
        advances = tuple(_advance(draft, live, count) for live, count in wanted)
        message = DraftRequest(
            self._round,
            advances,
            closed,
            self._confidence,
            request.least_reach,
            request.least_sum,
            request.runner_up_chances,
            request.rate,
        )
        draft.sent.update(live.row.key for live, _ in wanted)
        at = time.perf_counter()
        reply = draft.transport.ask(message)
        # On shared cores the draft may begin before the call returns; the hop is computed once the reply is here.
        sent = time.perf_counter() - at
        draft.known.update((live.row.key, len(live.tokens)) for live, _ in wanted)
        return _Asked(draft, self._round, reply, tuple(live.row.key for live in rows), len(wanted), at, sent)

    def _configure(self, draft: _Draft) -> None:
        draft.configured = True
        if self._layout is not None:
            draft_ahead = self._layout.kind is LayoutKind.OVERLAPPED
            draft.transport.reconfigure(self._layout.draft_cores, draft_ahead, self._deadline)

    def _collect(self, asked: _Asked) -> list[Proposal]:
        draft, nothing = asked.draft, [NO_PROPOSAL] * len(asked.rows)
        waiting = time.perf_counter()
        try:
            if not asked.reply.ready(max(0.0, asked.at + self._deadline - waiting)):
                draft.late.append(asked.reply)
                self._current.hops.observe(asked.wanted, self._deadline)
                return nothing
            candidates = asked.reply.take()
        except DraftFailed as error:
            # The draft lives, but its rows may be inconsistent: they are sent whole next time.
            draft.errors += 1
            draft.known.clear()
            logger.warning("the draft failed, this round goes on without it: %s", error)
            if draft.errors >= MOST_ERRORS:
                self._leave_alone(draft, error)
            return nothing
        except DraftLost as error:
            self._lose(draft, error)
            return nothing
        draft.errors = 0
        # hop = (time of asking and waiting) - (time that the draft worked).
        hop = max(0.0, asked.sent + time.perf_counter() - waiting - candidates.seconds)
        if self._statistics is not None:
            self._statistics.hop(hop)
            corrected = candidates.corrected_right, candidates.corrected_wrong
            self._statistics.drafted(candidates.passes, candidates.skipped, *corrected)
        draft.window = candidates.window
        if candidates.step is not None:
            self._current.steps.observe(asked.wanted, candidates.step)
        if candidates.one_pass:
            self._current.one_pass[asked.wanted] = candidates.one_pass
        if candidates.read is not None:
            self._current.reading.observe(1, candidates.read)
        # A request costs this once, however many candidates it asks for.
        self._current.hops.observe(asked.wanted, hop + candidates.overhead)
        for key in candidates.forgotten:
            draft.known.pop(key, None)
        if candidates.round != asked.round:
            return nothing
        tokens, runners_up, reaches = candidates.tokens, candidates.runners_up, candidates.reaches
        return [Proposal(tokens.get(key, ()), runners_up.get(key, ()), reaches=reaches.get(key, ())) for key in asked.rows]

    def _leave_alone(self, draft: _Draft, error: DraftFailed) -> None:
        """Decode plainly for a while; one more error begins the next while."""
        draft.resting_until = time.monotonic() + REST_SECONDS
        if self.note is None:
            self.note = (
                f"the draft answered {MOST_ERRORS} requests in succession with an error; rows go on without it, and it is "
                f"asked again in {REST_SECONDS / 60:.0f} minutes: {error}"
            )

    def _lose(self, draft: _Draft, error: DraftLost) -> None:
        """Decode plainly until the driver attaches another draft."""
        draft.lost = True
        logger.warning("the draft is lost, going on without it: %s", error)


def _caught_up(draft: _Draft) -> bool:
    """Whether the draft has answered all late requests. Their answers are dropped."""
    if not draft.late:
        return True
    draft.late = [reply for reply in draft.late if not reply.ready(0.0)]
    if not draft.late:
        # The dropped answers may have named forgotten rows, so every row is sent whole.
        draft.known.clear()
    return not draft.late


def _advance(draft: _Draft, live: LiveRow, limit: int) -> Advance:
    key, start = live.row.key, draft.known.get(live.row.key, 0)
    sampling = live.row.sampling if start == 0 else None
    states, states_end = live.states.take()
    tokens = tuple(live.tokens[start:])
    return Advance(key, start, tokens, limit, sampling, len(live.row.prompt), states, states_end)
