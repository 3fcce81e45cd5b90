"""A job's share of a target's counters: exact for what rows report themselves, else in proportion to the tokens gained."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, fields

from outrider.workers.messages import PartialTokens, Row, RowFailure, RowResult, TargetCounters

NUMBERS = [each.name for each in fields(TargetCounters) if each.name != "accepted_lengths"]


@dataclass(slots=True)
class _Sent:
    """A row that a replica has, and what has been reported of it so far: tokens of its answer, and candidates."""

    prompt: int
    resumed: int
    written: int
    proposed: int = 0
    accepted: int = 0
    reported: bool = False


class SentRows:
    """The rows of one job that replicas have; counts what each has gained since its last report."""

    def __init__(self) -> None:
        self._sent: dict[tuple[int, int], _Sent] = {}

    def add(self, replica: int, rows: Iterable[Row]) -> None:
        for row in rows:
            self._sent[replica, row.key] = _Sent(len(row.prompt), len(row.resumed), len(row.resumed))

    def stopped(self, replica: int) -> None:
        self._sent = {key: sent for key, sent in self._sent.items() if key[0] != replica}

    def forget(self, keys: Iterable[int]) -> None:
        gone = frozenset(keys)
        self._sent = {key: sent for key, sent in self._sent.items() if key[1] not in gone}

    def gained(
        self, replica: int, ended: Iterable[RowResult | RowFailure], written: Iterable[PartialTokens]
    ) -> tuple[int, Counter[str]]:
        """The job's weight in a harvest (tokens gained), and its exact figures by the names of ``TargetCounters``."""
        weight, own = 0, Counter[str]()
        for some in written:
            weight += len(some.tokens)
            own["tokens"] += len(some.tokens)
            if (sent := self._sent.get((replica, some.key))) is not None:
                own += _first_report(sent) + _new_candidates(sent, some)
                sent.written = some.start + len(some.tokens)
        for each in ended:
            new, sent = 0, self._sent.pop((replica, each.key), None)
            # A row that was withdrawn has no entry.
            if isinstance(each, RowResult) and sent is not None:
                own += _first_report(sent) + _new_candidates(sent, each)
                new = max(0, len(each.tokens) - sent.written)
            own["tokens"] += new
            weight += max(1, new)
        return weight, own


def _first_report(sent: _Sent) -> Counter[str]:
    """With the first report of a row: the tokens that the target prefilled for it."""
    if sent.reported:
        return Counter()
    sent.reported = True
    return Counter(prompt_tokens=sent.prompt, resumed_tokens=sent.resumed)


def _new_candidates(sent: _Sent, told: PartialTokens | RowResult) -> Counter[str]:
    """The candidates since the last report. (At the row's end would be too late: it may end in another process.)"""
    new = Counter(proposed=told.proposed - sent.proposed, accepted=told.accepted - sent.accepted)
    sent.proposed, sent.accepted = told.proposed, told.accepted
    return new


# The counters that rows report themselves.
OWN = ("tokens", "prompt_tokens", "resumed_tokens", "proposed", "accepted")


class Share:
    """Sums of shares as fractions, rounded only when they are read."""

    def __init__(self) -> None:
        self._sums: dict[str, float] = {}
        self._lengths: list[float] = []

    def add(self, before: TargetCounters, now: TargetCounters, part: float, own: Counter[str]) -> None:
        for name in NUMBERS:
            gained = own[name] if name in OWN else part * (getattr(now, name) - getattr(before, name))
            self._sums[name] = self._sums.get(name, 0.0) + gained
        lengths = self._lengths or [0.0] * len(now.accepted_lengths)
        gained_lengths = zip(lengths, now.accepted_lengths, before.accepted_lengths, strict=True)
        self._lengths = [kept + part * (after - earlier) for kept, after, earlier in gained_lengths]

    def counters(self) -> TargetCounters:
        usual = TargetCounters()
        sums = {
            name: value if isinstance(getattr(usual, name), float) else round(value) for name, value in self._sums.items()
        }
        shared = TargetCounters(**sums, accepted_lengths=list(map(round, self._lengths)))  # type: ignore[arg-type]
        # Rows do not report their reused tokens, so this share is an estimate and may exceed the prompts.
        shared.prompt_tokens_reused = min(shared.prompt_tokens_reused, shared.prompt_tokens)
        return shared
