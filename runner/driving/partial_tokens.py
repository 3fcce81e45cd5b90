"""What is written so far of the rows under way, so that whoever gets such a row next goes on where it was.

A target tells of it with its harvests. It is kept here for a target that dies, and in the journal for a driver that dies;
there it is bounded in bytes and in time.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from outrider.runner.job.journal import KeptTokens
from outrider.runner.job.requests import MOST_SAMPLES
from outrider.workers.messages import PartialTokens, Row, RowResult, TokenLogprobs

SECONDS_BETWEEN_WRITES = 2.0
# Writing takes no more than this share of the time: where the disk is slow, there is more time between two writes.
MOST_SHARE = 0.002
# Of all rows under way together. What is over it is kept for targets that die, and not in the journal.
MOST_BYTES = 64 << 20
TOKEN_BYTES = 4


@dataclass(slots=True)
class _PartialSample:
    """One sample of a row: its tokens so far, and the replica that tells of them. The journal has the first ``kept``."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    replica: int | None = None
    kept: int = 0
    bytes: int = 0


class PartialTokenStore:
    """Of every sample that a replica has: named by their keys, as replicas name them."""

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self._partials: dict[int, _PartialSample] = {}
        self._most_bytes = most_bytes
        self._bytes = 0
        self._due = 0.0

    def restore(self, kept: Iterable[KeptTokens]) -> None:
        """What an earlier driver has kept, in the order in which it was written."""
        for some in kept:
            partial = self._partials.setdefault(_key(some), _PartialSample())
            told = some.logprobs is None or len(some.logprobs) == len(some.tokens)
            # Some are missing, or damaged: what is behind them is written anew.
            if some.start == len(partial.tokens) == partial.kept and told:
                partial.tokens.extend(some.tokens)
                partial.logprobs.extend(some.logprobs or ())
                partial.kept = len(partial.tokens)
                self._count(partial, some)

    def resumed(self, row: Row, replica: int) -> Row:
        """The row as it goes to a replica: with what is written of it."""
        partial = self._partials.setdefault(row.key, _PartialSample())
        if partial.replica is None:
            partial.replica = replica
        if not partial.tokens:
            return row
        return replace(row, resumed=tuple(partial.tokens), resumed_logprobs=tuple(partial.logprobs))

    def listens_to(self, key: int, replica: int) -> bool:
        """Whether this replica is the one that tells of the sample."""
        partial = self._partials.get(key)
        return partial is not None and partial.replica == replica

    def told(self, replica: int, written: Iterable[PartialTokens]) -> None:
        """What a replica has written. Of two that have the same row, the first is listened to."""
        for each in written:
            partial = self._partials.get(each.key)
            if partial is not None and partial.replica == replica and each.start == len(partial.tokens):
                partial.tokens.extend(each.tokens)
                partial.logprobs.extend(each.logprobs)

    def ended(self, result: RowResult) -> None:
        """A sample that is whole, while others of its row are not."""
        partial = self._partials.get(result.key)
        # Where an engine is not exact, two replicas may have written two answers, and half of each would be neither.
        if partial is not None and tuple(partial.tokens) == result.tokens[: len(partial.tokens)]:
            partial.tokens[:] = result.tokens
            if (told := result.logprobs) is not None:
                own = zip(result.tokens, told.chosen, told.likeliest, strict=True)
                partial.logprobs[:] = [((token, chosen), *likeliest) for token, chosen, likeliest in own]

    def released(self, replica: int) -> None:
        """The replica has died, or has lost its host: another one may tell of its rows."""
        for partial in self._partials.values():
            if partial.replica == replica:
                partial.replica = None

    def forget(self, row: int, samples: int) -> None:
        """The row has ended, and its record is kept instead."""
        for key in (row * MOST_SAMPLES + sample for sample in range(samples)):
            if (partial := self._partials.pop(key, None)) is not None:
                self._bytes -= partial.bytes

    def due(self, now: float) -> bool:
        return now >= self._due

    def was_written(self, now: float, seconds: float) -> None:
        """The journal has taken ``seconds`` for it."""
        self._due = now + max(SECONDS_BETWEEN_WRITES, seconds / MOST_SHARE)

    def to_keep(self) -> list[KeptTokens]:
        """What the journal does not have yet."""
        found = []
        for key, partial in self._partials.items():
            if partial.kept < len(partial.tokens) and self._bytes < self._most_bytes:
                row, sample = divmod(key, MOST_SAMPLES)
                logprobs = tuple(partial.logprobs[partial.kept :]) if partial.logprobs else None
                some = KeptTokens(row, sample, partial.kept, tuple(partial.tokens[partial.kept :]), logprobs)
                partial.kept = len(partial.tokens)
                self._count(partial, some)
                found.append(some)
        return found

    def _count(self, partial: _PartialSample, some: KeptTokens) -> None:
        size = len(some.tokens) * TOKEN_BYTES + (len(json.dumps(some.logprobs)) if some.logprobs else 0)
        partial.bytes += size
        self._bytes += size


def _key(some: KeptTokens) -> int:
    return some.row * MOST_SAMPLES + some.sample
