"""Those who propose: the draft model's loop, and the n-gram lookup that needs no model."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from outrider.workers.engine import Engine, Feed
from outrider.workers.messages import Advance, Ask, Candidates

# A long prompt enters the draft's cache in pieces, so that its working memory stays small.
PREFILL_TOKENS = 512


@dataclass(slots=True)
class DraftRow:
    """``committed`` is what the target has decided; ``cached`` what the engine's cache holds, guesses included."""

    committed: list[int] = field(default_factory=list)
    cached: list[int] = field(default_factory=list)


class Drafter:
    """Answers a target's requests. Whatever it says is a hint, so it may forget anything at any time."""

    def __init__(self, engine: Engine, end_tokens: Collection[int]) -> None:
        self.engine = engine
        self.end_tokens = frozenset(end_tokens)
        self._rows: dict[int, DraftRow] = {}

    def propose(self, ask: Ask) -> Candidates:
        for key in ask.closed:
            self._close(key)
        known = [advance for advance in ask.rows if self._advance(advance)]
        forgotten = tuple(advance.key for advance in ask.rows if advance.key not in self._rows)
        limits = {advance.key: self._room(advance) for advance in known}
        return Candidates(ask.round, self._write(limits), forgotten)

    def _advance(self, advance: Advance) -> bool:
        """Take in what the target has committed. False where this row's history here is not the target's."""
        if advance.start == 0 and advance.sampling is not None:
            self._close(advance.key)
            self._rows[advance.key] = DraftRow()
            self.engine.open(advance.key, advance.sampling, advance.prompt_length)
        row = self._rows.get(advance.key)
        if row is None or len(row.committed) != advance.start:
            self._close(advance.key)
            return False
        row.committed.extend(advance.tokens)
        # On full acceptance the cache lacks the last candidate and the target's own token; on a miss it holds too much.
        agreed = _common_prefix(row.cached, row.committed, len(row.committed) - 1)
        del row.cached[agreed:]
        self.engine.truncate(advance.key, agreed)
        return True

    def _room(self, advance: Advance) -> int:
        row = self._rows[advance.key]
        if any(token >= self.engine.vocabulary for token in row.committed[len(row.cached) :]):
            return 0  # the target's vocabulary is the larger one, and this row uses it
        return max(0, min(advance.limit, self.engine.context - len(row.committed)))

    def _write(self, limits: dict[int, int]) -> dict[int, tuple[int, ...]]:
        """One step a candidate, all rows that still want one together."""
        written: dict[int, list[int]] = {key: [] for key, limit in limits.items() if limit}
        active = list(written)
        while active:
            for key, token in zip(active, self._step(active, written), strict=True):
                written[key].append(token)
            active = [key for key in active if self._continues(written[key], limits[key])]
        return {key: tuple(tokens) for key, tokens in written.items()}

    def _continues(self, tokens: list[int], limit: int) -> bool:
        return len(tokens) < limit and tokens[-1] not in self.end_tokens

    def _step(self, keys: Sequence[int], written: dict[int, list[int]]) -> list[int]:
        feeds = []
        for key in keys:
            row = self._rows[key]
            new = (row.committed + written[key])[len(row.cached) :]
            while len(new) > PREFILL_TOKENS:
                self.engine.feed([Feed(key, new[:PREFILL_TOKENS], 0)])
                row.cached.extend(new[:PREFILL_TOKENS])
                del new[:PREFILL_TOKENS]
            row.cached.extend(new)
            feeds.append(Feed(key, new, 1))
        return [chosen.tokens[0] for chosen in self.engine.feed(feeds)]

    def _close(self, key: int) -> None:
        if self._rows.pop(key, None) is not None:
            self.engine.close(key)


def _common_prefix(left: Sequence[int], right: Sequence[int], most: int) -> int:
    for index in range(min(len(left), len(right), most)):
        if left[index] != right[index]:
            return index
    return min(len(left), len(right), most)


def lookup(tokens: Sequence[int], limit: int, longest: int = 4) -> tuple[int, ...]:
    """What followed the last occurrence of the row's last n tokens, for the largest n up to ``longest`` that occurred."""
    if limit <= 0:
        return ()
    for size in range(min(longest, len(tokens) - 1), 0, -1):
        tail = tuple(tokens[-size:])
        for start in range(len(tokens) - size - 1, -1, -1):
            if tuple(tokens[start : start + size]) == tail:
                return tuple(tokens[start + size : start + size + limit])
    return ()
