"""A head on the target's hidden states as a draft: what is committed it reads with the target's states, once it has them.

Its own guesses go on from what it left itself. They are only ever guesses: as soon as the target's states for such tokens
are here, these are read again. Of tokens whose states it was never sent (another row has read their prompt, or an earlier
draft was sent them) it knows nothing: the row then begins where its states begin.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from outrider.workers.draft.constraints import Constraints
from outrider.workers.draft.drafter import Drafter, DraftRow
from outrider.workers.engines.head import HeadEngine, States
from outrider.workers.messages import Advance, DraftReply, DraftRequest, Sampling

# A row that is not asked for waits with so many states at most: of one that waits longer the oldest are let go.
MOST_WAITING = 2048


class HeadDrafter(Drafter):
    def __init__(
        self,
        engine: HeadEngine,
        end_tokens: Collection[int],
        prefix_tokens: int = 0,
        constraints: Constraints | None = None,
    ) -> None:
        super().__init__(engine, end_tokens, prefix_tokens, constraints)
        self._head = engine

    def propose(self, request: DraftRequest) -> DraftReply:
        """What feeds that were taken apart cost is in the reply's seconds: of a step, or of what lies beside the steps."""
        before = self._head.more_passes
        reply = super().propose(request)
        return reply._replace(passes=reply.passes + self._head.more_passes - before)

    def draft_ahead(self) -> bool:
        """Nothing: of what follows its guesses it would have to read everything anew."""
        return False

    def _go_to(self, row: DraftRow, advance: Advance) -> None:
        self._learn(row, advance)
        for each in (row.guessed, row.margins, row.chances, row.runners_up):
            each.clear()
        row.reach = 1.0
        row.committed.extend(advance.tokens)
        self._follow(row)
        confirmed = self._head.confirmed(advance.key)
        if confirmed < row.cached:
            row.cached = confirmed
            self.engine.truncate(advance.key, confirmed)
        row.limit = self._room(row, advance.limit)
        self._take(advance)

    def _open(self, advance: Advance, sampling: Sampling) -> None:
        _, first = self._states_of(advance)
        super()._open(advance, sampling)
        row = self._rows[advance.key]
        if first > max(row.cached, 1):
            # What is skipped must not be taken for a prompt that has been read, by rows that begin alike.
            self._prefix_cache.close(advance.key)
            self.engine.open(advance.key, sampling, advance.prompt_length)
            row.cached = 0
        self._take(advance)

    def _states_of(self, advance: Advance) -> tuple[States, int]:
        """The states that came, and with which of the row's tokens the first of them goes: the one behind its own."""
        states = np.frombuffer(advance.states, np.uint16).reshape(-1, self._head.model.program.taken_in)
        return states, advance.states_end - len(states) + 1

    def _take(self, advance: Advance) -> None:
        """Have the states that came lie ready for the tokens that are read next."""
        row, key = self._rows[advance.key], advance.key
        states, first = self._states_of(advance)
        waiting = self._head.waiting(key)
        if len(waiting) and row.cached + len(waiting) == first:
            states, first = np.concatenate([waiting, states]), row.cached
        states = states[max(0, row.cached - first) :]
        first = max(first, row.cached)
        if (surplus := len(states) - MOST_WAITING) > 0:
            states, first = states[surplus:], first + surplus
        if len(row.committed) > self.engine.context:
            states = states[:0]
        if len(states) and first > row.cached:
            self._head.skip(key, row.committed[row.cached : first])
            row.cached = first
        if not len(states):
            # Nothing that it could begin with.
            row.limit = 0
        self._head.give(key, states)
