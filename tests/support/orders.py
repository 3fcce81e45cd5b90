"""A job with random failures: a seed decides which actors and hosts die, hang, join, and answer late, twice or never.

The driver, its replicas, the schedule and the journal are the real ones, on a Ray and a clock of this process
(``virtual_ray.py``). The driver itself may be killed between any two of its steps, and is started again on the same
journal. Failures happen until a certain time (``horizon``); after it there are none, and the job must end.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ray.exceptions import RayActorError
from virtual_ray import Actor, Crash, DraftActor, Fate, Future, TargetActor, VirtualRay, in_place_of_ray, result_of

from outrider.runner.driving.driver import Driver
from outrider.runner.driving.schedule import MOST_ATTEMPTS
from outrider.runner.job.journal import DONE, FAILED, Journal, StoredRow
from outrider.runner.job.requests import MOST_SAMPLES
from outrider.runner.job.resolved_request import samples_of
from outrider.runner.job.results import error_record, result_record
from outrider.runner.planning.placement import PlannedActor
from outrider.runner.planning.replica_plan import ActorPlan, ReplicaPlan
from outrider.workers.errors import JobChangedError, JobError, LeaseError, RayLostError, UsageError, WorkerError
from outrider.workers.machine.pinning import Launch
from outrider.workers.messages import ActorPlacement, ModelSpec, ReplicaSpec, Row, RowFailure

MODEL = "tiny"
# A job that takes longer after the last failure, or more runs, will never end.
CALM_SECONDS = 5000.0
MOST_RUNS = 80
DEADLINE = 30.0
PATIENCE = 300.0
HARMS = ("target", "draft", "host", "join", "freeze", "drain", "ray", "crash")


class Violation(BaseException):
    """An invariant is violated; the message has the seed and the events before. As a BaseException, which the driver does
    not catch."""


@dataclass(slots=True)
class Host:
    """``name`` is the id of its Ray node, ``known_gone`` the time at which its end is known."""

    name: str
    replicas: int
    known_gone: float | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """The figures of a job that has ended."""

    runs: int
    deaths: int
    blamed: int
    seconds: float


class FailingJob:
    """A job and the failures that ``seed`` decides."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.ray = VirtualRay(seed)
        self.ray.step = self._step
        dice = self.dice = self.ray.dice
        self.horizon = dice.choice((20.0, 60.0, 200.0))
        self.batch = dice.randint(1, 4)
        self.with_draft = dice.random() < 0.4
        # One machine as ``LocalHost`` sees it, or a cluster whose hosts come and go.
        self.one_machine = dice.random() < 0.3
        self.hosts = [Host(f"{n:056x}", dice.randint(1, 2)) for n in range(1 if self.one_machine else dice.randint(1, 4))]
        self.rows = dice.choice((1, 3, 10, 25, 60))
        numbers = range(self.rows)
        self.poison = {dice.choice(numbers) for _ in range(dice.choice((0, 0, 1, 2)))}
        self.refused = {dice.choice(numbers) for _ in range(dice.choice((0, 0, 1)))} - self.poison
        # Without random deaths only rows that kill their target may be blamed.
        self.kills = dice.random() < 0.6
        self.chance = dict.fromkeys(("fails", "never", "lease", "usage", "lost", "twice", "late", "path"), 0.0)
        for what in dice.sample(sorted(self.chance), 3):
            self.chance[what] = dice.choice((0.02, 0.1, 0.3))
        if not self.kills:
            self.chance["lost"] = 0.0
        self.journal = Journal(Path(":memory:"))
        self.door = Door(self)
        self.stored = self._fill()
        self.acknowledged: dict[int, str] = {}
        # For each row the deaths of targets that had it; no other death may count against the row.
        self.present: Counter[int] = Counter()
        self.witnessed: set[TargetActor] = set()
        self.blameable = self.deaths = 0
        self.driver: Driver | None = None
        self.job_hosts: Hosts | None = None
        self.lost: str | None = None
        self.allowed: set[type[BaseException]] = set()
        self.crash_in: int | None = None
        self.crashed = False
        self._harm()

    def _fill(self) -> list[StoredRow]:
        def request(number: int) -> dict[str, Any]:
            return {
                "max_tokens": self.dice.choice((3, 20, 100)), "n": self.dice.choice((1, 1, 1, 2, 3)), "stop": [],
                "temperature": 0.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "seed": number, "repetition_penalty": 1.0,
                "presence_penalty": 0.0, "frequency_penalty": 0.0, "logit_bias": [],
            }  # fmt: skip

        stored = [StoredRow(n, f"id-{n}", n + 1, "completion", request(n), (n, 7)) for n in range(self.rows)]
        bad = StoredRow(self.rows, "bad", self.rows + 1, "completion", {}, ())
        self.journal.fill(stored, [(bad, error_record(bad, "invalid_request", "was never good"))], {})
        return stored

    # Failures

    def _harm(self) -> None:
        kinds = [kind for kind in HARMS if self.dice.random() < 0.5 and (self.kills or kind != "target")]
        for kind in kinds:
            for _ in range(self.dice.choice((1, 2, 5, 12))):
                self.ray.later(self.dice.random() * self.horizon, getattr(self, f"_{kind}"))
        self.ray.later(self.horizon, self._calm)

    @property
    def calm(self) -> bool:
        return self.ray.now >= self.horizon

    def host_gone(self, name: str | None) -> float | None:
        """The time from which it is known that the host is gone, which may be in the future; None while it is up."""
        return next((host.known_gone for host in self.hosts if host.name == name), None)

    def _living(self, kind: type[Actor]) -> list[Any]:
        return [actor for actor in self.ray.actors if actor.alive and isinstance(actor, kind)]

    def _target(self) -> None:
        if living := self._living(TargetActor):
            self.kill(self.dice.choice(living), "is killed")

    def kill(self, target: TargetActor, how: str) -> None:
        self.witness(target)
        target.die(how)

    def witness(self, target: TargetActor) -> None:
        """The target is about to die, and the driver will see it: the rows that it was given may be suspected."""
        self.deaths += 1
        self.blameable += 1
        self.witnessed.add(target)
        self.present.update({key // MOST_SAMPLES for key in target.given})

    def _draft(self) -> None:
        if living := self._living(DraftActor):
            self.dice.choice(living).die("is killed")

    def _host(self) -> None:
        here = [host for host in self.hosts if host.known_gone is None]
        if self.one_machine or not here:
            return
        host = self.dice.choice(here)
        self.ray.say(f"host {host.name[-3:]} goes down")
        host.known_gone = self.ray.now + self.dice.choice((0.05, 1.0, 20.0)) * self.dice.random()
        for actor in self.ray.actors:
            if actor.host == host.name:
                actor.die("dies with its host")
        self.ray.later(self.dice.choice((3.0, 40.0)) * self.dice.random(), self._join)

    def _join(self) -> None:
        if not self.one_machine:
            self.hosts.append(Host(f"{len(self.hosts):056x}", self.dice.randint(1, 2)))
            self.ray.say(f"host {self.hosts[-1].name[-3:]} joins")

    def _freeze(self) -> None:
        if living := self._living(Actor):
            self.allowed.add(WorkerError)  # it may still have been loading
            self.dice.choice(living).freeze(self.dice.choice((0.5, 5.0, 50.0)) * self.dice.random())

    def _drain(self) -> None:
        if self.driver is not None:
            self.ray.say("a drain is asked for")
            self.driver.drain()

    def _ray(self) -> None:
        """Ray dies. Its actors die before the driver knows of it, and no row may be blamed for that."""
        if self.driver is not None and self.lost is None:
            self.ray.say("Ray dies")
            self.lost = "Ray was killed"
            for actor in self.ray.actors:
                actor.die("dies with Ray")

    def _crash(self) -> None:
        if self.driver is not None:
            self.crash_in = self.dice.randint(1, 40)

    def _calm(self) -> None:
        self.ray.say("from now on all is calm")
        if not self.one_machine and all(host.known_gone is not None for host in self.hosts):
            self._join()

    def _step(self) -> None:
        if self.crashed:
            raise Crash
        self.ray.now += 0.0005
        if self.crash_in is not None:
            self.crash_in -= 1
            if self.crash_in <= 0:
                self.ray.say("the driver is killed")
                self.crashed = True
                raise Crash
        if self.ray.now > self.horizon + CALM_SECONDS:
            raise Violation(self.told("the job does not come to its end"))

    # The runs of the job

    def run(self) -> Outcome:
        runs = 0
        with in_place_of_ray(self.ray, lambda: Chance(self)):
            while self.journal.counts().pending:
                runs += 1
                if runs > MOST_RUNS:
                    raise Violation(self.told("the job is begun again and again"))
                self._run_once()
                self._check()
                self.ray.sleep(self.dice.random() * 3.0)
        self._check_end()
        blamed = sum("replica_died" in record for record in self.journal.records(FAILED))
        return Outcome(runs, self.deaths, blamed, self.ray.now)

    def _run_once(self) -> None:
        self.lost, self.crashed, self.crash_in, self.allowed = None, False, None, set()
        self.job_hosts = Hosts(self)
        while not (plans := self.job_hosts.open()):
            self.ray.sleep(1.0)
        self.ray.say(f"the driver begins with {len(plans)} replicas")
        try:
            self.driver = Driver(
                self.door,  # type: ignore[arg-type]
                plans, MODEL, DEADLINE, self._agree_on_path, self.job_hosts, lambda counters: self._step(), None, PATIENCE,
            )  # fmt: skip
            self.driver.run()
            if not self.driver.draining and self.journal.counts().pending:
                raise Violation(self.told("the driver has ended, and rows are left"))
        except Crash:
            pass
        except Exception as error:
            if not self._may_end_by(error):
                raise Violation(self.told(f"the driver has ended by {error!r}")) from error
            self.ray.say(f"the driver has ended: {error!r}")
        finally:
            self.driver = None
            self.ray.kill_all()

    def _may_end_by(self, error: Exception) -> bool:
        if isinstance(error, RayLostError):
            return self.lost is not None
        if type(error) is JobError:
            # Replicas are given up after three deaths each; or there was no place for any replica.
            return "has had cores" in str(error) if not self.deaths else True
        return type(error) in self.allowed

    def _agree_on_path(self, path: dict[str, str]) -> None:
        if not self.calm and self.dice.random() < self.chance["path"]:
            self.allowed.add(JobChangedError)
            raise JobChangedError("it computes otherwise")

    # Invariants

    def told(self, what: str) -> str:
        return f"seed {self.seed}: {what} (python stress/orders.py --seeds {self.seed})\n" + "\n".join(self.ray.log[-60:])

    def _demand(self, holds: bool, what: str) -> None:
        if not holds:
            raise Violation(self.told(what))

    def _check(self) -> None:
        records = dict(self.journal._query("SELECT row, record FROM records"))
        states = dict(self.journal._query("SELECT row, state FROM rows"))
        ended = {row for row, state in states.items() if state in (DONE, FAILED)}
        self._demand(ended == records.keys(), "a row is marked as ended without a record, or the other way round")
        for row, record in self.acknowledged.items():
            self._demand(records.get(row) == record, f"row {row} had ended, and is not as it was")
        done = [row for row, state in states.items() if state == DONE]
        self._demand(all(records[row] == self._expected(row) for row in done), "a row is done, and not as undisturbed")
        tokens = sum(json.loads(records[row])["response"]["body"]["usage"]["completion_tokens"] for row in done)
        counters = self.journal.meta("totals") or {"tokens": 0}
        self._demand(counters["tokens"] == tokens, f"{counters['tokens']} tokens are counted, and {tokens} written")
        for row, attempts in self.journal._query("SELECT row, attempts FROM rows WHERE attempts > 0"):
            self._demand(attempts <= self.present[row], f"row {row} is blamed for {attempts} deaths")

    def _expected(self, row: int) -> str:
        stored = self.stored[row]
        return result_record(stored, [result_of(sample) for sample in samples_of(stored)], MODEL)

    def _check_end(self) -> None:
        failed = dict(self.journal._query("SELECT row, record FROM records JOIN rows USING (row) WHERE state = 2"))
        blamed = {row for row, record in failed.items() if "replica_died" in record}
        self._demand(self.poison <= blamed, "a row that kills its target has not failed")
        refused = (self.refused - blamed) | {self.rows}
        self._demand(failed.keys() - blamed == refused, "other rows were refused than should be")
        for row in blamed - self.poison:
            self._demand(self.kills, f"row {row} is blamed, and is innocent")
            self._demand(self.present[row] >= MOST_ATTEMPTS, f"row {row} is blamed for more than it was present at")


class Chance(Fate):
    """An actor's fate, drawn from the job's dice."""

    def __init__(self, job: FailingJob) -> None:
        self.job = job
        self._pace = job.dice.choice((0.01, 0.05, 0.3))

    def _happens(self, what: str) -> bool:
        job = self.job
        return not job.calm and job.dice.random() < job.chance[what]

    def start(self, actor: Actor) -> tuple[float | None, Exception | None]:
        job = self.job
        if job.host_gone(actor.host) is not None:
            actor.die("is nowhere to be started")
            return None, None
        seconds = 1.0 + 5.0 * job.dice.random()
        if self._happens("never"):
            job.ray.say(f"{actor.name} never comes up")
            if isinstance(actor, TargetActor):
                job.allowed.add(WorkerError)
                job.deaths += 1
            return None, None
        if self._happens("fails"):
            job.deaths += 1
            return seconds, WorkerError("no memory")
        if self._happens("usage"):
            # Ends the job, or counts as a death if any replica has been up before.
            job.allowed.add(UsageError)
            job.deaths += 1
            return seconds, UsageError("this model cannot be")
        if self._happens("lease"):
            return seconds, LeaseError("core 1 is held by another")
        return seconds, None

    def notice(self) -> float:
        return self.job.dice.choice((0.01, 0.3, 3.0)) * self.job.dice.random()

    def seconds_a_token(self) -> float:
        return self._pace

    def begins(self, target: TargetActor, row: Row) -> RowFailure | None:
        return RowFailure(row.key, "cannot be") if row.key // MOST_SAMPLES in self.job.refused else None

    def given(self, target: TargetActor, rows: Sequence[Row]) -> None:
        if target in self.job.witnessed:
            self.job.present.update({row.key // MOST_SAMPLES for row in rows})

    def fatal(self, target: TargetActor, row: Row) -> float | None:
        poison = row.key // MOST_SAMPLES in self.job.poison
        return self.job.dice.choice((0.0, 2.0)) * self.job.dice.random() if poison else None

    def dies_of(self, target: TargetActor, row: Row) -> None:
        self.job.kill(target, f"dies of row {row.key // MOST_SAMPLES}")

    def answers(self, target: TargetActor) -> tuple[float, str]:
        late = self.job.dice.random() * (20.0 if self._happens("late") else 0.02)
        if self._happens("lost"):
            self.job.ray.say(f"an answer of {target.name} is lost")
            self.job.witness(target)
            return late, "lost"
        return late, "twice" if self._happens("twice") else ""


class Door:
    """The journal, for a driver that may be killed before and after every call of it."""

    def __init__(self, job: FailingJob) -> None:
        self._job = job

    def __getattr__(self, name: str) -> Callable[..., Any]:
        job = self._job
        method = getattr(job.journal, name)

        def called(*arguments: Any) -> Any:
            job.ray.step()
            answer = method(*arguments)
            if name == "count_attempt":
                job.blameable -= 1
                job._demand(job.blameable >= 0, "rows are blamed for a death that was none")
            # If the driver is killed here, it does not learn that the call succeeded.
            job.ray.step()
            if name == "record":
                job.acknowledged |= {row: record for records in arguments[:2] for row, record in records}
            return answer

        return called


class Hosts:
    """The hosts as one driver sees them: places without a replica are offered again after POLL_SECONDS."""

    POLL_SECONDS = 2.0

    def __init__(self, job: FailingJob) -> None:
        self._job = job
        self._used: dict[str, list[ReplicaPlan]] = {}
        self._looked = 0.0

    def open(self) -> list[ReplicaPlan]:
        return [plan for host in self._idle() for plan in self._plan_replicas(host)]

    def _idle(self) -> list[Host]:
        return [host for host in self._job.hosts if host.known_gone is None and not self._used.get(host.name)]

    def _plan_replicas(self, host: Host) -> list[ReplicaPlan]:
        job = self._job
        self._used[host.name] = plans = [plan_on(job, host.name) for _ in range(host.replicas)]
        return list(plans)

    def lost(self) -> str | None:
        self._job.ray.step()
        return self._job.lost

    def new_replica_plans(self, unplaced: int) -> list[ReplicaPlan]:
        job = self._job
        job.ray.step()
        if job.one_machine:
            return [plan_on(job, None)] if unplaced and job.dice.random() < 0.3 else []
        if job.ray.now - self._looked < self.POLL_SECONDS:
            return []
        self._looked = job.ray.now
        return self.open()

    def gone(self, plan: ReplicaPlan) -> bool:
        self._job.ray.step()
        known = self._job.host_gone(plan.target.node)
        return known is not None and self._job.ray.now >= known

    def sign_of_life(self, plan: ReplicaPlan) -> Future | None:
        job = self._job
        job.ray.step()
        if job.one_machine and job.dice.random() < 0.3:
            return None
        future = Future()
        gone = job.host_gone(plan.target.node)
        if gone is not None:
            job.ray.later(max(0.0, gone - job.ray.now), lambda: future.resolve(RayActorError()))
        elif job.calm or job.dice.random() < 0.9:
            job.ray.later(job.dice.random() * 2.0, lambda: future.resolve(None))
        return future

    def release(self, plan: ReplicaPlan) -> None:
        self._job.ray.step()
        for plans in self._used.values():
            plans[:] = [other for other in plans if other is not plan]

    def host(self, plan: ReplicaPlan) -> str:
        return str(plan.target.node)


def plan_on(job: FailingJob, host: str | None) -> ReplicaPlan:
    def actor(role: str) -> ActorPlan:
        planned = PlannedActor(role, 0, "here", (0,), (), 1, "cpu", "", {}, (), {})
        plan_on_free_cores = ActorPlacement(Launch(planned.pin, "affinity", (), "python3"))
        return ActorPlan(ModelSpec("/models/tiny", "hf", "fp32"), planned, plan_on_free_cores, host)

    replica_spec = ReplicaSpec(batch=job.batch, draft_tokens=3)
    return ReplicaPlan(actor("target"), actor("draft") if job.with_draft else None, replica_spec)
