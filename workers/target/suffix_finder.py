"""Candidates by suffix decoding: what followed earlier occurrences of a row's last tokens, found before a draft is
asked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from outrider.kernels.suffixes import NOTHING_FOUND, Found, Gain, Suffixes
from outrider.workers.models.draft_names import MOST_FOUND
from outrider.workers.speculation import CandidateRequest
from outrider.workers.target.live_row import LiveRow
from outrider.workers.target.proposers import NO_PROPOSAL, PendingProposals, Proposal, Proposer, Source

# The least reach of a candidate: less likely ones never pay for their slot.
LEAST_REACH = 0.03


class SuffixFinder:
    """Searches the row's own text and the last ``answer_tokens`` tokens that rows wrote.

    Each candidate comes with its reach, so the policy chooses among them before it asks a proposer.
    """

    def __init__(self, answer_tokens: int) -> None:
        self._suffixes = Suffixes(answer_tokens)
        # How many of each row's tokens have been taken in.
        self._known: dict[int, int] = {}
        self._found: dict[int, Found] = {}

    def find(self, rows: Sequence[LiveRow]) -> Sequence[Sequence[float]]:
        """Find candidates; returns their reaches for each row.

        To be called once after each pass: the tokens that rows have gained show which of the last candidates were right,
        whether they were verified or not.
        """
        found = self._suffixes.advance([self._gain(live) for live in rows], LEAST_REACH)
        self._found = {live.row.key: each for live, each in zip(rows, found, strict=True)}
        return [each.reaches for each in found]

    def _gain(self, live: LiveRow) -> Gain:
        key, tokens = live.row.key, live.tokens
        known, self._known[key] = self._known.get(key, 0), len(tokens)
        before = live.text_before
        gained = tokens[known:] if known or not before else [*before, *tokens]
        # A candidate for the row's last token would be wasted: the target chooses one more token than it accepts.
        most = max(0, min(MOST_FOUND, live.remaining - 1))
        return Gain(key, gained, len(before) + len(live.row.prompt), most)

    def proposal(self, live: LiveRow, count: int) -> Proposal:
        """The first ``count`` candidates that ``find`` found for the row."""
        found = self._found.get(live.row.key, NOTHING_FOUND)
        return Proposal(found.tokens[:count], (), Source.SUFFIX, found.from_others[:count], found.reaches[:count])

    def ended(self, live: LiveRow) -> None:
        """Add the rest of an ended row's answer. (Rows that are not assisted were never searched for, and are not kept.)"""
        known = self._known.pop(live.row.key, None)
        if known is not None:
            self._suffixes.end(live.row.key, live.tokens[known:])

    def learn(self, answers: Sequence[Sequence[int]]) -> None:
        """Add answers of other replicas."""
        for answer in answers:
            self._suffixes.learn(answer)


def ask(proposer: Proposer, finder: SuffixFinder, rows: Sequence[LiveRow], request: CandidateRequest) -> PendingProposals:
    """The finder's candidates for the rows in ``request.found``, and the proposer's for all others."""
    proposals = [
        finder.proposal(live, count) if index in request.found else NO_PROPOSAL
        for index, (live, count) in enumerate(zip(rows, request.counts, strict=True))
    ]
    wanted = [index for index, count in enumerate(request.counts) if count and index not in request.found]
    if not wanted:
        return lambda: proposals
    counts = [request.counts[index] for index in wanted]
    answer = proposer.ask([rows[index] for index in wanted], replace(request, counts=counts, found={}))

    def taken() -> list[Proposal]:
        for index, proposal in zip(wanted, answer(), strict=True):
            proposals[index] = proposal
        return proposals

    return taken
