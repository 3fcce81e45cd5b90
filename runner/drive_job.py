"""Run a prepared job: find its hosts, run the driver, drain on Ctrl-C, and write the outputs whatever stops it."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from outrider.runner import continued
from outrider.runner.counted import counted
from outrider.runner.hosts.ray_restart import check_worth_another
from outrider.runner.hosts.ray_start import joined_ray
from outrider.runner.hosts.submit import absolute_model
from outrider.runner.hosts.this_machine import Hosts, local_host
from outrider.runner.job.directory import describe
from outrider.runner.job.identity import check_same
from outrider.runner.job.journal import Journal
from outrider.runner.job.results import write_results
from outrider.runner.model_choice import placement_request_of
from outrider.runner.options.job import JobSpec
from outrider.runner.options.option import flag_of
from outrider.runner.planning.replica_plan import ReplicaPlan
from outrider.runner.prepare_job import MODEL_NAME, PreparedJob
from outrider.runner.process_exit import end_signals, is_repeated_signal
from outrider.runner.report import statistics
from outrider.runner.report.counters import JobCounters
from outrider.runner.report.display import Watcher
from outrider.runner.report.report import write_report
from outrider.runner.report.summary import summarize
from outrider.runner.report.trace import TraceFile
from outrider.workers.errors import OutriderError, RayLostError, UsageError

# Options without effect when no row is left to run.
_UNUSED = {
    "trace": "there is nothing to trace",
    "address": "no cluster is joined",
    "metrics_port": "no metrics are served",
}


@contextmanager
def _hosts(spec: JobSpec, prepared: PreparedJob, display: Watcher) -> Iterator[tuple[Hosts, list[ReplicaPlan]]]:
    """The hosts that the job runs on, and the plans of its first replicas."""
    replica_template, sizes = prepared.replica_template, prepared.sizes
    request_for_cores = partial(placement_request_of, spec, replica_template.movable)
    if spec.address is None:
        options = (spec.wait_for_cores, display.say, spec.metrics_port, spec.start_deadline)
        with ExitStack() as stack:
            try:
                host_and_plans = stack.enter_context(local_host(replica_template, sizes, request_for_cores, *options))
            except RayLostError as lost:
                check_worth_another(prepared.journal, lost, ours=True)
                raise
            yield host_and_plans
        return
    if spec.metrics_port is not None:
        raise UsageError(
            "--metrics-port is for a Ray that the job starts; the metrics of a cluster are set up where it is started"
        )
    # Absolute paths, since the working directory differs between hosts.
    models = {absolute_model(model_info.name): (model_info.path, model_info.digest) for model_info in prepared.model_infos}
    kept = (prepared.journal.meta("numeric_path") or {}).get("instruction_set")
    with joined_ray(spec.address) as head:
        # Ray reads its settings when it is first imported, so nothing that imports it may come before it starts.
        from outrider.runner.hosts.cluster import ClusterHosts, cluster

        hosts = ClusterHosts(replica_template, sizes, spec.replicas, request_for_cores, models, kept, display.say, head)
        with cluster(hosts, spec.wait_for_cores) as hosts_and_plans:
            yield hosts_and_plans


def drive(spec: JobSpec, directory: Path, prepared: PreparedJob, display: Watcher) -> dict[str, Any]:
    """Run until all rows have ended or a stop is asked for, and write the job's files; returns the outcome in job.json."""
    journal = prepared.journal
    counts = journal.counts()
    if counts.pending:
        # Failed rows alone do not mean that the job has run: rows that are wrong in the input fail at admission.
        if journal.meta("numeric_path") is not None and (counts.done or counts.failed):
            display.say(f"resuming {directory}: {counts.done + counts.failed:,} of {counted(counts.rows, 'row')} ended")
        return _run_pending(spec, directory, prepared, display)
    for option, what in _UNUSED.items():
        if getattr(spec, option) is not None:
            display.say(f"note: {flag_of(JobSpec, option)}: nothing was left to do, so {what}")
    outcome = _outcome(journal, interrupted=False)
    for write in _files(journal, directory, lambda: outcome):
        write()
    return outcome


def _outcome(journal: Journal, interrupted: bool) -> dict[str, Any]:
    return {
        "summary": summarize(journal),
        "over_time": statistics.over_time(journal.meta(statistics.KEY)),
        "interrupted": interrupted,
        # Unknown as long as no target has come up.
        "numeric_path": journal.meta("numeric_path") or {},
    }


def _files(journal: Journal, directory: Path, description: Callable[[], dict[str, Any]]) -> list[Callable[[], object]]:
    """The steps that write the job's files. The report has what job.json says."""

    def in_place(step: Callable[[], object]) -> Callable[[], object]:
        """The step, where the directory is still this job's: one of that name may be another's by now."""

        def checked() -> None:
            journal.check_in_place()
            step()

        return checked

    return [
        in_place(lambda: write_results(journal, directory)),
        in_place(lambda: describe(directory, journal, description())),
        in_place(lambda: write_report(journal, directory, running=False)),
    ]


def _run_pending(spec: JobSpec, directory: Path, prepared: PreparedJob, display: Watcher) -> dict[str, Any]:
    """Run the pending rows until all have ended or a stop is asked for, and write the job's files; returns the outcome."""
    journal = prepared.journal
    outcome: dict[str, Any] = {}

    def description() -> dict[str, Any]:
        outcome.update(_outcome(journal, driver.draining and journal.counts().pending > 0))
        return {**_run_details(driver), **outcome}

    def agree_on_path(path: dict[str, str]) -> None:
        kept = journal.meta("numeric_path")
        if kept is None:
            journal.set_meta("numeric_path", path)
        else:
            check_same(kept, path, "a numeric path", directory)

    trace, shown = TraceFile(spec.trace), _Shown(display)
    with _hosts(spec, prepared, display) as (where, plans):
        from outrider.runner.driving.driver import Driver

        driver = Driver(
            journal,
            plans,
            # A job of an older outrider lacks the key.
            journal.meta(MODEL_NAME) or spec.model,
            spec.start_deadline,
            agree_on_path,
            where,
            lambda counters: shown.show(counters, driver.draining),
            trace,
            spec.wait_for_cores,
        )
        with (
            # Around the writing, too: a first Ctrl-C that comes as the last row has ended must not keep it unwritten.
            _draining_on_signals(driver),
            _always_afterwards(
                display.say,
                lambda: _close(trace, display),
                # Also after an error, so that the rows that are done can be read.
                *_files(journal, directory, description),
            ),
        ):
            try:
                with continued.counted():
                    driver.run()
            except RayLostError as lost:
                if driver.draining:
                    display.say(str(lost))
                else:
                    check_worth_another(journal, lost, ours=spec.address is None)
                    if said := trace.set_aside():
                        display.say(f"trace: {said}")
                    raise
        return outcome


@contextmanager
def _always_afterwards(say: Callable[[str], None], *steps: Callable[[], object]) -> Iterator[None]:
    """Take these steps after the block, also when it raises.

    The block's own error is the one that is raised: a step that fails after it (often by the same full disk) is a note,
    unless it fails by that error itself.
    """
    try:
        yield
    except BaseException as first:
        for step in steps:
            try:
                step()
            except (OutriderError, OSError) as error:
                if str(error) != str(first):
                    say(f"note: {error}")
        raise
    for step in steps:
        step()


def _close(trace: TraceFile, display: Watcher) -> None:
    if said := trace.close():
        display.say(f"trace: {said}")


def _run_details(driver: Any) -> dict[str, Any]:
    """What job.json says of how the replicas ran."""
    record = driver.record
    return {
        "pinning": list(record.pinned.values()),
        "layouts": record.layouts,
        "costs": record.costs,
        "rows_by_host": dict(record.rows_by_host),
    }


class _Shown:
    """Shows the job's progress, and says once that the job drains.

    The signal's handler does not: the signal may come amid a print, and a stream cannot be written within its own writing.
    """

    def __init__(self, display: Watcher) -> None:
        self._display = display
        self._said = False

    def show(self, counters: JobCounters, draining: bool) -> None:
        if draining and not self._said:
            self._said = True
            said = "finishing the rows under way; Ctrl-C again stops at once (either way the job can be resumed)"
            self._display.say(said)
        self._display.show(counters)


@contextmanager
def _draining_on_signals(driver: Any) -> Iterator[None]:
    """The first Ctrl-C, SIGTERM or SIGHUP drains the job, a second Ctrl-C or SIGTERM stops it at once.

    SIGHUP (a terminal that closes) never counts as the second: the kernel and the shell may both send it, and a user who
    has asked the job to drain may close the terminal.
    """

    def handle(number: int, frame: Any) -> None:
        repeated = is_repeated_signal()
        if not driver.draining:
            driver.drain()
        elif number != signal.SIGHUP and not repeated:
            raise KeyboardInterrupt

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, *end_signals())}
    try:
        yield
    finally:
        for number, handler in before.items():
            if number != signal.SIGHUP or not driver.draining:
                signal.signal(number, handler)
