"""The line to a draft actor, against a Ray that is a few lines long."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
from fakes import END, FakeEngine, decode, hashed, plain
from ray.exceptions import RayActorError, RayTaskError

from outrider.workers.draft import call_transport as lines
from outrider.workers.draft.call_transport import CallTransport
from outrider.workers.draft.drafter import Drafter
from outrider.workers.engines.costs import CostCurve
from outrider.workers.messages import DraftReply, DraftRequest, Row, Sampling
from outrider.workers.speculation import CandidateRequest, DraftCost, LayoutKind
from outrider.workers.target import draft_link
from outrider.workers.target.draft_link import MOST_ERRORS, REST_SECONDS, DraftLink
from outrider.workers.target.live_row import LiveRow
from outrider.workers.target.proposers import NO_PROPOSAL, Proposal
from outrider.workers.target.statistics import TargetStatistics
from outrider.workers.target.text_and_stop_strings import TextWriter
from outrider.workers.target.verifier import Verifier


class Reply:
    """A future: ``ready`` says whether its answer is there, which it is after having been waited for ``waits`` times."""

    def __init__(self, answer: Any, ready: bool = True, waits: int = 0) -> None:
        self.answer, self.ready, self._waits = answer, ready, waits

    def waited_for(self) -> bool:
        self._waits -= 1
        self.ready = self.ready or self._waits == 0
        return self.ready


class FakeRay:
    def __init__(self) -> None:
        self.waits: list[float | None] = []

    def wait(self, replies: list[Reply], timeout: float | None, num_returns: int = 1) -> tuple[list[Reply], list[Reply]]:
        self.waits.append(timeout)
        done = [one for one in replies if one.waited_for()]
        return done, [one for one in replies if one not in done]

    def get(self, reply: Reply) -> Any:
        assert reply.ready
        if isinstance(reply.answer, Exception):
            raise reply.answer
        return reply.answer


@pytest.fixture(autouse=True)
def fake_ray(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    fake = FakeRay()
    monkeypatch.setattr(lines.ray, "wait", fake.wait)
    monkeypatch.setattr(lines.ray, "get", fake.get)
    return fake


class Actor:
    """Stands for a handle: ``actor.propose.remote(ask)`` gives a reply."""

    def __init__(self, answer: Callable[[DraftRequest], Reply]) -> None:
        self.asks: list[DraftRequest] = []
        self._answer = answer

    @property
    def propose(self) -> Actor:
        return self

    def remote(self, ask: DraftRequest) -> Reply:
        self.asks.append(ask)
        return self._answer(ask)


def drafting(change: Callable[[DraftReply], Any] = lambda reply: reply) -> tuple[Actor, FakeEngine]:
    """A draft that works as the real one does."""
    engine = FakeEngine()
    drafter = Drafter(engine, {END})
    return Actor(lambda ask: Reply(change(drafter.propose(ask)))), engine


def live(key: int, tokens: Sequence[int]) -> LiveRow:
    row = Row(key, tuple(tokens[:2]), 50, Sampling(seed=key))
    return LiveRow(row, list(tokens), TextWriter(decode, (), ()), 0.0)


def dead() -> RayActorError:
    return RayActorError()


def broken() -> RayTaskError:
    return RayTaskError("propose", "Traceback\nIndexError: 9", IndexError("9"))


def link(actor: Actor | None) -> DraftLink:
    made = DraftLink(deadline=5.0)
    made.attach(None if actor is None else CallTransport(actor))
    return made


def propose(draft: DraftLink, rows: Sequence[LiveRow], counts: Sequence[int]) -> list[Proposal]:
    return list(draft.ask(rows, CandidateRequest(list(counts)))())


def test_only_what_is_new_travels() -> None:
    actor, _ = drafting()
    draft, row = link(actor), live(3, [1, 2, 3])
    proposal = propose(draft, [row], [4])[0].tokens
    assert len(proposal) == 4
    row.tokens += [*proposal[:2], 9]
    propose(draft, [row], [2])
    first, second = (ask.rows[0] for ask in actor.asks)
    assert (first.start, first.tokens, first.sampling, first.prompt_length) == (0, (1, 2, 3), Sampling(seed=3), 2)
    assert (second.start, second.tokens, second.sampling) == (3, (*proposal[:2], 9), None)
    assert [ask.round for ask in actor.asks] == [1, 2]


def test_a_row_that_is_not_asked_about_is_told_whole_when_it_is() -> None:
    """What the draft has been told it counts as read, and it reads what is asked about alone."""
    actor, _ = drafting()
    draft = link(actor)
    first, second = live(1, [1, 2, 3]), live(2, [4, 5, 6])
    assert [bool(each.tokens) for each in propose(draft, [first, second], [2, 0])] == [True, False]
    assert [advance.key for advance in actor.asks[0].rows] == [1]
    assert (draft.unread(first), draft.unread(second)) == (0, 3)
    second.tokens.append(7)
    propose(draft, [first, second], [2, 2])
    assert [(advance.key, advance.start, advance.tokens) for advance in actor.asks[1].rows] == [
        (1, 3, ()),
        (2, 0, (4, 5, 6, 7)),
    ]
    assert 1 in draft.costs()[""]["step"], "a step of two rows was not what the first request took"


def test_a_draft_reads_no_more_of_a_text_than_it_says() -> None:
    windows = iter((0, 32, 0))
    actor, _ = drafting(lambda reply: reply._replace(window=next(windows), skipped=7))
    statistics = TargetStatistics()
    draft, rows = DraftLink(5.0, statistics=statistics), [live(key, range(1, 15)) for key in range(3)]
    draft.attach(CallTransport(actor))
    long = live(9, [1] * 80)
    for row, unread in zip(rows, (80, 32, 80), strict=True):
        propose(draft, [row], [2])
        assert draft.unread(long) == unread
        assert draft.unread(row) == 0
    assert statistics.counters.draft_skipped == 21
    assert draft.unread(live(8, [1] * 20)) == 20


def test_the_rate_that_a_target_expects_reaches_its_draft() -> None:
    actor, _ = drafting()
    link(actor).ask([live(3, [1, 2, 3])], CandidateRequest([4], rate=180.0))()
    assert actor.asks[0].rate == 180.0


def test_runners_up_are_asked_for_and_arrive() -> None:
    actor, _ = drafting(lambda reply: reply._replace(runners_up={4: ((1, 7),)}, reaches={4: (0.9, 0.5)}))
    rows = [live(3, [1, 2, 3]), live(4, [3, 1])]
    proposals = link(actor).ask(rows, CandidateRequest([2, 2], runner_up_chances=(0.1, 0.2)))()
    assert [proposal.runners_up for proposal in proposals] == [(), ((1, 7),)]
    assert [proposal.reaches for proposal in proposals] == [(), (0.9, 0.5)]
    assert actor.asks[0].runner_up_chances == (0.1, 0.2)


def test_a_row_that_ended_is_named_once_and_leaves_the_draft() -> None:
    actor, engine = drafting()
    draft = link(actor)
    propose(draft, [live(1, [1, 2, 3]), live(2, [4, 5])], [1, 1])
    draft.forget(1)
    other = live(2, [4, 5, 6])
    propose(draft, [other], [1])
    assert actor.asks[1].closed == (1,)
    assert set(engine.rows) == {2}
    other.tokens.append(1)
    propose(draft, [other], [1])
    assert actor.asks[2].closed == ()


def test_without_a_draft_there_are_no_candidates() -> None:
    draft = link(None)
    assert propose(draft, [live(1, [1, 2])], [3]) == [NO_PROPOSAL]
    assert draft.draft_cost(1) is None
    draft.forget(1)


def test_a_late_draft_costs_one_deadline_and_is_asked_again_when_it_has_caught_up(fake_ray: FakeRay) -> None:
    replies: list[Reply] = []
    engine = FakeEngine()
    drafter = Drafter(engine, {END})

    def slow(ask: DraftRequest) -> Reply:
        replies.append(Reply(drafter.propose(ask), ready=len(replies) > 0))
        return replies[-1]

    actor = Actor(slow)
    draft, row = link(actor), live(1, [1, 2, 3])
    assert propose(draft, [row], [2]) == [NO_PROPOSAL]
    assert fake_ray.waits == [pytest.approx(5.0, abs=0.1)]
    row.tokens.append(4)
    assert propose(draft, [row], [2]) == [NO_PROPOSAL]
    assert fake_ray.waits == [pytest.approx(5.0, abs=0.1), 0], "while an answer is owed nobody waits"
    assert len(actor.asks) == 1
    replies[0].ready = True
    row.tokens.append(5)
    assert len(propose(draft, [row], [2])[0].tokens) == 2
    assert actor.asks[1].rows[0].start == 0, "after a lost answer a row is sent whole"
    assert list(actor.asks[1].rows[0].tokens) == [1, 2, 3, 4, 5]


def test_a_draft_that_is_always_late_looks_expensive() -> None:
    draft = link(Actor(lambda ask: Reply(None, ready=False)))
    propose(draft, [live(1, [1, 2])], [1])
    cost = draft.draft_cost(1)
    assert cost is not None and cost.hop > 0.5


def test_a_dead_draft_is_not_asked_again_until_another_comes() -> None:
    actor = Actor(lambda ask: Reply(dead()))
    draft, row = link(actor), live(1, [1, 2])
    for _ in range(3):
        assert propose(draft, [row], [2]) == [NO_PROPOSAL]
    assert len(actor.asks) == 1
    assert draft.draft_cost(1) is None
    other, _ = drafting()
    draft.attach(CallTransport(other))
    assert len(propose(draft, [row], [2])[0].tokens) == 2
    assert other.asks[0].rows[0].start == 0


def test_a_call_that_fails_at_once_is_a_dead_draft() -> None:
    def refuse(ask: DraftRequest) -> Reply:
        raise dead()

    draft = link(Actor(refuse))
    assert propose(draft, [live(1, [1, 2])], [2]) == [NO_PROPOSAL]
    assert draft.draft_cost(1) is None


def test_a_draft_that_failed_once_is_asked_again_with_whole_rows() -> None:
    answers = iter([broken(), None])
    engine = FakeEngine()
    drafter = Drafter(engine, {END})
    actor = Actor(lambda ask: Reply(next(answers, None) or drafter.propose(ask)))
    draft, row = link(actor), live(1, [1, 2])
    assert propose(draft, [row], [2]) == [NO_PROPOSAL]
    row.tokens.append(3)
    assert len(propose(draft, [row], [2])[0].tokens) == 2
    assert [ask.rows[0].start for ask in actor.asks] == [0, 0]


def test_a_draft_that_always_fails_is_left_alone_for_a_while_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was given up for good, and nobody was told: a server could lose its draft by a moment's want of memory."""
    now = [100.0]
    monkeypatch.setattr(draft_link.time, "monotonic", lambda: now[0])
    engine = FakeEngine()
    drafter, mended = Drafter(engine, {END}), list[bool]()
    actor = Actor(lambda ask: Reply(drafter.propose(ask) if mended else broken()))
    draft, row = link(actor), live(1, [1, 2])
    for _ in range(MOST_ERRORS - 1):
        propose(draft, [row], [2])
    assert not draft.note
    for _ in range(5):
        assert propose(draft, [row], [2]) == [NO_PROPOSAL]
    assert len(actor.asks) == MOST_ERRORS
    assert draft.draft_cost(1) is None
    said = str(draft.note)
    assert said.startswith(f"the draft answered {MOST_ERRORS} requests in succession with ")
    assert "asked again in 10 minutes" in said

    now[0] += REST_SECONDS  # one more error begins the next ten minutes
    for _ in range(3):
        assert propose(draft, [row], [2]) == [NO_PROPOSAL]
    assert len(actor.asks) == MOST_ERRORS + 1

    now[0] += REST_SECONDS
    mended.append(True)
    for _ in range(MOST_ERRORS):
        assert len(propose(draft, [row], [2])[0].tokens) == 2
    assert draft.ready and draft.draft_cost(1) is not None


def test_a_row_that_ends_after_a_failed_round_is_still_closed() -> None:
    """The draft may have opened it before it failed."""
    actor = Actor(lambda ask: Reply(broken()))
    draft = link(actor)
    propose(draft, [live(1, [1, 2])], [2])
    draft.forget(1)
    propose(draft, [live(2, [1, 2])], [2])
    assert actor.asks[1].closed == (1,)


def test_rows_that_end_without_the_draft_are_not_named_to_it() -> None:
    """A draft that does not pay is not asked for hours, while thousands of rows end; nor is one that was lost."""
    actor, _ = drafting()
    draft = link(actor)
    propose(draft, [live(1, [1, 2]), live(2, [1, 2])], [2, 0])
    for key in range(1, 1000):
        draft.forget(key)
    propose(draft, [live(1000, [1, 2])], [2])
    assert actor.asks[1].closed == (1,)


def test_an_answer_to_another_round_is_dropped() -> None:
    actor, _ = drafting(lambda reply: DraftReply(reply.round + 1, reply.tokens))
    assert propose(link(actor), [live(1, [1, 2])], [2]) == [NO_PROPOSAL]


def test_a_forgotten_row_is_sent_whole() -> None:
    def forgetful(ask: DraftRequest) -> Reply:
        return Reply(DraftReply(ask.round, {}, tuple(advance.key for advance in ask.rows if advance.start)))

    actor = Actor(forgetful)
    draft, row = link(actor), live(1, [1, 2])
    for token in (3, 4, 5):
        assert propose(draft, [row], [2]) == [NO_PROPOSAL]
        row.tokens.append(token)
    assert [ask.rows[0].start for ask in actor.asks] == [0, 2, 0]


def test_the_hop_is_what_the_target_waited_beyond_the_drafts_own_work(monkeypatch: pytest.MonkeyPatch) -> None:
    # When it asks, when it has asked, when it begins to wait, when the answer is there.
    clock = iter([0.0, 0.3, 1.0, 1.2, 10.0, 10.0, 10.0, 14.0])
    monkeypatch.setattr(draft_link, "time", SimpleNamespace(perf_counter=lambda: next(clock), monotonic=lambda: 0.0))
    replies = iter([DraftReply(1, {}, (), 0.4, 0.1), DraftReply(2, {}, (), 3.0, 0.3)])
    draft = link(Actor(lambda ask: Reply(next(replies))))
    assert draft.draft_cost(1) == DraftCost(0.0, rows=0), "until something is known candidates count as free"
    propose(draft, [live(1, [1, 2])], [4])
    assert draft.draft_cost(1) == DraftCost(0.1, cast(float, pytest.approx(0.1)))
    propose(draft, [live(key, [key, 2]) for key in range(2, 10)], [1] * 8)
    assert [draft.draft_cost(rows) for rows in (2, 7, 30)] == [
        DraftCost(0.1, cast(float, pytest.approx(0.1)), rows=1),
        DraftCost(0.3, cast(float, pytest.approx(1.0)), row=cast(float, pytest.approx(0.2 / 7)), rows=8),
        DraftCost(0.3, cast(float, pytest.approx(1.0)), row=cast(float, pytest.approx(0.2 / 7)), rows=8),
    ]


def test_sending_and_waiting_are_the_hop_but_for_what_the_draft_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 0.4, 1.0, 1.5])
    monkeypatch.setattr(draft_link, "time", SimpleNamespace(perf_counter=lambda: next(clock), monotonic=lambda: 0.0))
    statistics = TargetStatistics()
    made = DraftLink(5.0, statistics=statistics)
    made.attach(CallTransport(Actor(lambda ask: Reply(DraftReply(ask.round, {}, (), 0.7)))))
    propose(made, [live(1, [1, 2])], [4])
    # 0.4 to ask (the draft was at work already, on the same core) and 0.5 to wait, of which it computed for 0.7.
    assert statistics.counters.hop_seconds == pytest.approx(0.2)


def test_other_rows_may_be_asked_for_before_an_answer_is_taken() -> None:
    actor, _ = drafting()
    draft, left, right = link(actor), live(1, [1, 2]), live(2, [3, 4])
    first = draft.ask([left], CandidateRequest([2]))
    second = draft.ask([right], CandidateRequest([3]))
    assert [len(first()[0].tokens), len(second()[0].tokens)] == [2, 3]


class Moody(Actor):
    """Right, late, forgetful, confused, rude or failing, at random; now and then it dies."""

    def __init__(self, dice: random.Random) -> None:
        drafter = Drafter(FakeEngine(choose=lambda tokens, sampling: hashed(tokens, sampling)), {END})
        self._before = DraftReply(0, {})
        self.dead = False

        def answer(ask: DraftRequest) -> Reply:
            if self.dead:
                return Reply(dead())
            candidates = drafter.propose(ask)
            before, self._before = self._before, candidates
            keys = tuple(advance.key for advance in ask.rows)
            match dice.choice(("right",) * 12 + ("late", "forgets", "twice", "huge", "long", "fails", "nothing", "dies")):
                case "late":
                    return Reply(candidates, ready=False, waits=dice.randrange(2, 6))
                case "forgets":
                    return Reply(DraftReply(ask.round, {}, keys))
                case "twice":
                    return Reply(before)
                case "huge":
                    return Reply(DraftReply(ask.round, dict.fromkeys(keys, (1, 1 << 40, -3))))
                case "long":
                    return Reply(DraftReply(ask.round, dict.fromkeys((*keys, 999_999), (2,) * 50)))
                case "fails":
                    return Reply(broken())
                case "nothing":
                    return Reply(DraftReply(ask.round, {}))
                case "dies":
                    self.dead = dice.random() < 0.2
                    return Reply(dead() if self.dead else candidates)
            return Reply(candidates)

        super().__init__(answer)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("most", [500, pytest.param(4_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", list(LayoutKind))
def test_thousands_of_rounds_with_a_draft_that_does_everything_wrong(kind: LayoutKind, most: int) -> None:
    dice = random.Random(11)
    engine, moody = FakeEngine(), Moody(dice)
    draft = link(moody)
    target = Verifier(
        engine=engine,
        new_writer=lambda row: TextWriter(decode, row.stop, (END,)),
        proposer=draft,
        batch=3,
        draft_tokens=4,
        verify_seconds=CostCurve({1: 1.0}),
        end_tokens=(END,),
    )
    target.set_layout(kind, 4)
    ended: dict[int, tuple[int, ...]] = {}
    rounds = deaths = key = 0
    while rounds < most:
        while len(ended) + 8 > key:
            row = Row(key, (key % END, key % 7, 3), 40, Sampling(temperature=key % 2, seed=key), ("abca",))
            target.add([row])
            key += 1
        for one in target.round():
            number = one.key
            expected = plain(
                Row(number, (number % END, number % 7, 3), 40, Sampling(number % 2, seed=number), ("abca",)), 96
            )
            assert one.tokens == expected.tokens, f"row {number} differs"  # type: ignore[union-attr]
            ended[number] = one.tokens  # type: ignore[union-attr]
        rounds += 1
        if moody.dead or dice.random() < 0.002:
            deaths += 1
            moody = Moody(dice)
            draft.attach(CallTransport(moody))
    assert deaths > most // 200
    assert len(ended) > most // 2
    assert target.counters.accepted > most
