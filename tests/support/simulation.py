"""Thousands of replicas for the real schedule: rows of uneven length, deaths, stragglers, replicas that hang.

``python tests/support/simulation.py --replicas 2000 --rows 5000000`` prints the figures that
docs/lab/2026-11-21-driver-and-admission.md keeps.
"""

from __future__ import annotations

import argparse
import heapq
import json
import resource
from collections import Counter, deque
from dataclasses import asdict, dataclass, field
from time import thread_time

import numpy as np

from outrider.runner.driving import schedule, schedule_events

TICK_SECONDS = 0.2
QUEUED, ENDED, FAILED = 0, 1, 2


@dataclass(frozen=True)
class Scenario:
    """Times in seconds, lengths in tokens; rows have log-normal lengths, cut at ``longest`` as by "max_tokens"."""

    replicas: int = 50
    rows: int = 50_000
    slots: int = 4
    capacity: int = 8
    median: float = 80.0
    sigma: float = 1.0
    longest: int = 512
    tokens_a_second: float = 10.0
    # Each replica is slower than the fastest one by up to this share.
    spread: float = 0.5
    start_seconds: float = 60.0
    mean_life: float = 7200.0
    # The share of replica lives that become slow at some moment (by ``slowdown``), and the share that hang without dying.
    stragglers: float = 0.04
    slowdown: float = 5.0
    hangs: float = 0.01
    poison: int = 3
    report_seconds: float = 0.02
    seed: int = 0


@dataclass(frozen=True)
class Outcome:
    rows: int
    failed: int
    # Rows that failed although they kill no target: three random deaths hit them, the last while they ran alone.
    innocent: int
    deaths: int
    makespan: float
    ideal: float
    excess: float
    second_answers: int
    copies: int
    most_held: int
    events: int
    scheduler_microseconds_a_row: float
    peak_mib: float
    seconds: float


@dataclass
class _Machine:
    """One life of a replica."""

    life: int
    speed: float
    slow_from: float
    factor: float
    queue: deque[int] = field(default_factory=deque)
    running: set[int] = field(default_factory=set)
    ended: list[int] = field(default_factory=list)
    reporting: bool = False

    def end_of(self, tokens: float, now: float) -> float:
        quick = max(0.0, self.slow_from - now) * self.speed
        if tokens <= quick:
            return now + tokens / self.speed
        return max(now, self.slow_from) + (tokens - quick) / self.speed * self.factor


class Simulation:
    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.dice = np.random.default_rng(scenario.seed)
        draw = self.dice.lognormal(np.log(scenario.median), scenario.sigma, scenario.rows)
        self.lengths = np.clip(draw, 1, scenario.longest).astype(np.uint16)
        self.poison = {int(row) for row in self.dice.choice(scenario.rows, scenario.poison, replace=False)}
        self.state = bytearray(scenario.rows)
        self.attempts: Counter[int] = Counter()
        self.partial_results: set[int] = set()
        self.schedule = schedule.Schedule(range(scenario.replicas))
        self.machines: dict[int, _Machine] = {}
        self.speeds = scenario.tokens_a_second * (1 - scenario.spread * self.dice.random(scenario.replicas))
        self.agenda: list[tuple[float, int, str, int, int]] = []
        self.trace: list[tuple[float, float]] = []
        self.now, self.counter, self.lives, self.cursor = 0.0, 0, 0, 0
        self.deaths = self.copies = self.second_answers = self.most_held = self.events = 0
        self.scheduling = 0.0
        self.finish: schedule_events.Finish | None = None

    def run(self) -> Outcome:
        began = thread_time()
        for replica in range(self.scenario.replicas):
            self._later(self.scenario.start_seconds * self.dice.random(), "up", replica, 0)
        self._later(TICK_SECONDS, "tick", 0, 0)
        self._perform(self.schedule.start())
        while self.finish is None:
            assert self.agenda, "nothing can happen any more, and the schedule has not finished"
            self.now, _, what, replica, detail = heapq.heappop(self.agenda)
            getattr(self, f"_{what}")(replica, detail)
        assert self.finish.reason is None, self.finish.reason
        innocent = 0
        for row, state in enumerate(self.state):
            assert state != QUEUED, f"row {row} is lost"
            assert state == FAILED or row not in self.poison
            innocent += state == FAILED and row not in self.poison
        ideal = self._ideal()
        return Outcome(
            rows=self.scenario.rows,
            failed=self.state.count(FAILED),
            innocent=innocent,
            deaths=self.deaths,
            makespan=round(self.now, 1),
            ideal=round(ideal, 1),
            excess=round(self.now / ideal - 1, 4),
            second_answers=self.second_answers,
            copies=self.copies,
            most_held=self.most_held,
            events=self.events,
            scheduler_microseconds_a_row=round(self.scheduling / self.scenario.rows * 1e6, 2),
            peak_mib=round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1),
            seconds=round(thread_time() - began, 1),
        )

    def _ideal(self) -> float:
        """The time at which all tokens would be written if they were divided ideally over the replicas that were up, at
        their speeds."""
        left = float(self.lengths.sum()) - sum(int(self.lengths[row]) for row in self.poison)
        for machine in self.machines.values():
            rate = machine.speed * self.scenario.slots
            self.trace.append((machine.slow_from, rate / machine.factor - rate))
        rate, before = 0.0, 0.0
        for moment, change in sorted(self.trace):
            if rate * (moment - before) >= left:
                break
            left -= rate * (moment - before)
            rate, before = rate + change, moment
        return before + left / rate

    def _later(self, after: float, what: str, replica: int, detail: int) -> None:
        self.counter += 1
        heapq.heappush(self.agenda, (self.now + after, self.counter, what, replica, detail))

    # Events of the simulated replicas

    def _tick(self, _: int, __: int) -> None:
        self._tell(schedule_events.Tick(self.now))
        self._later(TICK_SECONDS, "tick", 0, 0)

    def _up(self, replica: int, _: int) -> None:
        scenario, dice = self.scenario, self.dice
        self.lives += 1
        life = float(dice.exponential(scenario.mean_life))
        fate = dice.random()
        factor = (
            scenario.slowdown
            if fate < scenario.stragglers
            else np.inf
            if fate < scenario.stragglers + scenario.hangs
            else 1.0
        )
        slow_from = self.now + (float(dice.random()) * min(life, scenario.mean_life) if factor > 1 else np.inf)
        self.machines[replica] = _Machine(self.lives, float(self.speeds[replica]), slow_from, factor)
        self._later(life, "death", replica, self.lives)
        self.trace.append((self.now, self.machines[replica].speed * scenario.slots))
        self._tell(schedule_events.ReplicaUp(replica, scenario.capacity, scenario.slots))

    def _death(self, replica: int, life: int) -> None:
        machine = self.machines.get(replica)
        if machine is None or machine.life != life:
            return
        del self.machines[replica]
        self.deaths += 1
        rate = machine.speed * self.scenario.slots
        slowed = 0.0
        if machine.slow_from < self.now:
            slowed = rate - rate / machine.factor
            self.trace.append((machine.slow_from, -slowed))
        self.trace.append((self.now, slowed - rate))
        self._tell(schedule_events.ReplicaDown(replica, "boom"))

    def _done(self, replica: int, row: int) -> None:
        machine = self.machines.get(replica)
        if machine is None or row not in machine.running:
            return
        machine.running.remove(row)
        machine.ended.append(row)
        self._begin(replica, machine)
        if not machine.reporting:
            machine.reporting = True
            self._later(self.scenario.report_seconds, "report", replica, machine.life)

    def _report(self, replica: int, life: int) -> None:
        machine = self.machines.get(replica)
        if machine is None or machine.life != life:
            return
        machine.reporting = False
        ended, machine.ended = machine.ended, []
        new = tuple(row for row in ended if self.state[row] == QUEUED)
        self.second_answers += len(ended) - len(new)
        for row in new:
            self.state[row] = ENDED
        self.partial_results.difference_update(new)
        if new:
            self._tell(schedule_events.RowsEnded(replica, new))

    def _begin(self, replica: int, machine: _Machine) -> None:
        while machine.queue and len(machine.running) < self.scenario.slots:
            row = machine.queue.popleft()
            machine.running.add(row)
            if row in self.poison:
                self._later(1.0, "death", replica, machine.life)
            else:
                end = machine.end_of(float(self.lengths[row]), self.now)
                if end < np.inf:
                    self._later(end - self.now, "done", replica, row)

    # Events for the schedule, and its commands

    def _tell(self, event: schedule_events.Event) -> None:
        began = thread_time()
        commands = self.schedule.handle(event)
        self.scheduling += thread_time() - began
        self.events += 1
        self.most_held = max(self.most_held, self.schedule.rows_known)
        self._perform(commands)

    def _perform(self, commands: list[schedule_events.Command]) -> None:
        for command in commands:
            assert self.finish is None, f"{command} after the finish"
            match command:
                case schedule_events.Fetch(count):
                    last = min(self.scenario.rows, self.cursor + count)
                    rows = tuple((row, self.attempts[row]) for row in range(self.cursor, last))
                    self.cursor = last
                    self._tell(schedule_events.RowsFetched(rows, len(rows) < count))
                case schedule_events.Send(replica, rows):
                    self._send(replica, rows)
                case schedule_events.Cancel(replica, rows):
                    machine = self.machines[replica]
                    machine.running.difference_update(rows)
                    machine.queue = deque(row for row in machine.queue if row not in rows)
                    self._begin(replica, machine)
                case schedule_events.RecordAttempts(rows):
                    self.attempts.update(rows)
                    self.partial_results.difference_update(rows)
                case schedule_events.FailRow(row, _):
                    assert self.state[row] == QUEUED
                    assert self.attempts[row] >= schedule.MOST_ATTEMPTS
                    self.state[row] = FAILED
                case schedule_events.Restart(replica):
                    assert replica not in self.machines
                    self._later(self.scenario.start_seconds, "up", replica, 0)
                case schedule_events.Finish():
                    self.finish = command

    def _send(self, replica: int, rows: tuple[int, ...]) -> None:
        machine = self.machines[replica]
        held = machine.running | set(machine.queue)
        assert not held & set(rows), "a row was sent twice to one replica"
        assert len(held) + len(rows) <= self.scenario.capacity, "the replica is overfull"
        for row in rows:
            assert self.state[row] == QUEUED, "a row was sent after its end"
            self.copies += row in self.partial_results
            assert self.attempts[row] < 2 or (not held and len(rows) == 1), "a suspect has company"
        self.partial_results.update(rows)
        machine.queue.extend(rows)
        self._begin(replica, machine)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, value in asdict(Scenario()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    print(json.dumps(asdict(Simulation(Scenario(**vars(parser.parse_args()))).run()), indent=2))


if __name__ == "__main__":
    main()
