"""Overlapped drafting hides a slow draft behind the target's passes: shown on a clock of this test, one for each process.

The verifier, the link and the drafter are the real ones. Made up are how long a pass takes, and that the two work at the
same time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from fakes import END, FakeEngine, Fixed, decode, hashed, plain

from outrider.workers.draft.drafter import Drafter
from outrider.workers.engines.engine import Chosen, Feed
from outrider.workers.messages import DraftReply, DraftRequest, Layout, Row, RowResult, Sampling
from outrider.workers.speculation import DraftCost, LayoutKind, round_seconds
from outrider.workers.target.draft_link import DraftLink
from outrider.workers.target.text_and_stop_strings import TextWriter
from outrider.workers.target.verifier import Verifier

PASS, CANDIDATES, CONTEXT = 1.0, 3, 512


class Timed(FakeEngine):
    """Whose passes take time on a clock of its own."""

    def __init__(self, seconds: float, salt: int = 0) -> None:
        super().__init__(CONTEXT, choose=lambda tokens, sampling: hashed(tokens, sampling, salt))
        self.seconds, self.now = seconds, 0.0

    def feed(self, feeds: Sequence[Feed]) -> list[Chosen]:
        self.now += self.seconds
        return super().feed(feeds)


@dataclass
class Answer:
    target: Timed
    due: float
    reply: DraftReply

    def ready(self, timeout: float) -> bool:
        self.target.now = max(self.target.now, self.due)
        return True

    def take(self) -> DraftReply:
        return self.reply


class Beside:
    """A draft on cores of its own: what it does takes nothing of the target's time but the waiting for its answer."""

    name = "virtual"

    def __init__(self, target: Timed, draft: Timed) -> None:
        self._target, self._draft = target, draft
        self._drafter = Drafter(draft, {END})
        self._drafts_ahead = False

    def reconfigure(self, cores: Sequence[int], draft_ahead: bool, timeout: float) -> None:
        self._drafts_ahead = draft_ahead

    def ask(self, request: DraftRequest) -> Answer:
        # Until now it was free to go on; the step under way is finished first.
        while self._drafts_ahead and self._draft.now < self._target.now and self._drafter.draft_ahead():
            pass
        self._draft.now = max(self._draft.now, self._target.now)
        reply = self._drafter.propose(request)
        return Answer(self._target, self._draft.now, reply)


def seconds_a_round(kind: LayoutKind, step: float, salt: int = 0) -> float:
    """Of many rounds of one row, whose text must be as without a draft."""
    target, draft = Timed(PASS), Timed(step, salt)
    link = DraftLink(deadline=60.0)
    link.attach(Beside(target, draft))
    link.set_layout(Layout(kind.value, kind))
    verifier = Verifier(
        engine=target,
        new_writer=lambda row: TextWriter(decode, row.stop, (END,)),
        proposer=link,
        batch=1,
        draft_tokens=CANDIDATES,
        verify_seconds=Fixed({1: PASS}),
        end_tokens=(END,),
    )
    verifier.set_layout(kind, CANDIDATES)
    row = Row(1, (1, 2, 3), 200, Sampling(end_tokens=()))
    verifier.add([row])
    ended: list[RowResult] = []
    while not verifier.idle:
        for one in verifier.round():
            assert isinstance(one, RowResult)
            ended.append(one)
    assert [one.tokens for one in ended] == [plain(row, CONTEXT).tokens]
    assert (verifier.counters.accepted == verifier.counters.proposed) == (salt == 0)
    # The first pass reads the prompt, and had nothing to wait for.
    return (target.now - PASS) / (ended[0].rounds - 1)


@pytest.mark.parametrize("step", [0.05, 0.2, 0.25, 0.3, 0.6])
def test_a_draft_that_is_right_is_hidden_as_far_as_the_pass_is_long(step: float) -> None:
    for kind in LayoutKind:
        forecast = round_seconds(kind, PASS, DraftCost(step), CANDIDATES, hit=1.0)
        assert seconds_a_round(kind, step) == pytest.approx(forecast, rel=0.03)
    if (CANDIDATES + 1) * step <= PASS:
        assert seconds_a_round(LayoutKind.OVERLAPPED, step) == pytest.approx(PASS, rel=0.03), "all of it is hidden"


@pytest.mark.one_in(2)
@pytest.mark.parametrize("step", [0.05, 0.3])
def test_a_draft_that_is_wrong_costs_no_more_than_the_step_under_way(step: float) -> None:
    sequential = seconds_a_round(LayoutKind.SEQUENTIAL, step, salt=5)
    overlapped = seconds_a_round(LayoutKind.OVERLAPPED, step, salt=5)
    assert sequential <= overlapped * 1.001
    assert overlapped <= sequential + step
