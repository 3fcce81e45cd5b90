"""The schedule: lists of events in, lists of commands out."""

from __future__ import annotations

import pytest

from outrider.runner.driving import schedule as module
from outrider.runner.driving.schedule import (
    FETCH,
    MOST_ATTEMPTS,
    MOST_BLAMED_IN_SUCCESSION,
    MOST_IDLE_DEATHS,
    Schedule,
)
from outrider.runner.driving.schedule_events import (
    Cancel,
    Drain,
    Event,
    FailRow,
    Fetch,
    Finish,
    RecordAttempts,
    ReplicaAdded,
    ReplicaDoubtful,
    ReplicaDown,
    ReplicaLost,
    ReplicaUp,
    Restart,
    RowsEnded,
    RowsEndedTogether,
    RowsFetched,
    RowsOffered,
    RowsWithdrawn,
    Send,
    Tick,
)


def fetched(*rows: int, exhausted: bool = True, attempts: int = 0) -> RowsFetched:
    return RowsFetched(tuple((row, attempts) for row in rows), exhausted)


def resumed(*rows: int, replicas: int = 1, capacity: int = 2) -> Schedule:
    """A schedule whose replicas are up, with these rows fetched."""
    schedule = Schedule(range(replicas))
    schedule.start()
    schedule.handle(fetched(*rows))
    for replica in range(replicas):
        schedule.handle(ReplicaUp(replica, capacity, capacity))
    return schedule


def test_it_fetches_first_and_sends_when_a_replica_is_up() -> None:
    schedule = Schedule([0, 1])
    assert schedule.start() == [Fetch(FETCH)]
    assert schedule.handle(fetched(0, 1, 2, 3, 4)) == []
    assert schedule.handle(ReplicaUp(1, 2, 2)) == [Send(1, (0, 1))]
    assert schedule.handle(ReplicaUp(0, 2, 2)) == [Send(0, (2, 3))]
    assert schedule.handle(RowsEnded(1, (0,))) == [Send(1, (4,))]


def test_it_ends_when_the_last_row_has_ended() -> None:
    schedule = resumed(0, 1, 2)
    assert schedule.handle(RowsEnded(0, (1,))) == [Send(0, (2,))]
    assert schedule.handle(RowsEnded(0, (0,))) == []
    assert schedule.handle(RowsEnded(0, (2,))) == [Finish()]
    assert schedule.handle(ReplicaUp(0, 2, 2)) == []


def test_a_job_without_rows_ends_at_once() -> None:
    schedule = Schedule([0])
    schedule.start()
    assert schedule.handle(fetched()) == [Finish()]


def test_it_fetches_ahead_before_it_runs_dry() -> None:
    schedule = Schedule([0])
    schedule.start()
    schedule.handle(fetched(*range(FETCH), exhausted=False))
    commands = schedule.handle(ReplicaUp(0, FETCH // 2, FETCH // 2))
    assert commands == [Send(0, tuple(range(FETCH // 2)))]
    assert schedule.handle(RowsEnded(0, (0,))) == [Send(0, (FETCH // 2,)), Fetch(FETCH)]
    assert schedule.handle(RowsEnded(0, (1,))) == [Send(0, (FETCH // 2 + 1,))], "one fetch at a time"


def test_rows_of_a_dead_replica_go_elsewhere_and_first() -> None:
    schedule = resumed(0, 1, 2, 3, 4, 5, replicas=2)
    assert schedule.handle(ReplicaDown(0, "gone")) == [RecordAttempts((0, 1)), Restart(0)]
    assert schedule.handle(RowsEnded(1, (2,))) == [Send(1, (1,))]
    assert schedule.handle(RowsEnded(1, (3,))) == [Send(1, (0,))]


def test_rows_that_were_too_many_at_once_are_not_blamed_and_come_again_fewer_at_a_time() -> None:
    schedule = resumed(0, 1, 2, 3, capacity=4)
    for capacity in (2, 1):
        assert schedule.handle(ReplicaDown(0, "memory was short", rows_are_blamed=False)) == [Restart(0)]
        assert schedule.handle(ReplicaUp(0, capacity, capacity)) == [Send(0, tuple(range(capacity)))]
    for row in range(3):
        assert schedule.handle(RowsEnded(0, (row,))) == [Send(0, (row + 1,))]
    assert schedule.handle(RowsEnded(0, (3,))) == [Finish()]


def test_a_row_that_saw_two_deaths_is_tried_alone() -> None:
    schedule = resumed(0, 1, 2)
    schedule.handle(ReplicaDown(0, "gone"))
    assert schedule.handle(ReplicaUp(0, 2, 2)) == [Send(0, (1, 0))]
    schedule.handle(ReplicaDown(0, "gone"))
    first = schedule.handle(ReplicaUp(0, 2, 2))
    assert first == [Send(0, (0,))]
    assert schedule.handle(RowsEnded(0, (0,))) == [Send(0, (1,))]
    assert schedule.handle(RowsEnded(0, (1,))) == [Send(0, (2,))]


def test_a_lone_poison_row_fails_and_the_job_ends_without_complaint() -> None:
    schedule = resumed(0)
    for _ in range(MOST_ATTEMPTS - 1):
        assert schedule.handle(ReplicaDown(0, "boom")) == [RecordAttempts((0,)), Restart(0)]
        assert schedule.handle(ReplicaUp(0, 2, 2)) == [Send(0, (0,))]
    commands = schedule.handle(ReplicaDown(0, "boom"))
    assert commands[:2] == [RecordAttempts((0,)), FailRow(0, "its replica died 3 times while doing it: boom")]
    assert commands[-1] == Finish(None)


def test_a_resumed_suspect_is_tried_alone() -> None:
    schedule = Schedule([0])
    schedule.start()
    schedule.handle(RowsFetched(((0, 0), (1, 2), (2, 0)), True))
    assert schedule.handle(ReplicaUp(0, 4, 4)) == [Send(0, (1,))]
    assert schedule.handle(RowsEnded(0, (1,))) == [Send(0, (0, 2))]


def test_a_replica_that_only_dies_is_given_up_and_the_others_do_its_rows() -> None:
    schedule = resumed(0, 1, 2, 3, replicas=2)
    for death in range(MOST_IDLE_DEATHS):
        commands = schedule.handle(ReplicaDown(0, "no memory"))
        assert (Restart(0) in commands) == (death < MOST_IDLE_DEATHS - 1)
        assert Finish() not in commands
    assert schedule.handle(RowsEnded(1, (2,))) != []


def test_a_replica_that_ends_rows_between_its_deaths_is_not_given_up() -> None:
    schedule = resumed(*range(50), capacity=1)
    for row in range(2 * MOST_IDLE_DEATHS):
        assert schedule.handle(RowsEnded(0, (row,))) == [Send(0, (row + 1,))]
        assert schedule.handle(ReplicaDown(0, "gone")) == [RecordAttempts((row + 1,)), Restart(0)]
        assert schedule.handle(ReplicaUp(0, 1, 1)) == [Send(0, (row + 1,))]


def test_rows_that_are_blamed_with_good_ones_between_them_are_not_in_succession() -> None:
    schedule = Schedule([0])
    schedule.start()
    schedule.handle(ReplicaUp(0, 1, 1))
    for row in range(0, 4 * MOST_BLAMED_IN_SUCCESSION, 2):
        schedule.handle(fetched(row, exhausted=False, attempts=MOST_ATTEMPTS - 1))
        commands = schedule.handle(ReplicaDown(0, "boom"))
        assert [type(command) for command in commands] == [RecordAttempts, FailRow, Restart]
        schedule.handle(ReplicaUp(0, 1, 1))
        assert schedule.handle(fetched(row + 1, exhausted=False))[0] == Send(0, (row + 1,))
        schedule.handle(RowsEnded(0, (row + 1,)))


def test_when_no_replica_stays_alive_the_job_says_why() -> None:
    schedule = Schedule([0])
    schedule.start()
    schedule.handle(fetched(0, 1))
    for _ in range(MOST_IDLE_DEATHS - 1):
        assert schedule.handle(ReplicaDown(0, "no such instruction")) == [Restart(0)]
    assert schedule.handle(ReplicaDown(0, "no such instruction")) == [Finish("no replica stays alive: no such instruction")]


def test_a_drain_sends_nothing_more_and_ends_with_what_is_under_way() -> None:
    schedule = resumed(0, 1, 2, 3)
    assert schedule.handle(Drain()) == []
    assert schedule.handle(RowsEnded(0, (0,))) == []
    assert schedule.handle(RowsEnded(0, (1,))) == [Finish()]


def test_a_drain_does_not_start_a_dead_replica_anew() -> None:
    schedule = resumed(0, 1)
    schedule.handle(Drain())
    assert schedule.handle(ReplicaDown(0, "gone")) == [RecordAttempts((0, 1)), Finish()]


def test_a_drain_before_anything_is_up_ends_at_once() -> None:
    schedule = Schedule([0])
    schedule.start()
    schedule.handle(fetched(0, 1))
    assert schedule.handle(Drain()) == [Finish()]


def test_a_drain_waits_for_a_fetch_under_way() -> None:
    schedule = Schedule([0])
    schedule.start()
    assert schedule.handle(Drain()) == []
    assert schedule.handle(fetched(0, exhausted=False)) == [Finish()]


def with_stragglers() -> Schedule:
    """Two replicas: 1 has had row 1 for long, nothing waits, and rows take 10 seconds by and large."""
    schedule = resumed(0, 1, replicas=2, capacity=1)
    schedule.handle(Tick(10.0))
    assert schedule.handle(RowsEnded(0, (0,))) == [], "row 1 is no straggler yet"
    return schedule


def test_a_straggler_is_given_to_an_idle_replica_and_the_first_answer_counts() -> None:
    schedule = with_stragglers()
    assert schedule.handle(Tick(14.9)) == []
    assert schedule.handle(Tick(15.1)) == [Send(0, (1,))]
    assert schedule.handle(Tick(1000.0)) == [], "two are enough"
    assert schedule.handle(RowsEnded(0, (1,))) == [Cancel(1, (1,)), Finish()]


def test_what_has_ended_in_the_same_moment_is_no_straggler() -> None:
    """Replica 0 has room again, and row 1 of replica 1 would be a straggler, had it not ended too."""
    schedule = resumed(0, 1, 2, replicas=2, capacity=1)
    schedule.handle(Tick(10.0))
    assert schedule.handle(RowsEnded(0, (0,))) == [Send(0, (2,))]
    schedule.handle(Tick(50.0))
    assert schedule.handle(RowsEndedTogether((RowsEnded(0, (2,)), RowsEnded(1, (1,))))) == [Finish()]


def test_rows_that_end_together_make_room_together() -> None:
    schedule = resumed(0, 1, 2, 3, 4, replicas=2)
    ended = RowsEndedTogether((RowsEnded(0, (0,)), RowsEnded(1, (2, 3))))
    assert schedule.handle(ended) == [Send(1, (4,))], "to the emptiest"


def test_the_late_replica_may_be_the_first_after_all() -> None:
    schedule = with_stragglers()
    schedule.handle(Tick(50.0))
    assert schedule.handle(RowsEnded(1, (1,))) == [Cancel(0, (1,)), Finish()]


def test_a_row_that_two_have_outlives_either() -> None:
    for first, second in ((0, 1), (1, 0)):
        schedule = with_stragglers()
        schedule.handle(Tick(50.0))
        assert schedule.handle(ReplicaDown(first, "gone")) == [RecordAttempts((1,)), Restart(first)]
        assert schedule.handle(ReplicaDown(second, "gone")) == [RecordAttempts((1,)), Restart(second)]
        assert schedule.handle(ReplicaUp(first, 1, 1)) == [Send(first, (1,))], "as a suspect, it is tried again"
        assert schedule.handle(RowsEnded(first, (1,))) == [Finish()]


def test_a_row_whose_copy_died_may_have_another() -> None:
    schedule = with_stragglers()
    schedule.handle(Tick(50.0))
    schedule.handle(ReplicaDown(0, "gone"))
    schedule.handle(Tick(60.0))
    assert schedule.handle(ReplicaUp(2, 1, 1)) == [], "a replica joins; the row has another chance where it is"
    assert schedule.handle(Tick(200.0)) == [Send(2, (1,))]


def test_nothing_is_given_twice_while_rows_wait_or_in_a_drain() -> None:
    schedule = resumed(0, 1, 2, 3, replicas=2, capacity=1)
    schedule.handle(Tick(10.0))
    schedule.handle(RowsEnded(0, (0,)))
    assert schedule.handle(Tick(100.0)) == []
    drained = with_stragglers()
    drained.handle(Drain())
    assert drained.handle(Tick(100.0)) == []


def test_near_the_end_nothing_lies_in_store() -> None:
    schedule = Schedule([0, 1])
    schedule.start()
    schedule.handle(fetched(*range(12)))
    assert schedule.handle(ReplicaUp(0, 4, 2)) == [Send(0, (0, 1, 2, 3))]
    assert schedule.handle(ReplicaUp(1, 4, 2)) == [Send(1, (4, 5, 6, 7))]
    # Four wait, as many as the stores hold.
    assert schedule.handle(RowsEnded(0, (0, 1))) == []
    assert schedule.handle(RowsEnded(0, (2,))) == [Send(0, (8,))]


def test_the_store_of_a_replica_that_is_gone_counts_no_more() -> None:
    schedule = Schedule([0, 1])
    schedule.start()
    schedule.handle(fetched(*range(8)))
    assert schedule.handle(ReplicaUp(0, 4, 2)) == [Send(0, (0, 1, 2, 3))]
    assert schedule.handle(ReplicaUp(1, 4, 2)) == [Send(1, (4, 5))], "four wait, as many as both stores hold"
    schedule.handle(ReplicaLost(1))
    assert schedule.handle(RowsEnded(0, (0, 1))) == [Send(0, (4, 5))], "four wait, and one store holds two"
    assert schedule.handle(RowsEnded(0, (2, 3))) == [], "now two do"


def test_suspects_are_tried_while_others_wait() -> None:
    schedule = resumed(*range(100), replicas=2, capacity=2)
    for _ in range(2):
        schedule.handle(ReplicaDown(0, "gone"))
        schedule.handle(ReplicaUp(0, 2, 2))
    # Rows 0 and 1 are suspects, and replica 1 is emptied for them.
    assert schedule.handle(RowsEnded(1, (2,))) == []
    assert schedule.handle(RowsEnded(1, (3,))) == [Send(1, (0,))]
    assert schedule.handle(RowsEnded(1, (0,))) == [Send(1, (1,))]
    assert schedule.handle(RowsEnded(1, (1,))) == [Send(1, (6, 7))]


def test_few_suspects_empty_few_replicas() -> None:
    schedule = resumed(*range(100), replicas=6, capacity=2)
    for _ in range(2):
        schedule.handle(ReplicaDown(0, "gone"))
        schedule.handle(ReplicaUp(0, 2, 2))
    # Rows 0 and 1 are suspects, and replica 1 is emptied for them; it is enough.
    assert schedule.handle(RowsEnded(1, (2,))) == []
    assert schedule.handle(RowsEnded(2, (4,))) == [Send(2, (14,))]
    assert schedule.handle(RowsEnded(3, (6,))) == [Send(3, (15,))]


def test_every_command_and_event_is_a_frozen_value() -> None:
    for kind in (*module.Command.__args__, *module.Event.__args__):
        assert kind.__dataclass_params__.frozen, kind


def test_a_lost_replica_keeps_its_place_and_its_rows_go_elsewhere_without_blame() -> None:
    schedule = resumed(0, 1, 2, 3, replicas=2)
    assert schedule.handle(ReplicaLost(0)) == []
    assert schedule.handle(RowsEnded(1, (2,))) == [Send(1, (0,))]
    for _ in range(MOST_ATTEMPTS + MOST_IDLE_DEATHS):
        assert schedule.handle(ReplicaLost(1)) == []
        assert schedule.handle(ReplicaUp(1, 2, 2)) == [Send(1, (3, 0))]
    assert schedule.handle(ReplicaUp(0, 2, 2)) == [Send(0, (1,))]


def test_a_suspect_on_a_lost_replica_is_no_more_and_no_less_suspect() -> None:
    schedule = resumed(0)
    schedule.handle(ReplicaDown(0, "died"))
    schedule.handle(ReplicaUp(0, 2, 2))
    schedule.handle(ReplicaDown(0, "died"))
    assert schedule.handle(ReplicaUp(0, 2, 2)) == [Send(0, (0,))]
    assert schedule.handle(ReplicaLost(0)) == []
    assert schedule.handle(ReplicaUp(0, 2, 2)) == [Send(0, (0,))]
    assert schedule.handle(ReplicaDown(0, "died"))[:2] == [
        RecordAttempts((0,)),
        FailRow(0, f"its replica died {MOST_ATTEMPTS} times while doing it: died"),
    ]


def test_a_replica_that_joins_is_fed() -> None:
    schedule = resumed(0, 1, 2)
    assert schedule.handle(ReplicaAdded(5)) == []
    assert schedule.handle(ReplicaUp(5, 2, 2)) == [Send(5, (2,))]


def test_without_a_single_host_the_job_waits() -> None:
    schedule = resumed(0)
    assert schedule.handle(ReplicaLost(0)) == []
    assert schedule.handle(ReplicaUp(0, 2, 2)) == [Send(0, (0,))]
    assert schedule.handle(RowsEnded(0, (0,))) == [Finish()]


def test_rows_that_had_not_left_for_a_replica_are_not_held_against() -> None:
    schedule = resumed(0, 1, 2, capacity=3)
    commands = schedule.handle(ReplicaDown(0, "boom", frozenset({1, 2})))
    assert commands == [RecordAttempts((0,)), Restart(0)]
    assert schedule.handle(ReplicaUp(0, 3, 3)) == [Send(0, (0, 1, 2))]


def test_a_suspect_that_had_not_left_is_not_blamed() -> None:
    schedule = Schedule([0])
    schedule.start()
    schedule.handle(fetched(7, attempts=MOST_ATTEMPTS - 1))
    assert schedule.handle(ReplicaUp(0, 2, 2)) == [Send(0, (7,))]
    assert schedule.handle(ReplicaDown(0, "boom", frozenset({7}))) == [Restart(0)]
    assert schedule.handle(ReplicaUp(0, 2, 2)) == [Send(0, (7,))]


def test_a_replica_in_doubt_gets_no_rows() -> None:
    schedule = resumed(0, 1, replicas=2, capacity=1)
    schedule.handle(ReplicaDoubtful(0))
    schedule.handle(RowsEnded(1, (1,)))
    # What is late is offered to those that have room, of which the dead one is none.
    assert schedule.handle(Tick(1000.0)) == [Send(1, (0,))]
    schedule = resumed(replicas=1)
    schedule.handle(ReplicaDoubtful(0))
    assert schedule.rows_known == 0


@pytest.mark.parametrize("answer", [ReplicaDown(0, "boom"), ReplicaLost(0)])
def test_what_a_replica_in_doubt_had_is_done_when_it_is_known_what_became_of_it(answer: Event) -> None:
    schedule = resumed(0, 1)
    assert schedule.handle(ReplicaDoubtful(0)) == []
    schedule.handle(answer)
    (sent,) = schedule.handle(ReplicaUp(0, 2, 2))
    assert isinstance(sent, Send)
    assert sorted(sent.rows) == [0, 1]


def test_a_row_was_not_alone_though_its_company_has_failed_since() -> None:
    """Two rows die together often enough; one of them is blamed elsewhere before the last death is known."""
    schedule = resumed(0, 1, replicas=2)
    schedule.handle(RowsFetched((), True))
    for row in (0, 1):
        schedule._replicas[0].rows[row] = MOST_ATTEMPTS - 1
    schedule.handle(ReplicaDoubtful(0))
    schedule._holders[0] = (0, 1)
    schedule._replicas[1].rows = {0: MOST_ATTEMPTS - 1}
    assert FailRow(0, f"its replica died {MOST_ATTEMPTS} times while doing it: boom") in schedule.handle(
        ReplicaDown(1, "boom")
    )
    commands = schedule.handle(ReplicaDown(0, "boom"))
    assert commands == [RecordAttempts((1,)), Restart(0)]


def test_a_suspect_does_not_wait_for_a_replica_that_has_no_place() -> None:
    schedule = Schedule([0, 1])
    schedule.start()
    schedule.handle(fetched(0))
    schedule.handle(ReplicaUp(0, 2, 2))
    schedule.handle(ReplicaDown(0, "boom"))
    schedule.handle(ReplicaUp(0, 2, 2))
    schedule.handle(ReplicaDown(0, "boom"))
    # The other, which nothing is known against, would be the better judge, if it came up.
    assert schedule.handle(ReplicaUp(0, 2, 2)) == []
    assert schedule.handle(ReplicaLost(1)) == [Send(0, (0,))]


def test_one_that_stays_open_waits_for_more_rows() -> None:
    schedule = Schedule([0], ahead=1, stays_open=True)
    assert schedule.start() == [Fetch(2)]
    assert schedule.handle(fetched()) == []
    assert schedule.handle(ReplicaUp(0, 2, 2)) == []
    assert schedule.handle(RowsOffered()) == [Fetch(2)]
    assert schedule.handle(fetched(7)) == [Send(0, (7,))]
    assert schedule.handle(RowsEnded(0, (7,))) == []
    assert schedule.handle(Drain()) == [Finish()]


def test_rows_that_are_withdrawn_are_cancelled_or_never_sent() -> None:
    schedule = resumed(0, 1, 10, 11, 12, replicas=2, capacity=2)
    assert schedule.handle(RowsWithdrawn(10, 19)) == [Cancel(1, (10, 11))]
    assert schedule.rows_known == 2
    assert schedule.handle(RowsEnded(0, (0, 1))) == [Finish()]


def test_places_of_withdrawn_rows_go_to_those_that_wait() -> None:
    schedule = resumed(0, 1, 10, 11, capacity=2)
    assert schedule.handle(RowsWithdrawn(0, 9)) == [Cancel(0, (0, 1)), Send(0, (10, 11))]


def test_suspects_that_are_withdrawn_are_not_sent() -> None:
    schedule = Schedule([0])
    schedule.start()
    schedule.handle(RowsFetched(((7, 2), (20, 0)), True))
    assert schedule.handle(RowsWithdrawn(0, 9)) == []
    assert schedule.handle(ReplicaUp(0, 2, 2)) == [Send(0, (20,))]


def test_a_row_that_was_withdrawn_is_never_late() -> None:
    schedule = resumed(0, 1, 2, replicas=3, capacity=1)
    schedule.handle(Tick(10.0))
    schedule.handle(RowsEnded(0, (0,)))
    assert schedule.handle(RowsWithdrawn(1, 1)) == [Cancel(1, (1,))]
    assert schedule.handle(Tick(50.0)) == [Send(0, (2,))]
