"""A draft in the same process: what the link and the actor do, without Ray between them."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.workers.messages import Advance, Ask
from outrider.workers.propose import Drafter
from outrider.workers.verify import LiveRow


class LocalDraft:
    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter
        self._known: dict[int, int] = {}
        self._closed: list[int] = []
        self._round = 0

    def propose(self, rows: Sequence[LiveRow], limits: Sequence[int]) -> list[Sequence[int]]:
        self._round += 1
        advances = []
        for live, limit in zip(rows, limits, strict=True):
            start = self._known.get(live.row.key, 0)
            sampling = live.row.sampling if start == 0 else None
            new = tuple(live.tokens[start:])
            advances.append(Advance(live.row.key, start, new, max(0, limit), sampling, len(live.row.prompt)))
            self._known[live.row.key] = len(live.tokens)
        closed, self._closed = tuple(self._closed), []
        reply = self._drafter.propose(Ask(self._round, tuple(advances), closed))
        assert not reply.forgotten
        return [reply.tokens.get(live.row.key, ()) for live in rows]

    def forget(self, key: int) -> None:
        if self._known.pop(key, None) is not None:
            self._closed.append(key)

    def step_seconds(self, rows: int) -> float | None:
        return 0.0
