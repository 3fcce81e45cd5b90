"""A target's statistics: seconds by phase, and candidates by outcome."""

from __future__ import annotations

import time
from itertools import pairwise

import pytest
from fakes import END, FakeEngine, Nonsense, decode

from outrider.workers.actor_loops import TargetLoop
from outrider.workers.engines.costs import CostCurve
from outrider.workers.messages import LONGEST_COUNTED, Row
from outrider.workers.target.statistics import TargetStatistics
from outrider.workers.target.text_and_stop_strings import TextWriter
from outrider.workers.target.verifier import Verifier
from outrider.workers.timeline import Timeline

PATIENCE = 20.0


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def server(statistics: TargetStatistics, draft_tokens: int = 3) -> TargetLoop:
    return TargetLoop(
        Verifier(
            engine=FakeEngine(),
            new_writer=lambda row: TextWriter(decode, row.stop, (END,)),
            proposer=Nonsense(1),
            batch=4,
            draft_tokens=draft_tokens,
            verify_seconds=CostCurve({1: 1.0}),
            end_tokens=(END,),
            statistics=statistics,
        )
    )


def test_the_way_to_the_draft_and_back_is_told_from_its_work() -> None:
    clock = Clock()
    statistics = TargetStatistics(clock=clock)
    statistics.hop(0.3)
    statistics.waited("waiting for draft", clock.now - 1.0, rows=1, candidates=4)
    assert statistics.counters.hop_seconds == pytest.approx(0.3)
    assert statistics.counters.draft_seconds == pytest.approx(0.7)
    # A draft that worked while the target did something else was not waited for longer than that.
    statistics.hop(-0.5)
    statistics.waited("waiting for draft", clock.now - 0.1, rows=1, candidates=4)
    assert statistics.counters.hop_seconds == pytest.approx(0.3)
    assert statistics.counters.draft_seconds == pytest.approx(0.8)


def test_accepted_lengths_are_counted_and_the_longest_stand_together() -> None:
    statistics = TargetStatistics()
    for proposed, accepted, tokens in ((4, 0, 1), (4, 4, 5), (0, 0, 1), (40, 40, 41), (16, 16, 17)):
        statistics.committed(proposed, accepted, tokens)
    lengths = statistics.counters.accepted_lengths
    assert (lengths[0], lengths[4], lengths[LONGEST_COUNTED], sum(lengths)) == (1, 1, 2, 4)
    assert (statistics.counters.row_rounds, statistics.counters.tokens) == (5, 65)
    assert (statistics.counters.proposed, statistics.counters.accepted) == (64, 60)


def test_idle_time_counts_while_it_lasts() -> None:
    clock = Clock()
    statistics = TargetStatistics(Timeline(), clock)
    with statistics.idling():
        clock.now += 2.0
        assert statistics.snapshot().idle_seconds == 2.0
        clock.now += 3.0
    clock.now += 1.0
    counters = statistics.snapshot()
    assert (counters.idle_seconds, counters.seconds) == (5.0, 6.0)
    assert statistics.timeline is not None
    idle = statistics.timeline.fetch().slices
    assert [(one.name, one.ended - one.started) for one in idle] == [("idle", 2 * 10**9), ("idle", 3 * 10**9)]


def test_a_snapshot_does_not_change_any_more() -> None:
    statistics = TargetStatistics()
    before = statistics.snapshot()
    statistics.committed(4, 2, 3)
    assert (before.tokens, sum(before.accepted_lengths)) == (0, 0)


def test_a_timeline_keeps_its_size_and_counts_what_it_drops() -> None:
    timeline = Timeline(most=3)
    for number in range(5):
        timeline.add("verify", number, number + 0.5, rows=1, tokens=2)
    trace = timeline.fetch()
    assert [one.started for one in trace.slices] == [0, 10**9, 2 * 10**9]
    assert trace.dropped == 2
    timeline.add("verify", 9.0, 9.5)
    assert (len(timeline.fetch().slices), timeline.fetch().dropped) == (1, 0)


def test_a_served_targets_slices_fill_its_time_and_do_not_overlap() -> None:
    statistics = TargetStatistics(Timeline())
    began = time.perf_counter_ns()
    target = server(statistics)
    target.submit([Row(key, (key % 7, 1), 30) for key in range(40)])
    ended = 0
    slices = []
    while ended < 40:
        harvest = target.harvest(PATIENCE)
        ended += len(harvest.ended)
        slices.extend(harvest.trace.slices)
    target.submit([Row(99, (1,), 2)])
    slices.extend(target.harvest(PATIENCE).trace.slices)
    last = target.harvest(0)
    slices.extend(last.trace.slices)
    wall = time.perf_counter_ns() - began
    assert {one.name for one in slices} == {"idle", "decide", "ask", "waiting for draft", "verify", "commit"}
    slices.sort(key=lambda one: one.started)
    for one, other in pairwise(slices):
        assert one.started <= one.ended <= other.started
    # What the fakes compute is nearly nothing, so this is the loosest bound that will ever be needed; and the system may
    # have taken the core away between two slices once.
    longest_gap = max(other.started - one.ended for one, other in pairwise(slices))
    assert 0.2 * (wall - longest_gap) < sum(one.ended - one.started for one in slices) <= wall
    counters = last.counters
    assert sum(one.tokens for one in slices if one.name == "commit") == counters.tokens
    assert sum(one.name == "verify" for one in slices) == counters.rounds
    phases = counters.verify_seconds + counters.draft_seconds + counters.hop_seconds + counters.idle_seconds
    assert phases <= counters.seconds
    assert 0 < counters.proposed <= counters.asked <= 3 * counters.asking_rows


def test_what_a_round_pays_for_being_counted() -> None:
    """A round of a small model takes a millisecond and more; all that is said of it must be far below its half percent."""
    statistics = TargetStatistics()
    rounds = 200
    quickest = float("inf")
    for _ in range(10):
        started = time.perf_counter()
        for _ in range(rounds):
            statistics.asked([4])
            statistics.hop(0.0005)
            statistics.waited("ask", 1.0, 1, 4)
            statistics.hop(0.0005)
            statistics.waited("waiting for draft", 1.0, 1, 4)
            statistics.verified(1.001, 1.003, 1, 5)
            statistics.committed(4, 2, 3)
            statistics.round_ended(1.003, 1, 3)
        quickest = min(quickest, time.perf_counter() - started)
    assert quickest / rounds < 50e-6
