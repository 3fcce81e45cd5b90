"""The target's loop in its own thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from types import SimpleNamespace

import pytest
from fakes import END, FakeEngine, Nonsense, decode, hashed, plain

from outrider.workers import build
from outrider.workers.actor_loops import TargetLoop
from outrider.workers.engines.costs import CostCurve
from outrider.workers.errors import WorkerError
from outrider.workers.machine.pinning import Launch
from outrider.workers.messages import ActorPlacement, ModelSpec, Row, RowFailure, RowResult, Sampling
from outrider.workers.target.text_and_stop_strings import TextWriter
from outrider.workers.target.verifier import Verifier

# Far more than anything here takes: a test that waits this long has failed.
PATIENCE = 20.0


def server(engine: FakeEngine, batch: int = 4) -> TargetLoop:
    return TargetLoop(
        Verifier(
            engine=engine,
            new_writer=lambda row: TextWriter(decode, row.stop, (END,)),
            proposer=Nonsense(1),
            batch=batch,
            draft_tokens=3,
            verify_seconds=CostCurve({1: 1.0}),
            end_tokens=(END,),
        )
    )


def gather(server: TargetLoop, count: int) -> list[RowResult | RowFailure]:
    ended: list[RowResult | RowFailure] = []
    while len(ended) < count:
        harvest = server.harvest(PATIENCE)
        assert harvest.ended, "nothing ended in all that time"
        ended.extend(harvest.ended)
    return ended


def test_rows_from_several_threads_all_end_once() -> None:
    target = server(FakeEngine())
    rows = [Row(key, (key % 7, 1), 20, Sampling(temperature=1.0, seed=key)) for key in range(60)]
    threads = [threading.Thread(target=target.submit, args=(rows[part::4],)) for part in range(4)]
    for thread in threads:
        thread.start()
    ended = gather(target, len(rows))
    for thread in threads:
        thread.join()
    assert sorted(one.key for one in ended) == [row.key for row in rows]
    for one in ended:
        assert isinstance(one, RowResult)
        assert one.tokens == plain(rows[one.key], 96).tokens
    counters = target.harvest(0).counters
    assert counters.tokens == sum(len(one.tokens) for one in ended if isinstance(one, RowResult))


def test_a_harvest_of_nothing_comes_back_empty() -> None:
    harvest = server(FakeEngine()).harvest(0)
    assert harvest.ended == ()
    assert harvest.counters.rounds == 0


def test_a_harvest_is_a_copy_of_the_totals() -> None:
    target = server(FakeEngine())
    before = target.harvest(0).counters
    target.submit([Row(1, (1,), 4)])
    gather(target, 1)
    assert before.rounds == 0
    assert target.harvest(0).counters.rounds > 0


def failing_at(length: int, gate: threading.Event | None = None) -> Callable[[Sequence[int], Sampling], int]:
    def choose(tokens: Sequence[int], sampling: Sampling) -> int:
        if len(tokens) >= length:
            if gate is not None:
                assert gate.wait(PATIENCE)
            raise MemoryError("no room for the cache")
        return hashed(tokens, sampling) % END

    return choose


def test_a_failing_engine_surfaces_in_every_later_harvest() -> None:
    target = server(FakeEngine(choose=failing_at(5)))
    target.submit([Row(1, (1,), 30)])
    for _ in range(2):
        with pytest.raises(WorkerError, match=r"the target failed: MemoryError.*no room for the cache"):
            target.harvest(PATIENCE)


def test_what_ended_before_a_failure_is_handed_out_first() -> None:
    gate = threading.Event()
    target = server(FakeEngine(choose=failing_at(6, gate)))
    target.submit([Row(1, (1,), 2), Row(2, (2,), 30)])
    # The loop cannot fail before the gate opens, and nothing is harvested before it has failed.
    with target._changed:
        gate.set()
        assert target._changed.wait_for(lambda: target._failure is not None, timeout=PATIENCE)
    assert [one.key for one in target.harvest(0).ended] == [1]
    with pytest.raises(WorkerError):
        target.harvest(0)


def test_answers_are_gathered_while_there_is_enough_in_store() -> None:
    target = server(FakeEngine())
    target.submit([Row(key, (1,), 3) for key in range(40)])
    # Four in the batch and two in store at most.
    assert len(target.harvest(PATIENCE).ended) >= 34


def test_a_harvest_waits_for_no_more_than_its_time() -> None:
    gate = threading.Event()
    target = server(FakeEngine(choose=failing_at(6, gate)))
    target.submit([Row(1, (1,), 2), *(Row(key, (2,), 30) for key in range(2, 20))])
    with target._changed:
        assert target._changed.wait_for(lambda: target._ended, timeout=PATIENCE)
    assert [one.key for one in target.harvest(0.05).ended] == [1], "there is plenty in store, and still it comes"
    gate.set()


def test_cancelled_rows_leave_nothing_behind() -> None:
    gate = threading.Event()

    def choose(tokens: Sequence[int], sampling: Sampling) -> int:
        assert gate.wait(PATIENCE)
        return hashed(tokens, sampling) % END

    engine = FakeEngine(choose=choose)
    target = server(engine)
    rows = [Row(key, (1, key), 5) for key in range(8)]
    target.submit(rows)
    # One that is being written, one in store, one that is not here.
    target.cancel([0, 7, 99])
    gate.set()
    ended = gather(target, 6)
    assert sorted(one.key for one in ended) == [1, 2, 3, 4, 5, 6]
    assert target.harvest(0.05).ended == ()
    assert engine.rows == {}


def test_what_is_said_of_a_model_names_its_role(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job's notes stand one below the other, the target's and the draft's."""
    from outrider.workers import actors  # which imports Ray

    model = SimpleNamespace(weights=(), threads=None, kind="fake", notes=["fp32"], numeric_path={})
    monkeypatch.setattr(actors, "pin_process", lambda *_, shared: None)
    monkeypatch.setattr(build, "open_unchanged", lambda *_: model)
    monkeypatch.setattr(actors, "check_pinning", lambda *_: SimpleNamespace(record=dict, differences=()))
    placement = ActorPlacement(Launch(None, "affinity", (), "python3"))  # type: ignore[arg-type]
    _, report = actors._open("draft", ModelSpec("tiny", "native", "fp32"), placement, 1)
    assert report.notes == ("draft: fp32",)
