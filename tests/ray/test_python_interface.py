"""The Python interface on real models and a real Ray: scripts, threads, notebooks, and the caller's own Ray."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
from command_line import DEADLINE, OFFLINE, described, outrider, rows_done

import outrider as library
from outrider.runner.job.lock import is_held

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples" / "prompts.jsonl"
ROWS = [json.loads(line) for line in EXAMPLES.read_text().splitlines()]
# Long enough to be interrupted.
LONG = [{"id": f"row {number}", "prompt": f"Row {number} of", "max_tokens": 60} for number in range(1000)]
# What the caller's Ray would else write into the home directory; and it is not to join that of another test.
ENVIRONMENT = {**os.environ, **OFFLINE, "RAY_AUTH_MODE": "disabled", "RAY_ADDRESS": "local"}


def python(program: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """A script without a main guard."""
    (folder / "script.py").write_text(program)
    return subprocess.run(
        [sys.executable, "script.py"],
        cwd=folder,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=2 * DEADLINE,
        check=False,
    )


def start(program: str, folder: Path) -> subprocess.Popen[str]:
    (folder / "script.py").write_text(program)
    return subprocess.Popen(
        [sys.executable, "script.py"],
        cwd=folder,
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def wait_for(come, what: str) -> None:
    deadline = time.monotonic() + DEADLINE
    while not come():
        assert time.monotonic() < deadline, f"no {what} within {DEADLINE} s"
        time.sleep(0.05)


def test_the_examples_of_the_docs(tmp_path: Path) -> None:
    blocks = [block.split("```")[0] for block in (ROOT / "docs" / "python.md").read_text().split("```python\n")[1:]]
    done = python("\n".join(blocks), tmp_path)
    assert done.returncode == 0, done.stderr
    assert "max_tokens: 12 then, 13 now" in done.stdout
    assert done.stderr == "", "where nobody looks nothing is shown"


BESIDE_A_RAY = """
import json, os, signal, threading
import ray
ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, configure_logging=False)
before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)}
settings = dict(os.environ)

@ray.remote(num_cpus=0)
class Counter:
    def __init__(self):
        self.count = 0
    def add(self):
        self.count += 1
        return self.count

counter = Counter.remote()
assert ray.get(counter.add.remote()) == 1
import outrider
rows = json.load(open("rows.json"))
job = outrider.run(rows, out="job", draft_tokens=4, progress=False)
assert ray.get(counter.add.remote()) == 2, "it is the same Ray as before"
assert {number: signal.getsignal(number) for number in before} == before
assert dict(os.environ) == settings
found = []
thread = threading.Thread(target=lambda: found.append(outrider.run(rows, out="again", draft="none")))
thread.start()
thread.join()
assert list(found[0].results()) == list(job.results())
assert threading.active_count() == threading.active_count()
print(job)
"""


@pytest.mark.oldest_ray
def test_beside_a_ray_of_the_callers_and_in_a_thread_it_is_the_job_of_the_command_line(tmp_path: Path) -> None:
    (tmp_path / "rows.json").write_text(
        json.dumps([{"id": str(n), "prompt": f"Row {n}", "max_tokens": 16} for n in range(6)])
    )
    done = python(BESIDE_A_RAY, tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"Job('{tmp_path}/job', done: 6 rows, 6 done, 0 failed)\n"
    # The job's own input is one that the command line takes as well.
    again = outrider("run", "job/input", "-o", "job", "--draft-tokens", "4", "--json", cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    assert json.loads(again.stdout)["rows"] == 6
    told = described(tmp_path / "job")
    assert library.open(tmp_path / "job").summary.tokens == told["summary"]["tokens"]
    lines = (tmp_path / "job" / "results.jsonl").read_text().splitlines()
    texts = [json.loads(line)["response"]["body"]["choices"][0]["text"] for line in lines]
    assert texts == [row.text for row in library.open(tmp_path / "job").results()]
    plain = outrider("run", "job/input", "-o", "plain", "--draft", "none", cwd=tmp_path)
    assert plain.returncode == 0, plain.stderr
    assert (tmp_path / "plain" / "results.jsonl").read_bytes() == (tmp_path / "job" / "results.jsonl").read_bytes()


def test_bad_rows_are_the_sentence_and_the_lines_of_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(library.OutriderError) as caught:
        library.run(["fine", {"prompt": "x", "max_tokens": 0}], out="job", progress=False)
    assert caught.value.exit_code == 2
    assert caught.value.lines == ['rows:2: "max_tokens" must be at least 1, got 0']
    (tmp_path / "in.jsonl").write_text('{"prompt": "fine"}\n{"prompt": "x", "max_tokens": 0}\n')
    said = outrider("run", "in.jsonl", "-o", "other", cwd=tmp_path)
    assert said.returncode == 2
    assert said.stderr.splitlines() == ['in.jsonl:2: "max_tokens" must be at least 1, got 0', f"outrider: {caught.value}"]


# What a shell begins in the background ignores SIGINT, and so would all that it begins.
INTERRUPTED = """
import json, outrider, signal
signal.signal(signal.SIGINT, signal.default_int_handler)
try:
    outrider.run(json.load(open("rows.json")), out="job", batch=4, draft="none")
except KeyboardInterrupt:
    job = outrider.open("job")
    print(job.status, job.summary.done)
"""


def test_an_interrupt_drains_and_the_same_call_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "rows.json").write_text(json.dumps(LONG))
    script = start(INTERRUPTED, tmp_path)
    wait_for(lambda: rows_done(tmp_path / "job") > 3, "row")
    assert is_held(tmp_path / "job")
    # Of the terminal only the caller gets it.
    os.killpg(script.pid, signal.SIGINT)
    said, _ = script.communicate(timeout=DEADLINE)
    assert script.returncode == 0, said
    status, done = said.split()
    assert status == "stopped"
    assert int(done) in range(4, len(LONG))
    assert not is_held(tmp_path / "job")

    monkeypatch.chdir(tmp_path)
    job = library.run(LONG[:], out="job", draft="none", wait=False, progress=False)
    wait_for(lambda: job.status == "running" and job.summary.done > int(done), "row of the second run")
    with pytest.raises(library.OutriderError, match="is being run by process"):
        library.run(LONG, out="job", progress=False)
    other = library.open("job")
    with pytest.raises(TimeoutError):
        other.wait(timeout=0.01)
    with pytest.raises(library.OutriderError, match=r"is run by process [0-9]+ on .*, and is stopped there"):
        other.cancel()
    waited: list[str] = []
    thread = threading.Thread(target=lambda: waited.append(other.wait().status))
    thread.start()
    assert job.cancel().status == "stopped"
    thread.join(timeout=30)
    assert waited == ["stopped"]
    assert job.summary.pending


DIES = """
import json, time, outrider
job = outrider.run(json.load(open("rows.json")), out="job", batch=4, wait=False)
print("started", flush=True)
time.sleep(600)
"""


def test_a_job_whose_caller_is_killed_drains_and_leaves_nothing_running(tmp_path: Path) -> None:
    (tmp_path / "rows.json").write_text(json.dumps(LONG))
    script = start(DIES, tmp_path)
    wait_for(lambda: rows_done(tmp_path / "job") > 3, "row")
    [child] = psutil.Process(script.pid).children()
    family = [child, *child.children(recursive=True)]
    assert len(family) > 2
    script.kill()
    script.wait()
    assert script.stdout is not None
    script.stdout.close()
    wait_for(lambda: not is_held(tmp_path / "job"), "end of the job")
    psutil.wait_procs(family, timeout=30)
    assert not [process for process in family if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]
    job = library.open(tmp_path / "job")
    assert job.status == "stopped"
    assert 3 < job.summary.done < len(LONG)
    assert len((tmp_path / "job" / "results.jsonl").read_text().splitlines()) == job.summary.done


def test_a_job_whose_ray_dies_begins_its_command_line_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the same process, with what the caller has handed over: the file it tells in, and rows that are read already."""
    monkeypatch.chdir(tmp_path)
    rows = LONG[:40]
    job = library.run(rows, out="job", batch=2, draft="none", wait=False, progress=False)
    wait_for(lambda: rows_done(tmp_path / "job") > 3, "row")
    # By its short name, cut at 15 letters: a process that has just ended has no command line.
    [server] = [process for process in psutil.Process().children(recursive=True) if process.name().startswith("gcs_server")]
    server.kill()
    assert job.wait().status == "done"
    assert (job.summary.done, job.summary.ray_deaths) == (len(rows), 1)
    assert any("it is started anew, and the job goes on" in note for note in job.notes)
    assert [row.id for row in job.results()] == [row["id"] for row in rows]
