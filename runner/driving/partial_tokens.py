"""The tokens so far of rows in progress, from which another replica or a resumed job continues them.

Targets report them with their harvests. They are kept here in case a target dies, and in the journal in case the driver
dies; the journal's part is bounded in bytes and in time.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from outrider.runner.job.journal import KeptTokens
from outrider.runner.job.requests import MOST_SAMPLES
from outrider.workers.messages import PartialTokens, Row, RowResult, TokenLogprobs

SECONDS_BETWEEN_WRITES = 2.0
# Writing takes at most this share of the time: on a slow disk the writes are further apart.
MOST_SHARE = 0.002
# What the journal keeps of all rows in progress together. Tokens beyond that are kept in memory only.
MOST_BYTES = 64 << 20
TOKEN_BYTES = 4


@dataclass(slots=True)
class _PartialSample:
    """One sample of a row: its tokens so far, and the replica that reports them. The journal has the first ``kept``."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    replica: int | None = None
    kept: int = 0
    bytes: int = 0


class PartialTokenStore:
    """The tokens of every sample that a replica has, by the sample's key."""

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self._partials: dict[int, _PartialSample] = {}
        self._most_bytes = most_bytes
        self._bytes = 0
        self._due = 0.0

    def restore(self, kept: Iterable[KeptTokens]) -> None:
        """Take over what an earlier driver has journalled, in the order in which it was written."""
        for some in kept:
            partial = self._partials.setdefault(_key(some), _PartialSample())
            whole = some.logprobs is None or len(some.logprobs) == len(some.tokens)
            # After a gap or damage the rest is dropped: those tokens are generated again.
            if some.start == len(partial.tokens) == partial.kept and whole:
                partial.tokens.extend(some.tokens)
                partial.logprobs.extend(some.logprobs or ())
                partial.kept = len(partial.tokens)
                self._count(partial, some)

    def resumed(self, row: Row, replica: int) -> Row:
        """The row with its tokens so far, to send to a replica."""
        partial = self._partials.setdefault(row.key, _PartialSample())
        if partial.replica is None:
            partial.replica = replica
        if not partial.tokens:
            return row
        return replace(row, resumed=tuple(partial.tokens), resumed_logprobs=tuple(partial.logprobs))

    def is_reporter(self, key: int, replica: int) -> bool:
        """Whether the sample's tokens are taken from this replica."""
        partial = self._partials.get(key)
        return partial is not None and partial.replica == replica

    def add_reported(self, replica: int, written: Iterable[PartialTokens]) -> None:
        """Add tokens that a replica reports. If two replicas have the row, only the first one's are taken."""
        for each in written:
            partial = self._partials.get(each.key)
            if partial is not None and partial.replica == replica and each.start == len(partial.tokens):
                partial.tokens.extend(each.tokens)
                partial.logprobs.extend(each.logprobs)

    def sample_ended(self, result: RowResult) -> None:
        """Take a finished sample whole; other samples of its row are still in progress."""
        partial = self._partials.get(result.key)
        # On an engine that is not exact two replicas may generate different texts: do not mix them.
        if partial is not None and tuple(partial.tokens) == result.tokens[: len(partial.tokens)]:
            partial.tokens[:] = result.tokens
            if (logprobs := result.logprobs) is not None:
                own = zip(result.tokens, logprobs.chosen, logprobs.likeliest, strict=True)
                partial.logprobs[:] = [((token, chosen), *likeliest) for token, chosen, likeliest in own]

    def replica_gone(self, replica: int) -> None:
        """The replica has died or lost its host: its samples' tokens are taken from the next replica that gets them."""
        for partial in self._partials.values():
            if partial.replica == replica:
                partial.replica = None

    def forget(self, row: int, samples: int) -> None:
        """Drop the tokens of a row that has ended."""
        for key in (row * MOST_SAMPLES + sample for sample in range(samples)):
            if (partial := self._partials.pop(key, None)) is not None:
                self._bytes -= partial.bytes

    def due(self, now: float) -> bool:
        return now >= self._due

    def was_written(self, now: float, seconds: float) -> None:
        """The last write to the journal ended at ``now`` and took ``seconds``."""
        self._due = now + max(SECONDS_BETWEEN_WRITES, seconds / MOST_SHARE)

    def to_keep(self) -> list[KeptTokens]:
        """The tokens that the journal does not have yet; they count as kept from now on."""
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
