"""A draft in the same process: what the link and the actor do, without Ray between them."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.workers.draft.drafter import Drafter
from outrider.workers.messages import Advance, Ask
from outrider.workers.speculation import Price, Request
from outrider.workers.target.verifier import Answer, Guess, LiveRow


class LocalDraft:
    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter
        self._known: dict[int, int] = {}
        self._closed: list[int] = []
        self._round = 0

    def ask(self, rows: Sequence[LiveRow], request: Request) -> Answer:
        self._round += 1
        advances = []
        for live, limit in zip(rows, request.counts, strict=True):
            start = self._known.get(live.row.key, 0)
            sampling = live.row.sampling if start == 0 else None
            new = tuple(live.tokens[start:])
            advances.append(Advance(live.row.key, start, new, max(0, limit), sampling, len(live.row.prompt)))
            self._known[live.row.key] = len(live.tokens)
        closed, self._closed = tuple(self._closed), []
        limits = (0.0, request.keep, request.a_step, request.runner_up_chances)
        reply = self._drafter.propose(Ask(self._round, tuple(advances), closed, *limits))
        assert not reply.forgotten
        keys = [live.row.key for live in rows]
        return lambda: [Guess(reply.tokens.get(key, ()), reply.runners_up.get(key, ())) for key in keys]

    def forget(self, key: int) -> None:
        if self._known.pop(key, None) is not None:
            self._closed.append(key)

    def price(self, rows: int) -> Price | None:
        return Price(step=0.0)

    def unread(self, live: LiveRow) -> int:
        return len(live.tokens) - self._known.get(live.row.key, 0)
