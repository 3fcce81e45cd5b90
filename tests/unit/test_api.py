"""The Python interface without models: accepted inputs and options, refusals, and reading a job's results."""

from __future__ import annotations

import ast
import errno
import fcntl
import inspect
import io
import json
import os
import pty
import signal
import struct
import subprocess
import sys
import tempfile
import termios
import threading
import time
import tty
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace, UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import pytest

import outrider
from outrider.runner import api, job_child, job_process, retry
from outrider.runner.cli.main import main
from outrider.runner.job.directory import job_lock
from outrider.runner.job.journal import Journal, StoredRow
from outrider.runner.job.prompts import BadRow, read_rows
from outrider.runner.job.results import error_record, result_record
from outrider.runner.job.row_lines import write_lines
from outrider.runner.job.source import Source, file_digest
from outrider.runner.options.job import JobSpec
from outrider.runner.progress import ProgressLine
from outrider.runner.report.counters import JobCounters
from outrider.runner.report.summary import Summary, summarize
from outrider.runner.run_arguments import RunArguments
from outrider.workers.errors import InputError, JobError, JobStoppedError, UsageError
from outrider.workers.messages import RowResult

HEAVY = ("torch", "ray", "transformers", "numpy", "pydantic", "typer", "rich", "yaml", "outrider.runner")


def test_the_package_imports_nothing_that_is_heavy_and_is_there_at_once() -> None:
    program = (
        "import sys, time\nstarted = time.process_time()\nimport outrider\nseconds = time.process_time() - started\n"
        f"assert not [name for name in {HEAVY} if name in sys.modules]\n"
        "assert {'run', 'open', 'Job', 'OutriderError'} <= set(dir(outrider))\n"
        "outrider.run\n"
        "print(seconds, *(name for name in ('torch', 'ray', 'transformers', 'numpy', 'rich') if name in sys.modules))"
    )
    # The machine may be busy: it has to be possible in that time.
    times = []
    for _ in range(5):
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
        seconds, *loaded = done.stdout.split()
        assert loaded == [], "the door itself waits with these for a job"
        times.append(float(seconds))
        if times[-1] < 0.1:
            break
    assert min(times) < 0.1, times


def without_annotations(kind: Any) -> Any:
    """A type as a caller has it: a path may be a text too."""
    if get_origin(kind) is Annotated:
        kind = get_args(kind)[0]
    if get_origin(kind) in (Union, UnionType):
        return Union[tuple(map(without_annotations, get_args(kind)))]  # noqa: UP007  (made of a tuple)
    return Union[str, os.PathLike[str]] if kind is Path else kind  # noqa: UP007


def test_the_typed_arguments_are_the_options_of_a_job() -> None:
    typed = get_type_hints(RunArguments)
    hints = get_type_hints(JobSpec, include_extras=True)
    taken = {name: without_annotations(hints[name]) for name in JobSpec.model_fields if name != "input"}
    # Names for the command line, which a caller may hold as paths.
    taken |= dict.fromkeys(("model", "draft"), Union[str, os.PathLike[str]])  # noqa: UP007  (as the hints are)
    assert taken == typed


def test_help_names_every_option_with_its_default() -> None:
    shown = inspect.signature(outrider.run).parameters
    for name, field in JobSpec.model_fields.items():
        assert name in shown
        if name != "input":
            assert shown[name].default == field.default
            assert f"    {name}: " in (outrider.run.__doc__ or "")


@pytest.mark.parametrize(
    ("rows", "lines"),
    [
        (["a", {"id": "b", "prompt": "c"}], ['{"prompt": "a"}', '{"id": "b", "prompt": "c"}']),
        (("two\nlines", "\u00fc \ud83d"), ['{"prompt": "two\\nlines"}', '{"prompt": "\\u00fc \\ud83d"}']),
        (iter(["x"]), ['{"prompt": "x"}']),
    ],
)
def test_rows_become_lines_and_the_same_rows_the_same_lines(rows: Any, lines: list[str]) -> None:
    file, again = io.BytesIO(), io.BytesIO()
    digest = write_lines(rows, file)
    assert file.getvalue().decode().splitlines() == lines
    assert digest == write_lines([json.loads(line) for line in lines], again)


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ({"prompt": "a"}, r"the input is one row; give a list of rows, such as \[row\]"),
        ([], "the input has no rows"),
        (5, r"the input must be a path or rows \(dicts or prompts\), got 5"),
        (b"prompts.txt", "the input must be a path or rows"),
        ({"a", "b"}, r"the input is a set, whose order differs from run to run; give sorted\(rows\)"),
        (frozenset("a"), "the input is a set"),
        (SimpleNamespace(to_pylist=list), r"of pyarrow; give its rows: input.to_pylist\(\)"),
    ],
)
def test_what_are_no_rows(rows: Any, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(outrider.OutriderError, match=said) as caught:
        outrider.run(rows)
    assert caught.value.exit_code == 2
    assert not list(tmp_path.iterdir())


class Int64:
    """As numpy's: no int."""


NAMED = "leave the key out, or give Python's own numbers, texts, lists and dicts (of numpy's numbers .item())"
SAID_OF_ROWS: list[tuple[Any, str]] = [
    ({"id": "fine", "prompt": "a"}, ""),
    (None, "must be a dict or a prompt, got None"),
    (5, "must be a dict or a prompt, got 5"),
    (SimpleNamespace(), "must be a dict or a prompt, got one of type SimpleNamespace"),
    (
        {"id": "a", "prompt": "a", "temperature": float("nan")},
        '"temperature" is nan, which is no JSON value; leave the key out where it has none',
    ),
    (
        {"id": "b", "prompt": "a", "seed": Int64()},
        f'"seed" cannot be written as JSON: Object of type Int64 is not JSON serializable; {NAMED}',
    ),
    ({("a",): 1}, f"\"('a',)\" cannot be written as JSON: keys must be str, int, float, bool or None, not tuple; {NAMED}"),
]


def test_rows_that_json_cannot_say_are_refused_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=r"^6 rows are wrong and nothing was started; mend them") as caught:
        outrider.run([row for row, _ in SAID_OF_ROWS])
    assert caught.value.lines == [f"rows:{number}: {said}" for number, (_, said) in enumerate(SAID_OF_ROWS, 1) if said]
    with pytest.raises(InputError) as caught:
        outrider.run([SAID_OF_ROWS[1][0]] * 60)
    assert len(caught.value.lines) == 51
    assert caught.value.lines[50] == "... and 10 more"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("first", [0, 1])
def test_rows_that_json_cannot_say_are_skipped_where_bad_rows_are(first: int, tmp_path: Path) -> None:
    """What is read of the lines, whichever comes first, is what was wrong, under the row's own id where it has one."""
    some = SAID_OF_ROWS[first:]
    with (tmp_path / "rows").open("wb", buffering=0) as file:
        digest = write_lines((row for row, _ in some), file, skip_bad=True)
    assert digest == file_digest(tmp_path / "rows")
    found = [row for row in read_rows(Source(tmp_path / "rows")) if isinstance(row, BadRow)]
    assert [(row.line, row.message) for row in found] == [
        (number, said) for number, (_, said) in enumerate(some, 1) if said
    ]
    assert [row.custom_id for row in found] == [str(2 - first), str(3 - first), str(4 - first), "a", "b", str(7 - first)]


def test_options_are_refused_before_rows_are_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.yaml").write_text("input: other.jsonl\n")

    made: list[str] = []

    def rows() -> Iterator[str]:
        made.append("a")
        yield "a"

    for options, said in (
        ({"max_token": 1}, 'unknown option "max_token"'),
        ({"format": "text"}, "--format: rows from a program are lines of JSON"),
        ({"config": "c.yaml"}, "^c.yaml: input is given by the program that reads this file; leave it out$"),
    ):
        with pytest.raises(UsageError, match=said):
            outrider.run(rows(), **options)
    assert not made


@pytest.mark.parametrize(
    ("input", "options", "said"),
    [
        (["a"], {"max_tokens": 0}, "--max-tokens: must be at least 1, got 0"),
        (["a"], {"max_token": 1}, 'unknown option "max_token"; known are address'),
        (["a"], {"max_token": 1}, "ignore_eos, ipex"),
        (["a"], {"model": b"x"}, "--model: must be a text, got b'x'"),
        (["a"], {"out": b"x"}, "--out: must be a text, got b'x'"),
        (["a"], {"draft_tokens": True}, "--draft-tokens: must be a whole number from 0 to 64"),
        (["a"], {"draft": Path("x"), "draft_tokens": 99}, "--draft-tokens: must be a whole number from 0 to 64"),
        (["a"], {"format": "text"}, "--format: rows from a program are lines of JSON"),
        (["a"], {"config": "none.yaml"}, "--config: none.yaml cannot be read: No such file or directory"),
        ("", {}, "INPUT: must be a name that is not empty"),
        ("-", {}, "INPUT: - is this program's own"),
        ("/dev/stdin", {}, "INPUT: /dev/stdin is this program's own"),
    ],
)
def test_what_is_refused_before_a_process_is_started(
    input: Any, options: dict[str, Any], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(job_process.subprocess, "Popen", lambda *_, **__: pytest.fail("a process was started"))
    with pytest.raises(UsageError, match=said):
        outrider.run(input, **options)
    assert not list(tmp_path.iterdir())


@pytest.mark.one_in(2)
@pytest.mark.parametrize("words", [["none.jsonl"], ["kept/job.json", "-o", "kept"]])
def test_an_error_is_the_sentence_of_the_command_line_with_its_code(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["outrider", "run", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    with pytest.raises(UsageError) as caught:
        outrider.run(words[0], out=words[2] if len(words) > 2 else None, progress=True)
    assert f"outrider: {caught.value}\n" == capsys.readouterr().err
    assert caught.value.exit_code == ended.value.code == 2


class FullDisk(io.BytesIO):
    def write(self, data: Any) -> int:
        if self.tell() + len(data) > 20:
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().write(data[:3])  # as a file without a buffer may


def test_rows_and_options_that_find_no_room_are_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(JobError, match=r"the rows cannot be kept in a temporary file: No space left on device; set TMPDIR"):
        write_lines(["a"] * 3, FullDisk())
    monkeypatch.setattr(job_process, "temporary_file", FullDisk)
    with pytest.raises(JobError, match=r"the options cannot be kept in a temporary file: No space left on device; set"):
        job_process.JobProcess(JobSpec(input=Path("in.jsonl")))

    def broken() -> Iterator[str]:
        yield "a"
        raise OSError("of the rows themselves")

    with pytest.raises(OSError, match="of the rows themselves"):
        write_lines(broken(), io.BytesIO())


def test_without_a_place_for_temporary_files_it_is_a_sentence_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/nowhere")
    with pytest.raises(JobError, match=r"a temporary file cannot be made: No such file or directory; set TMPDIR"):
        outrider.run(["a"])


READS_ITS_ROWS = """
import os, sys
from pathlib import Path
import outrider
from outrider.runner import job_process

job_process.BEGIN = (
    "import json, os, sys; asked = json.loads(sys.argv[1]); "
    "options = json.loads(os.pread(asked['events'], asked['options'], 0)); rows = open(options['input']).read(); "
    "os.write(asked['events'], json.dumps({{'note': rows, 'ended': 0}}).encode() + b'\\\\n')"
)
for closed in (1, 2, 3):
    if os.fork() == 0:
        os.closerange(0, closed)
        job = outrider.run(["a"], progress=False)
        Path(str(closed)).write_text(job.notes[0])
        break
else:
    for _ in range(3):
        os.wait()
"""


@pytest.mark.slow
def test_a_program_without_standard_input_or_output_hands_its_rows_over(tmp_path: Path) -> None:
    """As services have none: the numbers of these descriptors then are those of the next files that are opened."""
    subprocess.run([sys.executable, "-c", READS_ITS_ROWS], cwd=tmp_path, check=True, timeout=60)
    assert {name: (tmp_path / name).read_text() for name in "123"} == dict.fromkeys("123", '{"prompt": "a"}\n')


def child(program: str, monkeypatch: pytest.MonkeyPatch) -> job_process.JobProcess:
    """A process as a job's, with this program in the place of the job."""
    begin = "import json, os, signal, sys, time\nasked = json.loads(sys.argv[1])\n"
    begin += "def tell(**event): os.write(asked['events'], json.dumps(event).encode() + b'\\n')\n" + program
    monkeypatch.setattr(job_process, "BEGIN", begin.replace("{", "{{").replace("}", "}}"))
    return job_process.JobProcess(JobSpec(input=Path("in.jsonl")))


@pytest.mark.parametrize(
    ("program", "error"),
    [
        ("tell(ended=0)", None),
        ("tell(ended=3); sys.exit(3)", None),
        # What it told counts: others may have asked for its exit code first.
        ("tell(ended=0); sys.exit(1)", None),
        (
            "tell(error={'kind': 'InputError', 'sentence': 'two rows are wrong', 'lines': ['a', 'b']}); sys.exit(2)",
            InputError("two rows are wrong", ["a", "b"]),
        ),
        (
            "tell(ended=130); sys.exit(130)",
            JobStoppedError("the job was stopped from outside; the same call goes on with it"),
        ),
        (
            "print('first'); print('no memory', file=sys.stderr); sys.stdout.flush(); os._exit(1)",
            JobError("the process of the job ended with exit code 1 (no memory); the same call goes on with it"),
        ),
        (
            "os.kill(os.getpid(), signal.SIGKILL)",
            JobError("the process of the job was killed by signal 9; the same call goes on with it"),
        ),
    ],
)
def test_what_becomes_of_a_process(program: str, error: Exception | None, monkeypatch: pytest.MonkeyPatch) -> None:
    process = child(program, monkeypatch)
    assert process.follow(lambda event: None)
    if error is None:
        return process.check()
    for _ in range(2):
        with pytest.raises(type(error)) as caught:
            process.check()
        assert caught.value.args == error.args
    return None


@pytest.mark.parametrize(
    "program", ["os.kill(os.getpid(), signal.SIGKILL)", "print('no memory'); sys.stdout.flush(); os._exit(1)"]
)
def test_a_process_whose_exit_code_is_lost_has_not_succeeded(program: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where SIGCHLD is ignored the system throws the codes of children away."""
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        process = child(program, monkeypatch)
        assert process.follow(lambda event: None)
        said = " (no memory)" if "no memory" in program else ""
        with pytest.raises(JobError) as caught:
            process.check()
        assert str(caught.value) == (
            f"the process of the job ended without saying how{said}; the same call goes on with it"
        )
        process = child("tell(ended=3); sys.exit(3)", monkeypatch)
        assert process.follow(lambda event: None)
        process.check()
        process = child("tell(note='ready'); time.sleep(60)", monkeypatch)
        while not process.follow(lambda event: None, seconds=0.01):
            process.drain()
        process.check()  # it was asked to stop
    finally:
        signal.signal(signal.SIGCHLD, before)


TELLS_ITS_SIGNALS = (
    "import signal, sys; sys.path[:] = {path!r}; from outrider.runner import job_child\n"
    "job_child._run = lambda asked, told: told.tell(note=str(signal.getsignal(signal.SIGCHLD))) or 0\n"
    "job_child.main()"
)


TELLS_ITS_OPTIONS = (
    "import sys; sys.path[:] = {path!r}; from outrider.runner import job_child, run_job\n"
    "said = lambda spec: f'{{len(spec.template)}} {{spec.seed}}'\n"
    "run_job.run_job = lambda spec, events, retry_failed: events.tell(note=said(spec)) or sys.exit(0)\n"
    "job_child.main()"
)


@pytest.mark.slow
def test_options_may_be_longer_than_an_argument_of_a_program(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Such as a template with many examples: Linux takes 128 KiB of an argument."""
    monkeypatch.setattr(job_process, "BEGIN", TELLS_ITS_OPTIONS)
    spec = JobSpec(input=Path("in.jsonl"), template="x" * 200_000 + "{text}", seed=7)
    job = api.Job(tmp_path, job_process.JobProcess(spec))
    with suppress(JobError):  # it tells no more than that
        job.wait()
    assert job.notes == ("200006 7",)


def test_a_job_gets_the_exit_codes_of_what_it_starts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Whatever its caller does with those of its own children."""
    monkeypatch.setattr(job_process, "BEGIN", TELLS_ITS_SIGNALS)
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        job = api.Job(tmp_path, job_process.JobProcess(JobSpec(input=Path("in.jsonl")))).wait()
    finally:
        signal.signal(signal.SIGCHLD, before)
    assert job.notes == (str(signal.SIG_DFL),)


WAITED_FOR_IN_A_FORK = """
tell(note="ready")
signal.signal(signal.SIGTERM, lambda *_: (tell(ended=130), sys.exit(130)))
time.sleep(60)
"""


@pytest.mark.parametrize("killed", [True, False])
def test_a_process_that_was_forked_since_can_wait_for_the_job_and_stop_it(
    killed: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    job = api.Job(tmp_path, child(WAITED_FOR_IN_A_FORK, monkeypatch))
    while not job.notes:
        time.sleep(0.01)
    assert job._process is not None
    if (fork := os.fork()) == 0:
        code = 1
        try:
            code += 10 * (job.status != "starting")
            with suppress(TimeoutError):
                job.wait(timeout=0.02)
                code += 20
            if killed:
                os.kill(job._process._process.pid, signal.SIGKILL)
                with suppress(JobError):
                    job.wait()
                    code += 40
            else:
                job.cancel()
            code += 80 * (job.status != "stopped") - 1
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(fork, 0)[1]) == 0
    error = "was killed by signal 9" if killed else "the job was stopped from outside"
    with pytest.raises(JobError, match=error):  # nobody has told this process
        job.wait()


def test_jobs_that_have_ended_hold_no_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def open_files() -> int:
        return len([*Path("/proc/self/fd").iterdir()])

    before = open_files()
    jobs = [api.Job(tmp_path, child("print('no memory'); tell(note='a'); sys.exit(4)", monkeypatch)) for _ in range(3)]
    for job in jobs:
        for _ in range(2):
            with pytest.raises(JobError, match=r"ended with exit code 4 \(no memory\)"):
                job.wait()
        assert job.notes == ("a",)
    assert open_files() == before


def test_a_job_is_no_worker_of_the_ray_that_started_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RAY_JOB_ID", "RAY_RAYLET_PID", "RAY_JOB_CONFIG_JSON_ENV_VAR", "OTHER"):
        monkeypatch.setenv(name, "1")
    seen: dict[str, str] = {}

    def started(*_: Any, env: dict[str, str], **__: Any) -> Any:
        seen.update(env)
        return SimpleNamespace(pid=os.getpid(), poll=lambda: 0)

    monkeypatch.setattr(job_process.subprocess, "Popen", started)
    job_process.JobProcess(JobSpec(input=Path("in.jsonl")))
    left = {"OTHER", "RAY_JOB_CONFIG_JSON_ENV_VAR"}  # a job that joins the cluster was given what that says
    assert {name for name in seen if name.startswith(("RAY_JOB", "RAY_RAYLET", "OTHER"))} == left


DRAINS = """
asked_to = []
signal.signal(signal.SIGTERM, lambda *_: asked_to.append(1))
tell(note="ready")
while len(asked_to) < {times}:
    time.sleep(0.01)
tell(note=f"asked {{len(asked_to)}}", ended=130)
sys.exit(130)
"""


def test_what_is_told_is_followed_and_a_process_that_was_asked_to_stop_has_not_failed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    process, told = child(DRAINS.format(times=1), monkeypatch), []
    while not told:
        assert not process.follow(told.append, seconds=0.05)
    process.drain()
    assert process.follow(told.append)
    process.check()
    assert told == [{"note": "ready"}, {"note": "asked 1", "ended": 130}]
    process.drain()  # nobody is there any more


class Disk:
    """Takes this many bytes, and then no more until there is ``room`` again."""

    def __init__(self, room: int) -> None:
        self.room = room

    def write(self, descriptor: int, data: bytes) -> int:
        if not self.room:
            raise OSError(errno.ENOSPC, "No space left on device")
        count = os.write(descriptor, data[: self.room])
        self.room -= count
        return count


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    made = Disk(1 << 20)
    monkeypatch.setattr(job_child, "os", made)
    return made


@pytest.mark.one_in(3)
@pytest.mark.parametrize("room", range(0, 60, 7))
def test_what_a_full_disk_kept_back_is_told_when_there_is_room(
    room: int, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever it filled up: within an event, or between two."""
    process, events = child("pass", monkeypatch), []
    told = job_child.EventWriter(process._events.fileno())
    disk.room = room
    told.say("a note")
    told.tell(error={"kind": "InputError", "sentence": "two rows are wrong", "lines": []})
    events += process._new_events()
    disk.room = 1 << 20
    told.tell(ended=2)
    process.follow(events.append)
    error = {"kind": "InputError", "sentence": "two rows are wrong", "lines": []}
    assert events == [{"note": "a note"}, {"error": error}, {"ended": 2}]
    with pytest.raises(InputError, match="two rows are wrong"):
        process.check()


def test_a_full_disk_makes_no_heap_of_progress_that_is_old(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    process, events = child("pass", monkeypatch), []
    told = job_child.EventWriter(process._events.fileno())
    monkeypatch.setattr(job_child, "TELL_SECONDS", 0.0)
    disk.room = 5
    for _ in range(100):
        told.show(JobCounters(rows=7))
    disk.room = 1 << 20
    told.show(JobCounters(rows=9))
    process.follow(events.append)
    assert [event["progress"].split(" rows")[0] for event in events] == ["loading models: 0/7", "loading models: 0/9"]


def test_the_last_event_waits_for_room(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    process, events = child("pass", monkeypatch), []
    told = job_child.EventWriter(process._events.fileno())
    disk.room = 3
    told.tell(ended=0)
    naps: list[float] = []

    def sleep(seconds: float) -> None:
        naps.append(seconds)
        disk.room = 1 << 20 if len(naps) == 3 else 0

    monkeypatch.setattr(job_child, "time", SimpleNamespace(monotonic=lambda: sum(naps), sleep=sleep))
    told.close()
    events += process._new_events()
    assert events == [{"ended": 0}]
    disk.room = 0
    told.tell(ended=1)
    told.close()
    assert sum(naps) == pytest.approx(job_child.LAST_WRITE_SECONDS, abs=1.0), "it gives up in the end"


def test_half_an_event_of_an_earlier_life_is_not_glued_to_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    process, events = child("pass", monkeypatch), []
    os.write(process._events.fileno(), b'{"progress": "3 of')
    told = job_child.EventWriter(process._events.fileno())
    told.tell(ended=0)
    process.follow(events.append)
    assert events == [{"ended": 0}]


@pytest.mark.slow
@pytest.mark.parametrize("times", [1, 2])
def test_an_interrupt_drains_and_a_second_one_stops(
    times: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = api.Job(tmp_path, child(DRAINS.format(times=times), monkeypatch), progress=True)
    before = signal.getsignal(signal.SIGINT)

    def interrupt() -> None:
        for _ in range(times):
            while len(job._notes) < 1:
                time.sleep(0.01)
            time.sleep(0.3)
            os.kill(os.getpid(), signal.SIGINT)

    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        thread = threading.Thread(target=interrupt)
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            job.wait()
        thread.join()
    finally:
        signal.signal(signal.SIGINT, before)
    assert job.notes == ("ready", f"asked {times}")
    assert "finishing the rows under way" in capsys.readouterr().err
    assert job.wait() is job, "it was asked for, so it is no error"


class AlarmError(Exception):
    """As a program's own signal handler raises it."""


@pytest.mark.parametrize("again", [False, True])
def test_whatever_interrupts_a_call_that_waits_the_job_lets_its_rows_end(
    again: bool, monkeypatch: pytest.MonkeyPatch, directory: Path
) -> None:
    """Nobody has got a job that could be stopped."""
    process, told = child(DRAINS.format(times=1), monkeypatch), []

    def tell(job: api.Job, event: dict[str, Any]) -> None:
        raise AlarmError

    monkeypatch.setattr(api, "JobProcess", lambda *_, **__: process)
    monkeypatch.setattr(api.Job, "_tell", tell)
    monkeypatch.setattr(retry, "retry_spec", lambda *_: JobSpec(input=Path("in.jsonl")))
    with pytest.raises(AlarmError):
        outrider.open(directory).retry() if again else outrider.run("in.jsonl", out=directory)
    assert process.follow(told.append, seconds=60)
    assert told == [{"note": "asked 1", "ended": 130}]


def test_a_job_that_another_process_has_gone_on_with_runs(monkeypatch: pytest.MonkeyPatch, directory: Path) -> None:
    job = api.Job(directory, child("tell(ended=0)", monkeypatch))
    assert (job.wait().status, job.cancel().status) == ("stopped", "stopped")
    with job_lock(directory):
        assert job.status == "running"
        with pytest.raises(TimeoutError, match=r"still runs after 0\.01 s"):
            job.wait(timeout=0.01)
        with pytest.raises(
            UsageError, match=rf"is run by process {os.getpid()} on .*, and is stopped there \(Ctrl-C, kill"
        ):
            job.cancel()
    assert job.wait().status == "stopped"


def test_while_a_job_is_starting_it_has_no_rows_and_everything_else_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    job = api.Job(tmp_path / "job", child(DRAINS.format(times=1), monkeypatch))
    assert (job.status, repr(job)) == ("starting", f"Job('{tmp_path}/job', starting)")
    assert ([*job.results()], [*job.errors()]) == ([], [])
    said = rf'^{tmp_path}/job is being started: .*; wait until job.status is "running"$'
    for asked in (lambda: job.summary, lambda: job.to_csv(tmp_path / "x.csv"), job.report, lambda: job.retry(wait=False)):
        with pytest.raises(UsageError, match=said):
            asked()
    while not job.notes:
        time.sleep(0.01)
    job.cancel()
    for ended in (lambda: [*job.results()], lambda: job.to_csv(tmp_path / "x.csv")):
        with pytest.raises(UsageError, match="holds no job: it ended before"):
            ended()


def test_a_job_that_ended_before_its_input_was_accepted_is_shown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    directory = tmp_path / "job"
    job = api.Job(directory, child("tell(ended=130); sys.exit(130)", monkeypatch))
    assert job._process is not None
    assert job._process.follow(lambda event: None)
    said = f"{directory} holds no job: it ended before its input was accepted"
    assert (job.status, repr(job)) == ("stopped", f"Job({str(directory)!r}: {said})")
    with pytest.raises(UsageError, match=f"^{said}$"):
        _ = job.summary


def test_a_job_whose_journal_is_damaged_is_shown(directory: Path) -> None:
    job = outrider.open(directory)
    (directory / "job.db").write_bytes(b"no journal" * 100)
    assert "file is not a database" in repr(job)


def test_a_job_that_takes_longer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    job = api.Job(tmp_path, child(DRAINS.format(times=1), monkeypatch))
    with pytest.raises(TimeoutError, match=r"still runs after 0\.05 s"):
        job.wait(timeout=0.05)
    assert job.status == "starting"
    while not job.notes:
        time.sleep(0.01)
    assert job.cancel().status == "stopped"


WATCHED = """
import os, signal, sys, time
from pathlib import Path
from outrider.runner.job_child import _drain_when_orphaned
signal.signal(signal.SIGTERM, lambda *_: (Path(sys.argv[1]).write_text("drains"), os._exit(0)))
CALLER = os.getpid()
if os.fork() == 0:
    time.sleep(DELAY)
    _drain_when_orphaned(CALLER)
    time.sleep(60)
time.sleep(0.2)
"""


@pytest.mark.slow
@pytest.mark.parametrize("delay", ["0", "0.5"])
def test_a_caller_that_is_gone_is_noticed(tmp_path: Path, delay: str) -> None:
    """Also one that was gone before anybody looked."""
    file = tmp_path / "said"
    subprocess.run([sys.executable, "-c", WATCHED.replace("DELAY", delay), str(file)], check=True, timeout=60)
    deadline = time.monotonic() + 30
    while not file.exists() or file.read_text() != "drains":
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Path]:
    """A job with three rows that have ended, of which one failed, and one that has not."""
    rows = [
        StoredRow(number, custom_id, number + 1, kind, {"n": count}, (1, 2, 3))
        for number, (custom_id, kind, count) in enumerate(
            [("a", "completion", 1), ("b", "chat", 2), ("bad", "completion", 1), ("d", "completion", 1)]
        )
    ]
    journal = Journal(tmp_path / "job.db")
    journal.fill(rows, [], {"identity": {}})
    answers = [
        RowResult(key, tuple(range(count)), text, "stop", count, 0, 0, 1.0)
        for key, text, count in ((0, "x", 4), (1, "y", 2), (2, "z", 3))
    ]
    done = [(0, result_record(rows[0], answers[:1], "m")), (1, result_record(rows[1], answers[1:], "m"))]
    journal.record(done, [(2, error_record(rows[2], "invalid_request", "it is empty"))], {"tokens": 9.0, "seconds": 2.0})
    yield tmp_path
    journal.close()


def test_a_job_that_is_there_is_read(directory: Path) -> None:
    job = outrider.open(directory)
    assert (job.directory, job.status) == (directory, "stopped")
    assert repr(job) == f"Job({str(directory)!r}, stopped: 4 rows, 2 done, 1 failed)"
    found = list(job.results())
    assert [(row.id, row.text, row.tokens, row.finish_reason, row.prompt_tokens) for row in found] == [
        ("a", "x", 4, "stop", 3),
        ("b", "y", 5, "stop", 3),
    ]
    assert [choice.text for choice in found[1].choices] == ["y", "z"]
    assert (found[0].logprobs, found[0].error, found[0].carried) == (None, None, {})
    [error] = job.errors()
    assert (error.id, error.text, error.tokens, error.error_code, error.error) == (
        *("bad", "", 0),
        *("invalid_request", "it is empty"),
    )
    assert job.report() == directory / "report.html"
    assert "of 4 done" in job.report().read_text()
    assert job.wait() is job and job.cancel() is job, "nobody runs it"


def test_records_come_in_portions_between_which_a_job_may_write(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from outrider.runner.job import records

    monkeypatch.setattr(records, "ROWS_AT_ONCE", 1)
    found = outrider.open(directory).results()
    assert next(found).id == "a"
    journal = Journal(directory / "job.db")
    assert journal._db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0] == 0, "no reader is in its way"
    journal.close()
    assert [row.id for row in found] == ["b"]


def test_the_summary_has_the_attributes_of_job_json(directory: Path) -> None:
    summary = outrider.open(directory).summary
    journal = Journal(directory / "job.db", read_only=True)
    assert vars(summary) == summarize(journal)
    journal.close()
    assert list(vars(summary)) == list(Summary.__annotations__), "a new one has its type"
    assert (summary.rows, summary.done, summary.failed, summary.pending, summary.tokens) == (4, 2, 1, 1, 9.0)


def test_a_damaged_record_is_no_answer(directory: Path) -> None:
    journal = Journal(directory / "job.db")
    journal._db.execute("UPDATE records SET record = '{}' WHERE row = 1")
    journal.close()
    with pytest.raises(JobError, match="the record of row 1 is damaged"):
        list(outrider.open(directory).results())


def test_paths_are_paths_wherever_one_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of models too, and ~ in each, which no shell has read."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.yaml").write_text("seed: 3\ntrace: ~/trace\n")
    begun: list[JobSpec] = []
    monkeypatch.setattr(api, "JobProcess", lambda spec, *_, **__: begun.append(spec))
    job = outrider.run("~/in.txt", out="~/job", model=Path("~/m"), draft=Path("d"), config="~/c.yaml", wait=False)
    [spec] = begun
    assert (spec.input, spec.out, spec.trace, spec.model, spec.draft, spec.seed) == (
        *(tmp_path / "in.txt", tmp_path / "job", tmp_path / "trace"),
        *(f"{tmp_path}/m", "d", 3),
    )
    assert job.directory == tmp_path / "job"
    with pytest.raises(UsageError, match=rf"^{tmp_path}/job is not a job directory"):
        outrider.open("~/job")
    outrider.run("in.txt", draft="~nobody-of-this-name/x", wait=False)
    assert begun[1].draft == "~nobody-of-this-name/x"


class BytesPath:
    def __fspath__(self) -> bytes:
        return b"x"


@pytest.mark.parametrize("path", [b"x", BytesPath(), 5])
def test_what_is_no_path_is_a_sentence(path: Any, directory: Path) -> None:
    said = "^a path must be a text or a pathlib.Path, got "
    for call in (outrider.open, outrider.open(directory).to_csv, lambda path: outrider.run(["a"], config=path)):
        with pytest.raises(UsageError, match=said):
            call(path)
    with pytest.raises(UsageError, match=r"^a path holds no NUL, got 'a\\x00b'$"):
        outrider.open("a\0b")


def test_the_rows_that_a_job_has_kept_are_not_written_over(directory: Path) -> None:
    (directory / "input").write_text("rows")
    with pytest.raises(UsageError, match="input is a file of the job's own in"):
        outrider.open(directory).to_jsonl(directory / "input")
    assert (directory / "input").read_text() == "rows"


@pytest.mark.parametrize("name", ["x.parquet", "x.CSV.gz", "x.csv.gz"])
def test_a_table_is_written_as_its_name_says(directory: Path, name: str) -> None:
    job = outrider.open(directory)
    if name == "x.CSV.gz":  # which says nothing
        assert job.to_jsonl(directory / name).exists()
        return
    said = f"{name} does not end like a file of jsonl; give another name"
    with pytest.raises(UsageError, match=said):
        job.to_jsonl(directory / name)
    assert not (directory / name).exists()


def test_what_is_no_job(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"is not a job directory: it has no job.db"):
        outrider.open(tmp_path)


def test_parquet(directory: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    table = parquet.read_table(outrider.open(directory).to_parquet(directory / "rows.parquet"))
    assert table.column_names[:5] == ["id", "text", "tokens", "finish_reason", "logprobs"]
    rows = table.to_pylist()
    assert [(row["id"], row["text"], row["tokens"], row["texts"], row["error"]) for row in rows] == [
        ("a", "x", 4, None, None),
        ("b", "y", 5, ["y", "z"], None),
        ("bad", None, 0, None, "it is empty"),
    ]
    with pytest.raises(UsageError, match=r"none/rows.parquet cannot be written"):
        outrider.open(directory).to_parquet(directory / "none" / "rows.parquet")
    assert not list(directory.glob(".rows.parquet*"))


def test_parquet_without_pyarrow_says_what_to_install(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(UsageError, match=r"pip install 'outrider\[data\]'"):
        outrider.open(directory).to_parquet(directory / "rows.parquet")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_at_a_terminal_is_one_line_that_is_written_over(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    progress = ProgressLine(None)
    for line in ("running: 1/10 rows", "done"):
        progress.show(line)
    progress.say("note")
    progress.end()
    assert terminal.getvalue() == "\rrunning: 1/10 rows\rdone              \rnote\n"


def test_progress_is_as_wide_as_the_terminal_at_most() -> None:
    """A line that reached the last column would leave a part behind, and the terminal would scroll."""
    line = "running: 8,412/20,000 rows, 1.4 rows/s, about 2 h 16 min left"
    here, there = pty.openpty()
    tty.setraw(there)
    fcntl.ioctl(there, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 40, 0, 0))
    with os.fdopen(there, "w") as terminal, pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stderr", terminal)
        progress = ProgressLine(None)
        progress.show(line)
        fcntl.ioctl(there, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 20, 0, 0))
        progress.show(line)
        progress.say(line)
        expected, read = f"\r{line[:39]}\r{line[:19]}\r{line}\n".encode(), b""
        # One call may give what one of them wrote.
        while len(read) < len(expected):
            read += os.read(here, 1000)
        assert read == expected
    os.close(here)


def test_progress_is_not_shown_where_nobody_looks_and_harms_nothing_where_it_cannot_be(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    quiet = io.StringIO()
    monkeypatch.setattr(sys, "stderr", quiet)
    ProgressLine(None).say("a")
    ProgressLine(False).say("b")
    ProgressLine(True).say("c")
    assert quiet.getvalue() == "c\n"
    broken = Terminal()
    monkeypatch.setattr(sys, "stderr", broken)
    progress = ProgressLine(None)
    broken.close()
    progress.show("running")


def test_progress_in_a_notebook_is_shown_below_the_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    shell = type("Shell", (), {"kernel": object()})()
    monkeypatch.setitem(sys.modules, "IPython", type("Module", (), {"get_ipython": staticmethod(lambda: shell)}))
    cell = io.StringIO()
    monkeypatch.setattr(sys, "stdout", cell)
    progress = ProgressLine(None)
    progress.show("running: 1/2 rows")
    progress.show("running: 2/2 rows")
    assert cell.getvalue() == "\rrunning: 1/2 rows\rrunning: 2/2 rows"


def test_every_python_example_of_the_docs_can_be_read() -> None:
    """They are run in tests/ray/test_python_interface.py; that they are Python and name what there is shows here."""
    text = (Path(__file__).resolve().parents[2] / "docs" / "python.md").read_text()
    blocks = [block.split("```")[0] for block in text.split("```python\n")[1:]]
    assert len(blocks) >= 4
    known = {"job": {*dir(api.Job), "directory"}, "outrider": dir(outrider)}
    for node in (node for block in blocks for node in ast.walk(ast.parse(block))):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in known:
            assert node.attr in known[node.value.id]
