"""The driver in a model's process of the batch server: rows of several jobs, and no end when none waits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue

from outrider.runner.driving import schedule_events
from outrider.runner.driving.driver import DriverLoop
from outrider.runner.driving.schedule import Schedule
from outrider.runner.hosts.this_machine import Hosts
from outrider.runner.job.identity import check_same
from outrider.runner.planning.replica_plan import ReplicaPlan
from outrider.runner.report.trace import TraceFile
from outrider.runner.serve.shared_jobs import Job, SharedJobs, first_row

# The time between harvests while a request is streamed.
STREAMED_SECONDS = 0.25


class SharedDriver(DriverLoop):
    """At every turn of the loop the functions in ``inbox`` are called, then ``after``."""

    def __init__(
        self,
        jobs: SharedJobs,
        plans: Sequence[ReplicaPlan],
        start_deadline: float,
        hosts: Hosts,
        patience: float,
        inbox: SimpleQueue[Callable[[], None]],
        after: Callable[[], None],
    ) -> None:
        self.jobs = jobs
        self._inbox = inbox
        self._after = after
        # ahead=1: few rows wait in the schedule, so that rows of a new job need not wait long.
        waiting = Schedule(range(len(plans)), ahead=1, stays_open=True)
        super().__init__(
            jobs,
            jobs,
            plans,
            waiting,
            start_deadline,
            self._agree_on_path,
            hosts,
            lambda counters: None,
            TraceFile(None),
            patience,
        )

    def offer(self) -> None:
        """Tell the schedule that there are rows of a new job, or of a single request."""
        self._tell_schedule(schedule_events.RowsOffered())

    def withdraw(self, job: Job) -> None:
        """Do nothing more for this job, and cancel its rows in progress."""
        # Set first, since the schedule fills the room at once, which must not be by rows of this job.
        job.exhausted = True
        self._tell_schedule(schedule_events.RowsWithdrawn(first_row(job.number), first_row(job.number + 1) - 1))

    def withdraw_single(self, request: str) -> None:
        number = self.jobs.single.withdraw(request)
        if number is not None:
            self._tell_schedule(schedule_events.RowsWithdrawn(number, number))
            self.jobs.single.forget(number)

    def _agree_on_path(self, path: dict[str, str]) -> None:
        """All replicas must have the same numeric path; each job's own is compared when it is opened."""
        if self.jobs.path is None:
            self.jobs.path = path
        else:
            for job in self.jobs.jobs.values():
                check_same(self.jobs.path, path, "a numeric path", job.directory)

    def _ask_for_harvests(self) -> None:
        if not self.jobs.single.streaming:
            super()._ask_for_harvests()
            return
        for replica in self._replicas.values():
            replica.harvest(STREAMED_SECONDS)

    def _at_every_tick(self) -> None:
        while True:
            try:
                act = self._inbox.get_nowait()
            except Empty:
                break
            act()
        self._after()
