"""A row goes on where an earlier target or driver has left it, and its result is that of a row written in one go."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from driver_fakes import driver, fill, ids, install_fakes
from fakes import VOCABULARY, FakeEngine, Nonsense
from hypothesis import given, settings
from hypothesis import strategies as st
from ray.exceptions import RayActorError
from test_verifier import CONTEXT, assert_plain, finish, jobs, verifier

from examples import examples
from outrider.runner.driving.partial_tokens import PartialTokenStore
from outrider.runner.job.journal import DONE, Journal, KeptTokens
from outrider.workers.actor_loops import TargetLoop
from outrider.workers.messages import (
    Harvest,
    Logprobs,
    PartialTokens,
    Row,
    RowFailure,
    RowResult,
    Sampling,
    TargetCounters,
    TokenLogprobs,
)
from outrider.workers.target import verifier as verify
from outrider.workers.target.proposers import NoProposer


@settings(max_examples=examples(150), deadline=None)
@given(
    jobs(), st.integers(1, 8), st.sampled_from([None, 0, 3]), st.lists(st.integers(0, 30), max_size=4), st.integers(0, 9)
)
def test_rows_that_lose_their_target_again_and_again_end_as_if_they_had_not(
    rows: list[Row], batch: int, draft_tokens: int | None, lives: list[int], seed: int
) -> None:
    """Each life of a target lasts some rounds; what it told until then is all that the next one gets."""
    written, ended = PartialTokenStore(), {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(verify, "PREFILL_TOKENS", 16)
        for replica, rounds in enumerate(lives):
            target = verifier(FakeEngine(CONTEXT), Nonsense(seed), batch, draft_tokens)
            target.add([written.resumed(row, replica) for row in rows if row.key not in ended])
            for _ in range(rounds):
                ended.update({one.key: one for one in ([] if target.idle else target.round())})
                written.add_reported(replica, target.written())
            written.replica_gone(replica)
        last = verifier(FakeEngine(CONTEXT), Nonsense(seed), batch, draft_tokens)
        left = [written.resumed(row, len(lives)) for row in rows if row.key not in ended]
        ended.update(finish(last, left))
    assert_plain(rows, ended)
    assert last.counters.resumed_tokens == sum(len(row.resumed) for row in left)


def test_the_candidates_of_a_row_under_way_are_told_with_its_tokens() -> None:
    target = verifier(FakeEngine(CONTEXT), Nonsense(1), 2, 3)
    target.add([Row(key, (1, 2, 3), 8 + 8 * key) for key in range(3)])
    told: dict[int, tuple[int, int]] = {}
    while not target.idle:
        ended = target.round()
        for each in (*target.written(), *ended):
            assert isinstance(each, PartialTokens | RowResult)
            told[each.key] = (each.proposed, each.accepted)
        counted = (target.counters.proposed, target.counters.accepted)
        assert tuple(map(sum, zip(*told.values(), strict=True))) == counted
    assert target.counters.proposed > 0


@settings(max_examples=examples(100), deadline=None)
@given(jobs(), st.data())
def test_a_row_goes_on_from_any_of_its_tokens(rows: list[Row], data: st.DataObject) -> None:
    whole = finish(verifier(FakeEngine(CONTEXT), NoProposer(), end=()), rows)
    resumed = []
    for row in rows:
        result = whole[row.key]
        assert isinstance(result, RowResult)
        cut = data.draw(st.integers(0, len(result.tokens)))
        told = _entries(result.logprobs, result.tokens)[:cut] if result.logprobs is not None else ()
        resumed.append(replace(row, resumed=result.tokens[:cut], resumed_logprobs=told))
    engine = FakeEngine(CONTEXT)
    assert_plain(rows, finish(verifier(engine, Nonsense(1), prefix_tokens=64, end=()), resumed), end=())
    assert all(name < 0 for name in engine.rows), "a row that has ended must leave the engine"


def _entries(told: Logprobs, tokens: Sequence[int]) -> tuple[tuple[tuple[int, float], ...], ...]:
    return tuple(((token, own), *others) for token, own, others in zip(tokens, told.chosen, told.likeliest, strict=True))


@pytest.mark.parametrize(
    ("resumed", "logprobs", "told"),
    [((VOCABULARY,), None, ()), ((-1,), None, ()), ((3, 4), 1, (((3, -1.0),),)), ((3,), None, (((3, -1.0),),))],
)
def test_what_cannot_have_been_written_is_written_anew(
    resumed: tuple[int, ...], logprobs: int | None, told: tuple[tuple[tuple[int, float], ...], ...]
) -> None:
    row = Row(1, (1, 2, 3), 9, logprobs=logprobs)
    target = verifier(FakeEngine(CONTEXT), NoProposer())
    assert_plain([row], finish(target, [replace(row, resumed=resumed, resumed_logprobs=told)]))
    assert target.counters.resumed_tokens == 0


def test_harvests_tell_what_rows_under_way_have_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.workers.actor_loops.SECONDS_BETWEEN_PARTIAL_TOKENS", 0.0)
    row = Row(7, (1, 2, 3), 80, Sampling(min_tokens=80))
    server = TargetLoop(verifier(FakeEngine(CONTEXT), NoProposer(), batch=1))
    server.submit([row])
    told: list[int] = []
    while True:
        harvest = server.harvest(5.0)
        for each in harvest.written:
            assert (each.key, each.start) == (7, len(told))
            told += each.tokens
        if harvest.ended:
            break
    [result] = harvest.ended
    assert isinstance(result, RowResult)
    assert 0 < len(told) < 80
    assert result.tokens[: len(told)] == tuple(told)


def kept_of(journal: Journal, *rows: int) -> list[tuple[int, int, int, tuple[int, ...]]]:
    return [(piece.row, piece.sample, piece.start, piece.tokens) for piece in journal.kept_tokens(rows)]


class Telling:
    """What targets tell of row 0: some tokens in the first harvest, and then they die or go on as the test says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from driver_fakes import FakeReplica

        self.sent: list[Row] = []
        self.answers: list[object] = []
        outer = self

        def harvest(replica: FakeReplica) -> object:
            if not replica.rows:
                return Harvest((), TargetCounters())
            answer = outer.answers.pop(0)
            if isinstance(answer, Harvest):
                ended = {one.key for one in answer.ended}
                replica.rows = type(replica.rows)(row for row in replica.rows if row.key not in ended)
            if isinstance(answer, BaseException) and not isinstance(answer, Exception):
                raise answer
            return answer

        def submit(replica: FakeReplica, rows: Sequence[Row]) -> None:
            replica.rows.extend(rows)
            outer.sent += rows

        monkeypatch.setattr(FakeReplica, "_harvest", harvest)
        monkeypatch.setattr(FakeReplica, "submit", submit)


@pytest.fixture
def telling(monkeypatch: pytest.MonkeyPatch) -> Telling:
    install_fakes(monkeypatch)
    monkeypatch.setattr("outrider.runner.driving.partial_tokens.SECONDS_BETWEEN_WRITES", 0.0)
    monkeypatch.setattr("outrider.runner.driving.partial_tokens.MOST_SHARE", 1e9)
    return Telling(monkeypatch)


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    return Journal(tmp_path / "job.db")


def told(start: int, *tokens: int, key: int = 0, logprobs: tuple[TokenLogprobs, ...] = ()) -> Harvest:
    return Harvest((), TargetCounters(), written=(PartialTokens(key, start, tokens, logprobs),))


def result(key: int, *tokens: int, logprobs: Logprobs | None = None) -> Harvest:
    text = " ".join(map(str, tokens))
    return Harvest((RowResult(key, tokens, text, "stop", 1, 0, 0, 0.1, logprobs=logprobs),), TargetCounters())


def test_the_rows_of_a_dead_target_go_on_where_they_were(telling: Telling, journal: Journal) -> None:
    fill(journal, 1)
    telling.answers = [told(0, 5, 6), told(2, 7), RayActorError(), result(0, 5, 6, 7, 8)]
    driver(journal).run()
    assert [row.resumed for row in telling.sent] == [(), (5, 6, 7)]
    assert ids(journal, DONE) == ["id-0"]
    assert kept_of(journal, 0) == [], "what has ended needs none of them"


def test_the_rows_of_a_dead_driver_go_on_where_they_were(telling: Telling, journal: Journal, tmp_path: Path) -> None:
    fill(journal, 1)
    telling.answers = [told(0, 5, 6), told(2, 7), KeyboardInterrupt()]
    with pytest.raises(KeyboardInterrupt):
        driver(journal).run()
    assert kept_of(journal, 0) == [(0, 0, 0, (5, 6)), (0, 0, 2, (7,))]
    journal.close()
    again = Journal(tmp_path / "job.db")
    telling.answers = [told(3, 8), result(0, 5, 6, 7, 8, 9)]
    driver(again).run()
    assert [row.resumed for row in telling.sent] == [(), (5, 6, 7)]
    assert ids(again, DONE) == ["id-0"]


def test_samples_that_have_ended_are_not_asked_for_again(telling: Telling, journal: Journal, tmp_path: Path) -> None:
    fill(journal, 1, samples=2)
    telling.answers = [result(1, 3, 4), told(0, 5), RayActorError(), KeyboardInterrupt()]
    with pytest.raises(KeyboardInterrupt):
        driver(journal).run()
    assert [(row.key, row.resumed) for row in telling.sent] == [(0, ()), (1, ()), (0, (5,))]
    # Of a driver that has died, its successor knows what the journal holds: the whole of one sample, some of the other.
    telling.sent.clear()
    telling.answers = [KeyboardInterrupt()]
    with pytest.raises(KeyboardInterrupt):
        driver(Journal(tmp_path / "job.db")).run()
    assert [(row.key, row.resumed) for row in telling.sent] == [(0, (5,)), (1, (3, 4))]


def test_log_probabilities_go_on_with_their_tokens(telling: Telling, journal: Journal, tmp_path: Path) -> None:
    """Of a sample that is written in several steps, and of one that has ended."""
    five, seven, three, four = (((token, -0.5), (token + 1, -1.0)) for token in (5, 7, 3, 4))
    whole = Logprobs((-0.5, -0.5), (three[1:], four[1:]), {}, (0, 1))
    fill(journal, 1, samples=2)
    telling.answers = [
        told(0, 5, logprobs=(five,)),
        told(0, 3, key=1, logprobs=(three,)),
        told(1, 7, logprobs=(seven,)),
        result(1, 3, 4, logprobs=whole),
        KeyboardInterrupt(),
    ]
    with pytest.raises(KeyboardInterrupt):
        driver(journal).run()
    journal.close()
    telling.sent.clear()
    telling.answers = [KeyboardInterrupt()]
    with pytest.raises(KeyboardInterrupt):
        driver(Journal(tmp_path / "job.db")).run()
    assert [(row.key, row.resumed, row.resumed_logprobs) for row in telling.sent] == [
        (0, (5, 7), (five, seven)),
        (1, (3, 4), (three, four)),
    ]


def test_the_samples_of_a_row_stand_in_their_own_order(telling: Telling, journal: Journal) -> None:
    """Not in that in which they have ended."""
    fill(journal, 1, samples=3)
    telling.answers = [result(1, 4), result(2, 5), result(0, 3)]
    driver(journal).run()
    [record] = map(json.loads, journal.records(DONE))
    assert [(choice["index"], choice["text"]) for choice in record["response"]["body"]["choices"]] == [
        (0, "3"),
        (1, "4"),
        (2, "5"),
    ]


def test_of_two_replicas_with_the_same_row_one_is_listened_to() -> None:
    written = PartialTokenStore()
    row = Row(0, (1,), 9)
    assert written.resumed(row, 1).resumed == ()
    written.add_reported(1, [PartialTokens(0, 0, (5, 6))])
    assert written.resumed(row, 2).resumed == (5, 6)
    written.add_reported(2, [PartialTokens(0, 2, (9, 9))])
    written.add_reported(1, [PartialTokens(0, 2, (7,))])
    written.add_reported(1, [PartialTokens(0, 9, (8,))])  # a harvest between has been lost
    written.add_reported(1, [PartialTokens(4, 0, (8,))])  # a row that has ended
    assert written.resumed(row, 3).resumed == (5, 6, 7)
    written.replica_gone(1)
    assert written.resumed(row, 3).resumed == (5, 6, 7)
    written.add_reported(3, [PartialTokens(0, 3, (1,))])
    assert written.resumed(row, 4).resumed == (5, 6, 7, 1)


def test_an_answer_that_differs_from_what_is_kept_is_not_mixed_with_it() -> None:
    written = PartialTokenStore()
    written.resumed(Row(0, (1,), 9), 1)
    written.add_reported(1, [PartialTokens(0, 0, (5, 6))])
    written.sample_ended(RowResult(0, (5, 9, 9), "", "stop", 1, 0, 0, 0.1))
    assert written.resumed(Row(0, (1,), 9), 2).resumed == (5, 6)


def test_what_the_journal_gets_is_bounded_in_bytes() -> None:
    written = PartialTokenStore(most_bytes=100)
    for key in (0, 128):
        written.resumed(Row(key, (1,), 99), 1)
    written.add_reported(1, [PartialTokens(0, 0, (1,) * 30)])
    assert [piece.row for piece in written.to_keep()] == [0]
    written.add_reported(1, [PartialTokens(128, 0, (2,) * 3), PartialTokens(0, 30, (1,))])
    assert written.to_keep() == []
    written.forget(0, 1)
    assert written.to_keep() == [KeptTokens(1, 0, 0, (2, 2, 2))]


def test_what_the_journal_gets_is_bounded_in_time() -> None:
    written = PartialTokenStore()
    assert written.due(0.0)
    written.was_written(10.0, 0.001)
    assert (written.due(11.9), written.due(12.0)) == (False, True)
    written.was_written(12.0, 0.1)  # a slow disk: no more than 1/500 of the time
    assert (written.due(61.0), written.due(62.0)) == (False, True)


def test_damaged_tokens_cost_what_is_behind_it_and_no_more(journal: Journal, tmp_path: Path) -> None:
    fill(journal, 2)
    journal.keep_tokens(
        [
            KeptTokens(0, 0, 0, (1, 2)),
            KeptTokens(0, 0, 2, (3,)),
            KeptTokens(0, 0, 3, (4,)),
            KeptTokens(1, 0, 0, (5,), (((5, -0.5),),)),
        ]
    )
    with sqlite3.connect(tmp_path / "job.db") as hand:
        hand.execute("UPDATE kept_tokens SET tokens = x'000102' WHERE row = 0 AND start = 2")
        hand.execute("UPDATE kept_tokens SET logprobs = '{' WHERE row = 1")
    written = PartialTokenStore()
    written.restore(journal.kept_tokens([0, 1]))
    assert written.resumed(Row(0, (1,), 9), 1).resumed == (1, 2)
    assert written.resumed(Row(128, (1,), 9), 1).resumed == ()


def test_a_journal_from_before_tokens_were_kept_gets_them(journal: Journal, tmp_path: Path) -> None:
    fill(journal, 1)
    journal.close()
    with sqlite3.connect(tmp_path / "job.db") as hand:
        hand.execute("DROP TABLE kept_tokens")
    again = Journal(tmp_path / "job.db")
    again.keep_tokens([KeptTokens(0, 0, 0, (1,))])
    again.record([(0, json.dumps({"custom_id": "id-0"}))], [])
    assert again.kept_tokens([0]) == []


def test_failures_forget_what_was_written(telling: Telling, journal: Journal) -> None:
    fill(journal, 1)
    telling.answers = [told(0, 5), Harvest((RowFailure(0, "cannot be"),), TargetCounters())]
    driver(journal).run()
    assert kept_of(journal, 0) == []
