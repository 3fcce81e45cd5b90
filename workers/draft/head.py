"""A head on the target's hidden states (EAGLE) as a draft: committed tokens are fed with the target's states.

Its own guesses are fed with its own states, and again with the target's once they are committed. Tokens whose states it was
never sent (their prompt was read for another row, or the states went to an earlier draft) are skipped: the row then begins
where its states begin.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from outrider.workers.draft.constraints import Constraints
from outrider.workers.draft.drafter import Drafter, DraftRow
from outrider.workers.engines.head import HeadEngine, States
from outrider.workers.messages import Advance, DraftReply, DraftRequest, Sampling

# The most states that a row keeps until it is asked about; beyond that the oldest are dropped.
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
        """Adds the passes into which the engine has divided feeds; their seconds are in the reply already."""
        before = self._head.more_passes
        reply = super().propose(request)
        return reply._replace(passes=reply.passes + self._head.more_passes - before)

    def draft_ahead(self) -> bool:
        """Never: after each commit all guesses are fed again with the target's states, so nothing would be kept."""
        return False

    def _commit(self, row: DraftRow, advance: Advance) -> None:
        self._learn(row, advance)
        for each in (row.guessed, row.margins, row.chances, row.runners_up):
            each.clear()
        row.reach = 1.0
        row.committed.extend(advance.tokens)
        self._update_matching(row)
        confirmed = self._head.confirmed(advance.key)
        if confirmed < row.cached:
            row.cached = confirmed
            self.engine.truncate(advance.key, confirmed)
        row.limit = self._limit(row, advance.limit)
        self._give_states(advance)

    def _open(self, advance: Advance, sampling: Sampling) -> None:
        _, first = self._states_of(advance)
        super()._open(advance, sampling)
        row = self._rows[advance.key]
        if first > max(row.cached, 1):
            # A row with skipped tokens must not be in the prefix cache.
            self._prefix_cache.close(advance.key)
            self.engine.open(advance.key, sampling, advance.prompt_length)
            row.cached = 0
        self._give_states(advance)

    def _states_of(self, advance: Advance) -> tuple[States, int]:
        """The states that were sent, and the position of the token that is fed with the first of them: one after its
        own."""
        states = np.frombuffer(advance.states, np.uint16).reshape(-1, self._head.model.program.hidden_in)
        return states, advance.states_end - len(states) + 1

    def _give_states(self, advance: Advance) -> None:
        """Hand the states to the engine for the tokens that are fed next; tokens before the first state are skipped."""
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
            # Without a state nothing can be guessed.
            row.limit = 0
        self._head.give(key, states)
