"""Candidates that are found in texts before anybody is asked: what followed tokens like a row's last ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from outrider.kernels.suffixes import NOTHING_FOUND, Found, Gain, Suffixes
from outrider.workers.models.draft_names import MOST_FOUND
from outrider.workers.speculation import CandidateRequest
from outrider.workers.target.live_row import LiveRow
from outrider.workers.target.proposers import NO_PROPOSAL, PendingProposals, Proposal, Proposer, Source

# No pass has so much room that a candidate less likely to be accepted, with all before it, would be worth verifying.
LEAST_REACH = 0.03


class SuffixFinder:
    """Looks in the row's own text and in what all rows wrote, the last ``answer_tokens`` tokens of it.

    It knows beforehand each candidate's chance to be accepted, so the policy chooses among them before a proposer is asked.
    """

    def __init__(self, answer_tokens: int) -> None:
        self._suffixes = Suffixes(answer_tokens)
        # How many of each row's tokens have been taken in.
        self._known: dict[int, int] = {}
        self._found: dict[int, Found] = {}

    def find(self, rows: Sequence[LiveRow]) -> Sequence[Sequence[float]]:
        """For each row the chances that its candidates are accepted, each with all before it.

        To be called once after each pass: from what the rows have gained is learned what became of the last candidates,
        whether or not they were verified.
        """
        found = self._suffixes.advance([self._gain(live) for live in rows], LEAST_REACH)
        self._found = {live.row.key: each for live, each in zip(rows, found, strict=True)}
        return [each.reaches for each in found]

    def _gain(self, live: LiveRow) -> Gain:
        key, tokens = live.row.key, live.tokens
        known, self._known[key] = self._known.get(key, 0), len(tokens)
        before = live.text_before
        gained = tokens[known:] if known or not before else [*before, *tokens]
        # The last token of a row is always the target's own.
        most = max(0, min(MOST_FOUND, live.remaining - 1))
        return Gain(key, gained, len(before) + len(live.row.prompt), most)

    def proposal(self, live: LiveRow, count: int) -> Proposal:
        """What was found for the row last."""
        found = self._found.get(live.row.key, NOTHING_FOUND)
        return Proposal(found.tokens[:count], (), Source.SUFFIX, found.from_others[:count], found.reaches[:count])

    def ended(self, live: LiveRow) -> None:
        """Keep what the row wrote to its end; nothing of rows that may not be assisted, which are never looked at."""
        known = self._known.pop(live.row.key, None)
        if known is not None:
            self._suffixes.end(live.row.key, live.tokens[known:])

    def learn(self, answers: Sequence[Sequence[int]]) -> None:
        """Take in answers that other replicas wrote."""
        for answer in answers:
            self._suffixes.learn(answer)


def ask(proposer: Proposer, finder: SuffixFinder, rows: Sequence[LiveRow], request: CandidateRequest) -> PendingProposals:
    """What was found for the rows of which the request says so, and the proposer's candidates for the others."""
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
