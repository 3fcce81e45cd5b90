"""The schedule on small random jobs: whatever replicas die or hang, no row is lost or written twice."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from examples import examples
from outrider.runner.driving import schedule, schedule_events


def simulate(
    rows: int,
    replicas: int,
    capacity: int,
    poison: set[int],
    deaths: float,
    dice: random.Random,
    broken: set[int] = frozenset(),  # type: ignore[assignment]
    drain_after: int | None = None,
    eager: bool = False,
    hangs: frozenset[int] = frozenset(),
    fits: int = 1 << 30,
) -> tuple[set[int], set[int], str | None]:
    """A world that carries out commands; a replica with a poison row, or a broken one with any row, dies.

    Returns the rows that ended, those that failed, and why the job finished. ``eager``: poison kills before any row ends.
    A replica that holds more rows than its memory ``fits`` dies of that, and comes up again for half as many.
    """
    tested = schedule.Schedule(range(replicas))
    attempts: Counter[int] = Counter()
    ended: set[int] = set()
    failed: set[int] = set()
    holding: dict[int, set[int]] = {}
    starting = set(range(replicas))
    room = dict.fromkeys(range(replicas), capacity)
    cursor, steps = 0, 0
    finish: list[schedule_events.Finish] = []

    def perform(commands: list[schedule_events.Command]) -> None:
        nonlocal cursor
        for command in commands:
            assert not finish, f"{command} after the finish"
            match command:
                case schedule_events.Fetch(count):
                    some = [(row, attempts[row]) for row in range(cursor, min(rows, cursor + count))]
                    cursor += len(some)
                    perform(tested.handle(schedule_events.RowsFetched(tuple(some), len(some) < count)))
                case schedule_events.Send(replica, sent):
                    assert replica in holding, "rows were sent to a replica that is not up"
                    assert sent
                    assert not set(sent) & (ended | failed), "a row was sent after its end"
                    elsewhere = [row for row in sent for others in holding.values() if row in others]
                    assert not elsewhere or hangs, "a row is in two places"
                    assert len(elsewhere) == len(set(elsewhere)), "a row is in three places"
                    if any(attempts[row] > 1 for row in {*sent, *holding[replica]}):
                        assert len(holding[replica]) + len(sent) == 1, "a suspect has company"
                    holding[replica] |= set(sent)
                    assert len(holding[replica]) <= room[replica], "the replica is overfull"
                case schedule_events.Cancel(replica, dropped):
                    assert set(dropped) <= ended | failed | {
                        row for row in poison if attempts[row] >= schedule.MOST_ATTEMPTS
                    }
                    holding[replica] -= set(dropped)
                case schedule_events.RecordAttempts(lost):
                    attempts.update(lost)
                case schedule_events.FailRow(row, reason):
                    assert attempts[row] >= schedule.MOST_ATTEMPTS
                    assert row not in ended | failed
                    assert reason
                    failed.add(row)
                case schedule_events.Restart(replica):
                    assert replica not in holding
                    starting.add(replica)
                case schedule_events.Finish():
                    finish.append(command)

    def kill(replica: int, rows_are_blamed: bool = True) -> None:
        holding.pop(replica, None)
        starting.discard(replica)
        perform(tested.handle(schedule_events.ReplicaDown(replica, "boom", rows_are_blamed=rows_are_blamed)))

    perform(tested.start())
    while not finish:
        steps += 1
        assert steps < 20_000, "the schedule does not come to an end"
        if steps == drain_after:
            perform(tested.handle(schedule_events.Drain()))
            continue
        if hangs:
            perform(tested.handle(schedule_events.Tick(float(steps))))
        choices = sorted(starting | {replica for replica, held in holding.items() if held and replica not in hangs})
        if not choices and hangs and not finish:
            continue
        if finish:
            break
        assert choices, "nothing can happen any more, and the schedule has not finished"
        replica = dice.choice(choices)
        if replica in starting:
            if dice.random() < deaths:
                kill(replica)
                continue
            starting.discard(replica)
            holding[replica] = set()
            perform(tested.handle(schedule_events.ReplicaUp(replica, room[replica], room[replica])))
            continue
        held = holding[replica]
        if len(held) > fits:
            room[replica] //= 2
            kill(replica, rows_are_blamed=False)
            continue
        row = dice.choice(sorted(held))
        if replica in broken or row in poison or (eager and held & poison) or dice.random() < deaths:
            kill(replica)
            continue
        # Harvests that arrive together: the first answer to a row counts.
        together = {replica: row}
        for other in [other for other in choices if other not in starting | broken | together.keys()]:
            row = dice.choice(sorted(holding[other]))
            if dice.random() < 0.2 and row not in together.values() and not holding[other] & poison:
                together[other] = row
        for other, row in together.items():
            holding[other].discard(row)
            ended.add(row)
        events = tuple(schedule_events.RowsEnded(other, (row,)) for other, row in together.items())
        perform(tested.handle(schedule_events.RowsEndedTogether(events) if len(events) > 1 else events[0]))
    return ended, failed, finish[0].reason


@pytest.mark.parametrize("poison", [0, 1, 2, 3])
def test_a_poison_row_in_the_only_replicas_first_batch_takes_nobody_with_it(poison: int) -> None:
    """It kills before anything ends, so every death is a barren one."""
    ended, failed, reason = simulate(
        rows=9, replicas=1, capacity=4, poison={poison}, deaths=0.0, dice=random.Random(0), eager=True
    )
    assert failed == {poison}
    assert ended == set(range(9)) - {poison}
    assert reason is None


def test_a_broken_replica_is_not_the_judge_of_a_suspect() -> None:
    """Otherwise it would condemn innocent rows that the healthy one could do."""
    ended, failed, reason = simulate(
        rows=30, replicas=2, capacity=3, poison=set(), deaths=0.0, dice=random.Random(1), broken={0}
    )
    assert (ended, failed, reason) == (set(range(30)), set(), None)


def test_rows_are_not_all_blamed_for_a_machine_that_kills_everything() -> None:
    ended, failed, reason = simulate(
        rows=200, replicas=1, capacity=4, poison=set(), deaths=0.0, dice=random.Random(0), broken={0}
    )
    assert ended == set()
    assert len(failed) <= schedule.MOST_BLAMED_IN_SUCCESSION
    assert reason is not None


@settings(max_examples=examples(150))
@given(
    st.integers(0, 700),
    st.integers(1, 6),
    st.integers(1, 20),
    st.floats(0, 0.3),
    st.integers(0, 1 << 30),
)
def test_random_deaths_lose_no_row(rows: int, replicas: int, capacity: int, deaths: float, seed: int) -> None:
    ended, failed, reason = simulate(rows, replicas, capacity, set(), deaths, random.Random(seed))
    assert not ended & failed
    if reason is None:
        assert ended | failed == set(range(rows))
    else:
        assert reason == "no replica stays alive: boom"


@settings(max_examples=examples(100))
@given(st.integers(1, 300), st.integers(1, 5), st.integers(1, 16), st.integers(0, 1 << 30), st.booleans())
def test_poison_rows_fail_and_innocent_ones_do_not(rows: int, replicas: int, capacity: int, seed: int, eager: bool) -> None:
    dice = random.Random(seed)
    poison = {dice.randrange(rows)}
    ended, failed, reason = simulate(rows, replicas, capacity, poison, 0.0, dice, eager=eager)
    assert reason is None
    assert failed == poison
    assert ended == set(range(rows)) - poison


@settings(max_examples=examples(60))
@given(
    st.integers(0, 300), st.integers(1, 4), st.integers(1, 20), st.integers(1, 8), st.integers(0, 1 << 30), st.booleans()
)
def test_rows_that_memory_is_too_short_for_at_once_all_end(
    rows: int, replicas: int, capacity: int, fits: int, seed: int, poisoned: bool
) -> None:
    dice = random.Random(seed)
    poison = {dice.randrange(rows)} if poisoned and rows else set()
    ended, failed, reason = simulate(rows, replicas, capacity, poison, 0.0, dice, fits=fits)
    assert (ended, failed, reason) == (set(range(rows)) - poison, poison, None)


@settings(max_examples=examples(60))
@given(st.integers(20, 200), st.integers(2, 6), st.integers(1, 8), st.integers(0, 1 << 30))
def test_a_replica_that_hangs_holds_nothing_up(rows: int, replicas: int, capacity: int, seed: int) -> None:
    """Not even where it sits on the row that kills all others."""
    dice = random.Random(seed)
    poison = {dice.randrange(rows)}
    ended, failed, reason = simulate(rows, replicas, capacity, poison, 0.0, dice, hangs=frozenset({0}))
    assert reason is None
    assert failed == poison
    assert ended == set(range(rows)) - poison


@settings(max_examples=examples(60))
@given(st.integers(0, 300), st.integers(1, 4), st.floats(0, 0.2), st.integers(0, 1 << 30), st.integers(1, 100))
def test_a_drain_always_ends(rows: int, replicas: int, deaths: float, seed: int, after: int) -> None:
    dice = random.Random(seed)
    ended, failed, _ = simulate(rows, replicas, 4, set(), deaths, dice, drain_after=after)
    assert not ended & failed
    assert ended | failed <= set(range(rows))
