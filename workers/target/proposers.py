"""The sources of a target's candidates: the interface, no source, the row's own text (lookup), and draft or lookup by
row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from typing import NamedTuple, Protocol

from outrider.workers.draft.lookup import NgramIndex
from outrider.workers.speculation import (
    Acceptance,
    CandidateRequest,
    DraftCost,
    accepted,
    expected_tokens,
)
from outrider.workers.target.live_row import LiveRow

# The prior acceptance of lookup: few texts repeat themselves.
LOOKUP_PRIOR = 0.3


class Source(Enum):
    DRAFT = auto()
    LOOKUP = auto()
    SUFFIX = auto()


class Proposal(NamedTuple):
    """The candidates of a row. ``runners_up`` are (position, token): an alternative to the candidate at that position.

    ``from_others`` says of each candidate whether it was found in another row's answer. ``reaches`` are the chances that
    the candidates are accepted, each with all before it; empty where they are not known. ``certain`` are the positions of
    tokens that the grammar forces once all before them are accepted: they have to be fed anyway, so they count as no gain.
    """

    tokens: Sequence[int] = ()
    runners_up: Sequence[tuple[int, int]] = ()
    source: Source = Source.DRAFT
    from_others: Sequence[int] = ()
    reaches: Sequence[float] = ()
    certain: Sequence[int] = ()

    def choices(self, tokens: int) -> int:
        """How many of the first ``tokens`` candidates the target has to choose (are not forced)."""
        return tokens - sum(place < tokens for place in self.certain)


NO_PROPOSAL = Proposal()
# Waits for the proposals; one for each row of the request.
PendingProposals = Callable[[], Sequence[Proposal]]


class Proposer(Protocol):
    @property
    def knows_chances(self) -> bool:
        """Whether candidates come with ``reaches``, and only those that the request's thresholds allow."""

    def ask(self, rows: Sequence[LiveRow], request: CandidateRequest) -> PendingProposals:
        """Begin to propose at most ``request.counts[i]`` candidates for row i; fewer or none is always allowed.

        The rows do not change until the answer is taken, which happens once. Other rows may be asked for before that.
        """

    def forget(self, key: int) -> None:
        """The row has ended."""

    def draft_cost(self, rows: int) -> DraftCost | None:
        """The cost of candidates for that many rows; None while nothing can be proposed."""

    def unread(self, live: LiveRow) -> int:
        """How many of the row's tokens the proposer would have to prefill first."""


class NoProposer:
    """Plain decoding."""

    knows_chances = False

    def ask(self, rows: Sequence[LiveRow], request: CandidateRequest) -> PendingProposals:
        return lambda: [NO_PROPOSAL] * len(rows)

    def forget(self, key: int) -> None:
        pass

    def draft_cost(self, rows: int) -> DraftCost | None:
        return None

    def unread(self, live: LiveRow) -> int:
        return 0


class LookupProposer:
    """n-grams of the row's own prompt and text."""

    knows_chances = False

    def __init__(self) -> None:
        self._indexes: dict[int, NgramIndex] = {}

    def ask(self, rows: Sequence[LiveRow], request: CandidateRequest) -> PendingProposals:
        proposals = [_looked_up(self.proposal(live, count)) for live, count in zip(rows, request.counts, strict=True)]
        return lambda: proposals

    def proposal(self, live: LiveRow, count: int) -> tuple[int, ...]:
        index = self._indexes.get(live.row.key) or self._indexes.setdefault(live.row.key, NgramIndex(live.text_before))
        return index.propose(live.tokens, count)

    def forget(self, key: int) -> None:
        self._indexes.pop(key, None)

    def draft_cost(self, rows: int) -> DraftCost | None:
        return DraftCost(step=0.0)

    def unread(self, live: LiveRow) -> int:
        return 0


def _looked_up(tokens: Sequence[int]) -> Proposal:
    return Proposal(tokens, source=Source.LOOKUP)


@dataclass(slots=True)
class _Contest:
    """One row's two sources. Both are judged by what was committed after their last proposals, verified or not."""

    length: int = 0
    from_text: tuple[int, ...] = ()
    from_model: Sequence[int] = ()
    text: Acceptance = field(default_factory=lambda: Acceptance(LOOKUP_PRIOR))
    model: Acceptance = field(default_factory=Acceptance)

    def judge(self, tokens: Sequence[int]) -> None:
        """Compare the last proposals of both with the tokens that were committed since."""
        committed = tokens[self.length :]
        for proposal, record in ((self.from_text, self.text), (self.from_model, self.model)):
            known = proposal[: len(committed)]
            if known:
                record.observe(len(known), accepted(known, committed))
        self.from_text = self.from_model = ()
        self.length = len(tokens)


class EitherProposer:
    """A draft model and the row's own text: each row takes the source with more expected tokens a second."""

    knows_chances = False

    def __init__(self, model: Proposer, verify_seconds: Callable[[int], float]) -> None:
        self._model = model
        self._text = LookupProposer()
        self._verify_seconds = verify_seconds
        self._contests: dict[int, _Contest] = {}

    def ask(self, rows: Sequence[LiveRow], request: CandidateRequest) -> PendingProposals:
        contests = [self._contests.setdefault(live.row.key, _Contest()) for live in rows]
        draft_cost = self._model.draft_cost(len(rows))
        for live, contest, count in zip(rows, contests, request.counts, strict=True):
            contest.judge(live.tokens)
            contest.from_text = self._text.proposal(live, count)
        model_counts = [
            0 if draft_cost is None or self._text_is_better(contest, count, draft_cost) else count
            for contest, count in zip(contests, request.counts, strict=True)
        ]
        wanted = [index for index, count in enumerate(model_counts) if count]
        if not wanted:
            return lambda: [_looked_up(contest.from_text) for contest in contests]
        answer = self._model.ask(
            [rows[index] for index in wanted], replace(request, counts=[model_counts[index] for index in wanted])
        )

        def taken() -> list[Proposal]:
            proposals = [_looked_up(contest.from_text) for contest in contests]
            for index, proposal in zip(wanted, answer(), strict=True):
                proposals[index], contests[index].from_model = proposal, proposal.tokens
            return proposals

        return taken

    def _text_is_better(self, contest: _Contest, count: int, draft_cost: DraftCost) -> bool:
        found = len(contest.from_text)
        if not found:
            return False
        from_text = expected_tokens(contest.text.chance, found) / self._verify_seconds(found + 1)
        seconds = self._verify_seconds(count + 1) + draft_cost.seconds(count) + draft_cost.hop
        return from_text >= expected_tokens(contest.model.chance, count) / seconds

    def forget(self, key: int) -> None:
        self._contests.pop(key, None)
        self._text.forget(key)
        self._model.forget(key)

    def draft_cost(self, rows: int) -> DraftCost | None:
        # That of the draft, while there is one: lookup is free.
        return self._model.draft_cost(rows) or self._text.draft_cost(rows)

    def unread(self, live: LiveRow) -> int:
        # Lookup needs no prefill, so the row is always worth asking for.
        return 0
