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
    """``committed`` is what the target has decided, ``guessed`` how the draft goes on from there.

    The engine's cache holds the first ``cached`` tokens of the two in a row. The last guess has not been fed, so it is
    never among them.
    """

    committed: list[int] = field(default_factory=list)
    guessed: list[int] = field(default_factory=list)
    cached: int = 0
    limit: int = 0
    end_tokens: Collection[int] = ()

    def uncached(self) -> list[int]:
        beyond = self.cached - len(self.committed)
        return self.guessed[beyond:] if beyond >= 0 else self.committed[self.cached :] + self.guessed


class Drafter:
    """Answers a target's requests. Whatever it says is a hint, so it may forget anything at any time."""

    def __init__(self, engine: Engine, end_tokens: Collection[int]) -> None:
        self.engine = engine
        self.end_tokens = frozenset(end_tokens)
        self._rows: dict[int, DraftRow] = {}
        self._asked: list[int] = []

    def propose(self, ask: Ask) -> Candidates:
        for key in ask.closed:
            self._close(key)
        self._asked = [advance.key for advance in ask.rows if self._advance(advance)]
        forgotten = tuple(advance.key for advance in ask.rows if advance.key not in self._rows)
        while self._step([key for key in self._asked if self._wants_more(key, self._rows[key].limit)]):
            pass
        rows = {key: self._rows[key] for key in self._asked}
        return Candidates(ask.round, {key: tuple(row.guessed[: row.limit]) for key, row in rows.items()}, forgotten)

    def run_ahead(self) -> bool:
        """One step further for the rows of the last request, as if the target were going to accept everything.

        A second set of candidates and the target's own token between the two sets are as far as it pays to go. False
        where there is nothing to do.
        """
        return self._step([key for key in self._asked if self._wants_more(key, 2 * self._rows[key].limit + 1)])

    def _advance(self, advance: Advance) -> bool:
        """Take in what the target has committed. False where this row's history here is not the target's."""
        if advance.start == 0 and advance.sampling is not None:
            self._close(advance.key)
            own = advance.sampling.end_tokens
            self._rows[advance.key] = DraftRow(end_tokens=self.end_tokens if own is None else own)
            self.engine.open(advance.key, advance.sampling, advance.prompt_length)
        row = self._rows.get(advance.key)
        if row is None or len(row.committed) != advance.start:
            self._close(advance.key)
            return False
        held = _common_prefix(row.guessed, advance.tokens)
        # What was guessed beyond the committed tokens stays good as long as all of them were guessed right.
        row.guessed = row.guessed[held:] if held == len(advance.tokens) else []
        row.committed.extend(advance.tokens)
        keep = min(row.cached, advance.start + held, len(row.committed) - 1) if not row.guessed else row.cached
        if keep < row.cached:
            row.cached = keep
            self.engine.truncate(advance.key, keep)
        row.limit = self._room(row, advance.limit)
        return True

    def _room(self, row: DraftRow, limit: int) -> int:
        if any(token >= self.engine.vocabulary for token in row.uncached()):
            return 0  # the target's vocabulary is the larger one, and this row uses it
        return max(0, min(limit, self.engine.context - len(row.committed)))

    def _wants_more(self, key: int, count: int) -> bool:
        row = self._rows[key]
        if row.limit == 0 or len(row.guessed) >= min(count, self.engine.context - len(row.committed)):
            return False
        return not row.guessed or row.guessed[-1] not in row.end_tokens

    def _step(self, keys: Sequence[int]) -> bool:
        """One more guess for each of these rows, all together."""
        feeds = []
        for key in keys:
            row = self._rows[key]
            new = row.uncached()
            while len(new) > PREFILL_TOKENS:
                self.engine.feed([Feed(key, new[:PREFILL_TOKENS], 0)])
                row.cached += PREFILL_TOKENS
                del new[:PREFILL_TOKENS]
            feeds.append(Feed(key, new, 1))
        if not feeds:
            return False
        for feed, chosen in zip(feeds, self.engine.feed(feeds), strict=True):
            row = self._rows[feed.row]
            row.cached += len(feed.tokens)
            row.guessed.append(chosen.tokens[0])
        return True

    def _close(self, key: int) -> None:
        if self._rows.pop(key, None) is not None:
            self.engine.close(key)
            self._asked = [other for other in self._asked if other != key]


def _common_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    shorter = min(len(left), len(right))
    return next((index for index in range(shorter) if left[index] != right[index]), shorter)


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
