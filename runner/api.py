"""The Python interface: ``outrider.run`` and ``outrider.open``, and the ``Job`` that both give.

A job runs in a process of its own, by the same functions as from the command line. So it does not touch the caller's
signals, terminal or Ray, and the caller needs no ``if __name__ == "__main__"``.
"""

from __future__ import annotations

import inspect
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Set
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack, get_type_hints

from outrider.runner.counted import counted
from outrider.runner.job_process import JobProcess
from outrider.runner.options.job import JobSpec
from outrider.runner.options.option import build_options, home_read, option_of, sections, takes_path
from outrider.runner.progress import ProgressLine
from outrider.runner.run_arguments import RunArguments
from outrider.runner.temporary_file import temporary_file
from outrider.runner.validation_errors import shown
from outrider.runner.working_directory import working_directory
from outrider.workers.errors import OutriderError, UsageError

if TYPE_CHECKING:
    from outrider.runner.job.journal import Counts, Journal
    from outrider.runner.job.records import Record
    from outrider.runner.report.summary import Summary

POLL_SECONDS = 0.1
DRAINING = "finishing the rows under way; interrupt again to stop at once (either way the same call goes on with the job)"


class Job:
    """A job: its directory with the results so far and, if this program started it, its process.

    ``outrider.run`` and ``outrider.open`` make one.
    """

    def __init__(self, directory: Path, process: JobProcess | None = None, progress: bool | None = False) -> None:
        self.directory = directory
        self._process = process
        self._progress = ProgressLine(progress)
        self._notes: list[str] = []

    def __repr__(self) -> str:
        try:
            status = self.status
            if status == "starting":
                return f"Job({str(self.directory)!r}, {status})"
            counts = self._counts()
        except OutriderError as error:  # a notebook shows the repr, also of a job whose journal is damaged
            return f"Job({str(self.directory)!r}: {error})"
        ended = f"{counts.done:,} done, {counts.failed:,} failed"
        return f"Job({str(self.directory)!r}, {status}: {counted(counts.rows, 'row')}, {ended})"

    @property
    def status(self) -> str:
        """``starting`` (no row is accepted yet), ``running``, ``done`` (all rows have ended) or ``stopped`` (not all)."""
        from outrider.runner.job.directory import is_job

        # Another process may have resumed the job since this program's own process ended.
        running = self._own_runs or self._is_held
        if not is_job(self.directory):
            return "starting" if running else "stopped"
        return "running" if running else "stopped" if self._counts().pending else "done"

    @property
    def summary(self) -> Summary:
        """What the job has done so far; its attributes are the keys of ``summary`` in job.json."""
        from outrider.runner.report.summary import Summary, summarize

        with closing(self._journal()) as journal:
            return Summary(summarize(journal))

    @property
    def notes(self) -> tuple[str, ...]:
        """The job's messages: settings of a model that are not followed, actors that died and were restarted, and so on."""
        if self._process is not None:
            self._process.follow(self._tell, seconds=0.0)
        return tuple(self._notes)

    def results(self) -> Iterator[Record]:
        """The rows with answers, in input order, also while the job runs. Use the iterator in one thread only."""
        from outrider.runner.job import records

        if not self._is_starting:
            self._check_there()
            yield from records.results(self.directory)

    def errors(self) -> Iterator[Record]:
        """The rows that failed, in input order, each with its ``error``."""
        from outrider.runner.job import records

        if not self._is_starting:
            self._check_there()
            yield from records.errors(self.directory)

    def to_parquet(self, path: str | os.PathLike[str]) -> Path:
        """Write all rows that have ended, in input order, to a Parquet file; those that failed have an ``error``."""
        from outrider.runner.job.tables import PARQUET

        return self._write_table(path, PARQUET)

    def to_csv(self, path: str | os.PathLike[str]) -> Path:
        """The same as CSV, compressed where the file's name ends in .gz or .zst."""
        from outrider.runner.job.tables import CSV

        return self._write_table(path, CSV)

    def to_jsonl(self, path: str | os.PathLike[str]) -> Path:
        """The same as lines of JSON, compressed where the file's name ends in .gz or .zst."""
        from outrider.runner.job.tables import JSONL

        return self._write_table(path, JSONL)

    def to_dataset(self, path: str | os.PathLike[str]) -> Path:
        """The same as a directory that Hugging Face's ``datasets.load_from_disk`` reads."""
        from outrider.runner.job.tables import DATASET

        return self._write_table(path, DATASET)

    def report(self) -> Path:
        """Write report.html, the job in charts, and return its path."""
        from outrider.runner.report.report import report_of

        self._check_there()
        return report_of(self.directory)[0]

    def wait(self, timeout: float | None = None) -> Job:
        """Wait until the job has ended; raise ``TimeoutError`` if that takes longer than ``timeout`` seconds.

        A job that could not run raises the error that the command line would print. A ``KeyboardInterrupt`` drains the job
        and is raised once the rows in progress have ended; a second one stops the job at once.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        if self._process is not None:
            self._wait_for_own(self._process, timeout)
        while self._is_held:
            if deadline is not None and time.monotonic() >= deadline:
                raise TimeoutError(f"{self.directory} still runs after {timeout:g} s")
            time.sleep(POLL_SECONDS)
        return self

    def cancel(self) -> Job:
        """Let the rows in progress end, and stop. ``outrider.run`` on the same directory resumes the job."""
        if self._process is not None and self._process.running:
            self._process.drain()
            self._wait_for_own(self._process, None)
            return self
        if self._is_held:
            from outrider.runner.job.directory import holder_of

            raise UsageError(
                f"{self.directory} is run by {holder_of(self.directory)}, and is stopped there "
                "(Ctrl-C, kill with the number of its process, or outrider cancel)"
            )
        return self if self._process is None else self.wait()

    def retry(self, *, wait: bool = True, progress: bool | None = None, **options: Unpack[RunArguments]) -> Job:
        """Run the failed rows again with the job's options; those given here take precedence."""
        from outrider.runner.retry import retry_spec

        self._check_there()
        job = Job(self.directory, JobProcess(retry_spec(self.directory, _texts_of(options)), retry_failed=True), progress)
        return job._wait_or_drain() if wait else job

    def _write_table(self, path: str | os.PathLike[str], form: str) -> Path:
        from outrider.runner.job.tables import format_of, write_table

        to = _path_of(path)
        if format_of(to) not in (None, form):
            raise UsageError(f"{to} does not end like a file of {form}; give another name")
        self._check_there()
        return write_table(self.directory, to, form)

    def _counts(self) -> Counts:
        with closing(self._journal()) as journal:
            return journal.counts()

    def _journal(self) -> Journal:
        from outrider.runner.job.directory import open_job

        self._check_there()
        return open_job(self.directory)

    def _check_there(self) -> None:
        """Refuse a job without a journal: it is starting, or it ended before its input was accepted."""
        from outrider.runner.job.directory import is_job

        if self._is_starting:
            raise UsageError(
                f"{self.directory} is being started: its input has not been accepted yet; wait until job.status is "
                '"running"'
            )
        if self._process is not None and not self._is_held and not is_job(self.directory):
            raise UsageError(f"{self.directory} holds no job: it ended before its input was accepted")

    @property
    def _is_starting(self) -> bool:
        """Whether this program's own process runs and has no journal yet."""
        # The order matters: the process may make the journal in between.
        from outrider.runner.job.directory import is_job

        return self._own_runs and not is_job(self.directory)

    def _tell(self, event: dict[str, Any]) -> None:
        if "note" in event:
            self._notes.append(event["note"])
            self._progress.say(event["note"])
        if "progress" in event:
            self._progress.show(event["progress"])

    def _stop(self, process: JobProcess) -> None:
        process.drain()
        self._progress.say(DRAINING)
        try:
            process.follow(self._tell)
        except KeyboardInterrupt:
            process.drain()
            process.follow(self._tell)
        self._progress.end()

    def _wait_or_drain(self) -> Job:
        """Wait; if that raises, drain the job, since the caller then gets no ``Job`` by which to stop it."""
        try:
            return self.wait()
        except BaseException:
            if self._process is not None and self._process.running:
                self._process.drain()
            raise

    def _wait_for_own(self, process: JobProcess, timeout: float | None) -> None:
        try:
            ended = process.follow(self._tell, timeout)
        except KeyboardInterrupt:
            self._stop(process)
            raise
        if not ended:
            raise TimeoutError(f"{self.directory} still runs after {timeout:g} s")
        self._progress.end()
        process.check()

    @property
    def _is_held(self) -> bool:
        """Whether any process runs the job, this program's own or another."""
        from outrider.runner.job.lock import is_held

        return bool(is_held(self.directory))

    @property
    def _own_runs(self) -> bool:
        return self._process is not None and self._process.running


def run(
    input: str | os.PathLike[str] | Iterable[str | Mapping[str, Any]],
    *,
    wait: bool = True,
    progress: bool | None = None,
    config: str | os.PathLike[str] | None = None,
    **options: Unpack[RunArguments],
) -> Job:
    """Run a batch job, or resume it: the same call on the same job directory does only what is missing.

    ``input`` is a path, or rows: prompts, or dicts like the lines of an input file. Rows are kept in the job's directory;
    without ``out`` it is named after a digest of the rows. With ``wait=False`` the job runs beside the program; if the
    program ends first, or is killed, the rows in progress end, and the job can be resumed. ``progress`` is shown at
    terminals and in notebooks, unless it is True or False. ``config`` is a YAML file of options; those given here take
    precedence.

    A refusal raises ``outrider.OutriderError`` with the sentence that the command line would print and its
    ``exit_code``. Rows that fail raise nothing: they are in ``errors()``.
    """
    from outrider.runner.job.directory import default_directory
    from outrider.runner.job.row_lines import write_lines

    here = working_directory()
    with temporary_file() as kept:
        has_path = isinstance(input, str | os.PathLike)
        source = _path(input) if has_path else Path(f"/dev/fd/{kept.fileno()}")
        given: dict[str, Any] = {**_texts_of(options), "input": source}
        own: Set[str] = frozenset() if has_path else {"input"}
        # Options are checked before the rows are taken, since an iterable of rows may take long.
        spec = build_options(JobSpec, given, None if config is None else _path_of(config), own)
        if not has_path:
            _check_format(spec)
            spec = _with_directory_of_rows(spec, write_lines(input, kept, spec.skip_bad))
        directory = here / (spec.out or default_directory(spec.input))
        job = Job(directory, JobProcess(spec, None if has_path else kept), progress)
    return job._wait_or_drain() if wait else job


def _text_of(path: str | os.PathLike[str]) -> str:
    text = os.fspath(path) if isinstance(path, os.PathLike) else path
    if not isinstance(text, str):
        raise UsageError(f"a path must be a text or a pathlib.Path, got {shown(path, of_python=True)}")
    return str(home_read(text))


def _path_of(path: str | os.PathLike[str]) -> Path:
    """A path that is not an option of ``JobSpec``, and so is not checked with the options."""
    text = _text_of(path)
    if "\0" in text:
        raise UsageError(f"a path holds no NUL, got {shown(text, of_python=True)}")
    return Path(text)


def _texts_of(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options with paths as text, as the command line has them, and ~ expanded."""
    paths = {name for name, field in JobSpec.model_fields.items() if takes_path(field)}
    return {
        name: _text_of(value) if isinstance(value, os.PathLike) or (name in paths and isinstance(value, str)) else value
        for name, value in options.items()
    }


def _path(input: Any) -> str:
    from outrider.runner.job.piped_input import has_no_name

    path = _text_of(input)
    if path and has_no_name(Path(path)):
        raise UsageError(f"INPUT: {path} is this program's own, and a job runs in another process; give a file, or rows")
    return path


def _check_format(spec: JobSpec) -> None:
    if spec.format not in ("auto", "jsonl"):
        raise UsageError(f"--format: rows from a program are lines of JSON, never {spec.format}; leave it out")


def _with_directory_of_rows(spec: JobSpec, digest: str) -> JobSpec:
    """Without ``out``, name the directory after the rows, so that the same rows resume the same job."""
    return spec if spec.out is not None else spec.model_copy(update={"out": Path(f"rows-{digest[:8]}-job")})


def open(directory: str | os.PathLike[str]) -> Job:
    """The job in this directory, whichever process runs it or has run it."""
    from outrider.runner.job.directory import open_job

    path = working_directory() / _path_of(directory)
    open_job(path).close()
    return Job(path)


def _describe_run() -> None:
    """Give ``run`` a signature and docstring with every option and its help, for ``help`` and notebooks."""
    types = get_type_hints(RunArguments)
    named = list(inspect.signature(run).parameters.values())[:-1]
    lines = [inspect.getdoc(run) or ""]
    for section, names in sections(JobSpec).items():
        lines += ["", f"{section.__doc__}:"]
        for name in (name for name in names if name in types):
            field = JobSpec.model_fields[name]
            named.append(
                inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=types[name])
            )
            lines.append(f"    {name}: {option_of(field).help}")
    run.__signature__ = inspect.Signature(named, return_annotation=Job)  # type: ignore[attr-defined]
    run.__doc__ = "\n".join(lines)


_describe_run()
