"""The lifecycle of replicas: lists of instructions, compared event by event."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from driver_fakes import PLAN

from outrider.runner.driving import lifecycle_events, schedule_events
from outrider.runner.driving.lifecycle import (
    DRAFT_AGAIN_SECONDS,
    DRAFT_PAUSE_SECONDS,
    DRAFT_STEADY_SECONDS,
    MOST_DRAFT_DEATHS,
    SIGN_SECONDS,
    Doubtful,
    Down,
    LeftOut,
    Lifecycle,
    Lost,
    Starting,
    Up,
)
from outrider.runner.driving.lifecycle_events import (
    AskHost,
    AttachDraft,
    CoresOffered,
    DraftDied,
    DraftReady,
    Drain,
    EndJob,
    Event,
    Failure,
    HostGone,
    HostLives,
    HostWillTell,
    Instruction,
    Loss,
    Note,
    NoteLeftOut,
    Place,
    RecordLoss,
    Release,
    RestartWanted,
    Start,
    StartDraft,
    StartFailed,
    Stop,
    TargetDied,
    TargetDiffers,
    TargetReady,
    TellSchedule,
    Tick,
)
from outrider.workers.errors import JobChangedError, JobError, LeaseError, ModelError, WorkerError

DEADLINE, PATIENCE = 120.0, 600.0
DIED = Failure(RuntimeError("died"), "its process died")
UP = TellSchedule(schedule_events.ReplicaUp(0, 8, 4))
DOWN = TellSchedule(schedule_events.ReplicaDown(0, "its process died"))
TARGET_DIED = RecordLoss(Loss.TARGET, 0, "its process died")


def made(replicas: int = 1, up: Sequence[int] = ()) -> Lifecycle:
    """Started at 0; those that are ``up`` came up at 10."""
    machine = Lifecycle([PLAN] * replicas, DEADLINE, PATIENCE)
    machine.start(0.0)
    for number in up:
        machine.handle(TargetReady(number), 10.0)
    return machine


def told(machine: Lifecycle, *events: Event, now: float = 20.0) -> list[Instruction]:
    return [instruction for event in events for instruction in machine.handle(event, now)]


def test_replicas_are_started_and_come_up() -> None:
    machine = Lifecycle([PLAN, PLAN], DEADLINE, PATIENCE)
    assert machine.start(5.0) == [Start(0), Start(1)]
    assert machine.state(0) == Starting(5.0)
    assert told(machine, TargetReady(0)) == [UP]
    assert (machine.state(0), machine.up, machine.unplaced) == (Up(), 1, 0)


def test_a_draft_is_introduced_whether_its_target_is_up_or_not() -> None:
    assert told(made(), DraftReady(0)) == [AttachDraft(0)]
    assert told(made(up=[0]), DraftReady(0)) == [AttachDraft(0)]


def test_a_dead_draft_is_started_again_until_it_dies_too_often() -> None:
    machine = made(up=[0])
    recorded = RecordLoss(Loss.DRAFT, 0, "its process died")
    for _ in range(MOST_DRAFT_DEATHS - 1):
        assert told(machine, DraftDied(0, DIED)) == [recorded, StartDraft(0)]
    without = Note("replica 0 goes on without a draft, which died 5 times: its process died")
    assert told(machine, DraftDied(0, DIED)) == [recorded, without]
    assert machine.state(0) == Up()


def test_a_draft_that_dies_now_and_then_is_always_started_again() -> None:
    """As on a server, over weeks."""
    machine = made(up=[0])
    for death in range(3 * MOST_DRAFT_DEATHS):
        now = death * 2 * DRAFT_STEADY_SECONDS
        told(machine, DraftReady(0), now=now)
        assert StartDraft(0) in told(machine, DraftDied(0, DIED), now=now + DRAFT_STEADY_SECONDS + 1.0)


def test_a_draft_that_died_too_often_is_tried_again_after_a_pause() -> None:
    machine = made(up=[0])
    for _ in range(MOST_DRAFT_DEATHS):
        told(machine, DraftDied(0, DIED), now=5.0)
    for pause in (1, 2, 3):
        due = 5.0 + pause * (DRAFT_PAUSE_SECONDS + 1.0)
        assert told(machine, Tick(), now=due - 1.5) == []
        assert told(machine, Tick(), Tick(), now=due) == [StartDraft(0)]
        told(machine, DraftReady(0), now=due)
        said = [each for each in told(machine, DraftDied(0, DIED), now=due) if not isinstance(each, RecordLoss)]
        times = MOST_DRAFT_DEATHS + pause
        assert said == [Note(f"replica 0 goes on without a draft, which died {times} times: its process died")]


def test_a_target_that_dies_is_in_doubt_until_its_host_has_told() -> None:
    machine = made(up=[0])
    assert told(machine, TargetDied(0, DIED, frozenset({7})), now=30.0) == [Stop(0), AskHost(0)]
    assert machine.state(0) == Doubtful(30.0, "its process died", frozenset({7}))
    assert told(machine, HostWillTell(0)) == [TellSchedule(schedule_events.ReplicaDoubtful(0))]
    down = TellSchedule(schedule_events.ReplicaDown(0, "its process died", frozenset({7})))
    assert told(machine, HostLives(0)) == [Stop(0), TARGET_DIED, down]
    assert (machine.state(0), machine.up) == (Down(), 0)


def test_a_target_that_is_ended_for_memory_comes_up_again_for_half_as_many_rows() -> None:
    machine = made(up=[0])
    short = Failure(RuntimeError("died"), "memory was short", short_of_memory=True)
    for fewer, said in ((2, "2 rows at once from now on instead of 4"), (1, "1 row at once from now on instead of 2")):
        plan = replace(PLAN, replica_spec=replace(PLAN.replica_spec, batch=fewer))
        assert told(machine, TargetDied(0, short), HostLives(0)) == [
            Stop(0),
            AskHost(0),
            Stop(0),
            RecordLoss(Loss.TARGET, 0, "memory was short"),
            Place(0, plan),
            Note(f"replica 0 works on {said}: memory was short"),
            TellSchedule(schedule_events.ReplicaDown(0, "memory was short", rows_are_blamed=False)),
        ]
        assert told(machine, RestartWanted(0), TargetReady(0)) == [
            Start(0),
            TellSchedule(schedule_events.ReplicaUp(0, 2 * fewer, fewer)),
        ]
    # One row has the memory to itself: its death is held against it like any other.
    assert told(machine, TargetDied(0, short), HostLives(0))[3:] == [
        RecordLoss(Loss.TARGET, 0, "memory was short"),
        TellSchedule(schedule_events.ReplicaDown(0, "memory was short")),
    ]


def test_a_start_that_memory_is_too_short_for_had_no_rows() -> None:
    machine = made(up=[0])
    told(machine, TargetDied(0, DIED), HostLives(0), RestartWanted(0))
    short = Failure(RuntimeError("died"), "memory was short", short_of_memory=True)
    assert told(machine, StartFailed(0, short), HostLives(0))[-1] == TellSchedule(
        schedule_events.ReplicaDown(0, "memory was short")
    )


def test_where_nobody_can_be_asked_the_target_died_alone() -> None:
    machine = made(up=[0])
    assert told(machine, TargetDied(0, DIED), HostLives(0)) == [Stop(0), AskHost(0), Stop(0), TARGET_DIED, DOWN]


def test_a_target_that_lived_to_say_what_is_wrong_has_a_living_host() -> None:
    machine = made(up=[0])
    assert told(machine, TargetDied(0, replace(DIED, raised=True))) == [Stop(0), TARGET_DIED, DOWN]


def test_a_host_that_goes_takes_its_target_without_blame() -> None:
    gone = [RecordLoss(Loss.HOST, 0, "its process died"), Release(0), Stop(0), TellSchedule(schedule_events.ReplicaLost(0))]
    machine = made(up=[0])
    assert told(machine, TargetDied(0, DIED), HostWillTell(0), HostGone(0))[3:] == gone
    assert (machine.state(0), machine.unplaced) == (Lost(), 1)
    known = replace(DIED, host_gone=True)
    assert told(made(up=[0]), TargetDied(0, known)) == gone
    assert told(made(up=[0]), DraftDied(0, known)) == gone
    assert told(made(), StartFailed(0, known)) == gone


def test_a_host_without_a_word_is_taken_for_alive_in_the_end() -> None:
    machine = made(up=[0])
    told(machine, TargetDied(0, DIED), HostWillTell(0), now=30.0)
    assert told(machine, Tick(), now=30.0 + SIGN_SECONDS) == []
    assert told(machine, Tick(), now=30.1 + SIGN_SECONDS) == [Stop(0), TARGET_DIED, DOWN]
    assert told(machine, Tick(), now=92.0 + SIGN_SECONDS) == []


def test_the_schedule_says_whether_a_dead_replica_is_started_again() -> None:
    machine = made(up=[0])
    told(machine, TargetDied(0, DIED), HostLives(0))
    assert told(machine, RestartWanted(0), now=50.0) == [Start(0)]
    assert machine.state(0) == Starting(50.0)
    assert told(machine, TargetReady(0)) == [UP]


def test_the_draft_deaths_of_a_replica_are_counted_over_its_targets() -> None:
    machine = made(up=[0])
    for _ in range(MOST_DRAFT_DEATHS - 1):
        told(machine, DraftDied(0, DIED))
    told(machine, TargetDied(0, DIED), HostLives(0), RestartWanted(0), TargetReady(0))
    assert StartDraft(0) not in told(machine, DraftDied(0, DIED))


def test_a_draft_of_a_new_target_is_not_as_old_as_the_one_before() -> None:
    machine = made(up=[0])
    for _ in range(MOST_DRAFT_DEATHS - 1):
        told(machine, DraftDied(0, DIED))
    told(machine, DraftReady(0), TargetDied(0, DIED), HostLives(0))
    late = 10 * DRAFT_STEADY_SECONDS
    told(machine, RestartWanted(0), TargetReady(0), now=late)
    assert StartDraft(0) not in told(machine, DraftDied(0, DIED), now=late + 1.0), "it was not up for a moment"


def test_cores_that_another_run_holds_are_waited_for() -> None:
    machine = made(2, up=[1])
    held = Failure(LeaseError("core 1 is held by process 5"), "core 1 is held by process 5", raised=True)
    assert told(machine, StartFailed(0, held)) == [
        Note("replica 0 waits for cores: core 1 is held by process 5"),
        Release(0),
        Stop(0),
        TellSchedule(schedule_events.ReplicaLost(0)),
    ]
    assert machine.state(0) == Lost()


def test_a_draft_whose_cores_another_run_holds_is_no_death_and_is_tried_again() -> None:
    machine = made(up=[0])
    held = LeaseError("core 1 is held by process 5")
    for attempt in range(2 * MOST_DRAFT_DEATHS):
        now = attempt * (DRAFT_AGAIN_SECONDS + 1.0)
        said = told(machine, DraftDied(0, Failure(held, str(held), raised=True)), now=now)
        assert said == ([] if attempt else [Note("the draft of replica 0 waits for cores: core 1 is held by process 5")])
        assert told(machine, Tick(), now=now + DRAFT_AGAIN_SECONDS) == []
        assert told(machine, Tick(), Tick(), now=now + DRAFT_AGAIN_SECONDS + 0.1) == [StartDraft(0)]
    assert told(machine, DraftReady(0)) == [AttachDraft(0)]
    assert told(machine, DraftDied(0, DIED)) == [RecordLoss(Loss.DRAFT, 0, "its process died"), StartDraft(0)]
    assert len(told(machine, DraftDied(0, Failure(held, str(held), raised=True)))) == 1, "it waits once more"


def test_a_draft_is_not_tried_again_without_its_target_and_comes_with_the_next_one() -> None:
    held = LeaseError("core 1 is held by process 5")
    waits = DraftDied(0, Failure(held, str(held), raised=True))
    later = 1000.0
    machine = made(2, up=[0, 1])
    told(machine, waits, TargetDied(0, DIED), HostLives(0))
    assert told(machine, Tick(), now=later) == []
    assert told(machine, RestartWanted(0), Tick(), now=later) == [Start(0)]
    told(machine, TargetReady(0), waits, Drain(), now=later)
    assert told(machine, Tick(), now=2 * later) == [], "nothing is started any more"


def test_cores_that_come_free_go_to_the_replica_that_lost_its_own_and_then_to_new_ones() -> None:
    machine = made(2, up=[0, 1])
    told(machine, TargetDied(0, DIED), HostGone(0))
    other = replace(PLAN, replica_spec=replace(PLAN.replica_spec, batch=3))
    assert told(machine, CoresOffered(other)) == [Place(0, other), Start(0)]
    assert told(machine, CoresOffered(other)) == [Place(2, other), TellSchedule(schedule_events.ReplicaAdded(2)), Start(2)]
    assert told(machine, TargetReady(0), TargetReady(2)) == [
        TellSchedule(schedule_events.ReplicaUp(0, 6, 3)),
        TellSchedule(schedule_events.ReplicaUp(2, 6, 3)),
    ]
    assert (machine.up, machine.unplaced) == (3, 0)


WRONG = ModelError("tiny lacks 3 of its weights")
REFUSED = Failure(WRONG, str(WRONG), raised=True)


def test_what_no_replica_will_fare_better_with_ends_the_job() -> None:
    for event in (StartFailed(0, REFUSED), DraftDied(0, REFUSED), TargetDied(0, REFUSED)):
        assert told(made(2), event) == [EndJob(WRONG)]


def test_of_a_target_and_its_draft_each_has_to_have_come_up() -> None:
    """That the other could be loaded says nothing of it."""
    assert told(made(2, up=[1]), DraftDied(0, REFUSED)) == [EndJob(WRONG)]
    machine = made(2)
    told(machine, DraftReady(1))
    assert told(machine, StartFailed(0, REFUSED)) == [EndJob(WRONG)]


def test_a_target_that_cannot_be_read_any_more_is_a_death_like_any_other() -> None:
    """Its file system may have gone away for a minute: the other replicas have their targets in memory."""
    machine = made(2, up=[0, 1])
    died = [Stop(0), RecordLoss(Loss.TARGET, 0, str(WRONG)), TellSchedule(schedule_events.ReplicaDown(0, str(WRONG)))]
    assert told(machine, TargetDied(0, REFUSED)) == died
    assert told(machine, RestartWanted(0), StartFailed(0, REFUSED)) == [Start(0), *died]
    assert machine.state(1) == Up()


def test_without_a_draft_that_cannot_be_read_any_more_the_target_goes_on() -> None:
    machine = made(2, up=[0, 1])
    told(machine, DraftReady(1))
    recorded = RecordLoss(Loss.DRAFT, 0, str(WRONG))
    for _ in range(MOST_DRAFT_DEATHS - 1):
        assert told(machine, DraftDied(0, REFUSED)) == [recorded, StartDraft(0)]
    without = Note(f"replica 0 goes on without a draft, which died 5 times: {WRONG}")
    assert told(machine, DraftDied(0, REFUSED)) == [recorded, without]
    assert machine.state(0) == Up()


def test_a_target_that_computes_otherwise_is_not_used_and_may_have_other_cores() -> None:
    machine = made(2, up=[1])
    difference = JobChangedError("avx512 then, avx2 now")
    left_out = [NoteLeftOut(0, difference), Stop(0), TellSchedule(schedule_events.ReplicaLost(0))]
    assert told(machine, TargetDiffers(0, difference)) == left_out
    assert told(machine, CoresOffered(PLAN)) == [Place(0, PLAN), Start(0)]


def test_a_target_with_other_weights_is_not_tried_again() -> None:
    machine = made(2, up=[1])
    changed = JobChangedError("the files have changed")
    left_out = [NoteLeftOut(0, changed), Stop(0), TellSchedule(schedule_events.ReplicaLost(0))]
    assert told(machine, StartFailed(0, Failure(changed, "", raised=True))) == left_out
    assert (machine.state(0), machine.unplaced) == (LeftOut(), 0)
    assert told(machine, CoresOffered(PLAN))[0] == Place(2, PLAN)


def test_a_replica_that_differs_ends_a_job_that_has_no_other() -> None:
    difference = JobChangedError("avx512 then, avx2 now")
    machine = made(2, up=[0])
    told(machine, TargetDied(0, DIED), HostGone(0))
    assert told(machine, TargetDiffers(1, difference)) == [EndJob(difference)]
    assert told(made(), StartFailed(0, Failure(difference, "", raised=True))) == [EndJob(difference)]


def test_one_in_doubt_is_another_that_may_go_on() -> None:
    machine = made(2, up=[0])
    told(machine, TargetDied(0, DIED), HostWillTell(0))
    assert EndJob not in map(type, told(machine, TargetDiffers(1, JobChangedError("avx2 now"))))


def test_a_start_that_takes_too_long_ends_a_job_of_which_none_has_ever_come_up() -> None:
    machine = made(2)
    assert told(machine, Tick(), now=DEADLINE) == []
    [end] = told(machine, Tick(), now=DEADLINE + 1)
    assert isinstance(end, EndJob)
    assert isinstance(end.error, WorkerError)
    assert str(end.error).startswith("the target of replica 0 is not up after 120 s")


def test_a_start_that_takes_too_long_is_a_death_where_one_has_come_up() -> None:
    machine = made(2, up=[1])
    assert told(machine, Tick(), now=DEADLINE + 1) == [Stop(0), AskHost(0)]
    _, recorded, down = told(machine, HostLives(0))
    assert isinstance(recorded, RecordLoss)
    assert recorded.reason.startswith("the target of replica 0 is not up after 120 s")
    assert down == TellSchedule(schedule_events.ReplicaDown(0, recorded.reason))


def test_a_job_without_any_place_gives_up_in_the_end() -> None:
    machine = made(up=[0])
    told(machine, Tick(), now=100.0)
    told(machine, TargetDied(0, DIED), HostGone(0), now=100.0)
    assert told(machine, Tick(), now=100.0 + PATIENCE) == []
    [end] = told(machine, Tick(), now=101.0 + PATIENCE)
    assert isinstance(end, EndJob)
    assert isinstance(end.error, JobError)


def test_one_that_drains_does_not_wait_for_a_place() -> None:
    machine = made(up=[0])
    told(machine, TargetDied(0, DIED), HostGone(0), Drain(), now=100.0)
    assert told(machine, Tick(), now=200.0 + PATIENCE) == []


def test_every_event_is_answered() -> None:
    """An event that ``handle`` does not know would be answered by None."""
    difference = JobChangedError("avx2 now")
    samples: list[Event] = [
        TargetReady(0), TargetDiffers(0, difference), StartFailed(0, DIED), TargetDied(0, DIED), DraftReady(0),
        DraftDied(0, DIED), HostLives(0), HostWillTell(0), HostGone(0), RestartWanted(0), CoresOffered(PLAN), Drain(),
        Tick(),
    ]  # fmt: skip
    assert {type(each) for each in samples} == set(lifecycle_events.Event.__args__)
    for event in samples:
        machine = made(2, up=[0, 1])
        if isinstance(event, HostLives):
            told(machine, TargetDied(0, DIED))
        assert isinstance(machine.handle(event, 20.0), list)
